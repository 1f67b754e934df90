"""Releases of carryback beside each other: what one writes, others read or refuse; never do they mistake it.

`tests/recorded/0.1.json` has what release 0.1 wrote, its engines real ones. It is never changed: installations
are upgraded one process at a time, so what is in it goes on being read, or the version that stands in front of
it (of events, of seals, of the state) is counted up, and docs/upgrades.md says what that costs. (Before the
release its records were sealed again, with the tests' key, when seals became version 2; its events were written again, of
what those engines had said, when events became version 3; and what it leaves in Redis was recorded again when that became
version 2. `redis-1.json` has the layout before.)
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, Literal

import carryback
import msgspec
import pytest
from carryback import wire
from carryback.wire import events
from carryback_server import chains, redis_state, state
from carryback_vllm import seal
from carryback_vllm.seal import Sealer
from carryback_vllm.version import SUPPORTED

RECORDED = json.loads((Path(__file__).parents[1] / "recorded/0.1.json").read_text())
KEY = b"the key of the tests"


def raw(text: str) -> bytes:
    """Bytes as they are recorded."""
    return base64.b64decode(text)


def said(event: msgspec.Struct) -> dict[str, Any]:
    """The fields of an event, as JSON has them."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return {
        name: msgspec.to_builtins(value)
        for name, value in fields.items()
        if not isinstance(value, msgspec.Raw)
    }


# -- engine events


class Hello(msgspec.Struct, tag="hello"):
    """As release 0.1 reads it; likewise the others."""

    engine: str
    seq: int
    pinned: int
    capacity: int
    takes_go: bool = False


class Held(msgspec.Struct, tag="held"):
    engine: str
    seq: int
    key: str
    tokens: int
    blocks: int
    hold_s: float
    tip: bytes
    pinned: int
    generated: int = 0


class Released(msgspec.Struct, tag="released"):
    engine: str
    seq: int
    key: str
    reason: Literal["expired", "asked", "covered", "void"]
    pinned: int


class Declined(msgspec.Struct, tag="declined"):
    engine: str
    seq: int
    key: str
    reason: str


class Prefilled(msgspec.Struct, tag="prefilled"):
    engine: str
    seq: int
    key: str
    params: bytes


class Found(msgspec.Struct, tag="found"):
    engine: str
    seq: int
    key: str
    prompt_tokens: int
    cached_tokens: int


class Go(msgspec.Struct, tag="go"):
    key: str
    params: bytes


TODAY: list[events.Event] = [
    events.Hello("e", 3, 7, 99, takes_go=True, about=events.about({"vllm": "9.9", "later": {}}), time_ns=5),
    events.Held("e", 4, "key", 64, 4, 480.0, b"\xff" * 16, 7, 12),
    *(events.Released("e", 5, "key", reason, 3) for reason in ("expired", "asked", "covered", "void")),
    events.Declined("e", 6, "key", "unverified"),
    events.Prefilled("e", 7, "key", b'{"b":2}'),
    events.Found("e", 8, "key", 194, 160),
]


@pytest.mark.parametrize("name", RECORDED["events"])
def test_events_of_0_1_are_read(name: str) -> None:
    recorded = RECORDED["events"][name]
    event = events.decode(raw(recorded["payload"]))
    assert type(event).__name__ == name
    assert said(event).items() >= recorded["says"].items()
    topic, _ = events.encode(event)
    assert topic.decode() == recorded["topic"]


@pytest.mark.parametrize("event", TODAY, ids=lambda event: type(event).__name__)
def test_events_of_today_are_read_by_0_1(event: events.Event) -> None:
    _, payload = events.encode(event)
    assert payload[0] == RECORDED["event_version"]
    read = msgspec.msgpack.decode(payload[1:], type=Hello | Held | Released | Declined | Prefilled | Found)
    assert type(read).__name__ == type(event).__name__
    assert said(event).items() >= said(read).items()


