"""The state of one router and of several: the same behaviour in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from carryback_server import redis_state
from carryback_server.redis_state import RedisState
from carryback_server.state import (
    Conversation,
    Location,
    MemoryState,
    Page,
    State,
    StateBusy,
    StateDown,
    StateFailed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, free_port, redis_server

ODD_IDS = ["{a}", "}{", "a:b", "*", "..", "%00", "~" * 256, "a b"]


def location(at: float = 1000.0, key: str = "key", **fields: Any) -> Location:
    """Where a request that came at this time left its KV."""
    known: dict[str, Any] = {
        "engine": "d0", "run": "run", "tokens": 64, "until": at + 60, "turn": "1", "tip": b"\x00\xff" * 8,
    }  # fmt: skip
    return Location(key=key, at=at, **known | fields)


async def where(state: State, id: str = "a", tenant: str = "t") -> Location | None:
    known = await state.get(tenant, id)
    return known.location if known is not None else None


def names(conversations: list[Conversation]) -> list[str]:
    return [each.id for each in conversations]


class Replicas:
    """Routers that share one state."""

    def __init__(self, url: str | None, **settings: Any) -> None:
        self._url = url
        self._settings: dict[str, Any] = {"max_conversations": 1000, **settings}
        self._prefix = uuid.uuid4().hex
        self._states: list[State] = []
        self.messages: list[bytes] = []
        self.junk: list[int] = []

    async def add(self, **settings: Any) -> State:
        """One more router's state."""
        settings = {
            **self._settings,
            "on_message": self.messages.append,
        } | settings
        if self._url is not None:
            settings = {"timeout_s": 5, "conversation_ttl_s": 60, "responses_max_bytes": 10_000, **settings}
            settings = {"key": "a secret of these routers", **settings}
            settings = {"on_junk": lambda: self.junk.append(1), **settings}
            state: State = RedisState(self._url, prefix=self._prefix, **settings)
        elif self._states:
            return self._states[0]
        else:
            state = MemoryState(**{"responses_max_bytes": 10_000, **settings})
        await state.start()
        self._states.append(state)
        return state

    async def stop(self) -> None:
        for state in self._states:
            await state.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def replicas(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Replicas]]:
    made = []
    url = request.getfixturevalue("server").url if request.param == "redis" else None

    def make(**settings: Any) -> Replicas:
        made.append(Replicas(url, **settings))
        return made[-1]

    yield make
    for each in made:
        await each.stop()


@pytest.fixture
async def state(replicas: Callable[..., Replicas]) -> State:
    return await replicas().add()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# -- conversations


async def test_a_conversation_is_made_once_and_remembered(state: State) -> None:
    first = await state.open("t", "a", "parent")
    assert (first.tenant, first.id, first.parent, first.requests) == ("t", "a", "parent", 1)
    assert (first.turn, first.location) == ("", None)
    first.turn, first.step, first.boundary, first.reuse = "t1", 2, "mid_turn", "hit"
    await state.save(first)
    again = await state.open("t", "a", "another")
    assert (again.created, again.parent, again.requests) == (first.created, "parent", 2)
    assert (again.turn, again.step, again.boundary, again.reuse) == ("t1", 2, "mid_turn", "hit")
    assert again.last_seen > first.last_seen
    assert await state.get("t", "a") == again
    assert await state.get("t", "b") is None


async def test_changes_are_kept_by_save_only(state: State) -> None:
    conversation = await state.open("t", "a")
    conversation.turn = "not saved"
    known = await state.get("t", "a")
    assert known is not None
    assert known.turn == ""
    known.turn = (await state.page("t", 10)).items[0].turn = "nor here"
    known = await state.get("t", "a")
    assert known is not None
    assert known.turn == ""


async def test_what_is_deleted_stays_deleted(state: State) -> None:
    conversation = await state.open("t", "a")
    await state.locate("t", "a", location(key="k"))
    deleted = await state.delete("t", "a")
    assert deleted is not None
    assert (deleted.id, deleted.location) == ("a", location(key="k"))
    await state.save(conversation)
    assert not await state.locate("t", "a", location(2000.0))
    assert await state.get("t", "a") is None
    assert await state.delete("t", "a") is None
    assert (await state.page("t", 10)).items == []


