"""What voids all that an engine has made, and that nothing of it is held or found afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from carryback.wire import events

pytest.importorskip("vllm", reason="the connector runs inside vLLM")

from carryback_vllm import forget
from carryback_vllm.forget import LOCKED, Adapters, Asker, Sealed
from carryback_vllm.worker import CarrybackWorker
from scheduling import Engine, prompt
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler

Start = Callable[..., Engine]
WITHIN_S = 20.0


# -- the lock

# Of vLLM's scheduler, what neither hashes, takes nor frees a block.
READS_ONLY = {
    "get_grammar_bitmask", "get_num_unfinished_requests", "has_unfinished_requests", "has_finished_requests", "has_requests",
    "pause_state", "get_request_counts", "get_kv_cache_usage", "get_kv_connector", "get_ec_connector",
    "get_kv_event_publisher_config", "reset_encoder_cache", "shutdown",
}  # fmt: skip


def test_all_that_changes_blocks_holds_the_lock() -> None:
    """A canary: each method of vLLM's scheduler is known, and those that change anything are wrapped."""
    methods = {name for name in vars(SchedulerInterface) if not name.startswith("_")}
    assert methods == {*LOCKED, "schedule", "update_from_output"} | READS_ONLY
    forget.watch()
    for name in (*LOCKED, "schedule", "update_from_output"):
        for scheduler in (Scheduler, AsyncScheduler):
            assert hasattr(getattr(scheduler, name), "carryback"), (
                f"{scheduler.__name__}.{name} is not wrapped"
            )


def test_it_is_wrapped_once() -> None:
    forget.watch()
    before = {name: getattr(Scheduler, name) for name in (*LOCKED, "schedule", "update_from_output")}
    forget.watch()
    assert before == {name: getattr(Scheduler, name) for name in before}


