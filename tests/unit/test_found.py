"""What a decode engine says it has of a prompt: all that is written, and nothing that is not yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM's own prefix cache is looked up")

import msgspec
from carryback.wire import events
from carryback_vllm.found import PrefixCache
from scheduling import BLOCK, FULL, WINDOW, Engine, prompt
from vllm.v1.request import RequestStatus

Start = Callable[..., Engine]
modes = pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "two steps"])


def found(engine: Engine, tokens: list[int], **asked: Any) -> int:
    """So many blocks of a prompt an engine leases out."""
    answer = engine.ask(tokens, **asked)
    engine.send(events.Done([answer.lease]))
    assert bool(answer.record) == (answer.tokens > 0)
    return answer.tokens // BLOCK


@modes
def test_a_block_is_found_once_its_step_has_ended(start: Start, is_async: bool) -> None:
    engine = start(is_async=is_async, chunk=4 * BLOCK)
    request = engine.add(prompt(12), 8)
    assert found(engine, prompt(12)) == 0
    for chunk in range(3):
        work = engine.begin()
        # vLLM has the hashes of this step's blocks already.
        assert engine.side._find(request, 12 * BLOCK, is_settled=False).tokens == 4 * (chunk + 1) * BLOCK
        assert found(engine, prompt(12)) == 4 * chunk
        engine.end(work)
        assert found(engine, prompt(12)) == 4 * (chunk + 1)


def test_a_mutant_that_skips_the_rule_is_caught(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests here look for is there to be found: without the rule, blocks would be leased that are garbage."""
    monkeypatch.setattr(PrefixCache, "_settled", lambda self, groups, tokens: tokens)
    engine = start(chunk=4 * BLOCK)
    engine.add(prompt(12), 8)
    engine.begin()
    assert found(engine, prompt(12)) == 4


def test_two_steps_that_are_under_way(start: Start) -> None:
    engine = start(is_async=True, chunk=4 * BLOCK)
    engine.add(prompt(12), 8)
    first, second = engine.begin(), engine.begin()
    assert found(engine, prompt(12)) == 0
    engine.end(first)
    assert found(engine, prompt(12)) == 4
    third = engine.begin()
    assert found(engine, prompt(12)) == 4
    engine.end(second)
    assert found(engine, prompt(12)) == 8
    engine.end(third)
    assert found(engine, prompt(12)) == 12


@modes
def test_what_is_generated_is_found(start: Start, is_async: bool) -> None:
    """Also the block that the last step of an engine has filled, which then does nothing any more."""
    engine = start(is_async=is_async)
    # The last token that is sampled has no KV: with it, two blocks would be full, and the last one is not.
    request = engine.add(prompt(2), 2 * BLOCK + 1)
    pending = []
    while not request.is_finished():
        pending.append(engine.begin())
        history = list(request.all_token_ids)
        computed = len(history) - 1
        assert found(engine, history, max_tokens=len(history)) * BLOCK <= computed
        if not is_async or len(pending) == 2:
            engine.end(pending.pop(0))
    while pending:
        engine.end(pending.pop(0))
    history = list(request.all_token_ids)
    assert len(history) == 4 * BLOCK + 2
    assert found(engine, history, max_tokens=len(history)) == 4


