"""The connector inside vLLM's real scheduler. Only the worker is played: it says which reads are over."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from carryback.wire import events
from carryback_vllm.seal import Sealer

pytest.importorskip("vllm", reason="the connector runs inside vLLM")

import torch
from carryback_vllm import connector
from carryback_vllm.connector import address_of_rank
from carryback_vllm.forget import Adapters, Asker, Sealed
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
CAPACITY = 99
WITHIN_S = 20.0
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=2 * BLOCK
)
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)


class Engine:
    """One engine's scheduler, and what it publishes."""

    def __init__(self, config: VllmConfig, listen: str, specs: Sequence[KVCacheSpec] = (FULL,)) -> None:
        cache = KVCacheConfig(
            num_blocks=CAPACITY + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)],
            hash_block_size=BLOCK,
        )
        config.cache_config.num_gpu_blocks = cache.num_blocks
        self.scheduler = Scheduler(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=max(spec.block_size for spec in specs),
            hash_block_size=BLOCK,
        )
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._ids = itertools.count()
        self._deadlines: dict[str, float] = {}
        self._read: set[str] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(listen)
        self.next(events.Hello)

    def close(self) -> None:
        self.scheduler.connector.shutdown()
        self._context.destroy(linger=0)

    def step(self) -> None:
        """One step: a token for each scheduled request, and the worker's report."""
        work = self.scheduler.schedule()
        self._deadlines |= work.kv_connector_metadata.reqs_to_send
        over = {
            request
            for request, deadline in self._deadlines.items()
            if request in self._read or time.perf_counter() >= deadline
        }
        for request in over:
            del self._deadlines[request]
        requests = list(work.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=[[7] for _ in requests],
            kv_connector_output=KVConnectorOutput(finished_sending=over),
        )
        self.scheduler.update_from_output(work, done)

    def add(self, prompt: list[int], tokens: int, stop: list[str] | None = None, **params: Any) -> Request:
        """A request of so many tokens."""
        request = self.request(prompt, tokens, stop, params)
        self.scheduler.add_request(request)
        return request

    def request(
        self,
        prompt: list[int],
        tokens: int,
        stop: list[str] | None = None,
        params: Mapping[str, Any] = {},
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """One that has not come yet."""
        sampling = SamplingParams(
            max_tokens=tokens, stop=stop, detokenize=True, extra_args={"kv_transfer_params": dict(params)}
        )
        sampling.update_from_generation_config({}, eos_token_id=0)
        return Request(
            f"request-{next(self._ids)}", prompt, sampling, None,
            lora_request=lora_request, block_hasher=self._hasher,
        )  # fmt: skip

    def rpc(self, method: str) -> None:
        """A method of the workers, as `/collective_rpc` calls it."""
        executor = SimpleNamespace(collective_rpc=lambda *args, **kwargs: [])
        core = SimpleNamespace(scheduler=self.scheduler, model_executor=executor)
        EngineCore.collective_rpc(core, method)

    def run(self, prompt: list[int], **params: Any) -> str:
        """A request of one token; its id."""
        request = self.add(prompt, 1, **params)
        while not request.is_finished():
            self.step()
        return request.request_id

    def abort(self, request: Request) -> None:
        """Abort it, as if its client had gone, or a stop string had been found."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def hold(self, prompt: list[int], hold_s: float = 60) -> events.Held:
        """A request that a decode engine is asked to hold; the event."""
        name = self.run(prompt, carryback_key=f"key-{next(self._ids)}", hold_s=hold_s)
        held = self.next(events.Held)
        assert held.request == name
        return held

    def release(self, held: events.Held) -> events.Released:
        """Let go of it; the event."""
        self.run([1], carryback_release=[held.request])
        return self.released()

    def read(self, request: str) -> None:
        """A reader is through."""
        self._read.add(request)
        self.step()

    def released(self) -> events.Released:
        """The next `Released` event."""
        return self.next(events.Released, step=True)

    def next(self, kind: type[Any], *, step: bool = False) -> Any:
        """The next event of a kind."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            if step:
                self.step()
            if self._socket.poll(20):
                event = events.decode(self._socket.recv_multipart()[-1])
                if isinstance(event, kind):
                    return event
        pytest.fail(f"no {kind.__name__}")

    @property
    def used(self) -> int:
        """KV blocks that are not free, as vLLM counts them."""
        return round(self.scheduler.kv_cache_manager.usage * CAPACITY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "head_dim": 32,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 300, "max_position_embeddings": 4096,
        "torch_dtype": "float32", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def port() -> int:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=32_000)


@pytest.fixture
def start(model: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes an engine."""
    monkeypatch.setenv("CARRYBACK_KEY", "k")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port + 100))
    engines = []

    def make(
        role: str = "kv_consumer", rank: int = 0, specs: Sequence[KVCacheSpec] = (FULL,), **extra: Any
    ) -> Engine:
        address = f"tcp://127.0.0.1:{port}"
        transfer = KVTransferConfig(
            kv_connector="CarrybackConnector",
            kv_connector_module_path="carryback_vllm.connector",
            kv_role=role,
            kv_connector_extra_config={"bidirectional_kv_xfer": True, "carryback_events": address, **extra},
        )
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, block_size=BLOCK, max_model_len=4096,
            max_num_batched_tokens=4096, dtype="float32", enforce_eager=True,
            prefix_caching_hash_algo="sha256_cbor", kv_transfer_config=transfer,
        ).create_engine_config()  # fmt: skip
        config.parallel_config.data_parallel_index = rank
        engines.append(Engine(config, f"tcp://127.0.0.1:{port + rank}", specs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(blocks: int, seed: int = 1, shared: int = 0) -> list[int]:
    """So many full blocks, and one token in the next. The first `shared` blocks do not depend on the seed."""
    return [2] * shared * BLOCK + [10 + seed] * ((blocks - shared) * BLOCK) + [1]


def record_of(held: events.Held, **changed: Any) -> dict[str, Any]:
    """The record of what is held, as a prefill engine gets it; sealed with what was changed."""
    record: dict[str, Any] = json.loads(held.record)
    seal = record.pop("carryback")
    record |= {"do_remote_decode": True, "do_remote_prefill": False, **changed}
    Sealer(b"k").seal(record, digests=held.digests, tail=seal["tail"], block_size=BLOCK)
    return record


def test_an_engine_that_holds_nothing_says_so(start: Callable[..., Engine]) -> None:
    hello = start().next(events.Hello)
    assert (hello.pinned, hello.capacity) == (0, CAPACITY)


def test_what_is_held_and_let_go_of(start: Callable[..., Engine]) -> None:
    engine = start()
    first, second = engine.hold(prompt(4)), engine.hold(prompt(9, seed=2))
    assert (first.tokens, first.blocks, first.pinned) == (4 * BLOCK, 5, 5)
    assert (second.tokens, second.blocks, second.pinned) == (9 * BLOCK, 10, 15)
    assert engine.used == 15
    engine.read(first.request)
    released = engine.released()
    assert (released.key, released.reason, released.pinned) == (first.key, "read", 10)
    assert engine.used == 10
    released = engine.release(second)
    assert (released.key, released.reason, released.pinned) == (second.key, "asked", 0)
    assert engine.used == 0
    assert engine.next(events.Hello).pinned == 0


def test_an_answer_that_a_stop_string_ends_is_held(start: Callable[..., Engine]) -> None:
    engine = start()
    request = engine.add(prompt(4), 2 * BLOCK, stop=["x"], carryback_key="stopped", hold_s=60)
    for _ in range(BLOCK):
        engine.step()
    engine.abort(request)
    held = engine.next(events.Held)
    # The last token that was sampled has no KV.
    assert request.num_tokens == 5 * BLOCK + 1
    assert (held.key, held.tokens, held.blocks) == ("stopped", 5 * BLOCK, 5)
    assert len(held.digests) == 5 * 16
    engine.read(held.request)
    assert engine.released().reason == "read"
    assert engine.used == 0


@pytest.mark.parametrize(
    ("stop", "steps", "key"),
    [(None, 3, {"carryback_key": "left"}), (["x"], 0, {"carryback_key": "left"}), (["x"], 3, {})],
    ids=["no stop string", "no token", "no router"],
)
def test_nothing_is_held_of_a_request_whose_client_left(
    start: Callable[..., Engine], stop: list[str] | None, steps: int, key: dict[str, str]
) -> None:
    engine = start()
    request = engine.add(prompt(4), 2 * BLOCK, stop=stop, hold_s=60, **key)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.step()
    assert engine.used == 0


def test_a_record_and_its_digests_are_sealed_together(start: Callable[..., Engine]) -> None:
    held = start().hold(prompt(4))
    record = json.loads(held.record)
    assert "digests" not in record["carryback"]
    assert len(held.digests) == 4 * 16
    assert not Sealer(b"k").is_authentic(record)
    record["carryback"]["digests"] = base64.b64encode(held.digests).decode()
    assert Sealer(b"k").is_authentic(record)


def test_time_to_live(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "READ_GRACE_S", 0.5)
    engine = start()
    held = engine.hold(prompt(4), hold_s=0.5)
    assert held.pinned == engine.used == 5
    released = engine.released()
    assert (released.reason, released.pinned, engine.used) == ("expired", 0, 0)


def test_a_read_that_ends_after_the_deadline_was_a_read(start: Callable[..., Engine]) -> None:
    engine = start()
    held = engine.hold(prompt(4), hold_s=0.01)
    time.sleep(0.05)
    engine.read(held.request)
    assert engine.released().reason == "read"


def test_blocks_of_a_common_prefix_count_once(start: Callable[..., Engine]) -> None:
    engine = start()
    held = [engine.hold(prompt(20, seed, shared=16)) for seed in range(3)]
    assert [each.blocks for each in held] == [21, 21, 21]
    assert [each.pinned for each in held] == [21, 26, 31]
    assert engine.used == 31
    assert [engine.release(each).pinned for each in held] == [26, 21, 0]
    assert engine.used == 0


def test_no_more_is_held_than_the_engines_share(start: Callable[..., Engine]) -> None:
    engine = start(carryback_max_pinned=0.5)  # of 99 blocks
    first, second, third = (engine.hold(prompt(19, seed)) for seed in range(3))
    assert (first.blocks, second.blocks, second.pinned) == (20, 20, 40)
    assert (third.blocks, third.tokens, third.record, third.digests, third.pinned) == (0, 0, b"", b"", 40)
    assert engine.used == 40
    assert engine.hold(prompt(8, seed=3)).pinned == 49  # it fits, to the last block
    assert engine.hold(prompt(20)).blocks == 0
    assert engine.release(first).pinned == 29
    assert engine.hold(prompt(19, seed=2)).pinned == 49


def test_blocks_that_are_held_already_need_no_more_room(start: Callable[..., Engine]) -> None:
    engine = start(carryback_max_pinned=0.5)
    assert engine.hold(prompt(40, seed=1, shared=38)).pinned == 41
    assert engine.hold(prompt(40, seed=2, shared=38)).pinned == 44
    assert engine.hold(prompt(40, seed=3)).blocks == 0


def test_a_prefill_engine_counts_and_is_not_limited(start: Callable[..., Engine]) -> None:
    engine = start("kv_producer", carryback_max_pinned=0)
    request = engine.run(prompt(4), do_remote_decode=True, carryback_key="key", hold_s=60)
    while not (hello := engine.next(events.Hello)).pinned:
        pass
    assert hello.pinned == engine.used == 5
    engine.read(request)
    while (hello := engine.next(events.Hello)).pinned:
        pass
    assert (hello.seq, engine.used) == (0, 0)  # a decode engine reads it at once; no router waits for it


def test_nothing_is_held_with_a_share_of_nothing(start: Callable[..., Engine]) -> None:
    assert start(carryback_max_pinned=0).hold(prompt(4)).blocks == 0


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_a_share_that_is_none_is_refused(start: Callable[..., Engine], share: object) -> None:
    with pytest.raises(RuntimeError, match="carryback_max_pinned"):
        start(carryback_max_pinned=share)


def test_each_rank_has_a_port(start: Callable[..., Engine]) -> None:
    start(rank=0)
    assert start(rank=2).next(events.Hello).capacity == CAPACITY


def test_addresses_of_ranks() -> None:
    assert address_of_rank("tcp://*:5701", 3) == "tcp://*:5704"
    assert address_of_rank("tcp://[::1]:5701", 1) == "tcp://[::1]:5702"
    assert address_of_rank("ipc:///run/events", 0) == "ipc:///run/events"
    with pytest.raises(RuntimeError, match="carryback_events"):
        address_of_rank("ipc:///run/events", 1)


def test_blocks_that_a_window_has_moved_past_are_named_as_gone(start: Callable[..., Engine]) -> None:
    held = start(specs=[FULL, WINDOW]).hold(prompt(6))
    full, window = json.loads(held.record)["remote_block_ids"]
    assert held.tokens == 6 * BLOCK
    assert len(full) == 6
    assert all(full)
    # The next token sees the 2 * BLOCK - 1 before it.
    assert window[:4] == [0, 0, 0, 0]
    assert all(window[4:])
    assert len(window) == 6
    # The full blocks, those of the window, and the one begun of either.
    assert held.blocks == 6 + 2 + 2


@pytest.mark.parametrize(
    "specs",
    [
        [LATENT],
        # Windows without vLLM's hybrid KV cache manager: all is kept.
        [replace(FULL, sliding_window=2 * BLOCK)],
        [WINDOW],
    ],
)
def test_layouts_that_are_held(start: Callable[..., Engine], specs: list[KVCacheSpec]) -> None:
    assert start(specs=specs).hold(prompt(4)).tokens == 4 * BLOCK


@pytest.mark.parametrize(
    "specs",
    [
        [FULL, MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))],
        [FULL, replace(FULL, block_size=2 * BLOCK)],
        [RSWASpec(BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, rswa_window=BLOCK)],
    ],
)
def test_layouts_that_cannot_be_cut_are_not_held(
    start: Callable[..., Engine], specs: list[KVCacheSpec]
) -> None:
    assert start(specs=specs).hold(prompt(4)).blocks == 0


@pytest.mark.parametrize(
    ("ranks", "is_read"),
    [
        ({"tp_size": 1}, True),
        ({"tp_size": 2}, True),
        # The model has two KV heads: more ranks hold copies.
        ({"tp_size": 4}, False),
        ({"pp_size": 1}, True),
        ({"pp_size": 2}, False),
    ],
)
def test_ranks_that_do_not_fit_are_not_read(
    start: Callable[..., Engine], ranks: dict[str, int], is_read: bool
) -> None:
    record = record_of(start().hold(prompt(4)), **ranks)
    prefill = start("kv_producer", rank=1)
    request = prefill.add(prompt(4), 1, carryback_key="key", carryback_tell=True, **record)
    prefill.step()
    if is_read:
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return
    told = prefill.next(events.Prefilled, step=True)
    reuse = json.loads(told.params)["carryback_reuse"]
    assert (reuse["outcome"], reuse["reason"]) == ("miss", "layouts_differ")


def test_what_was_not_computed_is_told(start: Callable[..., Engine]) -> None:
    prefill = start("kv_producer")
    prefill.run(prompt(4), do_remote_decode=True, carryback_key="a", carryback_tell=True)
    told = [prefill.next(events.Prefilled)]
    prefill.run(prompt(4), do_remote_decode=True, carryback_key="b", carryback_tell=True)
    told.append(prefill.next(events.Prefilled))
    # The second found the first's blocks in the prefix cache.
    assert [json.loads(each.params)["remote_prefill_cached_tokens"] for each in told] == [0, 4 * BLOCK]


def test_little_to_compute_goes_before_much(start: Callable[..., Engine]) -> None:
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
def test_first_come_first_served(start: Callable[..., Engine], extra: dict[str, Any]) -> None:
    engine = start("kv_producer", **extra)
    if extra:
        engine.run(prompt(20, seed=1), do_remote_decode=True)
    long = engine.add(prompt(30, seed=2), 1, do_remote_decode=True)
    short = engine.add(prompt(2, seed=3), 1, do_remote_decode=True)
    engine.step()
    assert long.is_finished()
    assert short.is_finished()


def test_nobody_waits_for_who_was_broken_off(start: Callable[..., Engine]) -> None:
    engine = start("kv_producer")
    engine.run(prompt(20, seed=1), do_remote_decode=True)
    long = engine.add(prompt(30, seed=2), 1, do_remote_decode=True)
    engine.abort(engine.add(prompt(2, seed=3), 1, do_remote_decode=True))
    engine.step()
    assert long.is_finished()


@pytest.mark.parametrize("patience_s", [-1, "long", float("inf")])
def test_a_patience_that_is_none_is_refused(start: Callable[..., Engine], patience_s: object) -> None:
    with pytest.raises(RuntimeError, match="carryback_patience_s"):
        start("kv_producer", carryback_patience_s=patience_s)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of the plug-in")


@pytest.mark.parametrize(
    "piece",
    ["_take_in", "_is_next", "_match", "_given_blocks", "_reads_ended", "_leave", "_keep", "_pin", "_unpin"],
)
def test_a_fault_of_ours_ends_no_decode_engine(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    engine = start()
    ours = engine.scheduler.connector.connector_scheduler
    older = engine.hold(prompt(4))
    with monkeypatch.context() as patch:
        patch.setattr(ours, piece, broken)
        held = engine.hold(prompt(4, seed=2))
        engine.read(older.request)
        engine.read(held.request)
    assert engine.used == 0
    # Where what is to be held is decided or sealed, nothing is held, and the router hears so.
    assert (held.blocks == 0) == (piece in ("_keep", "_pin"))
    assert ours._guarded.failures > 0 or piece == "_match"  # a request with nothing to read needs none
    engine.read(engine.hold(prompt(4, seed=3)).request)
    assert engine.used == 0


@pytest.mark.parametrize(
    "piece", ["_take_in", "_is_next", "_match", "_offer", "_cut", "_readable", "_ranks_fit"]
)
def test_a_fault_of_ours_makes_a_prefill_engine_compute(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    held = start().hold(prompt(4))
    prefill = start("kv_producer", rank=1)
    ours = prefill.scheduler.connector.connector_scheduler
    with monkeypatch.context() as patch:
        patch.setattr(ours, piece, broken)
        request = prefill.add(prompt(4), 1, carryback_key="key", carryback_tell=True, **record_of(held))
        told = prefill.next(events.Prefilled, step=True)
    assert request.is_finished()
    reuse = json.loads(told.params)["carryback_reuse"]
    assert (reuse["outcome"], reuse["tokens"], reuse["reason"]) == ("miss", 0, "plugin_failed")
    assert ours._guarded.failures > 0
    # Its own record is good: a decode engine can read what was computed.
    assert json.loads(told.params)["remote_num_tokens"] == len(prompt(4))


@pytest.mark.parametrize("piece", ["_keep", "_pin"])
def test_a_prefill_engine_that_cannot_seal_holds_nothing(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    engine = start("kv_producer")
    monkeypatch.setattr(engine.scheduler.connector.connector_scheduler, piece, broken)
    request = engine.add(prompt(4), 1, do_remote_decode=True)
    engine.step()
    assert request.is_finished()
    assert engine.used == 0


def test_a_request_that_waits_goes_on_after_a_fault_of_ours(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    ours = engine.scheduler.connector.connector_scheduler
    request = engine.add(prompt(4), 1, carryback_key="key", carryback_await=600)
    engine.step()
    assert not request.is_finished()
    monkeypatch.setattr(ours, "_may_go_on", broken)
    engine.step()
    assert request.is_finished()
    assert not ours._waiting


@pytest.mark.parametrize(
    "params",
    [
        {"_carryback_reads": "nobody's"},
        {"carryback_await": "long"},
        {"hold_s": "long", "carryback_release": 7},
        {"carryback_record": {"_carryback_reads": ["unhashable"], "carryback": {"mac": "x", "v": {}}}},
        {"carryback_release": {"a": 1}, "carryback_threshold": "many", "carryback_key": 7},
        {"remote_block_ids": [[1]], "do_remote_prefill": True, "remote_engine_id": {}},
    ],
)
def test_what_a_request_may_come_with(start: Callable[..., Engine], params: dict[str, Any]) -> None:
    """The engine answers it, and nothing of it stays there for ever."""
    engine = start()
    engine.run(prompt(4), **params)
    held = engine.hold(prompt(4, seed=2))
    engine.read(held.request)
    assert engine.released().reason == "read"


@pytest.mark.parametrize(("said", "billed"), [(0, 0), (64, 64), (10**6, 4 * BLOCK), (-5, 0)])
@pytest.mark.parametrize("waits", [False, True])
def test_usage_says_what_the_router_said(
    start: Callable[..., Engine], port: int, said: int, billed: int, waits: bool
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


def test_who_waits_is_told_where_kv_is_and_nothing_else(start: Callable[..., Engine], port: int) -> None:
    engine = start()
    mine = engine.hold(prompt(4, seed=2))
    request = engine.add(prompt(4), 1, carryback_key="key", carryback_await=600, hold_s=60)
    engine.step()
    deep: object = 1
    for _ in range(500):
        deep = [deep]
    params = {
        "carryback_await": 600, "carryback_release": [mine.request], "carryback_key": "another", "hold_s": 0,
        "_carryback_reads": "nobody's", "later": deep,
    }  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.XSUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.connect(f"tcp://127.0.0.1:{port}")
        router.send(events.encode_command(events.Go("key", json.dumps(params).encode())))
        held = engine.next(events.Held, step=True)
    assert request.is_finished()
    assert (held.key, held.blocks) == ("key", 5)
    assert held.pinned == 10  # the other's is held as before
    assert engine.scheduler.connector.connector_scheduler._guarded.failures == 0
    assert "later" not in request.kv_transfer_params


@pytest.mark.parametrize("how", ["reset", "pause", "rpc", "asked"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_what_is_held_is_let_go_of_before(start: Callable[..., Engine], role: str, how: str) -> None:
    engine = start(role)
    is_prefill = role == "kv_producer"
    epoch = engine.scheduler.connector.connector_scheduler._epoch
    if is_prefill:
        engine.run(prompt(4), do_remote_decode=True)
    else:
        engine.hold(prompt(4))
    engine.step()
    assert engine.used == 5
    before = epoch.name
    if how == "reset":
        assert engine.scheduler.reset_prefix_cache()
    elif how == "pause":
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    elif how == "rpc":
        engine.rpc("load_new_weights")
    else:
        engine.run([1], carryback_forget=True)
    if how == "pause" and is_prefill:
        # Requests that run are about to read it.
        assert (engine.used, epoch.name) == (5, before)
        return
    assert epoch.name != before
    if how != "asked":
        assert (engine.used, engine.scheduler.has_requests()) == (0, False)
    if not is_prefill:
        assert (engine.released().reason, engine.used) == ("asked", 0)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    # What the worker says of them later is nothing to the scheduler.
    engine.run([1])
    engine.step()
    assert engine.used == 0
    if how in ("rpc", "asked"):
        # Nor is it found in the engine's own cache.
        request = engine.add(prompt(4), 1)
        engine.step()
        assert request.prefill_stats is None or request.prefill_stats.num_local_cached_tokens == 0
    if not is_prefill:
        assert engine.hold(prompt(4)).blocks == 5


def test_an_rpc_that_changes_no_weights_voids_nothing(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.hold(prompt(4))
    engine.rpc("compute_weight_checksums")
    assert engine.used == 5


@pytest.mark.parametrize("how", ["reset", "pause"])
def test_a_request_that_ran_meanwhile_is_not_held(start: Callable[..., Engine], how: str) -> None:
    engine = start()
    request = engine.add(prompt(4), 8, carryback_key="meanwhile", hold_s=60)
    engine.step()
    if how == "reset":
        assert not engine.scheduler.reset_prefix_cache()  # stock code's answer: it runs
    else:
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    while not request.is_finished():
        engine.step()
    held = engine.next(events.Held)
    assert (held.key, held.blocks, engine.used) == ("meanwhile", 0, 0)


def test_a_request_that_is_computed_again_after_a_reset_is_held(start: Callable[..., Engine]) -> None:
    engine = start()
    request = engine.add(prompt(4), 8, carryback_key="again", hold_s=60)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    while not request.is_finished():
        engine.step()
    assert engine.next(events.Held).blocks == 5


def test_a_request_that_ends_in_a_pause_is_not_held(start: Callable[..., Engine]) -> None:
    engine = start()
    request = engine.add(prompt(4), 3, carryback_key="drained", hold_s=60)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)  # `/pause?mode=wait`
    while not request.is_finished():
        engine.step()
    engine.step()
    assert not engine.scheduler.has_requests()  # else the pause would go on waiting
    hello = engine.next(events.Hello)
    while not hello.is_paused:
        hello = engine.next(events.Hello)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_who_has_read_is_told_whether_it_is_void(start: Callable[..., Engine]) -> None:
    side = start().scheduler.connector.connector_scheduler
    side.set_xfer_handshake_metadata({})
    address = side.side_channel_host, side.side_channel_port
    asker = Asker()
    made = time.perf_counter()
    sealed = Sealed(side._epoch.name, made)
    try:
        earliest = asker.ask(*address, sealed).result()
        assert earliest is not None
        assert earliest <= made
        side.forget("test")
        assert asker.ask(*address, sealed).result() is None
    finally:
        asker.close()


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
            connector.CarrybackWorker._confirm(self, done, failed)
            if done or failed:
                return "void" if failed else "good"
            time.sleep(0.01)
        pytest.fail("no answer")


@pytest.mark.parametrize(
    "what", ["good", "voided by its holder", "made before this engine's own reset", "its holder has ended"]
)
def test_what_was_read_counts_once_it_is_known_to_be_good(start: Callable[..., Engine], what: str) -> None:
    side = start().scheduler.connector.connector_scheduler
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


def test_adapters_of_one_name_and_other_weights_have_other_blocks(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start()
    hashes = []
    for number, weights in enumerate(("1", "2", "1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(weights)
        adapter = LoRARequest(lora_name="a", lora_int_id=1000 + number, lora_path=str(folder))
        hashes.append(engine.request(prompt(2), 1, lora_request=adapter).block_hashes)
    assert hashes[0] == hashes[2] != hashes[1]
