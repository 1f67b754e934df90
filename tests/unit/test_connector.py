"""The connector inside vLLM's real scheduler. Only the worker is played: it says which reads are over."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zmq
from carryback import wire
from carryback.wire import events
from carryback_vllm.seal import Sealer

pytest.importorskip("vllm", reason="the connector runs inside vLLM")

import torch
from carryback_vllm import scheduler as scheduler_module
from carryback_vllm.layout import address_of_rank
from scheduling import BLOCK, CAPACITY, FULL, WINDOW, Engine, broken, prompt
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, RSWASpec
from vllm.v1.request import Request, RequestStatus

Start = Callable[..., Engine]
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)


def reuse_of(engine: Engine, request: Request, **step: Any) -> dict[str, Any]:
    """What a prefill did, once it is over. (It was asked to `carryback_tell`.)"""
    told = engine.next(events.Prefilled, step=True)
    assert request.is_finished()
    reuse: dict[str, Any] = json.loads(told.params)["carryback_reuse"]
    assert reuse["reason"] in wire.ENGINE_REASONS
    assert reuse["tokens"] + reuse["cached"] + reuse["recomputed"] == request.num_prompt_tokens
    return reuse


def prefill(engine: Engine, tokens: list[int], ask: list[str], **params: Any) -> Request:
    """A prompt at a prefill engine."""
    params = {"carryback_key": "key", "carryback_tell": True, **params}
    return engine.add(tokens, 1, do_remote_decode=True, carryback_ask=ask, **params)


def reads(engine: Engine, request: Request) -> None:
    """Step until it reads."""
    deadline = time.monotonic() + 20
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert not request.is_finished()
        assert time.monotonic() < deadline
        engine.step()


def tip(held: events.Held) -> dict[str, Any]:
    return {"tokens": held.tokens, "digest": held.tip.hex()}


def test_an_engine_that_holds_nothing_says_so(start: Start) -> None:
    hello = start().next(events.Hello)
    assert (hello.pinned, hello.leased, hello.capacity) == (0, 0, CAPACITY)


# -- pins


def test_what_is_pinned_and_let_go_of(start: Start) -> None:
    engine = start()
    first, second = engine.hold(prompt(4)), engine.hold(prompt(9, seed=2))
    assert (first.tokens, first.blocks, first.pinned, first.generated) == (4 * BLOCK, 4, 4, 1)
    assert (second.tokens, second.blocks, second.pinned) == (9 * BLOCK, 9, 13)
    assert engine.used == 13
    engine.send(events.Release([first.key, "unknown"]))
    released = engine.next(events.Released)
    assert (released.key, released.reason, released.pinned) == (first.key, "asked", 9)
    assert engine.used == 9
    # What is not pinned is found still.
    assert engine.ask(prompt(4)).tokens == 4 * BLOCK
    engine.send(events.Release([second.key]))
    assert engine.next(events.Released).pinned == 0
    assert engine.settle().pinned == 0


def test_the_tip_tells_a_history_from_another(start: Start) -> None:
    engine = start()
    first, same, other, short = (
        engine.hold(tokens) for tokens in (prompt(4), prompt(4), prompt(4, seed=2), [1] * (BLOCK - 1))
    )
    assert len(first.tip) == 16
    assert first.tip == same.tip != other.tip
    assert (short.tokens, short.blocks, short.tip) == (0, 0, b"")


def test_an_answer_that_a_stop_string_ends_is_pinned(start: Start) -> None:
    engine = start()
    request = engine.add(prompt(4), 2 * BLOCK, stop=["x"], carryback_key="stopped", hold_s=60)
    for _ in range(BLOCK):
        engine.step()
    engine.abort(request)
    held = engine.next(events.Held)
    # The last token that was sampled has no KV.
    assert request.num_tokens == 5 * BLOCK + 1
    assert (held.key, held.tokens, held.blocks) == ("stopped", 5 * BLOCK, 5)
    assert engine.used == 5


@pytest.mark.parametrize(("stop", "steps"), [(None, 3), (["x"], 0)], ids=["no stop string", "no token"])
def test_nothing_is_pinned_of_a_request_whose_client_left(
    start: Start, stop: list[str] | None, steps: int
) -> None:
    engine = start()
    request = engine.add(prompt(4), 2 * BLOCK, stop=stop, hold_s=60, carryback_key="left")
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    held = engine.next(events.Held)
    assert (held.blocks, held.hold_s, held.tokens) == (0, 0, 4 * BLOCK if steps else 0)
    engine.step()
    assert engine.used == 0


@pytest.mark.parametrize("hold_s", [0, -1, float("inf"), float("nan"), "long", None])
def test_without_a_time_nothing_is_pinned_and_all_is_found(start: Start, hold_s: Any) -> None:
    engine = start()
    held = engine.hold(prompt(4), hold_s=hold_s)
    assert (held.blocks, held.hold_s, held.tokens, len(held.tip)) == (0, 0, 4 * BLOCK, 16)
    assert engine.used == 0
    assert engine.ask(prompt(4)).tokens == 4 * BLOCK


def test_a_request_of_no_router_is_pinned_for_nobody(start: Start) -> None:
    engine = start()
    engine.run(prompt(4), hold_s=60)
    assert engine.settle().pinned == engine.used == 0


def test_a_pin_ends_by_its_time(start: Start) -> None:
    engine = start()
    held = engine.hold(prompt(4), hold_s=0.5)
    assert held.pinned == 4
    # Without a step: the engine may have nothing to do.
    released = engine.next(events.Released)
    assert (released.key, released.reason, released.pinned, engine.used) == (held.key, "expired", 0, 0)
    assert engine.ask(prompt(4)).tokens == 4 * BLOCK


def test_a_newer_pin_covers_the_older_one(start: Start) -> None:
    engine = start()
    older, branch = engine.hold(prompt(4)), engine.hold(prompt(6, seed=5, shared=4))
    longer = engine.hold(prompt(4, seed=9))
    newer = engine.hold([*prompt(4)[:-1], *prompt(2)])
    released = engine.next(events.Released)
    assert (released.key, released.reason) == (older.key, "covered")
    assert (newer.blocks, released.pinned) == (6, 6 + branch.blocks + longer.blocks)
    assert engine.used == engine.settle().pinned


def test_blocks_of_a_common_prefix_count_once(start: Start) -> None:
    engine = start()
    held = [engine.hold(prompt(20, seed, shared=16)) for seed in range(3)]
    assert [each.blocks for each in held] == [20, 20, 20]
    assert [each.pinned for each in held] == [20, 24, 28]
    assert engine.used == 28
    left = []
    for each in held:
        engine.send(events.Release([each.key]))
        left.append(engine.next(events.Released).pinned)
    assert left == [24, 20, 0]
    assert engine.used == 0


def test_no_more_is_pinned_than_the_engines_share(start: Start) -> None:
    engine = start(carryback_max_pinned=0.5)  # of 99 blocks
    first, second, third = (engine.hold(prompt(20, seed)) for seed in range(3))
    assert (first.blocks, second.blocks, second.pinned) == (20, 20, 40)
    assert (third.blocks, third.tokens, third.pinned) == (0, 20 * BLOCK, 40)
    assert engine.used == 40
    assert engine.hold(prompt(9, seed=3)).pinned == 49  # it fits, to the last block
    assert engine.hold([*prompt(20, seed=1)[:-1], *prompt(1)]).blocks == 0
    engine.send(events.Release([first.key]))
    assert engine.next(events.Released).pinned == 29
    assert engine.hold(prompt(20, seed=2)).pinned == 49


def test_nothing_is_pinned_with_a_share_of_nothing(start: Start) -> None:
    assert start(carryback_max_pinned=0).hold(prompt(4)).blocks == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("carryback_max_pinned", each) for each in (-0.1, 1.5, "half")],
        *[("carryback_patience_s", each) for each in (-1, "long", float("inf"))],
        *[("carryback_ask_timeout_s", each) for each in (0, "long", float("inf"))],
        *[("carryback_peers", each) for each in ("tcp://127.0.0.1:1", [7], {"a": 1})],
    ],
)
def test_a_setting_that_cannot_work_is_named(start: Start, name: str, value: object) -> None:
    with pytest.raises(RuntimeError, match=name):
        start("kv_producer", **{name: value})


# -- prompts whose KV waits for a decode engine


def test_a_prefill_engine_counts_and_is_not_limited(start: Start) -> None:
    engine = start("kv_producer", carryback_max_pinned=0)
    request = engine.run(prompt(4), do_remote_decode=True, carryback_key="key", hold_s=60)
    hello = engine.settle()
    assert hello.pinned == engine.used == 5
    engine.read(request)
    hello = engine.settle()
    assert (hello.pinned, hello.seq, engine.used) == (0, 0, 0)  # no router waits for it
    assert (engine.side._prompts, engine.side._prompt_keys) == ({}, {})


def test_a_prompt_that_nobody_will_read_is_let_go_of(start: Start) -> None:
    """The worker watches over it still: what it says of it later is nothing to the scheduler."""
    engine = start("kv_producer")
    engine.run(prompt(4), do_remote_decode=True, carryback_key="key", hold_s=60)
    engine.step()  # the worker has its deadline
    other = engine.run(prompt(4, seed=2), do_remote_decode=True, carryback_key="other", hold_s=60)
    engine.send(events.Release(["key"]))
    assert engine.settle().pinned == engine.used == 5
    for _ in range(3):
        engine.step()
    assert not engine.side._dropped
    engine.send(events.Release(["key", "other"]))
    assert engine.settle().pinned == engine.used == 0
    # The worker had just heard that it was read.
    engine.read(other)
    engine.step()
    assert engine.side._guarded.failures == 0
    engine.run(prompt(4, seed=3))


def test_a_prompt_that_is_computed_still_is_not_let_go_of(start: Start) -> None:
    engine = start("kv_producer", chunk=4 * BLOCK)
    request = engine.add(prompt(12), 1, do_remote_decode=True, carryback_key="key", hold_s=60)
    engine.step()
    engine.send(events.Release(["key"]))
    engine.settle()
    assert engine.used >= 4
    while not request.is_finished():
        engine.step()
    assert engine.settle().pinned == 13


def test_each_rank_has_a_port(start: Start) -> None:
    start(rank=0)
    assert start(rank=2).next(events.Hello).capacity == CAPACITY


def test_addresses_of_ranks() -> None:
    assert address_of_rank("tcp://*:5701", 3) == "tcp://*:5704"
    assert address_of_rank("tcp://[::1]:5701", 1) == "tcp://[::1]:5702"
    assert address_of_rank("ipc:///run/events", 0) == "ipc:///run/events"
    with pytest.raises(RuntimeError, match="carryback_events"):
        address_of_rank("ipc:///run/events", 1)


# -- questions


def test_what_is_found_is_leased_and_sealed(start: Start) -> None:
    engine = start()
    engine.run(prompt(4))
    answer = engine.ask(prompt(2, seed=5))
    assert (answer.tokens, answer.reason, answer.record) == (0, "nothing", b"")
    answer = engine.ask(prompt(4))
    assert (answer.tokens, answer.engine, answer.reason) == (4 * BLOCK, engine.side.engine_id, "")
    record = json.loads(answer.record)
    assert (record["remote_request_id"], record["remote_num_tokens"]) == (answer.lease, 4 * BLOCK)
    assert "digests" not in record["carryback"]
    assert len(answer.digests) == 4 * 16
    assert not Sealer(b"k").is_authentic(record)
    record["carryback"]["digests"] = base64.b64encode(answer.digests).decode()
    assert Sealer(b"k").is_authentic(record)
    assert Sealer(b"k").common_blocks(record, engine.request(prompt(4), 1).block_hashes) == (4, 4)
    assert events.transfer_params(record) == record


def test_a_lease_ends_when_its_reader_says_so_or_is_not_heard_of(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "LEASE_S", 1.5)
    engine = start()
    for seed in (1, 2):
        engine.run(prompt(4, seed))
    done, late = engine.ask(prompt(4)), engine.ask(prompt(4, seed=2))
    assert engine.used == 8
    engine.send(events.Done([done.lease, "carryback-lease-nobodys"]))
    for _ in range(4):
        engine.send(events.Keep([late.lease, "carryback-lease-nobodys"]))
        hello = engine.next(events.Hello)
    assert late.lease in engine.side._leases
    while hello.leased:
        hello = engine.next(events.Hello)
    assert engine.used == 0
    assert not len(engine.side._leases)
    engine.send(events.Keep([late.lease]))  # it comes to life again by no word
    assert engine.settle().leased == engine.used == 0


def test_leases_are_bounded_for_each_asker_and_for_all(start: Start) -> None:
    engine = start()
    for seed in range(3):
        engine.run(prompt(28, seed))
    first = engine.ask(prompt(28, seed=0), asker="one")
    refused = engine.ask(prompt(28, seed=1), asker="one")
    assert (refused.tokens, refused.record, refused.reason) == (28 * BLOCK, b"", "too_many_leases")
    assert engine.ask(prompt(28, seed=0), asker="one").record  # the same blocks
    assert engine.ask(prompt(28, seed=1), asker="two").record
    assert engine.ask(prompt(28, seed=2), asker="three").reason == "too_many_leases"
    engine.send(events.Done([first.lease]))
    assert engine.settle().leased == 56


def test_leases_and_pins_are_counted_apart(start: Start) -> None:
    engine = start()
    held = engine.hold(prompt(20))
    answer = engine.ask(prompt(20))
    hello = engine.settle()
    assert (hello.pinned, hello.leased, engine.used) == (20, 20, 20)
    engine.send(events.Release([held.key]))
    hello = engine.settle()
    assert (hello.pinned, hello.leased, engine.used) == (0, 20, 20)
    engine.send(events.Done([answer.lease]))
    assert engine.settle().leased == engine.used == 0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [({"block_size": 2 * BLOCK}, "layouts_differ"), ({"block_size": 16}, "layouts_differ")],
)
def test_engines_that_hash_otherwise_are_answered(start: Start, asked: dict[str, int], reason: str) -> None:
    engine = start()
    engine.run(prompt(4))
    assert engine.ask(prompt(4), **asked).reason == reason


def test_a_question_with_half_a_hash_is_answered(start: Start) -> None:
    engine = start()
    engine.send(events.Ask("asker", "lease", b"x" * 33, BLOCK, 99))
    assert engine.next(events.Leased).reason == "layouts_differ"


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_any_role_answers(start: Start, role: str) -> None:
    engine = start(role)
    engine.run(prompt(4))
    assert engine.ask(prompt(4)).tokens == 4 * BLOCK


@pytest.mark.parametrize(
    "specs", [[LATENT], [replace(FULL, sliding_window=2 * BLOCK)], [WINDOW], [FULL, WINDOW]]
)
def test_layouts_that_are_leased(
    start: Start, monkeypatch: pytest.MonkeyPatch, specs: list[KVCacheSpec]
) -> None:
    engine = start(specs=specs)
    assert engine.hold(prompt(4)).tokens == 4 * BLOCK
    assert engine.ask(prompt(4)).tokens == 4 * BLOCK


@pytest.mark.parametrize(
    "specs",
    [
        [FULL, MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))],
        [FULL, replace(FULL, block_size=2 * BLOCK)],
        [RSWASpec(BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, rswa_window=BLOCK)],
    ],
)
def test_layouts_that_cannot_be_cut_are_not(start: Start, specs: list[KVCacheSpec]) -> None:
    engine = start(specs=specs)
    held = engine.hold(prompt(4))
    assert (held.blocks, held.tokens) == (0, 0)
    assert engine.ask(prompt(4)).reason == "unsupported"
    assert engine.used == 0


def test_a_router_is_told_what_a_decode_engine_has_itself(start: Start) -> None:
    engine = start()
    engine.run(prompt(4))
    engine.add(prompt(4), 1, carryback_key="key", carryback_find=True)
    said = engine.next(events.Found)
    assert (said.key, said.prompt_tokens, said.cached_tokens) == ("key", 4 * BLOCK + 1, 4 * BLOCK)
    engine.add([8] * 40, 1, carryback_key="new", carryback_find=True)
    said = engine.next(events.Found)
    assert (said.key, said.prompt_tokens, said.cached_tokens) == ("new", 40, 0)


# -- what a prefill engine reads


def test_what_a_decode_engine_has_is_read(start: Start) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    held = decode.hold(prompt(6))
    request = prefill(engine, prompt(6), [decode.address], carryback_tip=tip(held))
    reads(engine, request)
    assert decode.settle().leased == 6
    engine.step(received=[request.request_id])
    assert reuse_of(engine, request) == {
        "outcome": "hit", "tokens": 6 * BLOCK, "cached": 0, "recomputed": 1, "reason": "verified",
        "found": 6 * BLOCK, "holder": decode.side.engine_id, "asked": 1,
    }  # fmt: skip
    assert decode.settle().leased == 0
    assert_nothing_waits(engine)


def assert_nothing_waits(engine: Engine) -> None:
    side = engine.side
    assert not any(map(len, (side._matches, side._reading, side._waiting, side._line, side._loaded)))
    assert side._peers is None or not (side._peers._questions or side._peers._by_lease)
    assert side._guarded.failures == 0


def test_what_is_here_already_is_not_read(start: Start) -> None:
    """This engine's own prefix cache first, then what was found beyond it."""
    decode, engine = start(), start("kv_producer", rank=1)
    decode.run(prompt(6, seed=3, shared=4))
    engine.run(prompt(4, seed=9, shared=4))
    request = prefill(engine, prompt(6, seed=3, shared=4), [decode.address])
    reads(engine, request)
    engine.step(received=[request.request_id])
    reuse = reuse_of(engine, request)
    assert (reuse["outcome"], reuse["cached"], reuse["tokens"]) == ("hit", 4 * BLOCK, 2 * BLOCK)
    request = prefill(engine, prompt(6, seed=3, shared=4), [decode.address])
    reuse = reuse_of(engine, request)
    assert (reuse["outcome"], reuse["reason"], reuse["cached"]) == ("hit", "local_cache", 6 * BLOCK)
    assert decode.settle().leased == 0
    assert_nothing_waits(engine)