async def test_a_conversation_made_anew_has_nothing_of_the_old_one(state: State) -> None:
    old = await state.open("t", "a", "parent")
    old.turn = "old"
    await state.save(old)
    await state.locate("t", "a", location())
    await state.delete("t", "a")
    new = await state.open("t", "a")
    assert (new.requests, new.parent, new.turn, new.location) == (1, None, "", None)
    await state.save(old)
    known = await state.get("t", "a")
    assert known is not None
    assert known.turn == ""


@pytest.mark.parametrize("odd", ODD_IDS)
async def test_ids_of_all_characters_and_tenants_are_apart(state: State, odd: str) -> None:
    for tenant, id in (("a", odd), ("b", odd), ("a", odd[1:] + "x")):
        await state.open(tenant, id)
    await state.locate("a", odd, location(key="mine"))
    assert await where(state, odd, "b") is None
    assert await where(state, odd[1:] + "x", "a") is None
    assert [each.tenant for each in (await state.page("b", 10)).items] == ["b"]
    assert (await state.page("c", 10)).items == []
    assert await state.get("c", odd) is None
    assert await state.delete("c", odd) is None
    await state.locate("c", odd, location())
    assert await state.get("c", odd) is None
    await state.delete("b", odd)
    assert await where(state, odd, "a") == location(key="mine")


async def test_pages_show_each_conversation_once_the_newest_first(state: State) -> None:
    for number in range(25):
        await state.open("ab"[number % 2], f"{number:02}")
    await state.open("a", "00")
    await state.locate("a", "00", location(key="k"))
    seen, after = [], ""
    for _ in range(10):
        page = await state.page("a", 4, after)
        seen += page.items
        await state.open("a", "00")  # others go on meanwhile
        await state.open("a", f"new{len(seen)}")
        if not (after := page.after):
            break
    assert names(seen) == ["00", *(f"{number:02}" for number in range(24, 0, -2))]
    assert seen[0].location == location(key="k")
    every = (await state.page(None, 100)).items
    assert every == sorted(every, key=lambda each: each.last_seen, reverse=True)
    assert {each.tenant for each in every} == {"a", "b"}
    assert len(every) == len({(each.tenant, each.id) for each in every}) == 25 + 4


def cursor(last_seen: object, *more: object, tenant: str = "t") -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode([last_seen, tenant, *more])).decode()


NO_CURSORS = [
    "x", "AAAA", "é", "gA==", "lMtB2wAAAAAAAKFhoWI=", "k8t_-AAAAAAAAKF0oWk=",
    *(cursor(value, "a") for value in (float("nan"), float("inf"), float("-inf"), -1.0, 1e300, "1", None, 1)),
    cursor(1.0, "a", "more"), cursor(1.0), cursor(1.0, "a", tenant="another"), cursor(1.0, "a") + "=",
    " " + cursor(1.0, "a"), cursor(1.0, "a")[:-4], "\ud800",
    base64.urlsafe_b64encode(b"\x94" + msgspec.msgpack.encode(1.0) + b"\xa1t\xa1a" + b"\x91" * 100_000).decode(),
]  # fmt: skip


@pytest.mark.parametrize("after", NO_CURSORS)
async def test_a_page_after_nonsense_is_refused_and_nobody_else_feels_it(state: State, after: str) -> None:
    await state.open("t", "a")
    with pytest.raises(ValueError, match="not the end of a page"):
        await state.page("t", 10, after)
    assert state.is_up
    assert (await state.page("t", 10, cursor(4e9, "b"))).items


async def test_the_tenant_with_most_conversations_forgets_first(replicas: Callable[..., Replicas]) -> None:
    state = await replicas(max_conversations=3).add()
    await state.open("small", "a")
    await state.locate("small", "a", location(key="small"))
    for name in ("a", "b", "c", "d", "e"):
        await state.open("big", name)
        await state.locate("big", name, location())
        await state.open("big", "a")
    kept = names((await state.page("big", 10)).items)
    assert kept == ["a", "e"]
    assert all([await state.get("big", name) is None for name in "bcd"])
    assert await where(state, "a", "small") == location(key="small")


# -- locations


