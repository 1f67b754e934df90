"""A real prefill engine and a real decode engine with real NIXL between them, and a client.

Both run the tiny model. The prefill engine has no prefix cache: what it did not read it computes, so KV that was loaded
wrongly cannot hide in a cache or outlive its test there. The decode engine has one: that is what is read back.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from carryback import wire
from carryback_server.app import Router
from carryback_server.config import EngineConfig, RouterConfig, ServeConfig
from carryback_server.launch import EngineCommand, Ports, engine_commands, free_ports
from carryback_server.model import CHAT_TEMPLATE
from carryback_server.supervisor import Engines
from tiny_model import make_tiny_model

KEY = "the key of the tests"
NAME = "tiny"
BLOCK = 32
ENGINE_ARGS = [
    "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--max-num-seqs", "8",
    "--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
]  # fmt: skip


@dataclass
class Answer:
    """What a client got."""

    status: int
    text: str
    tokens: list[str]
    first: dict[str, float]
    "The first token's most likely candidates and their log-probabilities."
    reuse: wire.Reuse | None
    headers: Mapping[str, str]
    body: Any
    raw: bytes

    def assert_same(self, other: Answer) -> None:
        """Assert that this is the answer to the same prompt, computed from the same KV."""
        assert self.status == other.status == 200, (self.raw, other.raw)
        assert self.first.keys() == other.first.keys(), (self.first, other.first)
        for token, value in self.first.items():
            assert value == pytest.approx(other.first[token], abs=0.001), (token, self.first, other.first)
        assert self.tokens == other.tokens


class Client:
    """Talks to a router as any HTTP client would.

    Args:
        admin_url: where its operators look.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_url: str) -> None:
        self.session = session
        self.url = url
        self.admin_url = admin_url
        # What is said by way of one client is not found by way of another.
        self.salt = uuid.uuid4().hex

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """A request; its answer, streamed or not, put together."""
        if isinstance(body, dict):
            body = {"cache_salt": self.salt, **body}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
        reuse = response.headers.get(wire.CARRYBACK_REUSE)
        answer = Answer(
            response.status, "", [], {}, wire.Reuse.parse(reuse) if reuse else None,
            response.headers, None, raw,
        )  # fmt: skip
        chunks = [json.loads(raw)] if response.content_type == "application/json" else list(_events(raw))
        answer.body = chunks[0] if len(chunks) == 1 else chunks
        for chunk in chunks if response.status == 200 else ():
            for choice in chunk.get("choices", ()):
                message = choice.get("message") or choice.get("delta") or {}
                answer.text += choice.get("text") or message.get("content") or ""
                for token in (choice.get("logprobs") or {}).get("content") or ():
                    answer.tokens.append(token["token"])
                    if not answer.first:
                        answer.first = {top["token"]: top["logprob"] for top in token["top_logprobs"]}
        return answer

    async def metrics(self) -> dict[str, float]:
        """The router's metrics, by name and labels as they are printed."""
        async with self.session.get(self.admin_url + "/metrics") as response:
            text = await response.text()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def engines(self) -> list[dict[str, Any]]:
        """What the router says of its engines."""
        async with self.session.get(self.admin_url + "/admin/engines") as response:
            views: list[dict[str, Any]] = (await response.json())["data"]
        return views

    async def engine(self, role: str) -> dict[str, Any]:
        """What the router says of an engine, the only one of its role."""
        (view,) = [each for each in await self.engines() if each["role"] == role]
        return view

    async def is_busy(self, role: str, requests: int = 1) -> bool:
        """Whether at least so many requests are at an engine, the only one of its role."""
        in_flight: int = (await self.engine(role))["in_flight"]
        return in_flight >= requests

    async def hears(self) -> bool:
        """Whether the engines' events reach the router; nothing is held before."""
        return all(each["events"] for each in await self.engines())

    async def chat(
        self,
        messages: list[dict[str, Any]],
        conversation: str | None = None,
        *,
        reuse: bool = True,
        tokens: int = 32,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """A greedy chat completion of exactly so many tokens."""
        headers = dict(headers or {})
        if conversation is not None:
            headers[wire.CONVERSATION_ID] = conversation
        if not reuse:
            headers[wire.CARRYBACK_REUSE] = "off"
        # Without reuse there is nothing in the decode engine's own prefix cache either.
        body = {
            "model": NAME, "messages": messages, "temperature": 0, "max_tokens": tokens,
            "min_tokens": tokens, "logprobs": True, "top_logprobs": 5,
            "cache_salt": self.salt if reuse else uuid.uuid4().hex, **fields,
        }  # fmt: skip
        return await self.post("/v1/chat/completions", body, headers)


def _events(raw: bytes) -> list[Any]:
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def document(seed: int, sentences: int) -> str:
    """Text in which every sentence says something else."""
    animals = ["cat", "dog", "horse", "bird", "fish"]
    return " ".join(
        f"Item {seed}-{i}: the {animals[(seed + i) % 5]} has number {(seed * 31 + i * 37) % 997}."
        for i in range(sentences)
    )


@dataclass
class Pair:
    """The two engines."""

    engines: Engines | None
    "None if they were running already."
    commands: list[EngineCommand]
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def router(
        self, engines: list[EngineConfig] | None = None, **settings: Any
    ) -> AsyncIterator[Client]:
        """A router of its own in front of the engines, and a client of it."""
        configs = engines or [command.engine() for command in self.commands]
        router = Router(RouterConfig(engines=configs, port=0, **{"log_format": "off", **settings}))
        await router.start()
        client = Client(self.session, router.url, router.admin_url)
        try:
            await eventually(client.hears, 60, "the router does not hear the engines")
            yield client
        finally:
            await router.stop()

    def another(
        self,
        role: str,
        name: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        connector: tuple[str, str] = ("carryback_vllm.connector", "CarrybackConnector"),
    ) -> EngineCommand:
        """The command of one more engine like the one of a role, on ports of its own.

        Args:
            args: more arguments for vLLM.
            env: more variables.
            connector: its module (also one of this folder) and its class.
        """
        like = next(command for command in self.commands if command.role == role)
        http, events, side_channel = free_ports(3)
        address = f"tcp://127.0.0.1:{events}"
        argv = [
            word.replace(like.events, address)
            .replace("carryback_vllm.connector", connector[0])
            .replace("CarrybackConnector", connector[1])
            for word in like.argv
        ]
        path = ":".join([str(Path(__file__).parent), *sys.path])
        argv[argv.index("--port") + 1] = str(http)
        return replace(
            like,
            name=name,
            url=f"http://127.0.0.1:{http}",
            events=address,
            argv=[*argv, *args],
            env={
                **like.env,
                "PYTHONPATH": path,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
                **(env or {}),
            },
        )

    @asynccontextmanager
    async def beside(self, folder: Path, *args: str) -> AsyncIterator[Pair]:
        """Another pair with the same model, and more arguments for vLLM. This one stands still meanwhile.

        Args:
            folder: for its logs.
        """
        argv = self.commands[0].argv
        commands = commands_for(Path(argv[argv.index("--model") + 1]), *args)
        with self.paused("prefill", "decode"):
            async with running(commands, folder) as pair:
                yield pair

    @contextmanager
    def paused(self, *roles: str) -> Iterator[None]:
        """Stop engines for a while, so that others have the cores to themselves."""
        groups = [self.engines.pid(role) for role in roles] if self.engines is not None else []
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in groups:
                os.killpg(group, signal.SIGCONT)

    def url(self, role: str) -> str:
        """An engine's base URL."""
        return next(command.url for command in self.commands if command.role == role)

    async def metric(self, role: str, name: str) -> float:
        """The sum of an engine's metric over its labels."""
        async with self.session.get(self.url(role) + "/metrics") as response:
            lines = (await response.text()).splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, name
        return sum(values)

    async def pinned(self, role: str) -> float:
        """The share of an engine's KV blocks that are in use; the engine's own metric."""
        # Which changes with its steps only.
        nothing = {"model": NAME, "prompt": uuid.uuid4().hex, "max_tokens": 1}
        async with self.session.post(self.url(role) + "/v1/completions", json=nothing) as response:
            assert response.status == 200, await response.text()
        return await self.metric(role, "vllm:kv_cache_usage_perc")

    async def assert_unpinned(self, *roles: str, within_s: float = 30) -> None:
        """Assert that the engines hold nothing, in a moment."""
        for role in roles or ("prefill", "decode"):
            await eventually(lambda role=role: self._is_unpinned(role), within_s, f"{role} still holds KV")

    async def _is_unpinned(self, role: str) -> bool:
        return await self.pinned(role) == 0


@asynccontextmanager
async def running(commands: list[EngineCommand], folder: Path) -> AsyncIterator[Pair]:
    """A pair that is started, and logs to a folder."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        Engines(commands, log_dir=folder, restart_wait_s=0.1) as engines,
    ):
        await engines.wait_ready()
        yield Pair(engines, commands, session)


async def eventually(check: Callable[[], Awaitable[bool]], within_s: float, message: str) -> None:
    """Wait until `check` holds; fail with the message if it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            while not await check():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(message)


def commands_for(model_path: Path, *args: str, **settings: Any) -> list[EngineCommand]:
    """Both engines' commands for the tiny model, with more arguments for vLLM, and settings of `serve`."""
    config = ServeConfig(
        model=str(model_path),
        served_model_name=NAME,
        engine_args=[*ENGINE_ARGS, *args],
        prefill_lease_s=30,
        **settings,
    )
    numbers = free_ports(6)
    ports = {"prefill": Ports(*numbers[:3]), "decode": Ports(*numbers[3:])}
    commands = engine_commands(config, device="cpu", model_path=str(model_path), ports=ports, key=KEY)
    for command in commands:
        if command.role == "decode" and "--enable-prefix-caching" not in args:
            command.argv.append("--enable-prefix-caching")
    return commands


async def serve(folder: Path) -> None:
    """Run a pair until interrupted, for `CARRYBACK_TEST_ENGINES`: quick runs of single tests."""
    commands = commands_for(make_tiny_model(folder / "tiny", CHAT_TEMPLATE))
    async with running(commands, folder):
        (folder / "engines.json").write_text(json.dumps([asdict(command) for command in commands]))
        print(f"CARRYBACK_TEST_ENGINES={folder / 'engines.json'}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