@pytest.mark.parametrize("end", ["broken off while asked", "broken off while reading", "failed"])
def test_a_lease_ends_with_its_request(start: Start, end: str) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    decode.run(prompt(6))
    request = prefill(engine, prompt(6), [decode.address])
    if end == "broken off while asked":
        engine.abort(request)
    else:
        reads(engine, request)
        assert decode.settle().leased == 6
        if end == "failed":
            engine.step(failed=[request.request_id])
            reuse = reuse_of(engine, request)
            assert (reuse["outcome"], reuse["tokens"], reuse["reason"]) == ("miss", 0, "load_failed")
        else:
            engine.abort(request)
            assert decode.settle().leased == 6  # the worker may be reading still
            engine.step(received=[request.request_id])
    while decode.settle().leased:
        pass
    assert decode.used == 0
    engine.step()
    assert_nothing_waits(engine)


def test_a_prompt_waits_no_longer_than_its_time_for_an_engine_that_is_gone(start: Start) -> None:
    engine = start("kv_producer", carryback_ask_timeout_s=0.3)
    request = prefill(engine, prompt(6), ["tcp://127.0.0.1:1", "no address", 7])  # type: ignore[list-item]
    reuse = reuse_of(engine, request)
    assert (reuse["outcome"], reuse["reason"], reuse["asked"]) == ("miss", "no_answer", 0)