async def test_the_newest_requests_location_wins_whichever_comes_last(
    replicas: Callable[..., Replicas],
) -> None:
    shared = replicas()
    one, two = await shared.add(), await shared.add()
    await one.open("t", "a")
    await two.locate("t", "a", location(1000.25, "second"))
    assert await where(one) == location(1000.25, "second")
    assert await one.locate("t", "a", location(1000.125, "first")), "it is known"
    assert await where(two) == location(1000.25, "second")
    # The same request's again: what its engine says later of it.
    await two.locate("t", "a", location(1000.25, "second", until=0.0))
    assert await where(one) == location(1000.25, "second", until=0.0)
    await one.locate("t", "a", location(1000.375, "third", engine="d1", tip=b"", tokens=0))
    for state in (one, two):
        assert (await state.open("t", "a")).location == await where(state)
        assert await where(state) == location(1000.375, "third", engine="d1", tip=b"", tokens=0)


async def test_of_all_that_come_at_once_the_newest_stays(replicas: Callable[..., Replicas]) -> None:
    shared = replicas()
    states = [await shared.add() for _ in range(4)]
    await states[0].open("t", "a")
    # Times that differ in the last digits of a float.
    times = [1.7e9 + number * 2**-22 for number in range(40)]
    for _ in range(5):
        await states[0].delete("t", "a")
        await states[1].open("t", "a")
        told = [location(at, f"key{at}") for at in times]
        random.shuffle(told)
        await asyncio.gather(*(states[n % 4].locate("t", "a", each) for n, each in enumerate(told)))
        assert await where(states[2]) == location(times[-1], f"key{times[-1]}")


async def test_everybody_who_asks_gets_the_location_as_often_as_asked(
    replicas: Callable[..., Replicas],
) -> None:
    shared = replicas()
    states = [await shared.add() for _ in range(3)]
    await states[0].open("t", "a")
    await states[0].locate("t", "a", location())
    opened = await asyncio.gather(*(each.open("t", "a") for each in states for _ in range(4)))
    assert [each.location for each in opened] == [location()] * 12
    assert sorted(each.requests for each in opened) == list(range(2, 14))


async def test_a_pins_end_is_no_end_of_a_location(state: State) -> None:
    await state.open("t", "a")
    await state.locate("t", "a", location(1000.0, until=1000.5))
    assert await where(state) == location(1000.0, until=1000.5)


async def test_saving_keeps_the_location(state: State) -> None:
    conversation = await state.open("t", "a")
    await state.locate("t", "a", location())
    conversation.turn = "2"
    await state.save(conversation)
    known = await state.get("t", "a")
    assert known is not None
    assert (known.turn, known.location) == ("2", location())


OPERATION = st.tuples(
    st.sampled_from(["open", "locate", "delete", "save", "get"]),
    st.integers(0, 1),
    st.sampled_from([("t", "a"), ("t", "b"), ("u", "a")]),
    st.integers(1, 5),
)


@pytest.mark.parametrize("kind", ["memory", "redis"])
@settings(max_examples=60)
@given(history=st.lists(OPERATION, max_size=40))
def test_whatever_happens_the_newest_location_of_what_is_known_is_there(
    kind: str, server: RedisServer, history: list[tuple[str, int, tuple[str, str], int]]
) -> None:
    async def run() -> None:
        shared = Replicas(server.url if kind == "redis" else None)
        states = [await shared.add(), await shared.add()]
        handles: dict[tuple[int, tuple[str, str]], Conversation] = {}
        there: dict[tuple[str, str], Location | None] = {}
        turns: dict[tuple[str, str], str] = {}
        made: dict[tuple[str, str], float] = {}
        for count, (name, number, which, at) in enumerate(history):
            state = states[number]
            if name == "open":
                opened = handles[number, which] = await state.open(*which)
                assert opened.location == there.setdefault(which, None)
                assert opened.created == made.setdefault(which, opened.created)
                assert opened.turn == turns.setdefault(which, "")
            elif name == "locate":
                told = location(float(at), f"key{count}")
                assert await state.locate(*which, told) == (which in there)
                if which in there and ((before := there[which]) is None or before.at <= at):
                    there[which] = told
            elif name == "delete":
                known = await state.delete(*which)
                assert (known is not None) == (which in there)
                assert (known and known.location) == there.pop(which, None)
                made.pop(which, None)
                turns.pop(which, None)
            elif name == "save" and (handle := handles.get((number, which))) is not None:
                handle.turn = str(count)
                await state.save(handle)
                if made.get(which) == handle.created:
                    turns[which] = handle.turn
            known = await state.get(*which)
            assert (known is not None) == (which in there)
            assert known is None or (known.location, known.turn) == (there[which], turns[which])
        await shared.stop()

    asyncio.run(run())