@pytest.mark.parametrize("is_settled", [False, True])
def test_hashes_made_while_output_is_processed(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    """Asynchronous scheduling hashes generated blocks there, while the next step writes behind them."""
    engine = start(is_async=True)
    request = engine.add([5] * BLOCK, BLOCK + 4)
    pending = [engine.begin()]
    seen = []
    stock = engine.scheduler.kv_cache_manager.block_pool.cache_full_blocks

    def note(*, blocks: Any, num_cached_blocks: int, num_full_blocks: int, **others: Any) -> None:
        stock(blocks=blocks, num_cached_blocks=num_cached_blocks, num_full_blocks=num_full_blocks, **others)
        new = blocks[num_cached_blocks:num_full_blocks]
        seen.append((num_full_blocks, [engine.side._cache._steps[each.block_id] for each in new]))

    monkeypatch.setattr(engine.scheduler.kv_cache_manager.block_pool, "cache_full_blocks", note)
    while not seen:
        pending.append(engine.begin())
        engine.end(pending.pop(0))
    ((full, [step]),) = seen
    assert full == 2
    # It is in the cache; the newest step that was under way then has not ended.
    assert step == engine.side._cache._begun > engine.side._cache._ended
    history = list(request.all_token_ids)
    assert (
        engine.side._find(request, len(history), is_settled=is_settled).tokens
        == (1 + (not is_settled)) * BLOCK
    )
    engine.end(pending.pop(0))
    assert found(engine, history, max_tokens=len(history)) == 2


def test_blocks_that_were_received(start: Start) -> None:
    """They are hashed once they are there, and found with the step after."""
    prefill = start("kv_producer", rank=1)
    engine = start()
    source = prefill.add(prompt(4), 1, do_remote_decode=True, carryback_key="key", carryback_tell=True)
    prefill.step()
    assert source.is_finished()
    record = events.transfer_params(prefill.next(events.Prefilled).params)
    request = engine.add(prompt(4), 4, **record)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert found(engine, prompt(4)) == 0
    engine.step(received=[request.request_id])
    assert found(engine, prompt(4)) == 0
    engine.step()
    assert found(engine, prompt(4)) == 4


def test_a_block_that_was_overwritten_is_not_found_under_its_old_name(start: Start) -> None:
    engine = start()
    for seed in (1, 2):
        engine.run(prompt(60, seed))
    # The last blocks of what was there first went first: 98 of 99 are free and the second prompt has needed 61.
    assert found(engine, prompt(38, seed=1), max_tokens=20 * BLOCK) == 20
    request = engine.request(prompt(60, seed=1), 1)
    assert engine.side._find(request, 60 * BLOCK).tokens == 38 * BLOCK
    engine.run(prompt(90, seed=3))
    assert found(engine, prompt(60, seed=1), max_tokens=20 * BLOCK) < 20


def test_what_is_leased_is_not_overwritten(start: Start) -> None:
    engine = start()
    engine.run(prompt(20, seed=1))
    answer = engine.ask(prompt(20, seed=1))
    assert engine.used == 20
    for seed in range(2, 6):
        engine.run(prompt(60, seed=seed))
    assert found(engine, prompt(20, seed=1), lease="carryback-lease-again") == 20
    engine.send(events.Done([answer.lease]))
    assert engine.settle().leased == engine.used == 0
    for seed in range(2, 6):
        engine.run(prompt(60, seed=seed))
    assert found(engine, prompt(20, seed=1)) < 20


@pytest.mark.parametrize(("specs", "kept"), [([FULL], [6]), ([FULL, WINDOW], [6, 2]), ([WINDOW], [2])])
def test_what_the_next_token_needs_is_named(start: Start, specs: list[Any], kept: list[int]) -> None:
    """Of a window, the blocks that it covers, and nothing for those that it has moved past."""
    engine = start(specs=specs)
    engine.run(prompt(6))
    answer = engine.ask(prompt(6))
    assert answer.tokens == 6 * BLOCK
    named = msgspec.json.decode(answer.record)["remote_block_ids"]
    assert [len(group) for group in named] == kept
    assert all(block for group in named for block in group)  # block 0 is vLLM's placeholder
    assert engine.used == sum(kept)


@pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW]])
def test_a_reader_gives_as_many_blocks_as_it_is_to_read(start: Start, specs: list[Any]) -> None:
    """Of each group. (vLLM's worker reads the last ones where there are more of them here than there.)"""
    decode = start(specs=specs)
    prefill = start("kv_producer", rank=1, specs=specs)
    decode.run(prompt(6))
    request = prefill.add(prompt(6), 1, do_remote_decode=True, carryback_ask=[decode.address])
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        work = prefill.begin()
        prefill.end(work)
    meta = work.kv_connector_metadata.reqs_to_recv[request.request_id]
    assert [len(group) for group in meta.local_block_ids] == [len(group) for group in meta.remote.block_ids]


def test_a_window_settles_as_all_else(start: Start) -> None:
    engine = start(specs=[FULL, WINDOW], chunk=4 * BLOCK)
    engine.add(prompt(12), 2)
    first = engine.begin()
    assert found(engine, prompt(12)) == 0
    engine.end(first)
    assert found(engine, prompt(12)) == 4
    second = engine.begin()
    # vLLM has let go of the window's blocks before 4 where it could; what is named is whole, or nothing is.
    assert found(engine, prompt(12)) in (0, 4)
    engine.end(second)
    assert found(engine, prompt(12)) == 8