def test_engines_of_the_setting_are_asked_where_no_router_names_any(start: Start) -> None:
    decode = start()
    decode.run(prompt(6))
    engine = start("kv_producer", rank=1, carryback_peers=[decode.address])
    request = engine.add(prompt(6), 1, do_remote_decode=True, carryback_key="key", carryback_tell=True)
    reads(engine, request)
    engine.step(received=[request.request_id])
    assert reuse_of(engine, request)["tokens"] == 6 * BLOCK
    # A router that asks nobody means it.
    request = prefill(engine, prompt(6, seed=2), [])
    assert reuse_of(engine, request)["reason"] == "off"


def test_both_roles_in_one_engine(start: Start) -> None:
    one, other = start("kv_both"), start("kv_both", rank=1)
    one.run(prompt(6))
    request = prefill(other, prompt(6), [one.address])
    reads(other, request)
    other.step(received=[request.request_id])
    told = other.next(events.Prefilled, step=True)
    record = events.transfer_params(told.params)
    decoded = one.add(prompt(6), 2, carryback_key="decoded", hold_s=60, **record)
    reads(one, decoded)
    one.step(received=[decoded.request_id])
    while not decoded.is_finished():
        one.step()
    assert one.next(events.Held).blocks == 6


def test_too_many_leases_are_asked_for_again_when_the_turn_has_come(start: Start) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    held = decode.hold(prompt(28))
    decode.run(prompt(20, seed=2))
    blocker = prefill(engine, prompt(20, seed=2), [decode.address])
    reads(engine, blocker)
    request = prefill(engine, prompt(28), [decode.address], carryback_tip=tip(held))
    first = engine.side._line.first
    engine.side._line.first = lambda can_go=None: "somebody else"
    while request.request_id not in engine.side._matches:
        engine.step()
    assert engine.side._matches[request.request_id].reason == "too_many_leases"
    engine.step(received=[blocker.request_id])
    while decode.settle().leased:
        pass
    engine.side._line.first = first
    reads(engine, request)
    engine.step(received=[request.request_id])
    engine.next(events.Prefilled, step=True)
    reuse = reuse_of(engine, request)
    assert (reuse["outcome"], reuse["tokens"], reuse["reason"]) == ("hit", 28 * BLOCK, "verified")


