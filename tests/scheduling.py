"""One engine's scheduler: vLLM's own, with the connector in it. Only the worker is played."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from carryback.wire import events
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
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


class Engine:
    """One engine's scheduler, and what it publishes.

    Args:
        listen: where it publishes.
        is_async: a step is scheduled while another is under way.
    """

    def __init__(
        self,
        config: VllmConfig,
        listen: str,
        specs: Sequence[KVCacheSpec] = (FULL,),
        *,
        is_async: bool = False,
    ) -> None:
        cache = KVCacheConfig(
            num_blocks=CAPACITY + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)],
            hash_block_size=BLOCK,
        )
        config.cache_config.num_gpu_blocks = cache.num_blocks
        self.scheduler: Any = (AsyncScheduler if is_async else Scheduler)(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=max(spec.block_size for spec in specs),
            hash_block_size=BLOCK,
        )
        self.side: Any = self.scheduler.connector.connector_scheduler
        self.address = listen
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._ids = itertools.count()
        self._deadlines: dict[str, float] = {}
        self._read: set[str] = set()
        self._heard: list[events.Event] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XSUB)
        self._socket.connect(listen)
        self._socket.send(b"\x01")
        self.next(events.Hello)

    def close(self) -> None:
        self.scheduler.connector.shutdown()
        self._context.destroy(linger=0)

    # -- steps

    def begin(self) -> SchedulerOutput:
        """A step is scheduled, and goes to the worker."""
        work: SchedulerOutput = self.scheduler.schedule()
        self._deadlines |= work.kv_connector_metadata.reqs_to_send
        return work

    def end(self, work: SchedulerOutput, received: Iterable[str] = (), failed: Iterable[str] = ()) -> None:
        """The worker has done a step: a token for each scheduled request, and what it says of reads."""
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
            sampled_token_ids=[[] if self._is_chunk(request, work) else [7] for request in requests],
            kv_connector_output=KVConnectorOutput(
                finished_sending=over, finished_recving={*received, *failed}, failed_recving=set(failed)
            ),
        )
        self.scheduler.update_from_output(work, done)

    def _is_chunk(self, request_id: str, work: SchedulerOutput) -> bool:
        """Whether a step computes no more than the beginning of a prompt."""
        starts = {new.req_id: new.num_computed_tokens for new in work.scheduled_new_reqs}
        cached = work.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        return bool(starts[request_id] + work.num_scheduled_tokens[request_id] < request.num_prompt_tokens)

    def step(self, received: Iterable[str] = (), failed: Iterable[str] = ()) -> None:
        self.end(self.begin(), received, failed)

    # -- requests

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

    def run(self, prompt: list[int], **params: Any) -> str:
        """A request of one token; its id."""
        request = self.add(prompt, 1, **params)
        while not request.is_finished():
            self.step()
        return request.request_id

    def abort(self, request: Request) -> None:
        """Abort it, as if its client had gone, or a stop string had been found."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def rpc(self, method: str) -> None:
        """A method of the workers, as `/collective_rpc` calls it."""
        executor = SimpleNamespace(collective_rpc=lambda *args, **kwargs: [])
        core: Any = SimpleNamespace(scheduler=self.scheduler, model_executor=executor)
        EngineCore.collective_rpc(core, method)

    def hold(self, prompt: list[int], hold_s: float = 60, key: str = "") -> events.Held:
        """A request whose KV a decode engine is asked to pin; the event."""
        key = key or f"key-{next(self._ids)}"
        self.run(prompt, carryback_key=key, hold_s=hold_s)
        held: events.Held = self.next(events.Held, key=key)
        return held

    def read(self, request: str) -> None:
        """A decode engine has read a prompt's KV."""
        self._read.add(request)
        self.step()

    # -- what routers and other engines say, and hear

    def send(self, command: events.Command) -> None:
        self._socket.send(events.encode_command(command))

    def ask(
        self,
        prompt: list[int],
        *,
        asker: str = "asker",
        lease: str = "",
        max_tokens: int | None = None,
        block_size: int = BLOCK,
    ) -> events.Leased:
        """Ask it what it has of a prompt; its answer."""
        lease = lease or f"carryback-lease-{next(self._ids)}"
        hashes = b"".join(self.request(prompt, 1).block_hashes)
        most = len(prompt) - 1 if max_tokens is None else max_tokens
        self.send(events.Ask(asker, lease, hashes, block_size, most))
        answer: events.Leased = self.next(events.Leased, lease=lease)
        assert answer.key == asker
        return answer

    def next(self, kind: type[Any], *, step: bool = False, **fields: Any) -> Any:
        """The next event of a kind with these fields."""

        def is_it(event: events.Event) -> bool:
            return isinstance(event, kind) and all(getattr(event, name) == it for name, it in fields.items())

        for event in self._heard:
            if is_it(event):
                self._heard.remove(event)
                return event
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            if step:
                self.step()
            if self._socket.poll(20):
                event = events.decode(self._socket.recv_multipart()[-1])
                if is_it(event):
                    return event
                if not isinstance(event, events.Hello):
                    self._heard.append(event)
        pytest.fail(f"no {kind.__name__}")

    def settle(self) -> events.Hello:
        """What it says of itself once it has heard all that was sent to it."""
        self.ask([1] * BLOCK, lease="nothing")
        self.next(events.Hello)  # may have been on its way
        hello: events.Hello = self.next(events.Hello)
        return hello

    @property
    def used(self) -> int:
        """KV blocks that are not free, as vLLM counts them."""
        return round(self.scheduler.kv_cache_manager.usage * CAPACITY)


def prompt(blocks: int, seed: int = 1, shared: int = 0) -> list[int]:
    """So many full blocks, and one token in the next. The first `shared` blocks do not depend on the seed."""
    return [2] * shared * BLOCK + [10 + seed] * ((blocks - shared) * BLOCK) + [1]


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of the plug-in")