def test_what_a_router_tells_is_the_same_in_0_1() -> None:
    recorded = RECORDED["go"]
    go = events.decode_command(raw(recorded["frame"]))
    assert go == events.Go(recorded["key"], recorded["params"].encode())
    frame = events.encode_command(go)
    assert frame[:2] == raw(recorded["frame"])[:2]
    assert msgspec.msgpack.decode(frame[2:], type=Go) == Go(recorded["key"], recorded["params"].encode())


def test_why_kv_was_let_go_of_may_be_new_but_never_goes_unheard() -> None:
    written = {"type": "released", "engine": "e", "seq": 1, "key": "k", "reason": "preempted", "pinned": 0}
    event = events.decode(bytes([events.VERSION]) + msgspec.msgpack.encode(written))
    assert event == events.Released("e", 1, "k", "preempted", 0)


@pytest.mark.parametrize("version", [events.VERSION - 1, events.VERSION + 1])
def test_another_version_is_refused_in_both_directions(version: int) -> None:
    _, payload = events.encode(TODAY[0])
    frame = events.encode_command(events.Go("k", b"{}"))
    for read, other in (
        (events.decode, bytes([version]) + payload[1:]),
        (events.decode_command, frame[:1] + bytes([version]) + frame[2:]),
    ):
        with pytest.raises(
            ValueError, match=f"version {version}; this is {events.VERSION}.*releases of carryback"
        ):
            read(other)


def test_what_was_written_before_0_1_is_refused_and_not_mistaken() -> None:
    """Until prefill engines asked decode engines what they have (version 2)."""
    earlier = json.loads((Path(__file__).parents[1] / "recorded/events-2.json").read_text())
    refused = f"version {earlier['version']}; this is {events.VERSION}.*releases of carryback"
    for each in earlier["events"].values():
        with pytest.raises(ValueError, match=refused):
            events.decode(raw(each["payload"]))
    with pytest.raises(ValueError, match=refused):
        events.decode_command(raw(earlier["go"]))


# -- records and their seals


@pytest.mark.parametrize("name", RECORDED["records"])
def test_records_that_engines_of_0_1_sealed_are_verified(name: str) -> None:
    record = RECORDED["records"][name]
    sealer = Sealer(KEY)
    assert sealer.is_authentic(record)
    assert sealer.is_authentic({**record, "later": 1, "carryback_later": {}})
    common, held = sealer.common_blocks(record, [])
    assert (common, held) == (0, record["remote_num_tokens"] // record["carryback"]["block_size"])
    assert not Sealer(b"another").is_authentic(record)


def test_the_same_hashes_and_tokens_have_the_digests_of_0_1() -> None:
    recorded = RECORDED["digests"]
    sealer = Sealer(KEY)
    assert sealer.digests([raw(each) for each in recorded["hashes"]]) == raw(recorded["digests"])
    assert sealer.tail(recorded["tokens"], recorded["images"]) == recorded["tail"]


def test_a_record_of_today_is_sealed_as_in_0_1() -> None:
    recorded = RECORDED["records"]["decode"]
    sealer = Sealer(KEY)
    record = {name: value for name, value in recorded.items() if name != "carryback"}
    old = recorded["carryback"]
    sealer.seal(
        record,
        digests=raw(old["digests"]),
        tail=old["tail"],
        block_size=old["block_size"],
        epoch=old["epoch"],
        made=old["made"],
    )
    assert record == recorded


@pytest.mark.parametrize("version", [seal.VERSION - 1, seal.VERSION + 1, str(seal.VERSION), None])
def test_a_seal_of_another_version_proves_nothing(version: object) -> None:
    sealer = Sealer(KEY)
    record = json.loads(json.dumps(RECORDED["records"]["decode"]))
    other = {**record["carryback"], "v": version}
    del other["mac"]
    # With our key, and in our way: what it means is another release's all the same.
    record["carryback"] = {**other, "mac": sealer._mac(record, other)}
    assert not sealer.is_authentic(record)
    assert seal.sealed_as(record) == str(version)


# -- what clients are told


@pytest.mark.parametrize("header", RECORDED["reuse"])
def test_the_report_of_0_1_is_read(header: str) -> None:
    report = wire.Reuse.parse(header)
    assert report.header().startswith(header)
    assert report.prompt_tokens == RECORDED["reuse"][header]


@pytest.mark.parametrize("outcome", ["hit", "partial", "miss"])
def test_a_report_of_today_is_read_by_0_1(outcome: Any) -> None:
    header = wire.Reuse(outcome, 64, "verified", 5, 2).header()
    read = re.fullmatch(r"\s*(hit|partial|miss)\s*((?:;[^;]*)*)\s*", header)
    assert read is not None
    fields = dict(each.strip().split("=") for each in read[2].split(";")[1:])
    assert fields.items() >= {"tokens": "64", "reason": "verified", "recomputed": "5", "cached": "2"}.items()


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        ("hit; tokens=64; reason=verified; tier=host; saved_ms=12.5", "hit"),
        ("miss; reason=later_reason", "miss"),
        ("warm; tokens=64; reason=verified", None),
        ("hit; tokens=many", None),
    ],
)
def test_a_client_makes_of_a_later_router_what_it_understands(header: str, outcome: str | None) -> None:
    read = carryback.reuse({"X-Carryback-Reuse": header, "X-Carryback-Later": "1"})
    assert (read and read.outcome) == outcome