# -- responses and messages


async def test_responses_are_kept_for_their_tenant_and_time(state: State) -> None:
    await state.put_response("t", "r1", b"\x00one", 60)
    await state.put_response("t", "r2", b"two", 0.05)
    assert await state.get_response("t", "r1") == b"\x00one"
    assert await state.get_response("u", "r1") is None
    assert await state.get_response("t", "r3") is None

    async def is_gone() -> bool:
        return await state.get_response("t", "r2") is None

    await until(is_gone)
    await state.put_response("t", "r1", b"new", 60)
    assert await state.get_response("t", "r1") == b"new"


async def test_responses_are_bounded_fairly(replicas: Callable[..., Replicas]) -> None:
    state = await replicas(responses_max_bytes=20_000).add()
    await state.put_response("small", "r", b"x" * 100, 60)
    for number in range(100):
        await state.put_response("big", f"r{number}", b"x" * 3000, 60)
    kept = [number for number in range(100) if await state.get_response("big", f"r{number}")]
    assert kept == list(range(95, 100))
    assert await state.get_response("small", "r") is not None
    for _ in range(100):  # the same one again takes no more
        await state.put_response("small", "r", b"x" * 100, 60)
    assert [number for number in range(100) if await state.get_response("big", f"r{number}")] == kept
    await state.put_response("big", "huge", b"x" * 30_000, 60)
    assert await state.get_response("big", "huge") is None
    assert await state.get_response("small", "r") is not None


async def test_one_tenant_does_not_fill_redis(own: RedisServer) -> None:
    """Nor do several routers: they count together."""
    shared = Replicas(own.url, responses_max_bytes=4_000_000, max_conversations=50)
    states = [await shared.add() for _ in range(3)]
    await states[0].put_response("small", "r", b"x" * 100_000, 60)
    await states[0].open("small", "c")
    for number in range(20):
        await states[number % 3].put_response("big", f"r{number}", b"x" * 1_000_000, 60)
    await asyncio.gather(*(states[number % 3].open("big", f"c{number}") for number in range(200)))
    # (What the server has in buffers for its connections beside that comes and goes.)
    assert sum(own.client.memory_usage(key) or 0 for key in own.client.scan_iter("*")) < 6_000_000
    assert await states[1].get_response("small", "r") is not None
    assert await states[1].get("small", "c") is not None
    kept = [number for number in range(20) if await states[2].get_response("big", f"r{number}")]
    assert kept == [17, 18, 19]
    assert len((await states[0].page("big", 1000)).items) == 49
    assert len(list(own.client.scan_iter("*:conversation"))) == 50
    await shared.stop()


async def test_what_has_expired_counts_for_nobody(own: RedisServer) -> None:
    shared = Replicas(own.url, responses_max_bytes=10_000)
    state = await shared.add()
    for number in range(3):
        await state.put_response("idle", f"r{number}", b"x" * 2500, 0.05)

    async def is_gone() -> bool:
        return not list(own.client.scan_iter("*:response"))

    await until(is_gone)
    for number in range(3):
        await state.put_response("busy", f"r{number}", b"x" * 2500, 60)
    assert all([await state.get_response("busy", f"r{number}") for number in range(3)])
    await shared.stop()


async def test_a_message_reaches_every_router(replicas: Callable[..., Replicas]) -> None:
    shared = replicas()
    states = [await shared.add() for _ in range(3)]
    expected = len(set(map(id, states)))

    async def has_come() -> bool:
        shared.messages.clear()
        await states[0].broadcast(b"hello")
        await asyncio.sleep(0.05)
        return shared.messages == [b"hello"] * expected

    await until(has_come)


# -- what goes wrong with Redis


@pytest.fixture
def own() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def holding(replicas: Replicas, **settings: Any) -> State:
    """A state with two conversations that have a location, of a request that came at 1000."""
    state = await replicas.add(**settings)
    for id in ("a", "b"):
        await state.open("t", id)
        await state.locate("t", id, location())
    return state


async def is_up(state: State) -> bool:
    try:
        await state.get("t", "any")
    except StateDown:
        return False
    return True