class _Lock:
    """Counts who holds it."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def test_the_pool_is_touched_under_the_lock_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    lock = _Lock()
    monkeypatch.setattr(engine.side, "lock", lock)
    pool = engine.scheduler.kv_cache_manager.block_pool
    seen = []
    names = ("get_new_blocks", "free_blocks", "touch", "cache_full_blocks", "evict_blocks")

    def noted(name: str, stock: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, lock.depth > 0))
            return stock(*args, **kwargs)

        return method

    for name in names:
        monkeypatch.setattr(pool, name, noted(name, getattr(pool, name)))
    engine.hold(prompt(4))
    request = engine.add(prompt(4, seed=2), 64)
    engine.step()
    engine.abort(request)
    engine.run(prompt(4))
    engine.rpc("load_new_weights")
    engine.scheduler.reset_prefix_cache()
    assert {name for name, _ in seen} == set(names)
    assert all(is_locked for _, is_locked in seen), seen


# -- resets, pauses, weights


@pytest.mark.parametrize("how", ["reset", "pause", "rpc", "asked"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_what_is_held_is_let_go_of_before(start: Start, role: str, how: str) -> None:
    engine = start(role)
    is_prefill = role == "kv_producer"
    epoch = engine.side._epoch
    if is_prefill:
        engine.run(prompt(4), do_remote_decode=True, carryback_key="key")
    else:
        engine.hold(prompt(4), key="key")
    leased = engine.ask(prompt(4))
    assert leased.record
    engine.step()
    kept = engine.used
    assert kept == (5 if is_prefill else 4)
    before = epoch.name
    if how == "reset":
        assert engine.scheduler.reset_prefix_cache()
    elif how == "pause":
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    elif how == "rpc":
        engine.rpc("load_new_weights")
    else:
        engine.send(events.Forget())
    if how == "pause":
        # Requests that run are about to read it, and nothing of it changes.
        assert (engine.used, epoch.name) == (kept, before)
        assert engine.ask(prompt(4)).reason == "paused"
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert engine.ask(prompt(4)).record
        return
    if not is_prefill:
        released = engine.next(events.Released)
        assert (released.key, released.reason) == ("key", "void")
    engine.settle()
    assert epoch.name != before
    assert leased.lease not in engine.side._leases
    assert (engine.used, len(engine.side._leases), engine.scheduler.has_requests()) == (0, 0, False)
    # What the worker says of them later is nothing to the scheduler.
    engine.run([1])
    engine.step()
    assert engine.used == 0
    # Nor is it found in the engine's own cache.
    assert engine.ask(prompt(4)).tokens == 0
    if is_prefill:
        engine.run(prompt(4), do_remote_decode=True)
        engine.step()
        assert engine.used == 5
    else:
        assert engine.hold(prompt(4)).blocks == 4
    assert engine.side._guarded.failures == 0


def test_an_rpc_that_changes_no_weights_voids_nothing(start: Start) -> None:
    engine = start()
    engine.hold(prompt(4))
    engine.rpc("compute_weight_checksums")
    assert engine.used == 4
    assert engine.ask(prompt(4)).tokens == 128


def test_what_was_found_before_other_weights_is_not_handed_over_after(start: Start) -> None:
    """A prompt whose KV is of both is kept for nobody."""
    engine = start("kv_producer", chunk=64)
    request = engine.add(prompt(4), 1, do_remote_decode=True, carryback_key="key", carryback_tell=True)
    engine.step()
    engine.rpc("load_new_weights")
    told = engine.next(events.Prefilled, step=True)
    assert request.is_finished()
    assert "remote_block_ids" not in events.transfer_params(told.params)
    engine.step()
    assert engine.used == 0


@pytest.mark.parametrize("how", ["rpc", "reset"])
def test_a_request_that_ran_meanwhile_is_pinned_as_far_as_it_is_found(start: Start, how: str) -> None:
    engine = start()
    request = engine.add(prompt(4), 8, carryback_key="meanwhile", hold_s=60)
    engine.step()
    if how == "reset":
        assert (
            not engine.scheduler.reset_prefix_cache()
        )  # stock code's answer: it runs, and what is cached stays
    else:
        engine.rpc("load_new_weights")
    while not request.is_finished():
        engine.step()
    held = engine.next(events.Held)
    blocks = 4 if how == "reset" else 0
    assert (held.key, held.blocks, engine.used) == ("meanwhile", blocks, blocks)


def test_a_request_that_is_computed_again_after_a_reset_is_held(start: Start) -> None:
    engine = start()
    request = engine.add(prompt(4), 8, carryback_key="again", hold_s=60)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    while not request.is_finished():
        engine.step()
    assert engine.next(events.Held).blocks == 4


def test_a_request_that_ends_in_a_pause_is_not_held(start: Start) -> None:
    engine = start()
    request = engine.add(prompt(4), 3, carryback_key="drained", hold_s=60)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)  # `/pause?mode=wait`
    while not request.is_finished():
        engine.step()
    engine.step()
    assert not engine.scheduler.has_requests()  # else the pause would go on waiting
    assert engine.next(events.Held).blocks == 0
    hello = engine.next(events.Hello)
    while not hello.is_paused:
        hello = engine.next(events.Hello)


# -- whoever has read asks


@pytest.fixture
def asker() -> Any:
    made = Asker()
    yield made
    made.close()


def side_of(engine: Engine) -> tuple[str, int]:
    engine.side.set_xfer_handshake_metadata({})
    return engine.side.side_channel_host, engine.side.side_channel_port


def test_who_has_read_is_told_whether_it_is_void(start: Start, asker: Asker) -> None:
    engine = start()
    address = side_of(engine)
    made = time.perf_counter()
    sealed = Sealed(engine.side._epoch.name, made)
    earliest = asker.ask(*address, sealed).result()
    assert earliest is not None
    assert earliest <= made
    engine.side.forget("test")
    assert asker.ask(*address, sealed).result() is None


@pytest.mark.parametrize("end", ["nothing", "done", "late", "forgotten"])
def test_what_was_read_under_a_lease_counts_while_that_is_there(start: Start, asker: Asker, end: str) -> None:
    engine = start()
    address = side_of(engine)
    engine.run(prompt(4))
    lease = engine.ask(prompt(4)).lease
    sealed = Sealed(engine.side._epoch.name, time.perf_counter(), lease)
    if end == "done":
        engine.send(events.Done([lease]))
    elif end == "late":
        engine.side._leases.extend([lease], 0)
    elif end == "forgotten":
        engine.send(events.Forget())
    engine.settle()
    assert (asker.ask(*address, sealed).result() is not None) == (end == "nothing")


@pytest.mark.parametrize("end", ["nothing", "read", "released"])
def test_what_was_read_of_a_prompt_that_was_let_go_of_is_void(start: Start, asker: Asker, end: str) -> None:
    """A router lets go of a prompt that a decode engine is reading still, e.g. since the client has left."""
    engine = start("kv_producer")
    address = side_of(engine)
    name = engine.run(prompt(4), do_remote_decode=True, carryback_key="key")
    engine.step()
    sealed = Sealed(engine.side._epoch.name, time.perf_counter(), name)
    if end == "read":  # the worker hears of a read before its reader asks
        engine.read(name)
    elif end == "released":
        engine.send(events.Release(["key"]))
        engine.settle()
    assert (asker.ask(*address, sealed).result() is not None) == (end != "released")


class _Read:
    """A worker that has read what one record says, as far as its last step goes."""

    _is_prefill = True

    def __init__(self, sealed: Sealed, address: tuple[str, int], voided: float = -1.0) -> None:
        remote = SimpleNamespace(host=address[0], port=address[1])
        self._recving_transfers: dict[str, list[int]] = {"request": []}
        self._recving_metadata = {"request": SimpleNamespace(remote=remote)}
        self._recv_failures: set[str] = set()
        self._sealed = {"request": sealed}
        self._to_confirm: dict[str, Any] = {}
        self._voided = voided
        self._asker = Asker()

    def outcome(self, stock: Any) -> str:
        """`good` or `void`, once it is known."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            done, failed = stock(self)
            CarrybackWorker._confirm(self, done, failed)
            if done or failed:
                return "void" if failed else "good"
            time.sleep(0.01)
        pytest.fail("no answer")