@modes
def test_other_weights_in_the_middle(start: Start, is_async: bool) -> None:
    """What was computed before is not found, nor what a request that had begun computes after."""
    engine = start(is_async=is_async, chunk=4 * BLOCK)
    running = engine.add(prompt(12, seed=1), BLOCK)
    waiting = engine.add(prompt(4, seed=2), 1)
    engine.step()
    assert found(engine, prompt(12, seed=1)) == 4
    engine.rpc("load_new_weights")
    assert found(engine, prompt(12, seed=1)) == 0
    while not (running.is_finished() and waiting.is_finished()):
        engine.step()
    engine.step()
    history = list(running.all_token_ids)
    assert found(engine, history) == 0
    assert found(engine, prompt(4, seed=2)) == 4
    assert found(engine, prompt(12, seed=1)) == 0
    # Not even behind a beginning that is of the new ones.
    engine.run(prompt(12, seed=1)[: 4 * BLOCK + 1])
    engine.step()
    assert found(engine, history) == found(engine, prompt(12, seed=1)) == 4
    engine.run(prompt(12, seed=1))  # all of it with the new ones
    engine.step()
    assert found(engine, prompt(12, seed=1)) == 12


def test_a_request_that_is_computed_again_after_other_weights(start: Start) -> None:
    """After a preemption all of its KV is of the new ones."""
    engine = start()
    request = engine.add(prompt(4), 4)
    engine.step()
    engine.rpc("load_new_weights")
    engine.step()
    assert found(engine, prompt(4)) == 0
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    engine.step()
    assert request.num_preemptions == 1
    assert found(engine, prompt(4)) == 4


def test_an_engine_without_a_prefix_cache_has_nothing(start: Start) -> None:
    engine = start(caches=False)
    engine.run(prompt(4))
    answer = engine.ask(prompt(4))
    assert (answer.tokens, answer.reason, answer.record) == (0, "unsupported", b"")


def test_no_more_is_found_than_can_be_used(start: Start) -> None:
    engine = start()
    engine.run(prompt(6))
    for most, blocks in ((0, 0), (BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK + 1, 3), (10**9, 6)):
        assert found(engine, prompt(6), max_tokens=most) == blocks


@pytest.mark.parametrize("waits", ["to be told", "for answers", "for its turn"])
def test_a_prompt_that_waits_is_not_looked_up_in_each_step(start: Start, waits: str) -> None:
    engine = start("kv_consumer" if waits == "to be told" else "kv_producer", carryback_ask_timeout_s=600)
    looked_up = []
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    stock = coordinator.find_longest_cache_hit

    def count(hashes: Any, most: int) -> Any:
        looked_up.append(hashes)
        return stock(hashes, most)

    coordinator.find_longest_cache_hit = count
    if waits == "for its turn":
        engine.run(prompt(20, seed=1), do_remote_decode=True)  # how long a token takes
        blocker = engine.add(prompt(2, seed=3), 1, do_remote_decode=True)
        blocker.num_computed_tokens = 0
    params: dict[str, Any] = {
        "to be told": {"carryback_key": "key", "carryback_await": 600},
        "for answers": {"do_remote_decode": True, "carryback_ask": ["tcp://127.0.0.1:1"]},
        "for its turn": {"do_remote_decode": True},
    }[waits]
    looked_up.clear()
    request = engine.add(prompt(8, seed=2), 1, **params)
    if waits == "for its turn":
        engine.side._line.first = lambda can_go=None: blocker.request_id
    for _ in range(10):
        engine.step()
    assert not request.num_computed_tokens
    mine = [each for each in looked_up if list(each) == list(request.block_hashes)]
    # One whose turn has not come was looked up once: what it has here says how much there is to compute.
    assert len(mine) == (waits == "for its turn")
    # Afterwards it goes on as any other.
    engine.side._waiting.clear()
    if waits == "for answers":
        engine.side._peers.end(request.request_id)
    if waits == "for its turn":
        del engine.side._line.first
    while not request.is_finished():
        engine.step()
    assert request.prefill_stats is None