@pytest.mark.parametrize("options", [(), ("--appendonly", "yes", "--appendfsync", "no")])
async def test_what_comes_back_from_a_snapshot_is_an_older_location(options: tuple[str, ...]) -> None:
    """Which costs a question at most: the next request's answer is newer."""
    with redis_server(*options) as server:
        shared = Replicas(server.url)
        state = await holding(shared)
        if options:
            server.client.config_set("appendonly", "no")  # what is written from now on is lost
            server.client.config_set("save", "")
        else:
            server.client.save()
        await state.locate("t", "a", location(2000.0, "lost"))
        assert await where(state) == location(2000.0, "lost")
        server.kill()
        server.start()
        await until(lambda: is_up(state))
        assert names((await state.page("t", 10)).items) == ["b", "a"]
        assert await where(state) == location()
        await state.locate("t", "a", location(3000.0, "next"))
        assert await where(state) == location(3000.0, "next")
        await shared.stop()


async def test_a_replica_that_is_promoted_goes_on_with_what_it_has_heard() -> None:
    with (
        redis_server("--replicaof", "127.0.0.1", str(port := free_port())) as replica,
        redis_server(port=port) as main,
    ):

        async def is_synced() -> bool:
            return replica.client.info("replication")["master_link_status"] == "up" and (
                replica.client.dbsize() == main.client.dbsize()
            )

        await until(is_synced)
        old, new = Replicas(main.url), Replicas(replica.url)
        new._prefix = old._prefix
        state = await holding(old)
        await until(is_synced)
        replica.client.replicaof("NO", "ONE")  # promoted, while the old one goes on
        await state.locate("t", "a", location(2000.0, "missed"))
        promoted = await new.add()
        assert await where(promoted) == location()
        await promoted.locate("t", "a", location(3000.0, "next"))
        assert await where(promoted) == location(3000.0, "next")
        await old.stop()
        await new.stop()


