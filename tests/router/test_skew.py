"""Engines, routers and clients of different releases side by side: every answer is right, and nothing stays held."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from carryback.wire import events
from carryback_server import redis_state
from carryback_vllm import seal
from carryback_vllm.seal import Sealer
from cluster import Cluster, eventually
from redis_server import RedisServer, redis_server
from service import TEXT, until
from stub_engine import Settings, StubEngine

EARLIER = json.loads((Path(__file__).parents[1] / "recorded/events-2.json").read_text())
RECORDED = json.loads((Path(__file__).parents[1] / "recorded/0.1.json").read_text())


def later(event: events.Event) -> tuple[bytes, bytes]:
    """As a later release may write an event: with more in it."""
    topic, payload = events.encode(event)
    said = {**msgspec.msgpack.decode(payload[1:]), "later": [1, {"a": None}]}
    return topic, payload[:1] + msgspec.msgpack.encode(said)


def earliest(event: events.Event) -> tuple[bytes, bytes]:
    """As the first engines wrote it that this version of the events is of."""
    topic, payload = events.encode(event)
    said = msgspec.msgpack.decode(payload[1:])
    for name in ("takes_go", "about", "time_ns", "generated"):
        said.pop(name, None)
    return topic, payload[:1] + msgspec.msgpack.encode(said)


def newer(event: events.Event) -> tuple[bytes, bytes]:
    """As a release writes it whose events are of a later version."""
    topic, payload = events.encode(event)
    return topic, bytes([events.VERSION + 1]) + payload[1:]


def earlier(event: events.Event) -> tuple[bytes, bytes]:
    """As engines wrote it before prefill engines asked others; it does not matter of which request."""
    topic, _ = events.encode(event)
    recorded = EARLIER["events"].get(type(event).__name__, EARLIER["events"]["Declined"])
    return topic, base64.b64decode(recorded["payload"])


FOREIGN = pytest.mark.parametrize(
    ("foreign", "version"), [(newer, events.VERSION + 1), (earlier, EARLIER["version"])]
)


def answers_of_another_release(event: events.Event) -> tuple[bytes, bytes]:
    """What it says to routers they understand."""
    return newer(event) if isinstance(event, events.Leased) else events.encode(event)


class Later(msgspec.Struct, tag="later"):
    """A kind of event that a later release may have."""

    key: str


class LaterSealer(Sealer):
    """Of a release whose seals are of another version."""

    def seal(self, record: dict[str, Any], **of: Any) -> None:
        super().seal(record, **of)
        sealed = {**record["carryback"], "v": seal.VERSION + 1}
        del sealed["mac"]
        record["carryback"] = {**sealed, "mac": self._mac(record, sealed)}

    def is_authentic(self, record: Mapping[str, Any]) -> bool:
        sealed = dict(record.get("carryback") or {})
        mac = sealed.pop("mac", "")
        return sealed.get("v") == seal.VERSION + 1 and mac == self._mac(record, sealed)


async def gone(*engines: StubEngine) -> None:
    """Nothing is held any more."""
    await until(lambda: not any(each.in_use for each in engines), "nothing is held")


# -- engines and the router


async def test_engines_that_say_more_than_the_router_knows(cluster: Cluster, caplog: Any) -> None:
    prefill, decode = await cluster.pair(frames=later)
    router = await cluster.router()
    for engine in (prefill, decode):
        await cluster.hears(router, engine)
    chat = cluster.chat(router)
    for turn in range(4):
        assert (await chat.say(stream=bool(turn % 2))).reuse.outcome == ("hit" if turn else "miss")
        key = decode.requests[-1].params["carryback_key"]
        decode.ranks[0].publisher.send(Later(key))  # type: ignore[arg-type]

    async def counted() -> bool:
        refused = await cluster.metric(router, "engine_events_refused_total", role="decode")
        return refused == 4

    await eventually(counted)
    assert [each.levelname for each in caplog.records if "later" in each.message] == ["ERROR"]
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


async def test_engines_that_say_no_more_than_the_first_ones(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair(frames=earliest)
    router = await cluster.router()
    for engine in (prefill, decode):
        await cluster.hears(router, engine)
    chat = cluster.chat(router)
    for turn in range(3):
        assert (await chat.say()).reuse.outcome == ("hit" if turn else "miss")
    # It has not said that requests can wait there.
    assert not any("carryback_await" in each.params for each in decode.requests)
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


@FOREIGN
async def test_a_decode_engine_that_the_router_cannot_understand(
    cluster: Cluster, caplog: Any, foreign: Any, version: int
) -> None:
    prefill = await cluster.engine("prefill")
    decode = await cluster.engine("decode", frames=foreign)
    router = await cluster.router()
    await cluster.hears(router, prefill)

    async def refused() -> float:
        return await cluster.metric(router, "engine_events_refused_total", role="decode")

    # For longer than an engine may be silent before that is complained of.
    await eventually(lambda: _reaches(refused, 10))
    chat = cluster.chat(router)
    for turn in range(3):
        answer = await chat.say(stream=bool(turn % 2))
        assert (answer.reuse.outcome, answer.reuse.tokens) == ("miss", 0)
    # Who is not understood is not asked to hold anything, nor to let a request wait.
    assert all(each.params["hold_s"] == 0 for each in decode.requests)
    assert not any("carryback_await" in each.params for each in decode.requests)
    await gone(prefill, decode)
    told = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert len(told) == 1
    assert f"an engine event of version {version}; this is {events.VERSION}" in told[0]


async def _reaches(count: Any, value: float) -> bool:
    return bool(await count() >= value)


@FOREIGN
async def test_a_prefill_engine_that_the_router_cannot_understand(
    cluster: Cluster, foreign: Any, version: int
) -> None:
    prefill = await cluster.engine("prefill", frames=foreign)
    decode = await cluster.engine("decode")
    router = await cluster.router()
    await cluster.hears(router, decode)
    chat = cluster.chat(router)
    # Its answers say all that is needed.
    for turn in range(3):
        assert (await chat.say()).reuse.outcome == ("hit" if turn else "miss")
    assert not any(each.params["carryback_tell"] for each in prefill.requests)
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


async def test_a_decode_engine_whose_answers_prefill_engines_cannot_understand(cluster: Cluster) -> None:
    prefill = await cluster.engine("prefill", settings=Settings(ask_timeout_s=0.3))
    decode = await cluster.engine("decode", frames=answers_of_another_release)
    router = await cluster.router()
    for engine in (prefill, decode):
        await cluster.hears(router, engine)
    chat = cluster.chat(router)
    for turn in range(3):
        reuse = (await chat.say(stream=bool(turn % 2))).reuse
        assert (reuse.outcome, reuse.reason, reuse.tokens) == ("miss", "no_answer", 0)
    # What it leased for them is let go of, though they did not hear of it.
    await until(lambda: decode.leased == 0, "no lease is left")
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


@FOREIGN
async def test_engines_half_of_which_the_router_understands(
    cluster: Cluster, foreign: Any, version: int
) -> None:
    prefill = await cluster.engine("prefill")
    ours, other = await cluster.engine("decode"), await cluster.engine("decode", frames=foreign)
    router = await cluster.router()
    await cluster.hears(router, ours)
    hits: list[bool] = []
    while len(set(hits)) < 2:  # either decode engine has had a conversation
        chat = cluster.chat(router, f"chat-{len(hits)}")
        await chat.say(f"{chat.id}: {TEXT}")
        hits.append((await chat.say()).reuse.outcome == "hit")
    # Who is not understood is not asked.
    assert all(each.params["carryback_ask"] == [ours.events] for each in prefill.requests)
    assert other.asked == 0
    for number in range(len(hits)):
        await cluster.delete(router, f"/v1/conversations/chat-{number}")
    await gone(prefill, ours, other)


@pytest.mark.parametrize("newer", ["prefill", "decode"])
async def test_engines_that_seal_differently_compute(cluster: Cluster, newer: str) -> None:
    sealers = {newer: LaterSealer}
    prefill = await cluster.engine("prefill", sealer=sealers.get("prefill", Sealer))
    decode = await cluster.engine("decode", sealer=sealers.get("decode", Sealer))
    router = await cluster.router(prefill_lease_s=1.0)
    for engine in (prefill, decode):
        await cluster.hears(router, engine)
    chat = cluster.chat(router)
    for turn in range(3):
        answer = await chat.say(stream=bool(turn % 2))
        assert (answer.reuse.outcome, answer.reuse.tokens) == ("miss", 0)
        assert answer.reuse.reason == ("unverified" if turn else "new")

    async def declined() -> bool:
        return await cluster.metric(router, "decode_declined_total", reason="unverified") == 3

    await eventually(declined)
    # What the prefill engine would not read was let go of at once: one record is held, the last one.
    await until(lambda: len(decode.ranks[0].held) == 1)
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


@pytest.mark.parametrize("early", [True, False])
async def test_engines_of_two_vllms_are_not_mixed(cluster: Cluster, early: bool) -> None:
    """As they cannot read each other, prefill and decode engines of one vLLM go together."""
    old = await cluster.pair(version="0.32.0")
    new = await cluster.pair(version="0.33.0")
    router = await cluster.router(admit_early=early)
    for engine in (*old, *new):
        await cluster.hears(router, engine)
    await until(lambda: all(each.mismatches for each in router.pipeline.pool.engines))
    chats = [cluster.chat(router, f"chat-{number}") for number in range(12)]
    for turn in range(3):
        for chat in chats:
            answer = await chat.say(f"{chat.id}, {turn}: {TEXT}")
            assert answer.reuse.outcome == ("hit" if turn else "miss")
    for prefill, decode in (old, new):
        assert {each.params["remote_port"] for each in decode.requests if "remote_port" in each.params} <= {
            prefill._side_port
        }
        assert len(prefill.requests) == len(decode.requests) > 0
    # The upgrade goes on: the last old prefill engine leaves, and what is held at the old decode engine is lost.
    assert (
        await cluster.admin(router, "POST", f"/admin/engines/{old[0].url.removeprefix('http://')}/drain")
    ).status == 200
    before = len(old[1].requests)
    for chat in chats:
        assert (await chat.say()).reuse.outcome in ("hit", "miss", "partial")
    for chat in chats:
        assert (await chat.say()).reuse.outcome == "hit"
    assert len(old[1].requests) == before
    for chat in chats:
        await cluster.delete(router, f"/v1/conversations/{chat.id}")
    await gone(*old, *new)


async def test_a_prefill_engine_that_reports_more(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    for engine in (prefill, decode):
        await cluster.hears(router, engine)
    rank = prefill.ranks[0]
    finish = rank.finish

    def grown(*of: Any) -> dict[str, Any] | None:
        params = finish(*of)
        if params and "carryback_reuse" in params:
            params["carryback_reuse"] = {**params["carryback_reuse"], "later": [1]}
            params["carryback_work"] = {**params["carryback_work"], "later": "x"}
            params["carryback_later"] = {"a": 1}
        return params

    rank.finish = grown  # type: ignore[method-assign]
    chat = cluster.chat(router)
    for turn in range(3):
        assert (await chat.say()).reuse.outcome == ("hit" if turn else "miss")
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


# -- clients and the router


async def test_headers_that_the_router_does_not_know(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    await cluster.hears(router, decode)
    chat = cluster.chat(router)
    more = {
        "X-Carryback-Later": "yes",
        "X-Carryback-Priority": "7",
        "X-Conversation-Later": "a; b=c",
        "X-Turn-Later": "1",
    }
    for turn in range(2):
        assert (await chat.say(headers=more)).reuse.outcome == ("hit" if turn else "miss")
    for engine in (prefill, decode):
        for request in engine.requests:
            assert not {name.lower() for name in more} & request.headers.keys()


# -- routers that share a Redis


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def shared(redis: RedisServer) -> dict[str, Any]:
    return {"state": redis.url, "state_prefix": uuid.uuid4().hex, "state_timeout_s": 5.0}


async def test_routers_whose_state_differs_share_a_redis(
    cluster: Cluster, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await cluster.pair(settings=Settings(ask_timeout_s=30))
    old = await cluster.router(**shared)
    monkeypatch.setattr(redis_state, "VERSION", redis_state.VERSION + 1)
    new = await cluster.router(**shared)
    for router in (old, new):
        await cluster.hears(router, decode)
    chat = cluster.chat(old)
    # Each knows what it has served itself, and reads what the other's requests have left as well.
    for turn in range(6):
        reuse = (await chat.say(via=(old, new)[turn % 2])).reuse
        assert (reuse.outcome, reuse.reason) == (("hit", "verified") if turn else ("miss", "new"))
    for router in (old, new):
        assert (await cluster.conversation(router))["requests"] == 3
        assert (await cluster.delete(router, "/v1/conversations/chat-1")).status == 200
    await gone(prefill, decode)


async def test_what_a_router_of_a_later_release_added_is_left_aside(
    cluster: Cluster, shared: dict[str, Any], redis: RedisServer
) -> None:
    prefill, decode = await cluster.pair(settings=Settings(ask_timeout_s=30))
    router = await cluster.router(**shared)
    await cluster.hears(router, decode)
    chat = cluster.chat(router)
    await chat.say()

    async def is_located() -> bool:
        return (await cluster.conversation(router))["location"] is not None

    await eventually(is_located)
    (key,) = redis.client.scan_iter(f"{shared['state_prefix']}:*:conversation")
    for name in ("meta", "location"):
        values = msgspec.msgpack.decode(redis.client.hget(key, name))
        redis.client.hset(key, name, msgspec.msgpack.encode([*values, {"later": 1}]))
    redis.client.hset(key, "later", "1")
    assert (await chat.say()).reuse.outcome == "hit"
    assert (await cluster.conversation(router))["requests"] == 2
    await cluster.delete(router, "/v1/conversations/chat-1")
    await gone(prefill, decode)


async def test_a_router_goes_on_with_what_0_1_left_in_redis(cluster: Cluster, redis: RedisServer) -> None:
    left = RECORDED["redis"]
    fields = {name: base64.b64decode(value) for name, value in left["conversation"].items()}
    redis.client.hset(left["keys"]["conversation"], mapping=fields)
    await cluster.pair(settings=Settings(ask_timeout_s=30))
    router = await cluster.router(state=redis.url, state_prefix=left["prefix"], state_timeout_s=5.0)
    says = left["says"]
    known = await cluster.conversation(router, says["id"])
    assert (known["id"], known["requests"], known["turn"]) == (says["id"], 1, says["turn"])
    assert known["location"]["tokens"] == says["tokens"]
    # Those engines are others, and what the conversation had there is not what this one begins with.
    chat = cluster.chat(router, says["id"])
    first = (await chat.say()).reuse
    assert (first.outcome, first.reason) == ("miss", "history_changed")
    assert (await cluster.conversation(router, says["id"]))["requests"] == 2
    assert (await chat.say()).reuse.outcome == "hit"