@pytest.mark.parametrize(
    "what", ["good", "voided by its holder", "made before this engine's own reset", "its holder has ended"]
)
def test_what_was_read_counts_once_it_is_known_to_be_good(start: Start, what: str) -> None:
    side = start().side
    side.set_xfer_handshake_metadata({})
    sealed = Sealed(side._epoch.name, time.perf_counter())
    if what == "voided by its holder":
        side.forget("test")
    read = _Read(
        sealed,
        (side.side_channel_host, side.side_channel_port + (what == "its holder has ended")),
        voided=time.perf_counter() if what == "made before this engine's own reset" else -1.0,
    )

    def stock(worker: _Read) -> tuple[set[str], set[str]]:
        return ({"request"} if worker._recving_transfers.pop("request", None) is not None else set()), set()

    try:
        assert read.outcome(stock) == ("good" if what == "good" else "void")
    finally:
        read._asker.close()


def test_an_adapter_is_what_its_files_say(tmp_path: Path) -> None:
    adapters = Adapters()

    def adapter(number: int, folder: str, *, inplace: bool = False) -> Any:
        return SimpleNamespace(
            lora_int_id=number, lora_name="a", lora_path=str(tmp_path / folder), load_inplace=inplace
        )

    for folder, weights in (("one", "1"), ("copy", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text("{}")
        (tmp_path / folder / "adapter_model.safetensors").write_text(weights)
    one, copy, two = (adapter(at, folder) for at, folder in enumerate(("one", "copy", "two")))
    # Another engine's copy is the same adapter, whatever its path and number; another one's weights are not.
    assert adapters.print_of(one) == adapters.print_of(copy) != adapters.print_of(two)
    before = adapters.print_of(one)
    (tmp_path / "one" / "adapter_model.safetensors").write_text("3")
    assert adapters.print_of(one) == before  # what is loaded counts, not what lies there
    assert not adapters.load(one)
    assert adapters.print_of(one) == before  # vLLM keeps it as well
    assert adapters.load(adapter(0, "one", inplace=True))
    assert adapters.print_of(one) != before
    adapters.spoil(0)
    assert adapters.print_of(one) != Adapters().print_of(one)
    # What cannot be read equals nothing.
    nowhere = adapter(9, "nowhere")
    assert adapters.print_of(nowhere) == adapters.print_of(nowhere) != Adapters().print_of(nowhere)


def test_adapters_of_one_name_and_other_weights_have_other_blocks(start: Start, tmp_path: Path) -> None:
    engine = start()
    hashes = []
    for number, weights in enumerate(("1", "2", "1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(weights)
        adapter = LoRARequest(lora_name="a", lora_int_id=1000 + number, lora_path=str(folder))
        hashes.append(engine.request(prompt(2), 1, lora_request=adapter).block_hashes)
    assert hashes[0] == hashes[2] != hashes[1]
