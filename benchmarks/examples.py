"""What the examples reuse: every example agent on real engines, with each of its model calls counted by tokens.

    python benchmarks/examples.py                    # starts `carryback serve` with the default model
    python benchmarks/examples.py --base-url http://127.0.0.1:8000/v1 --inferred

Between an example and the router stands a meter. It asks the engine for the tokens themselves (vLLM's
`return_token_ids`), so that what was new in a prompt is counted and not estimated: the tokens behind its
longest common prefix with what the conversation's last call left, its answer included. With `--inferred`
each example runs once more, and the meter removes all that names a conversation or a turn: the router
then has the messages and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from carryback import wire
from carryback_server.explain import common_prefix

ROOT = Path(__file__).parents[1]
EXAMPLES = (
    "openai_loop", "bring_your_own_client", "langgraph_agent", "langgraph_graph", "human_in_the_loop",
    "agents_sdk", "research_team",
)  # fmt: skip
BLOCK = 32  # tokens; KV is reused in whole blocks

_SAYS_WHO = {
    name.lower()
    for name in (
        wire.CONVERSATION_ID, wire.CONVERSATION_PARENT, wire.CONVERSATION_END, wire.TURN_ID, wire.TURN_STEP,
        *(name for kind, name in wire.CONVERSATION_SOURCES if kind == "header"),
    )
}  # fmt: skip
_HOP_BY_HOP = {
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "accept-encoding",
    "content-encoding",
}


@dataclass
class Call:
    """One model call.

    Attributes:
        conversation: as the router said.
        prompt, generated: tokens.
        new: tokens of the prompt that the conversation's last call did not leave; None for its first call.
    """

    conversation: str
    reuse: wire.Reuse
    prompt: list[int]
    generated: list[int]
    new: int | None = None

    @property
    def is_bounded(self) -> bool:
        """Not more than one block was computed that the call before had computed already."""
        return self.new is None or self.reuse.recomputed <= self.new + BLOCK


@dataclass
class Meter:
    """Passes requests on to a router and counts them.

    Args:
        upstream: base URL with `/v1`.
        anonymous: remove what says which conversation a request belongs to.
    """

    upstream: str
    anonymous: bool = False
    calls: list[Call] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        is_chat = request.path == "/v1/chat/completions"
        if self.anonymous:
            headers = {name: value for name, value in headers.items() if name.lower() not in _SAYS_WHO}
        if is_chat:
            fields = json.loads(body)
            fields["return_token_ids"] = True
            if self.anonymous:
                fields.pop("prompt_cache_key", None)
            body = json.dumps(fields).encode()
        url = self.upstream.removesuffix("/v1") + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as reply:
            passed = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=reply.status, headers=passed)
            await response.prepare(request)
            seen = b""
            async for piece in reply.content.iter_any():
                seen += piece
                await response.write(piece)
            if is_chat and reply.status == 200:
                self._count(reply.headers, seen)
            await response.write_eof()
        return response

    def _count(self, headers: Any, answer: bytes) -> None:
        prompt: list[int] = []
        generated: list[int] = []
        for chunk in _chunks(answer):
            prompt += chunk.get("prompt_token_ids") or []
            for choice in chunk["choices"]:
                prompt += choice.get("prompt_token_ids") or []
                generated += choice.get("token_ids") or []
        conversation = headers[wire.CARRYBACK_CONVERSATION]
        call = Call(conversation, wire.Reuse.parse(headers[wire.CARRYBACK_REUSE]), prompt, generated)
        before = next((each for each in reversed(self.calls) if each.conversation == conversation), None)
        if before is not None:
            call.new = len(prompt) - common_prefix(before.prompt + before.generated, prompt)
        self.calls.append(call)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve; gives the base URL."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            await site.start()
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            finally:
                await runner.cleanup()


def _chunks(answer: bytes) -> Iterator[dict[str, Any]]:
    if answer.startswith(b"{"):
        yield json.loads(answer)
        return
    for line in answer.splitlines():
        if line.startswith(b"data:") and b"[DONE]" not in line:
            yield json.loads(line[5:])


async def run(example: str, base_url: str, *arguments: str) -> str:
    """Run an example as a user would; returns what it printed.

    Raises:
        RuntimeError: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / f"{example}.py"), "--base-url", base_url, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT,
        env={**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"examples/{example}.py ended with {process.returncode}:\n{out.decode()}")
    return out.decode()


async def measure(example: str, upstream: str, *, anonymous: bool = False) -> tuple[Meter, str]:
    """Run an example through a meter; returns that, and what the example printed."""
    meter = Meter(upstream, anonymous)
    async with meter.running() as base_url:
        printed = await run(example, base_url)
    return meter, printed


def row(example: str, calls: Sequence[Call], inferred: Sequence[Call] | None) -> str:
    """A line of the table, Markdown."""
    later = [call for call in calls if call.new is not None]
    reused = sum(call.reuse.tokens + call.reuse.cached for call in calls)
    share = ""
    if inferred is not None:
        share = f"{sum(call.reuse.tokens + call.reuse.cached for call in inferred) / max(reused, 1):.1%}"
    cells = (
        f"`{example}.py`", len({call.conversation for call in calls}), len(calls),
        sum(len(call.prompt) for call in calls), reused,
        sum(call.reuse.recomputed for call in later), sum(call.new or 0 for call in later),
        max((call.reuse.recomputed - (call.new or 0) for call in later), default=0), share,
    )  # fmt: skip
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"


HEAD = (
    "| example | conversations | model calls | prompt tokens | reused | later calls: recomputed | of them new "
    "| most beyond the new, in one call | reused if the router infers |\n|---|" + "---:|" * 8
)


@asynccontextmanager
async def serving(base_url: str | None) -> AsyncIterator[str]:
    """A server that runs already, or one for the time of the block."""
    if base_url is not None:
        yield base_url
        return
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    with demo.serving() as started:
        yield started


async def main() -> int:
    parser = argparse.ArgumentParser(description="What the examples reuse.")
    parser.add_argument("examples", nargs="*", default=EXAMPLES, metavar="EXAMPLE", help=" ".join(EXAMPLES))
    parser.add_argument("--base-url", help="a running server's, with /v1; one is started if not given")
    parser.add_argument("--inferred", action="store_true", help="once more without ids")
    options = parser.parse_args()
    is_bounded = True
    lines = [HEAD]
    async with serving(options.base_url) as upstream:
        for example in options.examples:
            meter, printed = await measure(example, upstream)
            print(printed, flush=True)
            inferred = None
            if options.inferred:
                inferred = (await measure(example, upstream, anonymous=True))[0].calls
                for call in inferred:
                    print(f"inferred, {call.conversation}: {call.reuse.header()}")
            lines.append(row(example, meter.calls, inferred))
            print(lines[-1], flush=True)
            for call in meter.calls:
                if not call.is_bounded:
                    is_bounded = False
                    print(f"computed more than it should: {call.reuse.header()}, {call.new} new", flush=True)
    print("\n".join(lines))
    return 0 if is_bounded else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