def test_what_a_conversation_had_is_known_when_engines_are_asked_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    held = decode.hold(prompt(28))
    monkeypatch.setattr(decode.side._leases, "_each", 0)
    request = prefill(engine, prompt(28), [decode.address], carryback_tip=tip(held))
    reuse = reuse_of(engine, request)
    assert (reuse["outcome"], reuse["reason"], reuse["found"]) == ("miss", "too_many_leases", 28 * BLOCK)
    decode.send(events.Release([held.key]))
    decode.settle()
    decode.rpc("load_new_weights")
    asked = prefill(engine, prompt(28, seed=7), [decode.address], carryback_tip=tip(held))
    expected = engine.side._expect(asked, asked.kv_transfer_params)
    assert expected == engine.side._expect(asked, asked.kv_transfer_params)
    assert (expected.expected, expected.is_changed) == (28 * BLOCK, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record.update(remote_num_tokens=BLOCK), "unverified"),
        (lambda record: record.update(tp_size=4), "layouts_differ"),
        (lambda record: record.update(pp_size=2), "layouts_differ"),
        (lambda record: record.update(remote_request_id="request-7"), "unverified"),
        (lambda record: record.update(remote_block_ids=[[1], [2]]), "layouts_differ"),
    ],
    ids=["tokens", "ranks", "stages", "no lease", "groups"],
)
def test_what_an_engine_of_ours_says_is_verified(
    start: Start, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    decode.run(prompt(4))
    seal = decode.side._sealer.seal

    def changed(record: dict[str, Any], **options: Any) -> None:
        change(record)
        seal(record, **options)

    monkeypatch.setattr(decode.side._sealer, "seal", changed)
    reuse = reuse_of(engine, prefill(engine, prompt(4), [decode.address]))
    assert (reuse["outcome"], reuse["reason"]) == ("miss", reason)
    assert decode.settle().leased == 0


def test_what_another_has_sealed_is_not_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    decode.run(prompt(4))
    monkeypatch.setattr(decode.side, "_sealer", Sealer(b"another"))
    reuse = reuse_of(engine, prefill(engine, prompt(4), [decode.address]))
    assert (reuse["outcome"], reuse["reason"]) == ("miss", "unverified")


@pytest.mark.parametrize("how", ["pause", "no cache", "below the threshold", "too short"])
def test_why_nothing_is_read(start: Start, how: str) -> None:
    decode = start(caches=how != "no cache")
    engine = start("kv_producer", rank=1)
    tokens = [3] * BLOCK if how == "too short" else prompt(4)
    decode.run(tokens)
    if how == "pause":
        decode.side.pause(True)
    threshold = {"carryback_threshold": 1000} if how == "below the threshold" else {}
    reuse = reuse_of(engine, prefill(engine, tokens, [decode.address], **threshold))
    assert (reuse["outcome"], reuse["reason"]) == (
        "miss",
        {"pause": "no_answer", "no cache": "unsupported_layout", "below the threshold": "below_threshold",
         "too short": "too_short"}[how],
    )  # fmt: skip
    assert decode.settle().leased == 0


def test_what_a_prompt_can_be_expected_to_find(start: Start) -> None:
    engine = start("kv_producer")
    request = engine.request(prompt(6), 1)
    digest = engine.side._sealer.digests(request.block_hashes[5:6]).hex()
    for said, expected in (
        ({"tokens": 6 * BLOCK, "digest": digest}, (6 * BLOCK, False)),
        ({"tokens": 6 * BLOCK, "digest": "0" * 32}, (6 * BLOCK, True)),
        ({"tokens": 60 * BLOCK, "digest": digest}, (6 * BLOCK, None)),
        ({"tokens": BLOCK - 1, "digest": "00"}, (0, False)),
        ({"tokens": "many", "digest": "00"}, (0, False)),
        ({"tokens": 64, "digest": 7}, (0, False)),
        ({"tokens": -64, "digest": "00"}, (0, False)),
        ({"tokens": 64}, (0, False)),
        ("text", (0, False)),
        (None, (0, False)),
    ):
        match = engine.side._expect(request, {"carryback_tip": said})
        assert (match.expected, match.is_changed) == expected, said


def test_what_was_not_computed_is_told(start: Start) -> None:
    engine = start("kv_producer")
    told = []
    for key in "ab":
        engine.run(prompt(4), do_remote_decode=True, carryback_key=key, carryback_tell=True)
        told.append(json.loads(engine.next(events.Prefilled).params))
    # The second found the first's blocks in the prefix cache.
    assert [each["remote_prefill_cached_tokens"] for each in told] == [0, 4 * BLOCK]
    assert [each["carryback_work"]["computed"] for each in told] == [4 * BLOCK + 1, 1]


# -- a decode engine reads a prompt's KV


@pytest.mark.parametrize("what", ["it", "another prompt", "a forged record", "a lease's record"])
def test_a_prompts_kv_is_read_if_it_is_that_prompts(start: Start, what: str) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    engine.run(prompt(4), do_remote_decode=True, carryback_key="key", carryback_tell=True)
    record = events.transfer_params(engine.next(events.Prefilled).params)
    if what == "a forged record":
        record["remote_block_ids"] = [[9, 9, 9, 9, 9]]
    elif what == "a lease's record":
        answer = engine.ask(prompt(4))
        record = {**json.loads(answer.record), "do_remote_prefill": True, "do_remote_decode": False}
        record["carryback"]["digests"] = base64.b64encode(answer.digests).decode()
    tokens = prompt(4, seed=2) if what == "another prompt" else prompt(4)
    request = decode.add(tokens, 2, carryback_key="key", **record)
    decode.step()
    if what == "it":
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return
    declined = decode.next(events.Declined)
    assert declined.reason == ("unverified" if what == "a forged record" else "prompt_differs")
    while not request.is_finished():
        decode.step()


# -- the line


def test_little_to_compute_goes_before_much(start: Start) -> None:
    engine = start("kv_producer")
    # How long a token takes has to be learned first.
    engine.run(prompt(20, seed=1), do_remote_decode=True)
    long = engine.add(prompt(30, seed=2), 1, do_remote_decode=True)
    short = engine.add(prompt(2, seed=3), 1, do_remote_decode=True)
    known = engine.add(prompt(20, seed=1), 1, do_remote_decode=True)  # it is in the prefix cache
    waits = engine.add(prompt(3, seed=4), 1)  # another's request, as vLLM has it
    engine.step()
    assert [each.is_finished() for each in (long, short, known, waits)] == [False, True, True, True]
    engine.step()
    assert long.is_finished()


@pytest.mark.parametrize("extra", [{"carryback_patience_s": 0}, {}])
def test_first_come_first_served(start: Start, extra: dict[str, Any]) -> None:
    engine = start("kv_producer", **extra)
    if extra:
        engine.run(prompt(20, seed=1), do_remote_decode=True)
    long = engine.add(prompt(30, seed=2), 1, do_remote_decode=True)
    short = engine.add(prompt(2, seed=3), 1, do_remote_decode=True)
    engine.step()
    assert long.is_finished()
    assert short.is_finished()


def test_nobody_waits_for_who_was_broken_off(start: Start) -> None:
    engine = start("kv_producer")
    engine.run(prompt(20, seed=1), do_remote_decode=True)
    long = engine.add(prompt(30, seed=2), 1, do_remote_decode=True)
    engine.abort(engine.add(prompt(2, seed=3), 1, do_remote_decode=True))
    engine.step()
    assert long.is_finished()


# -- faults of ours


@pytest.mark.parametrize(
    "piece",
    ["_take_in", "_look", "_find", "_decide", "_is_next", "_waits", "_given_blocks", "_reads_ended", "_leave_line", "_pin",
     "_tell_held", "_unpin", "_answer"],
)  # fmt: skip
def test_a_fault_of_ours_ends_no_decode_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    engine = start()
    older = engine.hold(prompt(4, seed=1), hold_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(engine.side, piece, broken)
        engine.run(prompt(4, seed=2), carryback_key="key", hold_s=60, carryback_find=True)
        engine.send(
            events.Ask("asker", "carryback-lease-x", engine.request(prompt(4), 1).block_hashes[0], BLOCK, 99)
        )
        engine.send(events.Release([older.key]))
        engine.next(events.Hello)
        engine.next(events.Hello)
    assert engine.side._guarded.failures > 0 or piece == "_unpin"
    engine.send(events.Done(["carryback-lease-x"]))
    engine.send(events.Release(["key", older.key]))
    engine.settle()
    assert engine.used == 0
    held = engine.hold(prompt(4, seed=3))
    assert (held.blocks, engine.used) == (4, 4)


@pytest.mark.parametrize(
    "piece", ["_take_in", "_look", "_ask", "_decide", "_match_found", "_expect", "_take_record", "_why_refused", "_is_next",
              "_waits", "_asks_again", "_threshold_of"],
)  # fmt: skip
def test_a_fault_of_ours_makes_a_prefill_engine_compute(
    start: Start, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    decode, engine = start(), start("kv_producer", rank=1)
    decode.run(prompt(4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.side, piece, broken)
        request = prefill(engine, prompt(4), [decode.address])
        if piece == "_waits":  # which says only when vLLM need not look
            reads(engine, request)
            engine.step(received=[request.request_id])
            reuse_of(engine, request)
        else:
            reuse = reuse_of(engine, request)
            assert (reuse["outcome"], reuse["tokens"], reuse["reason"]) == ("miss", 0, "plugin_failed")
    assert engine.side._guarded.failures > 0
    assert decode.settle().leased == 0
    # What it computed is good: a decode engine can read it.
    assert engine.used == 5


@pytest.mark.parametrize("piece", ["_hand_over", "_seal", "_tail"])
def test_a_prefill_engine_that_cannot_seal_keeps_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    engine = start("kv_producer")
    monkeypatch.setattr(engine.side, piece, broken)
    request = engine.add(prompt(4), 1, do_remote_decode=True, carryback_key="key")
    engine.step()
    assert request.is_finished()
    assert engine.used == 0
    assert (engine.side._prompts, engine.side._prompt_keys) == ({}, {})


def test_a_request_that_waits_goes_on_after_a_fault_of_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    request = engine.add(prompt(4), 1, carryback_key="key", carryback_await=600)
    engine.step()
    assert not request.is_finished()
    monkeypatch.setattr(engine.side, "_waits", broken)
    monkeypatch.setattr(engine.side, "_may_go_on", broken)
    engine.step()
    assert request.is_finished()
    assert not engine.side._waiting


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
@pytest.mark.parametrize(
    "params",
    [
        {"_carryback_ask": "nobody's", "_remote_blocks_processed": True},
        {"carryback_await": "long"},
        {"hold_s": "long", "carryback_find": "yes"},
        {"carryback": {"mac": "x", "v": {}}, "remote_block_ids": [[1]], "do_remote_decode": True},
        {
            "carryback_ask": {"a": 1},
            "carryback_threshold": "many",
            "carryback_key": 7,
            "do_remote_decode": True,
        },
        {"carryback_ask": [1, None], "carryback_tip": [], "do_remote_decode": True},
        {"remote_block_ids": [[1]], "do_remote_prefill": True, "remote_engine_id": {}},
    ],
)
def test_what_a_request_may_come_with(start: Start, role: str, params: dict[str, Any]) -> None:
    """The engine answers it, and nothing of it stays there for ever."""
    engine = start(role)
    name = engine.run(prompt(4), **params)
    engine.read(name)
    engine.step()
    assert engine.used == 0
    assert_nothing_waits(engine)


@pytest.mark.parametrize(("said", "billed"), [(0, 0), (64, 64), (10**6, 4 * BLOCK), (-5, 0)])
@pytest.mark.parametrize("waits", [False, True])
def test_usage_says_what_the_router_said(
    start: Start, port: int, said: int, billed: int, waits: bool
) -> None:
    engine = start()
    engine.run(prompt(4))  # its own prefix cache has most of the prompt now, and does not count
    bill = {"carryback_cached": said}
    request = engine.add(prompt(4), 1, carryback_key="key", **({"carryback_await": 600} if waits else bill))
    taken = []
    take = request.take_prefill_stats

    def note() -> Any:
        taken.append(take())
        return taken[-1]

    request.take_prefill_stats = note  # type: ignore[method-assign]
    with zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(f"tcp://127.0.0.1:{port}")
        if waits:
            router.send(events.encode_command(events.Go("key", json.dumps(bill).encode())))
        engine.next(events.Held, step=True)
    assert request.is_finished()
    assert [(stats.num_cached_tokens, stats.num_cache_creation_tokens) for stats in taken] == [(billed, 0)]


def test_who_waits_is_told_where_kv_is_and_nothing_else(start: Start) -> None:
    engine = start()
    mine = engine.hold(prompt(4, seed=2))
    request = engine.add(prompt(4), 1, carryback_key="key", carryback_await=600, hold_s=60)
    engine.step()
    deep: object = 1
    for _ in range(500):
        deep = [deep]
    params = {
        "carryback_await": 600, "carryback_key": "another", "hold_s": 0, "carryback_ask": ["tcp://127.0.0.1:1"],
        "_carryback_ask": "nobody's", "later": deep,
    }  # fmt: skip
    engine.send(events.Go("key", json.dumps(params).encode()))
    held = engine.next(events.Held, step=True)
    assert request.is_finished()
    assert (held.key, held.blocks) == ("key", 4)
    assert held.pinned == 4 + mine.blocks  # the other's is held as before
    assert engine.side._guarded.failures == 0
    assert "later" not in (request.kv_transfer_params or {})


def test_who_is_told_nothing_goes_on_when_its_time_is_over(start: Start) -> None:
    engine = start()
    request = engine.add(prompt(4), 1, carryback_key="key", carryback_await=0.2)
    engine.step()
    assert not request.is_finished()
    engine.next(events.Hello)
    time.sleep(0.2)
    engine.step()
    assert request.is_finished()