async def test_a_server_that_hangs_costs_one_wait_and_no_answer_is_mixed_up(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await holding(shared, timeout_s=2)
    own.pause()
    with pytest.raises(StateDown, match="no answer in time"):
        await state.get("t", "a")
    with pytest.raises(StateDown, match="is down"):
        await state.locate("t", "a", location(2000.0))
    assert not state.is_up
    assert state.failures == 1
    own.resume()
    await until(lambda: is_up(state))
    assert state.is_up
    assert await where(state) == location()
    for number in range(20):
        opened = await asyncio.gather(*(state.open("t", f"{number}-{each}") for each in range(10)))
        assert [each.id for each in opened] == [f"{number}-{each}" for each in range(10)]
    await shared.stop()


async def test_a_router_starts_without_redis_and_finds_it_later(caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer()
    shared = Replicas(server.url)
    state = await shared.add()
    assert not state.is_up
    assert "nothing is remembered until it is back" in caplog.text
    with pytest.raises(StateDown):
        await state.open("t", "a")
    try:
        server.start()
        await until(lambda: is_up(state))
        await state.open("t", "a")
        await state.locate("t", "a", location())
        assert await where(state) == location()

        async def has_come() -> bool:
            await state.broadcast(b"hello")
            await asyncio.sleep(0.05)
            return bool(shared.messages)

        await until(has_come)
        server.kill()
        await until(lambda: is_down(state))
        server.start()
        await until(lambda: is_up(state))
        shared.messages.clear()
        await until(has_come)
        await shared.stop()
    finally:
        server.close()


async def is_down(state: State) -> bool:
    return not await is_up(state)


async def test_the_password_is_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shared = Replicas("redis://user:hunter2@127.0.0.1:1/0")
    state = await shared.add()
    with pytest.raises(StateDown) as error:
        await state.get("t", "a")
    assert "127.0.0.1:1" in caplog.text
    assert "hunter2" not in caplog.text + str(error.value)
    await shared.stop()


JUNK: list[Callable[[redis.Redis, bytes], Any]] = [
    lambda client, key: client.set(key, b"\xc1 junk"),
    lambda client, key: client.rpush(key, "junk"),
    lambda client, key: client.hset(key, mapping={"junk": "junk"}),
    lambda client, key: client.hset(
        key, mapping=dict.fromkeys(("created", "meta", "seen", "requests", "at", "location"), b"\xc1\xff")
    ),
]


@pytest.mark.parametrize("junk", range(len(JUNK)))
@pytest.mark.parametrize("spoils_all", [True, False])
async def test_what_is_not_ours_in_redis_counts_as_absent(
    own: RedisServer, caplog: pytest.LogCaptureFixture, junk: int, spoils_all: bool
) -> None:
    shared = Replicas(own.url)
    state = await holding(shared)
    handle = await state.open("t", "a")
    await state.put_response("t", "r", b"blob", 60)

    def spoil() -> None:
        for key in own.client.scan_iter("*"):
            if not spoils_all and own.client.type(key) == b"hash":
                JUNK[junk](own.client, key)  # fields of our hashes
            elif spoils_all:
                own.client.delete(key)
                JUNK[junk](own.client, key)

    operations: list[Callable[[], Awaitable[Any]]] = [
        lambda: state.locate("t", "a", location(2000.0)),
        lambda: state.get("t", "a"),
        lambda: state.page("t", 10),
        lambda: state.page(None, 10),
        lambda: state.save(handle),
        lambda: state.open("t", "a"),
        lambda: state.delete("t", "a"),
        lambda: state.get_response("t", "r"),
    ]
    if spoils_all or junk > 1:
        for operation in operations:
            spoil()
            await operation()
        spoil()
    conversation = await state.open("t", "a")
    assert (conversation.tenant, conversation.id, conversation.parent) == ("t", "a", None)
    await state.locate("t", "a", location(3000.0, "good"))
    assert await where(state) == location(3000.0, "good")
    assert state.is_up
    if spoils_all:
        assert "not ours" in caplog.text
        assert shared.junk
    await shared.stop()


NAN, INF = float("nan"), float("inf")


def _set(place: int, value: object) -> Callable[[list[Any]], None]:
    """Changes one value of a location, or of a conversation's meta."""

    def change(values: list[Any]) -> None:
        values[place] = value

    return change


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("location", b"junk"), ("location", b""), ("location", b"\x91" * 5000), ("location", b"\x90"),
        ("location", _set(2, "k" * 5000)), ("location", _set(3, -1)), ("location", _set(3, "many")),
        ("location", _set(4, NAN)), ("location", _set(4, INF)), ("location", _set(4, -1.0)),
        ("location", _set(6, "text")), ("location", _set(7, NAN)), ("location", _set(7, 1e300)),
        ("location", _set(7, 999.0)), ("at", b"junk"), ("at", b"nan"), ("at", b"inf"), ("at", b"1e400"), ("at", b"1001"),
        ("meta", _set(0, "another")), ("meta", _set(1, "another")), ("meta", _set(2, "a\r\nSet-Cookie: a")),
        ("meta", _set(5, "another")), ("meta", b"\x91" * 5000),
        ("created", b"nan"), ("created", b"inf"), ("created", b"now"), ("requests", b"9" * 5000),
        ("seen", b"nan"), ("seen", b"inf"), ("seen", b"1e400"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["open", "get", "page", "delete"])
async def test_junk_in_a_field_counts_as_absent(
    own: RedisServer, field: str, change: Any, first: str
) -> None:
    shared = Replicas(own.url)
    state = await holding(shared)
    for key in own.client.scan_iter("*:conversation"):
        if callable(change):
            value = own.client.hget(key, field)
            assert value is not None
            values = msgspec.msgpack.decode(value)
            change(values)
            own.client.hset(key, field, msgspec.msgpack.encode(values))
        else:
            own.client.hset(key, field, change)
    if first == "open":
        conversation = await state.open("t", "a")
        if field == "seen":  # which is written with each request
            assert (conversation.requests, conversation.location) == (2, location())
            await state.get("t", "b")
        else:
            assert (conversation.requests, conversation.location) == (1, None)
        assert (conversation.tenant, conversation.id, conversation.parent) == ("t", "a", None)
    elif first == "get":
        assert await state.get("t", "a") is None
    elif first == "page":
        assert (await state.page("t", 10)).items == []
    else:
        assert await state.delete("t", "a") is None
    assert shared.junk
    assert state.is_up
    await state.open("t", "a")
    await state.locate("t", "a", location(2000.0, "good"))
    assert await where(state) == location(2000.0, "good")
    await shared.stop()


async def test_what_is_left_of_another_conversation_is_not_a_new_ones(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await holding(shared)
    for key in own.client.scan_iter("*:conversation"):
        own.client.hdel(key, "created")
    assert await state.get("t", "a") is None
    await state.locate("t", "a", location(2000.0))
    assert await state.get("t", "a") is None
    conversation = await state.open("t", "a")
    assert (conversation.requests, conversation.location) == (1, None)
    await shared.stop()


async def test_a_time_that_is_none_keeps_no_newer_location_out_for_long(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await holding(shared)
    (key,) = own.client.keys(f"*{{{redis_state._digest('t', 'a')}}}:conversation")
    for at in (b"inf", b"1e300", b"nan", b"junk", b"-1"):
        own.client.hset(key, "at", at)
        await state.locate("t", "a", location(2000.0, "kept out"))
        await state.open("t", "a")
        await state.locate("t", "a", location(3000.0, "good"))
        assert await where(state) == location(3000.0, "good")
    await shared.stop()


OLD = json.loads((Path(__file__).parents[1] / "recorded" / "redis-1.json").read_text())


def load(client: redis.Redis, keys: dict[str, Any]) -> None:
    """Write keys as they were recorded."""
    for key, (kind, value) in keys.items():
        if kind == "string":
            client.set(key, base64.b64decode(value))
        elif kind == "hash":
            client.hset(key, mapping={name: base64.b64decode(each) for name, each in value.items()})
        else:
            client.zadd(key, value)


def dump(client: redis.Redis, pattern: str) -> dict[bytes, Any]:
    return {key: client.dump(key) for key in client.scan_iter(pattern)}


async def test_what_routers_of_another_layout_keep_is_neither_read_nor_touched(own: RedisServer) -> None:
    prefix, tenant, id = OLD["prefix"], OLD["tenant"], OLD["conversation"]
    load(own.client, OLD["keys"])
    before = dump(own.client, "*")
    assert len(before) == len(OLD["keys"]) > 8
    shared = Replicas(own.url)
    shared._prefix = prefix
    state = await shared.add()
    assert await state.get(tenant, id) is None
    assert (await state.page(None, 10)).items == []
    assert await state.get_response(tenant, OLD["response"]) is None
    assert await state.delete(tenant, id) is None
    await state.locate(tenant, id, location())
    conversation = await state.open(tenant, id)
    assert (conversation.requests, conversation.turn, conversation.location) == (1, "", None)
    await state.locate(tenant, id, location())
    await state.put_response(tenant, OLD["response"], b"ours", 60)
    await state.save(conversation)
    assert names((await state.page(None, 10)).items) == [id]
    assert await state.delete(tenant, id) is not None
    assert shared.junk == []
    # Neither do they see ours.
    assert dump(own.client, f"{prefix}:1:*") == before
    await shared.stop()


async def test_what_redis_refuses_is_one_operations_own_error(
    own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, str]] = []
    shared = Replicas(own.url, observe=lambda operation, result, seconds: seen.append((operation, result)))
    state = await holding(shared)
    own.client.execute_command("ACL", "SETUSER", "default", "-get")
    seen.clear()
    with pytest.raises(StateFailed):
        await state.get_response("t", "r")
    assert await where(state) == location()
    assert (state.is_up, state.failures) == (True, 0)
    assert seen == [("get_response", "refused"), ("get", "done")]
    assert "this operation alone failed" in caplog.text
    await shared.stop()


async def test_a_full_server_is_an_outage(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await holding(shared)
    own.client.config_set("maxmemory-policy", "noeviction")
    own.client.config_set("maxmemory", 1)
    with pytest.raises(StateDown) as error:
        await state.open("t", "new")
    assert not isinstance(error.value, StateFailed)
    assert not state.is_up
    own.client.config_set("maxmemory", 0)
    await until(lambda: is_up(state))
    await shared.stop()


async def test_listings_at_once_keep_nobody_waiting(own: RedisServer) -> None:
    shared = Replicas(own.url, timeout_s=0.5)
    state = await shared.add()
    for number in range(600):
        await state.open("many", f"c{number}")
    await state.open("t", "a")
    listings = [asyncio.create_task(state.page("many", 600)) for _ in range(16)]
    turns = 0
    while not all(each.done() for each in listings):
        turns += 1
        await state.locate("t", "a", location(float(turns)))
        assert await where(state) == location(float(turns))
    results = await asyncio.gather(*listings, return_exceptions=True)
    assert turns
    assert (state.is_up, state.failures) == (True, 0)
    whole = [each for each in results if isinstance(each, Page)]
    assert whole
    assert all(len(each.items) == 600 for each in whole)
    assert all(isinstance(each, StateBusy) for each in results if not isinstance(each, Page))
    await shared.stop()


async def test_nothing_stays_in_redis_for_ever(own: RedisServer) -> None:
    shared = Replicas(own.url, conversation_ttl_s=30)
    state = await holding(shared)
    await state.put_response("t", "r", b"blob", 60)
    await state.save(await state.open("t", "a"))
    await state.locate("t", "gone", location())
    keys = list(own.client.scan_iter("*"))
    # Two conversations; a ledger of them, and one of the response; the response.
    assert len(keys) == 2 + 4 + 4 + 1
    assert all(0 < own.client.pttl(key) <= 60_000 for key in keys)
    await shared.stop()


async def test_a_listing_leaves_out_what_has_expired(own: RedisServer) -> None:
    shared = Replicas(own.url, conversation_ttl_s=0.3)
    state = await shared.add()
    await state.open("t", "old")

    async def is_gone() -> bool:
        await state.open("t", "new")
        return names((await state.page("t", 10)).items) == ["new"]

    await until(is_gone)
    await state.open("t", "new")  # which clears the index of what was gone before
    members = [
        member
        for key in own.client.scan_iter("*:conversations*", _type="zset")
        if not key.endswith(b"-tenants")
        for member in own.client.zrange(key, 0, -1)
    ]
    assert members == [b"t\0new"] * 2
    await shared.stop()


async def test_a_listing_looks_through_so_much_at_most(own: RedisServer) -> None:
    shared = Replicas(own.url, max_conversations=5000)
    state = await shared.add()
    await state.open("t", "oldest")
    for number in range(3000):
        await state.open("t", f"gone{number}")
    own.client.delete(
        *(
            set(own.client.scan_iter("*:conversation"))
            - set(own.client.keys(f"*{{{redis_state._digest('t', 'oldest')}}}:conversation"))
        )
    )
    own.client.config_resetstat()
    page = await state.page("t", 10)
    assert page.items == []
    assert own.client.info("commandstats")["cmdstat_hmget"]["calls"] < 1200
    pages = 1
    while page.after:
        page, pages = await state.page("t", 10, page.after), pages + 1
    assert names(page.items) == ["oldest"]
    assert pages < 6
    await shared.stop()


async def test_pages_pass_over_what_redis_has_evicted(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await shared.add()
    for number in range(100):
        await state.open("t", f"gone{number}" if 20 <= number < 90 else f"{number:02}")
        if number == 19:
            kept = set(own.client.scan_iter("*"))
        if number == 89:
            own.client.delete(*(set(own.client.scan_iter("*:conversation")) - kept))
    seen, after = [], ""
    while True:
        page = await state.page("t", 3, after)
        seen += names(page.items)
        if not (after := page.after):
            break
    assert seen == [f"{number:02}" for number in (*range(99, 89, -1), *range(19, -1, -1))]
    await shared.stop()


async def test_a_cluster_of_several_nodes() -> None:
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "yes")
    with (
        redis_server(*options, port=free_port()) as first,
        redis_server(*options, port=free_port()) as second,
    ):
        clients: list[Any] = [first.client, second.client]
        clients[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8000)
        clients[1].execute_command("CLUSTER", "ADDSLOTSRANGE", 8001, 16383)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", second.port)

        async def is_whole() -> bool:
            infos = [each.cluster("INFO") for each in clients]
            return all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "2" for info in infos)

        await until(is_whole)
        shared = Replicas(f"redis://127.0.0.1:{first.port}")
        states = [await shared.add(), await shared.add()]
        for number in range(40):
            await states[number % 2].open("t", str(number))
            await states[number % 2].locate("t", str(number), location(key=f"key{number}"))
        page = await states[0].page("t", 25)
        rest = await states[1].page(None, 25, page.after)
        assert names(page.items + rest.items) == [str(number) for number in range(39, -1, -1)]
        for number in range(40):
            assert await where(states[1 - number % 2], str(number)) == location(key=f"key{number}")
        assert await states[0].delete("t", "0") is not None
        await states[0].put_response("t", "r", b"blob", 60)
        assert await states[1].get_response("t", "r") == b"blob"
        assert min(first.client.dbsize(), second.client.dbsize()) > 5

        async def has_come() -> bool:
            await states[0].broadcast(b"hello")
            await asyncio.sleep(0.05)
            return len(shared.messages) >= 2

        await until(has_come)
        await shared.stop()
