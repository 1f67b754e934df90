"""A real conversation of two turns through a router, and the proof that the second one read the first one's KV."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from carryback import wire

from carryback_server.app import Router
from carryback_server.bench.engine_metrics import Reads
from carryback_server.causes import REASONS
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.doctor import holding, transport
from carryback_server.doctor.asking import Asker, NoAnswer, Reply
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn

# Long enough for a few blocks, whatever their size. Each conversation begins with its own id, so that no
# prefix cache knows it.
_QUESTION = "This is a check of a service, and its answer does not matter. " * 20
# With prefix caching, a prefill engine has the first question itself, and reads the answer alone.
ANSWER_TOKENS = 160
# An engine shows what it counted with its next step, or a little later.
COUNTED_S = 5.0
# Of vLLM's NIXL connector: how often, for how long and how much an engine read.
_COUNTERS = (
    "vllm:nixl_xfer_time_seconds_count",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_bytes_transferred_sum",
)


@dataclass(frozen=True)
class Place:
    """Where to converse.

    Attributes:
        url: the router's, for clients.
        prefills: the engines that may compute the prompts.
        model: in requests.
        headers: with the tenant's key.
        timeout_s: for a turn.
        name: of the pair of engines, if it is one of several; in what is found.
    """

    url: str
    prefills: Sequence[Seen]
    model: str
    headers: Mapping[str, str]
    timeout_s: float
    name: str = ""


@asynccontextmanager
async def own_router(engines: list[EngineConfig], config: RouterConfig) -> AsyncIterator[Router]:
    """A router of our own for these engines, with no state but its own memory; what it holds goes with it."""
    settings: dict[str, Any] = {
        "engines": engines, "host": "127.0.0.1", "port": 0, "admin_host": "127.0.0.1", "admin_port": 0,
        "state": "memory", "tenants_file": None, "api_keys": [], "otlp_endpoint": None, "explain_bytes": 0,
        "kv_recompute_threshold": 0, "log_format": "off", "shutdown_timeout_s": 5.0,
    }  # fmt: skip
    fields = {name: getattr(config, name) for name in RouterConfig.model_fields}
    router = Router(RouterConfig(**{**fields, **settings}))
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


async def converse(place: Place, asker: Asker) -> list[Finding]:
    """Two turns; the conversation is ended whatever happens."""
    name = f"carryback-doctor-{uuid.uuid4().hex}"
    try:
        return await _two_turns(place, asker, name)
    except NoAnswer as error:
        fix = "see the router's log, and the checks above; --conversation-timeout-s is the limit"
        return [fail("conversation", f"{_at(place)}{error}", fix)]
    finally:
        with suppress(NoAnswer):
            url = f"{place.url}/v1/conversations/{name}"
            await asker.ask(url, method="DELETE", headers=place.headers)


async def _two_turns(place: Place, asker: Asker, name: str) -> list[Finding]:
    headers = {**place.headers, wire.CONVERSATION_ID: name}
    messages = [{"role": "user", "content": f"{name}. {_QUESTION}"}]
    first = await _turn(place, asker, headers, messages, ANSWER_TOKENS)
    if first.status != 200:
        return [_refused(place, first, "first")]
    url = f"{place.url}/v1/conversations/{name}"
    held = [await holding.after_turn(url, place.headers, asker, _at(place))]
    before = await _counted(place, asker)
    try:
        answer = first.json["choices"][0]["message"].get("content") or ""
    except (TypeError, KeyError, IndexError):
        return [
            *held,
            fail("conversation", f"{_at(place)}{place.url} answers with no chat completion", "--router"),
        ]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you."}]
    second = await _turn(place, asker, {**headers, wire.CONVERSATION_END: "true"}, messages, 1)
    if second.status != 200:
        return [*held, _refused(place, second, "second")]
    said = second.headers.get(wire.CARRYBACK_REUSE.lower(), "")
    found = [*held, ok("conversation", f"{_at(place)}both turns were answered")]
    try:
        reuse = wire.Reuse.parse(said)
    except ValueError:
        fix = "give the address of a carryback router (--router)"
        return [
            *found,
            fail("reuse", f"{_at(place)}{place.url} is no carryback router: no {wire.CARRYBACK_REUSE}", fix),
        ]
    found.append(_reuse(place, reuse))
    if reuse.tokens:
        found += await _proof(place, asker, before, reuse)
    return found


async def _turn(
    place: Place, asker: Asker, headers: Mapping[str, str], messages: list[dict[str, str]], tokens: int
) -> Reply:
    body = {
        "model": place.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    url = place.url + "/v1/chat/completions"
    return await asker.ask(url, method="POST", body=body, headers=headers, timeout_s=place.timeout_s)


def _refused(place: Place, reply: Reply, which: str) -> Finding:
    fixes = {
        400: "what the engine wants: a chat template (--chat-template), a longer --max-model-len",
        401: "a tenant's key: --api-key, CARRYBACK_API_KEY",
        403: "the key of a tenant that may use this model: --api-key, CARRYBACK_API_KEY",
        404: "--model",
        429: "the tenant's limits, or another --api-key",
        503: "start the engines that the router misses; see health above",
    }
    fix = fixes.get(reply.status, "see the logs of the router and of the engines")
    return fail("conversation", f"{_at(place)}the {which} turn: {reply.problem}", fix)


def _reuse(place: Place, reuse: wire.Reuse) -> Finding:
    said = f"{_at(place)}{wire.CARRYBACK_REUSE}: {reuse.header()}"
    reason = REASONS.get(reuse.reason)
    if reuse.tokens:
        return ok("reuse", said)
    if reuse.reason == "local_cache":
        return warn(
            "reuse",
            f"{said}: the prefill engine had it all itself, so no read was seen",
            "nothing; to see a read, start the prefill engine with --no-enable-prefix-caching",
        )
    return fail(
        "reuse", said, (reason and (reason.do or reason.means)) or "see docs/router.md, What was reused"
    )


async def _proof(place: Place, asker: Asker, before: Reads | None, reuse: wire.Reuse) -> list[Finding]:
    """The prefill engines' own count of what they read."""
    reads = None
    if before is not None:
        for _ in range(int(COUNTED_S / 0.25)):
            now = await _counted(place, asker)
            reads = now - before if now is not None else None
            if reads is not None and reads.count:
                break
            await asyncio.sleep(0.25)
    if reads is None:
        found = skip("pull", f"{_at(place)}the prefill engine shows no metrics")
    elif not reads.count:
        found = warn(
            "pull",
            f"{_at(place)}the router says that {reuse.tokens} tokens were read, and the engine counted no read",
            "start engines without --disable-log-stats",
        )
    else:
        found = ok(
            "pull",
            f"{_at(place)}the prefill engine counted {transport.size(reads.bytes)} read for {reuse.tokens} tokens",
        )
    return [found, transport.bandwidth(reads, "prefill")]


async def _counted(place: Place, asker: Asker) -> Reads | None:
    """What the prefill engines have read; None if one does not say."""
    total = Reads()
    for seen in {each.url: each for each in place.prefills}.values():  # ranks count in one place
        try:
            reply = await asker.ask(seen.url + "/metrics", headers=seen.headers)
        except NoAnswer:
            return None
        lines = reply.body.decode(errors="replace").splitlines()
        sums = [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))
            for name in _COUNTERS
        ]
        total += Reads(*sums)
    return total


def _at(place: Place) -> str:
    return f"{place.name}: " if place.name else ""