# -- what routers share


class Meta(msgspec.Struct, array_like=True):
    """As release 0.1 reads it."""

    tenant: str
    id: str
    parent: str | None
    turn: str
    step: int
    boundary: Literal["", "mid_turn", "turn_end", "unfinished"]
    reuse: str


class Location(msgspec.Struct, array_like=True):
    engine: str
    run: str
    key: str
    tokens: int
    until: float
    turn: str
    tip: bytes
    at: float


def test_what_0_1_left_in_redis_is_read_by_routers_of_today() -> None:
    left = {name: raw(value) for name, value in RECORDED["redis"]["conversation"].items()}
    reply = [left[name] for name in redis_state._FIELDS]
    says = RECORDED["redis"]["says"]
    conversation = redis_state._conversation("default", says["id"], reply)
    assert (conversation.tenant, conversation.id, conversation.requests) == ("default", says["id"], 1)
    location = conversation.location
    assert location is not None
    assert (location.tokens, location.engine, location.turn) == (says["tokens"], says["engine"], says["turn"])
    assert (location.tip, location.at) == (bytes(range(16)), conversation.created)


def test_what_routers_of_today_leave_in_redis_is_read_by_0_1() -> None:
    assert RECORDED["redis"]["version"] == redis_state.VERSION
    meta = redis_state._Meta("t", "c", None, "3", 2, "mid_turn", "hit")
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=Meta)
    assert read == Meta("t", "c", None, "3", 2, "mid_turn", "hit")
    location = state.Location("decode", "run", "key", 64, 9.5, "3", b"tip", 8.5)
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(location), type=Location)
    assert found == Location("decode", "run", "key", 64, 9.5, "3", b"tip", 8.5)


def test_a_response_that_0_1_stored_can_be_continued() -> None:
    stored = msgspec.json.decode(RECORDED["response"].encode(), type=chains._Stored)
    assert msgspec.json.decode(stored.response)["id"].startswith("resp_")
    assert stored.conversation
    assert stored.input


# -- engines and vLLM


def test_the_docs_say_which_vllm_is_supported_and_of_which_runs_say_so() -> None:
    page = (Path(__file__).parents[2] / "docs/upgrades.md").read_text()
    named = re.search(r"\*\*(\d+)\.(\d+) to (\d+)\.(\d+)\*\*", page)
    assert named is not None
    first, last = SUPPORTED[0], SUPPORTED[-1]
    assert tuple(map(int, named.groups())) == (*first, *last)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"(?m)^\| \d.*$", page)]
    passed = {
        tuple(map(int, row[0].split(".")[:2])) for row in rows if row[2:8] == ["yes"] * 6 and not row[8]
    }
    # Of the latest one there is no CPU build yet.
    assert passed == set(SUPPORTED) - {last}
