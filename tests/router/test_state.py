"""The state of one router and of several: the same behaviour in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis
from carryback_server import redis_state
from carryback_server.redis_state import RedisState
from carryback_server.state import Gone, MemoryState, Page, Record, State, StateBusy, StateDown, StateFailed
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, free_port, redis_server

ODD_IDS = ["{a}", "}{", "a:b", "*", "..", "%00", "~" * 256, "a b"]
_numbers = itertools.count()


def record(key: str = "", engine: str = "d0") -> Record:
    key = key or f"key{next(_numbers)}"
    return Record(
        engine, "run", key, f"request-{key}", 64, 4, time.time() + 60, b'{"carryback": {}}', b"\x00\xff" * 32
    )


class Replicas:
    """Routers that share one state."""

    def __init__(self, url: str | None, **settings: Any) -> None:
        self._url = url
        self._settings: dict[str, Any] = {"max_conversations": 1000, **settings}
        self._prefix = uuid.uuid4().hex
        self._states: list[State] = []
        self.evicted: list[Record] = []
        self.messages: list[bytes] = []
        self.junk: list[int] = []

    async def add(self, **settings: Any) -> State:
        """One more router's state."""
        settings = {
            **self._settings,
            "on_evicted": self.evicted.append,
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
    first.turn, first.step, first.boundary, first.reuse, first.why_none = "t1", 2, "mid_turn", "hit", "off"
    await state.save(first)
    again = await state.open("t", "a", "another")
    assert (again.uid, again.created, again.parent, again.requests) == (first.uid, first.created, "parent", 2)
    assert (again.turn, again.step, again.boundary, again.reuse) == ("t1", 2, "mid_turn", "hit")
    assert again.why_none == "off"
    assert again.last_seen > first.last_seen
    known = await state.get("t", "a")
    assert known == (again, None)
    assert await state.get("t", "b") is None


async def test_changes_are_kept_by_save_only(state: State) -> None:
    conversation = await state.open("t", "a")
    conversation.turn = "not saved"
    known = await state.get("t", "a")
    assert known is not None
    assert known[0].turn == ""


async def test_what_is_deleted_stays_deleted(state: State) -> None:
    conversation = await state.open("t", "a")
    await state.put(conversation, record("k"), 60)
    known, left = await state.delete("t", "a")
    assert known
    assert left is not None
    assert left.request == "request-k"
    await state.save(conversation)
    with pytest.raises(Gone):
        await state.put(conversation, record(), 60)
    assert await state.take(conversation) is None
    assert conversation.why_none == "deleted"
    assert await state.get("t", "a") is None
    assert await state.delete("t", "a") == (False, None)
    assert (await state.page("t", 10)).items == []


async def test_a_conversation_made_anew_has_nothing_of_the_old_one(state: State) -> None:
    old = await state.open("t", "a")
    await state.put(old, record(), 60)
    await state.delete("t", "a")
    new = await state.open("t", "a")
    assert (new.requests, new.why_none) == (1, "new")
    with pytest.raises(Gone):
        await state.put(old, record(), 60)
    old.turn = "old"
    await state.save(old)
    assert await state.take(new) is None
    await state.put(new, record("new"), 60)
    assert await state.take(old) is None
    known = await state.get("t", "a")
    assert known is not None
    assert known[0].turn == ""
    assert known[1] is not None


@pytest.mark.parametrize("odd", ODD_IDS)
async def test_ids_of_all_characters_and_tenants_are_apart(state: State, odd: str) -> None:
    mine, theirs, other = (
        await state.open("a", odd),
        await state.open("b", odd),
        await state.open("a", odd[1:] + "x"),
    )
    await state.put(mine, record("mine"), 60)
    assert await state.take(theirs) is None
    assert await state.take(other) is None
    assert not await state.discard("b", odd, "mine", "expired")
    assert [each.tenant for each, _ in (await state.page("b", 10)).items] == ["b"]
    assert (await state.page("c", 10)).items == []
    assert await state.get("c", odd) is None
    assert (await state.delete("c", odd))[0] is False
    await state.delete("b", odd)
    taken = await state.take(mine)
    assert taken is not None
    assert taken.key == "mine"


async def test_pages_show_each_conversation_once_the_newest_first(state: State) -> None:
    for number in range(25):
        await state.open("ab"[number % 2], f"{number:02}")
    await state.put(await state.open("a", "00"), record("k"), 60)
    seen, after = [], ""
    for _ in range(10):
        page = await state.page("a", 4, after)
        seen += page.items
        await state.open("a", "00")  # others go on meanwhile
        await state.open("a", f"new{len(seen)}")
        if not (after := page.after):
            break
    assert [each.id for each, _ in seen] == ["00", *(f"{number:02}" for number in range(24, 0, -2))]
    shown = seen[0][1]
    assert shown is not None
    assert (shown.key, shown.params, shown.digests) == ("k", b"", b"")
    every = (await state.page(None, 100)).items
    assert [each.last_seen for each, _ in every] == sorted(
        (each.last_seen for each, _ in every), reverse=True
    )
    assert {each.tenant for each, _ in every} == {"a", "b"}
    assert len(every) == len({(each.tenant, each.id) for each, _ in every}) == 25 + 4


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
    shared = replicas(max_conversations=3)
    state = await shared.add()
    small = await state.open("small", "a")
    await state.put(small, record("small"), 60)
    for name in ("a", "b", "c", "d", "e"):
        await state.put(await state.open("big", name), record(f"big-{name}"), 60)
        await state.open("big", "a")
    kept = [each.id for each, _ in (await state.page("big", 10)).items]
    assert kept == ["a", "e"]
    gone = [name for name in "abcde" if name not in kept]
    assert [each.key for each in shared.evicted] == [f"big-{name}" for name in gone]
    assert all([await state.get("big", name) is None for name in gone])
    taken = await state.take(small)
    assert taken is not None


# -- records


async def test_a_record_comes_back_whole_and_once(state: State) -> None:
    conversation = await state.open("t", "a")
    assert conversation.why_none == "new"
    stored = record()
    assert await state.put(conversation, stored, 60) is None
    known = await state.get("t", "a")
    assert known is not None
    assert known[1] == stored.without_params()
    assert await state.take(conversation) == stored
    assert await state.take(conversation) is None
    assert conversation.why_none == "in_use"
    known = await state.get("t", "a")
    assert known is not None
    assert (known[0].why_none, known[1]) == ("in_use", None)


async def test_a_record_is_taken_once_by_whoever_asks(replicas: Callable[..., Replicas]) -> None:
    shared = replicas()
    states = [await shared.add() for _ in range(4)]
    conversations = [await each.open("t", "a") for each in states]
    for _ in range(20):
        stored = record()
        await states[0].put(conversations[0], stored, 60)
        takes = [each.take(mine) for each, mine in zip(states, conversations, strict=True) for _ in range(3)]
        discards = [each.discard("t", "a", stored.key, "released") for each in states]
        taken = [each for each in await asyncio.gather(*takes, *discards) if each]
        assert len(taken) == 1
        assert taken[0] in (True, stored)


async def test_a_newer_record_replaces_the_older(state: State) -> None:
    conversation = await state.open("t", "a")
    await state.put(conversation, record("old"), 60)
    older = await state.put(conversation, record("new"), 60)
    assert older is not None
    assert older.request == "request-old"
    assert not await state.discard("t", "a", "old", "expired")
    assert await state.discard("t", "a", "new", "budget")
    assert not await state.discard("t", "a", "new", "budget")
    assert await state.take(conversation) is None
    assert conversation.why_none == "budget"


async def test_a_record_expires(state: State) -> None:
    conversation = await state.open("t", "a")
    await state.put(conversation, record(), 0.05)

    async def is_gone() -> bool:
        known = await state.get("t", "a")
        return known is not None and known[1] is None

    await until(is_gone)
    assert await state.take(conversation) is None
    assert conversation.why_none == "expired"
    assert (await state.open("t", "a")).why_none == "expired"
    await state.put(conversation, record("next"), 60)
    taken = await state.take(conversation)
    assert taken is not None
    assert taken.key == "next"


async def test_saving_does_not_undo_a_record(state: State) -> None:
    conversation = await state.open("t", "a")
    conversation.why_none = "in_use"
    await state.put(conversation, record(), 60)
    await state.save(conversation)
    assert await state.take(await state.open("t", "a")) is not None


OPERATION = st.tuples(
    st.sampled_from(["open", "put", "take", "discard", "delete", "save", "get"]),
    st.integers(0, 1),
    st.sampled_from([("t", "a"), ("t", "b"), ("u", "a")]),
)


@pytest.mark.parametrize("kind", ["memory", "redis"])
@settings(max_examples=60)
@given(history=st.lists(OPERATION, max_size=40))
def test_whatever_happens_a_record_has_one_owner(
    kind: str, server: RedisServer, history: list[tuple[str, int, tuple[str, str]]]
) -> None:
    async def run() -> None:
        shared = Replicas(server.url if kind == "redis" else None)
        states = [await shared.add(), await shared.add()]
        handles = {}
        there: dict[tuple[str, str], str] = {}
        uids: dict[tuple[str, str], str] = {}
        for name, number, which in history:
            state = states[number]
            if name == "open" or (number, which) not in handles:
                handles[number, which] = await state.open(*which)
                assert handles[number, which].uid == uids.setdefault(which, handles[number, which].uid)
                continue
            handle = handles[number, which]
            is_current = uids.get(which) == handle.uid
            if name == "put":
                stored = record()
                try:
                    older = await state.put(handle, stored, 60)
                except Gone:
                    assert not is_current
                else:
                    assert is_current
                    assert (older and older.key) == there.get(which)
                    there[which] = stored.key
            elif name == "take":
                taken = await state.take(handle)
                assert (taken and taken.key) == (there.pop(which, None) if is_current else None)
            elif name == "discard":
                key = there.get(which, "none")
                assert await state.discard(*which, key, "x") == (which in there)
                there.pop(which, None)
            elif name == "delete":
                known, left = await state.delete(*which)
                assert known == (which in uids)
                assert (left and left.key) == there.pop(which, None)
                uids.pop(which, None)
            elif name == "save":
                await state.save(handle)
            known_now = await state.get(*which)
            assert (known_now is not None) == (which in uids)
            assert (known_now and known_now[1] and known_now[1].key) == there.get(which)
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


async def holding(replicas: Replicas, **settings: Any) -> tuple[State, Any, Any]:
    """A state with a conversation that has a record, and one whose record was taken already."""
    state = await replicas.add(**settings)
    used, unused = await state.open("t", "used"), await state.open("t", "unused")
    await state.put(used, record(), 60)
    await state.put(unused, record(), 60)
    return state, used, unused


async def is_up(state: State) -> bool:
    try:
        await state.get("t", "any")
    except StateDown:
        return False
    return True


@pytest.mark.parametrize("options", [(), ("--appendonly", "yes", "--appendfsync", "no")])
async def test_no_record_comes_back_from_a_snapshot(options: tuple[str, ...]) -> None:
    with redis_server(*options) as server:
        shared = Replicas(server.url)
        state, used, unused = await holding(shared)
        if options:
            server.client.config_set("appendonly", "no")  # what is written from now on is lost
            server.client.config_set("save", "")
        else:
            server.client.save()
        assert await state.take(used) is not None
        server.kill()
        server.start()
        assert server.client.dbsize() > 4, "the server has not loaded the old state"
        await until(lambda: is_up(state))
        for conversation in (used, unused):
            known = await state.get("t", conversation.id)
            assert known is not None
            assert known[1] is None
            assert [each[1] for each in (await state.page("t", 10)).items] == [None, None]
            assert await state.take(conversation) is None
            assert conversation.why_none == "state_lost"
        await state.put(used, record("next"), 60)
        taken = await state.take(used)
        assert taken is not None
        assert taken.key == "next"
        await shared.stop()


async def test_no_void_record_is_handed_out_for_release() -> None:
    """Somebody may be reading it."""
    with redis_server() as server:
        shared = Replicas(server.url)
        state, used, _ = await holding(shared)
        known = await state.get("t", "unused")
        assert known is not None
        assert known[1] is not None
        server.client.save()
        server.kill()
        server.start()
        await until(lambda: is_up(state))
        assert await state.put(used, record(), 60) is None
        assert not await state.discard("t", "unused", known[1].key, "expired")
        await shared.stop()


async def test_no_record_comes_back_from_a_replica_that_missed_its_use() -> None:
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
        state, used, unused = await holding(old)
        await until(is_synced)
        replica.client.replicaof("NO", "ONE")  # promoted, while the old one goes on
        assert await state.take(used) is not None
        promoted = await new.add()
        known = await promoted.get("t", "used")
        assert known is not None
        assert known[1] is None
        # The other way round again: the old one has all that the new one has, and its own run.
        port_of_new = free_port()
        replica.client.config_set("port", port_of_new)
        main.client.replicaof("127.0.0.1", port_of_new)

        async def is_back() -> bool:
            return bool(main.client.info("replication")["master_link_status"] == "up")

        await until(is_back)
        main.client.replicaof("NO", "ONE")
        again = await old.add()
        for conversation in (used, unused):
            assert await promoted.take(conversation) is None
            assert await again.take(conversation) is None
            assert conversation.why_none == "state_lost"
        await old.stop()
        await new.stop()


async def test_a_server_that_hangs_costs_one_wait_and_no_answer_is_mixed_up(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state, used, unused = await holding(shared, timeout_s=2)
    own.pause()
    with pytest.raises(StateDown) as first:
        await state.take(used)
    with pytest.raises(StateDown) as second:
        await state.take(unused)
    assert (first.value.maybe_done, second.value.maybe_done) == (True, False)
    assert not state.is_up
    assert state.failures == 1
    own.resume()
    await until(lambda: is_up(state))
    assert state.is_up
    # The one whose answer was lost counts as used; the other was never asked for.
    assert await state.take(used) is None
    taken = await state.take(unused)
    assert taken is not None
    for number in range(20):
        opened = await asyncio.gather(*(state.open("t", f"{number}-{each}") for each in range(10)))
        assert [each.id for each in opened] == [f"{number}-{each}" for each in range(10)]
    await shared.stop()


async def test_a_record_that_arrives_late_is_not_used_late(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state = await shared.add(timeout_s=2)
    conversation = await state.open("t", "a")
    own.pause()
    with pytest.raises(StateDown):
        await state.put(conversation, record(), 2.2)
    await asyncio.sleep(0.3)
    own.resume()
    await until(lambda: is_up(state))
    assert await state.take(conversation) is None
    await shared.stop()


async def test_a_router_starts_without_redis_and_finds_it_later(caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer()
    shared = Replicas(server.url)
    state = await shared.add()
    assert not state.is_up
    assert "nothing is reused until it is back" in caplog.text
    with pytest.raises(StateDown):
        await state.open("t", "a")
    try:
        server.start()
        await until(lambda: is_up(state))
        conversation = await state.open("t", "a")
        await state.put(conversation, record(), 60)
        assert await state.take(conversation) is not None

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
        key, mapping=dict.fromkeys(("uid", "meta", "seen", "requests", "why", "head", "params"), b"\xc1\xff")
    ),
]


@pytest.mark.parametrize("junk", range(len(JUNK)))
@pytest.mark.parametrize("spoils_all", [True, False])
async def test_what_is_not_ours_in_redis_counts_as_absent(
    own: RedisServer, caplog: pytest.LogCaptureFixture, junk: int, spoils_all: bool
) -> None:
    shared = Replicas(own.url)
    state, used, _ = await holding(shared)
    await state.put_response("t", "r", b"blob", 60)

    def spoil() -> None:
        for key in own.client.scan_iter("*"):
            if not spoils_all and own.client.type(key) == b"hash":
                JUNK[junk](own.client, key)  # fields of our hashes
            elif spoils_all:
                own.client.delete(key)
                JUNK[junk](own.client, key)

    operations: list[Callable[[], Awaitable[Any]]] = [
        lambda: state.take(used),
        lambda: state.get("t", "used"),
        lambda: state.page("t", 10),
        lambda: state.page(None, 10),
        lambda: state.discard("t", "used", "key", "x"),
        lambda: state.save(used),
        lambda: state.open("t", "used"),
        lambda: state.delete("t", "used"),
        lambda: state.get_response("t", "r"),
    ]
    if spoils_all or junk > 1:
        for operation in operations:
            spoil()
            await operation()
        spoil()
    conversation = await state.open("t", "used")
    await state.put(conversation, record("good"), 60)
    taken = await state.take(conversation)
    assert taken is not None
    assert taken.key == "good"
    assert state.is_up
    if spoils_all:
        assert "not ours" in caplog.text
        assert shared.junk
    await shared.stop()


NAN, INF = float("nan"), float("inf")
DEEP = b'{"carryback":{},"a":' + b"[" * 900 + b"]" * 900 + b"}"


def _set(place: int, value: object, *inner: int) -> Callable[[list[Any]], None]:
    """Changes one value of a record's head, or of a conversation's meta."""

    def change(values: list[Any]) -> None:
        for each in inner:
            values = values[each]
        values[place] = value

    return change


@pytest.mark.parametrize(
    ("kind", "field", "change"),
    [
        ("record", "params", b"junk"), ("record", "params", b"[]"), ("record", "params", b"{}"),
        ("record", "params", b'{"carryback": 1}'), ("record", "params", DEEP), ("record", "params", b"\xff"),
        ("record", "head", _set(1, NAN)), ("record", "head", _set(1, INF)), ("record", "head", _set(6, NAN, 0)),
        ("record", "head", _set(6, INF, 0)), ("record", "head", _set(4, "many", 0)), ("record", "head", b"\x91" * 5000),
        ("conversation", "meta", _set(3, NAN)), ("conversation", "meta", _set(3, INF)),
        ("conversation", "meta", _set(0, "another")), ("conversation", "meta", _set(1, "another")),
        ("conversation", "meta", _set(2, "a\r\nSet-Cookie: a")), ("conversation", "meta", b"\x91" * 5000),
        ("conversation", "seen", b"nan"), ("conversation", "seen", b"inf"), ("conversation", "seen", b"1e400"),
        ("conversation", "requests", b"9" * 5000), ("conversation", "why", b"new\r\nSet-Cookie: a"),
    ],
)  # fmt: skip
async def test_junk_in_a_field_counts_as_absent(own: RedisServer, kind: str, field: str, change: Any) -> None:
    shared = Replicas(own.url)
    state, _, _ = await holding(shared)

    def spoil() -> None:
        for key in own.client.scan_iter(f"*:{kind}"):
            if callable(change) and (value := own.client.hget(key, field)) is not None:
                values = msgspec.msgpack.decode(value)
                change(values)
                own.client.hset(key, field, msgspec.msgpack.encode(values))
            elif not callable(change):
                own.client.hset(key, field, change)

    spoil()
    await state.page("t", 10)
    await state.get("t", "unused")
    conversation = await state.open("t", "used")
    taken = await state.take(conversation)
    assert (taken is None) == (field != "seen")  # which is written with each request
    assert (conversation.tenant, conversation.id, conversation.parent) == ("t", "used", None)
    assert conversation.why_none.isidentifier()
    assert shared.junk
    assert state.is_up
    conversation = await state.open("t", "used")
    await state.put(conversation, record("good"), 60)
    taken = await state.take(conversation)
    assert taken is not None
    assert taken.key == "good"
    await shared.stop()


async def test_what_redis_refuses_is_one_operations_own_error(
    own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, str]] = []
    shared = Replicas(own.url, observe=lambda operation, result, seconds: seen.append((operation, result)))
    state, used, _ = await holding(shared)
    own.client.execute_command("ACL", "SETUSER", "default", "-get")
    seen.clear()
    with pytest.raises(StateFailed):
        await state.get_response("t", "r")
    assert await state.take(used) is not None
    assert (state.is_up, state.failures) == (True, 0)
    assert seen == [("get_response", "refused"), ("take", "done")]
    assert "this operation alone failed" in caplog.text
    await shared.stop()


async def test_a_full_server_is_an_outage(own: RedisServer) -> None:
    shared = Replicas(own.url)
    state, _, _ = await holding(shared)
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
    other = await state.open("t", "a")
    listings = [asyncio.create_task(state.page("many", 600)) for _ in range(16)]
    turns = 0
    while not all(each.done() for each in listings):
        await state.put(other, record(), 60)
        assert await state.take(other) is not None
        turns += 1
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
    state, _, unused = await holding(shared)
    await state.put_response("t", "r", b"blob", 60)
    await state.save(unused)
    await state.discard("t", "used", "none", "x")
    keys = list(own.client.scan_iter("*"))
    # Two conversations and their records; a ledger of them, and one of the response; the response.
    assert len(keys) == 2 * 2 + 4 + 4 + 1
    assert all(0 < own.client.pttl(key) <= 60_000 for key in keys)
    await shared.stop()


async def test_a_listing_leaves_out_what_has_expired(own: RedisServer) -> None:
    shared = Replicas(own.url, conversation_ttl_s=0.3)
    state = await shared.add()
    await state.open("t", "old")

    async def is_gone() -> bool:
        await state.open("t", "new")
        return [each.id for each, _ in (await state.page("t", 10)).items] == ["new"]

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
    assert own.client.info("commandstats")["cmdstat_eval"]["calls"] < 1200
    pages = 1
    while page.after:
        page, pages = await state.page("t", 10, page.after), pages + 1
    assert [each.id for each, _ in page.items] == ["oldest"]
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
        seen += [each.id for each, _ in page.items]
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
        conversations = [await states[number % 2].open("t", str(number)) for number in range(40)]
        for number, conversation in enumerate(conversations):
            await states[number % 2].put(conversation, record(f"key{number}"), 60)
        page = await states[0].page("t", 25)
        rest = await states[1].page(None, 25, page.after)
        assert [each.id for each, _ in page.items + rest.items] == [
            str(number) for number in range(39, -1, -1)
        ]
        for number, conversation in enumerate(conversations):
            both = await asyncio.gather(*(each.take(conversation) for each in states))
            assert [each.key for each in both if each is not None] == [f"key{number}"]
        assert (await states[0].delete("t", "0"))[0]
        await states[0].put_response("t", "r", b"blob", 60)
        assert await states[1].get_response("t", "r") == b"blob"
        assert min(first.client.dbsize(), second.client.dbsize()) > 5

        async def has_come() -> bool:
            await states[0].broadcast(b"hello")
            await asyncio.sleep(0.05)
            return len(shared.messages) >= 2

        await until(has_come)
        await shared.stop()
