"""vLLM's NIXL connector, made safe to read KV back from decode to prefill.

Loaded by vLLM with `--kv-transfer-config '{"kv_connector": "CarrybackConnector",
"kv_connector_module_path": "carryback_vllm.connector", ...}'`.

What it adds to `NixlPullConnector`, on both engines alike:

- Records are sealed by the engine that holds the blocks and verified by the one that reads them
  (`carryback_vllm.seal`): a prefill engine reads the verified prefix of what a decode engine holds, a
  decode engine reads a prompt's KV only if it is that prompt's.
- `kv_transfer_params["carryback_ask"]`: addresses of decode engines' events. A prefill engine asks them what they have
  of the prompt (`carryback_vllm.peers`), and reads the longest. Without it, it asks those of `carryback_peers`.
- `kv_transfer_params["carryback_find"]`: true: a decode engine says in an event what it has of the prompt itself.
- `kv_transfer_params["carryback_record"]`: a record, for a prefill engine to read. Routers send it so, and not as it
  is, since an engine without this plug-in would read what it is told to.
- `kv_transfer_params["hold_s"]` is how long, in seconds, this request's blocks are held; 0: not at all.
- `kv_transfer_params["carryback_key"]`: the router's key of the request. What the engine then holds is
  published as an event and is not in the response.
- `kv_transfer_params["carryback_threshold"]`: tokens below which this request's KV is computed rather than
  read, in place of the engine's `kv_recompute_threshold`.
- `kv_transfer_params["carryback_await"]`: seconds for which the request waits, before it is scheduled, for a
  router to say how it goes on (`carryback.wire.events.Go`); then it goes on by itself.
- `kv_transfer_params["carryback_cached"]`: how many of the prompt's tokens usage says were cached, whatever this
  engine's own prefix cache does.
- `kv_transfer_params["carryback_tell"]`: true: a prefill engine says in an event that it is done, before its
  answer has left.
- `kv_transfer_params["carryback_release"]`: a list of engine request ids whose blocks are let go of now.
- `kv_transfer_params["carryback_forget"]`: true: all that the engine has made until now is void, for whoever
  changed its weights where the engine could not know.
- `kv_transfer_params["carryback_withdraw"]`: true, beside a record: whatever request came or comes with
  this record does not read it, and the engine that holds the blocks is told so.
- A prefill engine's answer says what was reused, in `kv_transfer_params["carryback_reuse"]`, and how long
  that took, in `kv_transfer_params["carryback_work"]`.
- A prefill engine's blocks are not read after its lease ended.
- A decode engine answers prefill engines' questions, with short leases on what it has (`carryback_vllm.found`,
  `carryback_vllm.leases`).
- A reset of the prefix cache, a pause, sleep, an adapter that is loaded again, and whatever else may change the
  weights void what was made before, held or being read (`carryback_vllm.forget`).
- Prompts that have little to compute go before those that have much (`carryback_vllm.line`).
"""

from __future__ import annotations

import base64
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from carryback.wire.events import HASH_BYTES, Ask, Command, Done, Keep, Leased, ranks_fit, transfer_params
from carryback.wire.outside import Malformed
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from carryback_vllm.about import about_engine
from carryback_vllm.cpu import calm_new_threads
from carryback_vllm.events import KEY_VARIABLE, Publisher
from carryback_vllm.forget import ADAPTERS, Answers, Asker, Epoch, Sealed, watch
from carryback_vllm.found import PrefixCache
from carryback_vllm.guard import Guard
from carryback_vllm.leases import PREFIX as LEASE
from carryback_vllm.leases import Leases
from carryback_vllm.line import PATIENCE_S, Line
from carryback_vllm.peers import TIMEOUT_S, Peers, Question
from carryback_vllm.seal import VERSION, Sealer, sealed_as
from carryback_vllm.version import check_version

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        RemoteMeta,
        ReqMeta,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    BlockIds = tuple[list[int], ...]

logger = init_logger("vllm.carryback")

# A decode engine holds this much longer than it says, so that a read which began in time can end.
READ_GRACE_S = 10.0
# Records remembered as offered, so that none is read twice.
MAX_SPENT = 100_000
# A read of a prompt's KV must be under way this long before the prefill engine's lease ends.
# (For what a decode engine holds, stock code wants 5 s.)
LEASE_MARGIN_S = 1.0
# The share of its KV blocks that a decode engine holds for absent readers at most.
MAX_PINNED = 0.9
# A prefill engine waits so long for holders to say that what was read is good; most say it in a few milliseconds.
CONFIRM_WAIT_S = 0.02
# Why nothing was reused, after a fault of the plug-in's own.
FAULT = "plugin_failed"


class CarrybackConnector(NixlPullConnector):
    """`NixlPullConnector` with verified reads, retention per request, and events.

    Extra settings, in `kv_connector_extra_config`:

    - `carryback_events`: the ZMQ address on which the engine publishes; each data-parallel rank takes the
      port that is its rank further. With the environment variable `CARRYBACK_EVENTS_KEY`, only who has
      that secret hears.
    - `carryback_max_pinned`: the share of its KV blocks, 0 to 1, that a decode engine holds for absent
      readers at most, 0.9 unless given. What would exceed it is not held. Routers have budgets of their
      own; this is for when they fail. (Nothing is let go of early: it may be being read.)
    - `carryback_peers`: addresses of decode engines' events, which a prefill engine asks where no router names any.
    - `carryback_ask_timeout_s`: how long a prompt waits for their answers, in seconds, 1 unless given.
    - `carryback_patience_s`: how much longer than first come, first served a prompt may wait at a prefill engine
      for shorter ones, in seconds, 120 unless given; 0: not at all.

    Raises:
        RuntimeError: unsupported vLLM, no key, or a setting that cannot work; says what to change.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm.__version__)
        # Past NixlPullConnector's own constructor, which would build the two parts that we replace.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            watch()
            self.connector_scheduler = CarrybackScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            with calm_new_threads():
                self.connector_worker = CarrybackWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.connector_scheduler, CarrybackScheduler):
            self.connector_scheduler.bind(kv_cache_manager)


@dataclass
class _Match:
    """What a request may read, decided once, and what became of it."""

    blocks: int = 0
    "Leading blocks of the record that are this prompt's."
    whole: bool = False
    "Nothing that could have been reused was left out."
    reason: str = "no_record"
    cached_tokens: int = 0
    read_tokens: int = 0
    allocated: float = 0.0
    "When it was given blocks to read into."
    read_s: float = 0.0
    began: float = 0.0
    "When it was scheduled to be computed,"
    scheduled: int = 0
    "and how many tokens the engine had scheduled until then."
    found: int = 0
    "Tokens of the prompt that a decode engine had,"
    holder: str = ""
    "which one, by its id,"
    asked: int = 0
    "and how many of those asked have answered."


@dataclass
class _Pin:
    """Blocks that this engine holds for a reader.

    Attributes:
        key: the router's key, if a router hears of it.
        expires: when the engine lets go by itself, on its own clock.
        blocks: ids of the blocks.
    """

    key: str | None
    expires: float
    blocks: list[int]


class _Billed(PrefillStats):
    """What a router has told the client already, in `X-Carryback-Reuse`: usage says the same.

    That is what the prefill engine did not have to compute. What this engine has in its own prefix cache, or was
    sent, is no part of it, and neither is what it writes there: else the parts would not add up to the prompt in
    Anthropic's usage. Stock code reports a prefill engine's number only for requests that come with it, and waiting
    ones hear it later.
    """

    def __init__(self, cached_tokens: int) -> None:
        super().__init__()
        self._cached_tokens = cached_tokens

    def finalize(self, num_cached_tokens: int) -> None:
        super().finalize(num_cached_tokens)
        self.num_cached_tokens = self._cached_tokens
        self.num_cache_creation_tokens = 0


class CarrybackScheduler(NixlPullConnectorScheduler):
    """The scheduler's side: seals, verifies, decides retention, publishes.

    vLLM calls the hooks from its engine core, which ends with any exception. So in each hook our own code runs in
    `self._guarded`: after a fault of ours a request reads nothing and nothing of it is held.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._guarded = Guard()
        # Whatever vLLM's scheduler does, it does under this one; so does the thread that answers other engines.
        self.lock = threading.RLock()
        self._sealer = Sealer.from_environment()
        # As the engine resolves it; only from 0.32 on it is in `kv_cache_config`, too.
        _, self._hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._pp_size = vllm_config.parallel_config.pipeline_parallel_size
        self._kv_heads = split_kv_heads(vllm_config, kv_cache_config)
        self._cannot_cut = _why_not_cut(vllm_config, kv_cache_config, self._hash_block_size)
        # Of each KV cache group: the tokens back to which its layers see, themselves included; 0: all.
        self._windows = [
            group.kv_cache_spec.sliding_window if isinstance(group.kv_cache_spec, SlidingWindowSpec) else 0
            for group in kv_cache_config.kv_cache_groups
        ]
        self._matches: dict[str, _Match] = {}
        self._pins: dict[str, _Pin] = {}
        # How many pins hold a block. Requests with a common prefix may share blocks, which count once.
        self._pinned: Counter[int] = Counter()
        self._asked: set[str] = set()
        # What was made in an earlier one is void. Pins that were let go of with it, of which the worker will say so.
        self._epoch = Epoch()
        # From when vLLM has a cache to bind.
        self._cache: PrefixCache | None = None
        self._scheduler: Scheduler | None = None
        self._leases = Leases(0, lambda blocks: None, lambda blocks: None)
        self._dropped: set[str] = set()
        self._is_prefill = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._is_paused = False
        # Requests that wait to be told how to go on, and until when.
        self._waiting: dict[str, float] = {}
        self._threshold: int = self.kv_recompute_threshold
        # All tokens that this engine has scheduled, of whichever request.
        self._scheduled = 0
        # Records that were offered, by the holder and its request; and the live requests they came with.
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._readers: dict[str, Request] = {}
        if vllm_config.cache_config.prefix_caching_hash_algo != "sha256_cbor":
            raise RuntimeError(
                "carryback: engines must hash blocks alike; start both with "
                "--prefix-caching-hash-algo sha256_cbor and the same PYTHONHASHSEED"
            )
        assert vllm_config.kv_transfer_config is not None
        extra_config = vllm_config.kv_transfer_config.get_from_extra_config
        share = extra_config("carryback_max_pinned", MAX_PINNED)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise RuntimeError(f"carryback: carryback_max_pinned must be from 0 to 1, and is {share!r}")
        patience_s = extra_config("carryback_patience_s", PATIENCE_S)
        if not isinstance(patience_s, int | float) or not 0 <= patience_s < math.inf:
            raise RuntimeError(f"carryback: carryback_patience_s must be 0 or more, and is {patience_s!r}")
        # Without patience nobody is in it, and vLLM's order stays as it is.
        self._line: Line[Request] = Line(patience_s)
        self._is_ordered = patience_s > 0
        # Of those in line, the ones that have read what they can, and may be computed now.
        self._loaded: set[str] = set()
        capacity = kv_cache_config.num_blocks - 1  # block 0 is vLLM's placeholder
        self._max_pinned = int(share * capacity)
        timeout_s = extra_config("carryback_ask_timeout_s", TIMEOUT_S)
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise RuntimeError(
                f"carryback: carryback_ask_timeout_s must be more than 0, and is {timeout_s!r}"
            )
        peers = extra_config("carryback_peers", [])
        if not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
            raise RuntimeError(
                f"carryback: carryback_peers must be a list of ZMQ addresses, and is {peers!r}"
            )
        self._default_peers: list[str] = peers
        self._peers = None
        # Requests that read what they have a lease on.
        self._reading: set[str] = set()
        if self._is_prefill:
            self._peers = Peers(
                engine_id, secret=os.environ.get(KEY_VARIABLE), timeout_s=timeout_s, guarded=self._guarded
            )
        address = extra_config("carryback_events", None)
        self._publisher = None
        if address:
            # The index is the rank also where vLLM treats ranks as engines of their own (dense models).
            address = address_of_rank(address, vllm_config.parallel_config.data_parallel_index)
            self._publisher = Publisher(
                address,
                engine_id,
                capacity=capacity,
                secret=os.environ.get(KEY_VARIABLE),
                about=about_engine(
                    self, vllm_config, self._sealer, self._hash_block_size, self._kv_heads, address
                ),
                guarded=self._guarded,
                on_command=self._on_command,
            )
        if self._cannot_cut:
            logger.warning("carryback: no KV is read back from decode to prefill: %s", self._cannot_cut)

    def shutdown(self) -> None:
        with self._guarded():
            if self._publisher is not None:
                self._publisher.close()
        with self._guarded():
            if self._peers is not None:
                self._peers.close()
        super().shutdown()

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM has made its cache."""
        with self._guarded():
            self._cache = PrefixCache(manager)
            self._leases = Leases(self.kv_cache_config.num_blocks - 1, self._cache.touch, self._cache.free)
            if not self._cache.is_on and not self._is_prefill:
                logger.warning(
                    "carryback: this decode engine has no prefix cache, so it finds nothing of what prefill engines ask "
                    "for: start it with --enable-prefix-caching"
                )

    # -- other engines ask

    def _on_command(self, command: Command | None) -> None:
        """In the publisher's thread: another engine asks, or is through."""
        now = time.perf_counter()
        with self.lock:
            if isinstance(command, Ask):
                answer = Leased(self.engine_id, command.asker, command.lease, 0, reason="plugin_failed")
                with self._guarded():
                    answer = self._answer(command, now)
                if self._publisher is not None:
                    self._publisher.leased(answer)
            elif isinstance(command, Keep):
                self._leases.keep(command.leases, now)
            elif isinstance(command, Done):
                self._leases.end(command.leases)
            elif command is None and (late := self._leases.end_late(now)):
                logger.warning("carryback: %d leases ended since their readers were not heard of", late)

    def _answer(self, ask: Ask, now: float) -> Leased:
        """What this engine has of a prompt that a prefill engine asks for, under a lease."""

        def no(reason: str, tokens: int = 0) -> Leased:
            return Leased(self.engine_id, ask.asker, ask.lease, tokens, reason=reason)

        if self._cannot_cut or self._cache is None or not self._cache.is_on or self.use_host_buffer:
            return no("unsupported")
        if ask.block_size != self._hash_block_size or len(ask.hashes) % HASH_BYTES:
            return no("layouts_differ")
        if self._is_paused:
            return no("paused")
        hashes = [ask.hashes[at : at + HASH_BYTES] for at in range(0, len(ask.hashes), HASH_BYTES)]
        found = self._cache.find(hashes, ask.max_tokens)
        if not found.tokens:
            return no("nothing")
        if not self._leases.take(ask.lease, ask.asker, found.blocks, now):
            return no("too_many_leases", found.tokens)
        blocks = found.tokens // self._hash_block_size
        parallel = self.vllm_config.parallel_config
        record: dict[str, Any] = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[block.block_id for block in group] for group in found.groups],
            "remote_engine_id": self.engine_id,
            "remote_request_id": ask.lease,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "remote_num_tokens": found.tokens,
            "remote_blocks_expiry_time": None,
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "transfer_mode": self._TRANSFER_MODE,
        }
        digests = self._sealer.digests(hashes[:blocks])
        self._sealer.seal(
            record,
            digests=digests,
            tail="",
            block_size=self._hash_block_size,
            epoch=self._epoch.name,
            made=found.made,
        )
        del record["carryback"]["digests"]  # base64; the event has the bytes
        return Leased(
            self.engine_id, ask.asker, ask.lease, found.tokens, msgspec.json.encode(record), digests
        )

    def scheduling(self, scheduler: Scheduler, is_scheduling: bool) -> None:
        """vLLM begins to schedule a step, or has scheduled it."""
        self._scheduler = scheduler
        if self._cache is not None:
            self._cache.scheduling(is_scheduling)

    def step_ended(self, output: SchedulerOutput) -> None:
        """All workers have done a step."""
        with self._guarded():
            number = getattr(output.kv_connector_metadata, "carryback_step", None)
            if self._cache is not None and number is not None:
                self._cache.step_ended(number)

    # -- a request arrives

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is not None:
            with self._guarded(lambda: self._compute(request)):
                for name in [each for each in params if each.startswith("_")]:
                    del params[name]  # notes of ours and of stock code, which nobody else may make
                self._take_in(request, params)
        super().on_new_request(request)
        if params is not None:
            with self._guarded(lambda: self._compute(request)):
                self._ask(request, params)

    def _ask(self, request: Request, params: dict[str, Any]) -> None:
        """Ask decode engines what they have of a prompt; or look here, for a router that wants to know."""
        addresses = params.pop("carryback_ask", self._default_peers)
        if self._peers is not None and params.get("do_remote_decode") and not params.get("remote_block_ids"):
            if isinstance(addresses, list) and addresses and not self._cannot_cut:
                params["_carryback_ask"] = [each for each in addresses if isinstance(each, str)]
                self._ask_peers(request, params["_carryback_ask"])
        elif params.pop("carryback_find", False) is True and self._publisher is not None:
            tokens = 0
            if self._cache is not None and self._cache.is_on:
                tokens = self._cache.find(request.block_hashes, request.num_prompt_tokens - 1).tokens
            self._publisher.found(str(params.get("carryback_key")), request.num_prompt_tokens, tokens)

    def _ask_peers(self, request: Request, addresses: list[str]) -> None:
        assert self._peers is not None
        self._peers.ask(
            request.request_id,
            addresses,
            request.block_hashes,
            block_size=self._hash_block_size,
            max_tokens=request.num_prompt_tokens - 1,
        )

    def _is_unanswered(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether decode engines are still to say what they have of a prompt; takes in what they have said."""
        if self._peers is None or not self._peers.is_asked(request.request_id):
            return False
        if request.request_id in self._matches:
            return False
        if (question := self._peers.answer(request.request_id)) is None:
            return True
        self._take_answer(request, params, question)
        return False

    def _take_answer(self, request: Request, params: dict[str, Any], question: Question) -> None:
        answers = question.answers.values()
        best = question.best
        if best is not None:
            record = msgspec.json.decode(best.record)
            record["carryback"]["digests"] = base64.b64encode(best.digests).decode()
            params.update(transfer_params(record))
            self._verify(request, params)
        match = self._match(request, params)
        if best is None:
            most = max(answers, key=lambda each: each.tokens, default=None)
            match.reason = "no_answer" if most is None else most.reason
            match.found = most.tokens if most is not None else 0
        else:
            match.found, match.holder = best.tokens, best.engine
        match.asked = len(answers)
        self._matches[request.request_id] = match
        self._line.shorten(
            request.request_id, request.num_prompt_tokens - match.blocks * self._hash_block_size
        )
        if not match.blocks:
            self._end_lease(request, params)

    def _asks_again(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether engines are asked once more, now that a prompt's turn has come: too much was leased before."""
        match = self._matches.get(request.request_id)
        if match is None or match.reason != "too_many_leases" or self._peers is None:
            return False
        if (addresses := params.pop("_carryback_ask", None)) is None:
            return False
        self._peers.end(request.request_id)
        del self._matches[request.request_id]
        self._ask_peers(request, addresses)
        return True

    def _end_lease(self, request: Request, params: dict[str, Any]) -> None:
        """Nothing is read of what other engines have."""
        if self._peers is not None and self._peers.is_asked(request.request_id):
            _forget_remote(params)
            self._peers.end(request.request_id)

    def _take_in(self, request: Request, params: dict[str, Any]) -> None:
        """Verify what a request came with, and take out what stock code must not act on."""
        if isinstance(record := params.pop("carryback_record", None), dict):
            with suppress(Malformed):
                params.update({**transfer_params(record), **params})
        self._release(params.pop("carryback_release", ()))
        if params.pop("carryback_forget", False) is True:
            self.forget("a router asks for it", weights_changed=True)
        wait_s = params.pop("carryback_await", None)
        if isinstance(wait_s, int | float) and self._publisher is not None:
            self._waiting[request.request_id] = time.perf_counter() + wait_s
        self._verify(request, params)
        # Stock code takes any `do_remote_prefill` for a promise of blocks.
        if params.get("do_remote_prefill") and not params.get("remote_block_ids"):
            params["do_remote_prefill"] = False
        if self._is_ordered and params.get("do_remote_decode"):
            self._line.join(
                request.request_id,
                request,
                # (What other engines have of it is known later.)
                request.num_prompt_tokens
                - (self._readable(request, params) if params.get("remote_block_ids") else 0),
                time.perf_counter(),
                request.priority,
            )
        if isinstance(cached := params.get("carryback_cached"), int):
            request.prefill_stats = _Billed(max(min(cached, request.num_prompt_tokens - 1), 0))

    def _verify(self, request: Request, params: dict[str, Any]) -> None:
        """Take out a record that nobody with our key has sealed, or that this engine's ranks cannot read."""
        refused = ""
        if not self._sealer.is_authentic(params):
            if (version := sealed_as(params)) != str(VERSION):
                logger.warning_once(
                    "carryback: a record was sealed as version %s, and this is %d: engines of releases of "
                    "carryback that do not verify each other's records compute every prompt",
                    version,
                    VERSION,
                )
            refused = "unverified"
        elif not self._ranks_fit(params.get("tp_size"), params.get("pp_size")):
            refused = "layouts_differ"
        if refused:
            if params.get("do_remote_prefill") and params.get("remote_block_ids"):
                self._declined(params, refused)
            _forget_remote(params, refused)
        elif params.get("do_remote_decode") and params.get("remote_block_ids"):
            self._offer(request, params)

    def _compute(self, request: Request) -> None:
        """After a fault of ours: the request reads nothing, waits for nobody, and is computed."""
        self._matches[request.request_id] = _Match(reason=FAULT)
        self._waiting.pop(request.request_id, None)
        _forget_remote(request.kv_transfer_params, FAULT)
        request.kv_transfer_params["do_remote_prefill"] = False
        self._leave_line(request.request_id)

    def _ranks_fit(self, holders: object, stages: object) -> bool:
        """Whether this engine's ranks can read from so many tensor- and pipeline-parallel ones. Stock code finds out
        with the first read, and fails."""
        if isinstance(stages, int) and stages != self._pp_size:
            return False
        if not isinstance(holders, int) or holders == self._tp_size:
            return True
        return ranks_fit(self._tp_size, holders, self._kv_heads)

    def _offer(self, request: Request, params: dict[str, Any]) -> None:
        """A record came: see that it is read once at most, and by nobody once it was withdrawn."""
        record = f"{params['remote_engine_id']} {params['remote_request_id']}"
        is_first = record not in self._spent
        self._spent[record] = None
        if len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
        if not params.pop("carryback_withdraw", False):
            if is_first:
                self._readers[record] = request
                params["_carryback_reads"] = record
            else:
                _forget_remote(params, "spent")
            return
        reader = self._readers.get(record)
        if reader is not None and not reader.kv_transfer_params.get("_remote_blocks_processed"):
            _forget_remote(reader.kv_transfer_params, "withdrawn")
            self._matches.pop(reader.request_id, None)
        elif not is_first:
            # It was read, is being read or was declined: its holder knows, or hears when that is over.
            _forget_remote(params, "spent")
        # Else this request's own empty read tells the holder.

    def _release(self, request_ids: object) -> None:
        """Let go of pinned blocks: the worker takes a deadline that has passed."""
        for request_id in request_ids if isinstance(request_ids, Iterable) else ():
            if isinstance(request_id, str) and request_id in self._pins:
                self._asked.add(request_id)
                self._reqs_need_send[request_id] = time.perf_counter()

    # -- what is void

    def forget(self, why: str, scheduler: Scheduler | None = None, *, weights_changed: bool = False) -> None:
        """Void all that was made until now, and let go of what is held.

        Args:
            why: for the log.
            scheduler: vLLM's, if it has not scheduled anything yet.
            weights_changed: nothing is to be found in this engine's own prefix cache either.
        """
        scheduler = scheduler or self._scheduler
        with self.lock:
            self._epoch.change()  # before any block can be overwritten
            self._leases.end_all()
            if weights_changed and self._cache is not None:
                self._cache.evict_all()
                for request in scheduler.requests.values() if scheduler is not None else ():
                    self._cache.skip(request)
            if self._pins:
                logger.info("carryback: %s: letting go of %d requests' KV", why, len(self._pins))
            for request_id in list(self._pins):
                self._asked.add(request_id)
                # A deadline that has passed, for the worker.
                self._reqs_need_send[request_id] = time.perf_counter()
                if scheduler is not None and (request := scheduler.requests.get(request_id)) is not None:
                    self._dropped.add(request_id)
                    self._unpin(request_id)
                    scheduler._free_blocks(request)

    def pause(self, is_paused: bool, scheduler: Scheduler) -> None:
        """The engine is paused, or goes on.

        vLLM's pause waits until no request is left, those whose KV is held among them. What a prefill engine has is
        about to be read by requests that run, and its lease is short.
        """
        self._is_paused = is_paused
        if self._publisher is not None:
            self._publisher.is_paused = is_paused
        if is_paused and not self._is_prefill:
            self.forget("the engine is paused", scheduler)

    def _nixl_handshake_listener(self, encoded_data: dict[Any, Any], *args: Any) -> None:
        super()._nixl_handshake_listener(Answers(encoded_data, self._epoch, self._is_leased), *args)

    def _is_leased(self, lease: str) -> bool:
        return lease in self._leases

    # -- what may it read?

    def _readable(self, request: Request, params: dict[str, Any]) -> int:
        """How many tokens of a prompt need not be computed, since they can be read."""
        match = self._matches[request.request_id] = self._match(request, params)
        tokens = match.blocks * self._hash_block_size
        return tokens if tokens >= self._threshold_of(params) else 0

    def _threshold_of(self, params: dict[str, Any]) -> int:
        threshold = params.get("carryback_threshold")
        return threshold if isinstance(threshold, int) else self._threshold

    def _is_next(self, request: Request, computed_tokens: int) -> bool:
        """Whether no other waiting prompt goes before this one.

        Args:
            computed_tokens: of its prompt, those in this engine's own prefix cache.
        """
        if request.request_id not in self._line:
            return True
        self._line.shorten(request.request_id, request.num_prompt_tokens - computed_tokens)
        first = self._line.first(self._can_go)
        return first is None or first == request.request_id

    def _can_go(self, request: Request) -> bool:
        if (
            self._peers is not None
            and self._peers.is_asked(request.request_id)
            and (request.request_id not in self._matches)
        ):
            return False
        # vLLM gives what was read another status only when it comes to it, and it may stand behind others.
        return request.status == RequestStatus.WAITING or request.request_id in self._loaded

    def _leave_line(self, request_id: str) -> None:
        self._line.leave(request_id)
        self._loaded.discard(request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params is None:
            return 0, False
        match: _Match | None = None
        with self._guarded(lambda: self._compute(request)):
            if self._is_unanswered(request, params):
                return None, False
            if not self._is_next(request, num_computed_tokens) or self._asks_again(request, params):
                return None, False  # vLLM asks again in its next step, and goes on to who comes behind
            if request.request_id in self._waiting and not self._may_go_on(request, params):
                return None, False
            match = self._matches.get(request.request_id)
            if match is None:
                match = self._matches[request.request_id] = self._match(request, params)
            match.cached_tokens = num_computed_tokens
            self.kv_recompute_threshold = self._threshold_of(params)
        if match is None or match.blocks == 0 or params.get("_remote_blocks_processed"):
            # Nothing to read; or it was read before, and the request came back after a preemption or a
            # failed load: the record is spent.
            return 0, False
        count, load_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count == 0 and params.get("do_remote_decode"):
            local = num_computed_tokens >= match.blocks * self._hash_block_size
            match.reason = "local_cache" if local else "below_threshold"
            match.whole = match.whole and local
            with self._guarded():
                self._end_lease(request, params)
        return count, load_async

    def _may_go_on(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether a waiting request was told how to go on, or has waited long enough."""
        assert self._publisher is not None
        told = self._publisher.told(str(params.get("carryback_key")))
        if told is None and time.perf_counter() < self._waiting[request.request_id]:
            return False
        del self._waiting[request.request_id]
        with suppress(Malformed):  # else it computes its prompt itself
            params.update({**transfer_params(told or b"{}"), **params})
        self._take_in(request, params)
        super().on_new_request(request)  # its heartbeats begin
        return True

    def _match(self, request: Request, params: dict[str, Any]) -> _Match:
        """Compare the record with the prompt, and cut it to the blocks that are the prompt's."""
        if not params.get("remote_block_ids"):
            # A decode engine with such a layout holds nothing.
            reason = "unsupported_layout" if self._cannot_cut else "no_record"
            return _Match(reason=params.pop("_carryback_refused", reason))
        common, held = self._sealer.common_blocks(params, request.block_hashes)
        if params.get("do_remote_prefill"):
            return self._match_prompt(request, params, common, held)
        if self._cannot_cut:
            return _Match(reason="unsupported_layout")
        if params["carryback"].get("block_size") != self._hash_block_size or (
            len(params["remote_block_ids"]) != len(self._windows)
        ):
            return _Match(reason="layouts_differ")
        # At least one token is left to compute: its logits are the answer.
        usable = min(held, (request.num_prompt_tokens - 1) // self._hash_block_size)
        blocks = min(common, usable)
        if blocks:
            readable = self._cut(params["remote_block_ids"], blocks)
            if readable is None:
                return _Match(reason="window_gone")
            params["remote_block_ids"] = readable
            params["remote_num_tokens"] = blocks * self._hash_block_size
        if usable == 0:
            return _Match(reason="too_short")
        return _Match(blocks, blocks == usable, "verified" if blocks == usable else "history_changed")

    def _cut(self, groups: Sequence[Sequence[int]], blocks: int) -> list[list[int]] | None:
        """The block ids, for each KV cache group, with which a prompt goes on after so many blocks of tokens.

        None if a sliding window there reaches back to blocks that were let go of.

        Args:
            groups: for each group a block id for each block of tokens, 0 where there is none any more.
        """
        cut = []
        for ids, window in zip(groups, self._windows, strict=True):
            # The next token sees the `window - 1` before it. As vLLM has it, see SlidingWindowManager.
            first = max(blocks * self._hash_block_size - window + 1, 0) if window else 0
            needed = list(ids[first // self._hash_block_size : blocks])
            if not all(needed):
                return None
            cut.append(needed)
        return cut

    def _match_prompt(self, request: Request, params: dict[str, Any], common: int, held: int) -> _Match:
        """A decode engine reads a prompt's KV whole, or computes the prompt itself."""
        tokens = params.get("remote_num_tokens") or 0
        tail = self._tail(request, tokens)
        expected = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        if (
            tokens == expected
            and common == held == tokens // self._hash_block_size
            and tail == params["carryback"]["tail"]
        ):
            return _Match(max(common, 1), True, "verified")
        logger.error(
            "carryback: request %s is not the prompt whose KV it came with (%d of %d tokens match); "
            "computing it here. The two hops must send the same prompt to engines of the same block size.",
            request.request_id,
            common * self._hash_block_size,
            tokens,
        )
        self._declined(params, "prompt_differs")
        return _Match(reason="prompt_differs")

    def _tail(self, request: Request, tokens: int) -> str:
        start = tokens // self._hash_block_size * self._hash_block_size
        return self._sealer.tail(
            (request.prompt_token_ids or [])[start:tokens],
            [
                *(feature.identifier for feature in request.mm_features),
                *([ADAPTERS.print_of(request.lora_request)] if request.lora_request is not None else []),
            ],
        )

    def _declined(self, params: dict[str, Any], reason: str) -> None:
        if self._publisher is not None and isinstance(key := params.get("carryback_key"), str):
            self._publisher.declined(key, reason)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        first = params is not None and not params.get("_remote_blocks_processed")
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if params is None:
            return
        # Stock code tracks requests that come with a transfer; we may hold any request's blocks, and
        # the worker never lets go of blocks that it does not track.
        self._reqs_in_batch.add(request.request_id)
        if not request.num_computed_tokens:  # all of its KV is from now on, or was found as good
            params["_carryback_epoch"] = self._epoch.name
        with self._guarded():
            self._given_blocks(request, num_external_tokens, is_first=first)

    def _given_blocks(self, request: Request, external_tokens: int, *, is_first: bool) -> None:
        is_read = is_first and external_tokens > 0
        if not is_read:
            self._leave_line(request.request_id)  # else it reads first, and keeps its place
        if (match := self._matches.get(request.request_id)) is None:
            return
        now = time.perf_counter()
        if is_first:
            match.read_tokens = external_tokens
        if is_read:
            match.allocated = now
            self._reading.add(request.request_id)
        else:
            match.began, match.scheduled = now, self._scheduled

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NixlConnectorMetadata:
        sealed: dict[str, Sealed] = {}
        with self._guarded():
            self._scheduled += scheduler_output.total_num_scheduled_tokens
            self._line.look_again()
            # (Of what is not in it, the worker believes nothing.)
            sealed = {
                request_id: _sealed_of(request) for request_id, (request, *_) in self._reqs_need_recv.items()
            }
        meta = super().build_connector_meta(scheduler_output)
        meta.carryback_sealed = sealed
        meta.carryback_step = self._cache.step_begins() if self._cache is not None else 0
        meta.carryback_epoch_s = time.perf_counter() - self._epoch.began if self._epoch.began else None
        return meta

    # -- progress reported by the workers

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        with self._guarded():
            if self._dropped and connector_output.finished_sending:
                # The scheduler has no such requests any more, and would fail.
                gone = connector_output.finished_sending & self._dropped
                connector_output.finished_sending -= gone
                self._dropped -= gone
        super().update_connector_output(connector_output)
        failed, received = connector_output.failed_recving or (), connector_output.finished_recving or ()
        with self._guarded():
            self._reads_ended(failed, received)
        for request_id in connector_output.finished_sending or ():
            with self._guarded():
                self._unpin(request_id)

    def _reads_ended(self, failed: Iterable[str], received: Iterable[str]) -> None:
        now = time.perf_counter()
        for request_id in failed:
            if (match := self._matches.get(request_id)) is not None:
                match.read_tokens, match.whole, match.reason = 0, False, "load_failed"
        for request_id in self._reading.intersection((*received, *failed)):
            self._reading.discard(request_id)
            if self._peers is not None:
                self._peers.end(request_id)
        self._loaded.update(request_id for request_id in (*received, *failed) if request_id in self._line)
        for request_id in received:
            if (match := self._matches.get(request_id)) is not None and match.read_tokens:
                match.read_s = now - match.allocated

    # -- a request is finished

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        match = self._matches.pop(request.request_id, None)
        with self._guarded():
            self._leave(request, params)
        status = request.status
        with self._guarded():
            if _may_have_stopped(request):
                request.status = RequestStatus.FINISHED_STOPPED
        try:
            hold, record = super().request_finished(request, block_ids)
        finally:
            request.status = status
        if params is None or record is None:
            return hold, record
        kept: tuple[bool, dict[str, Any] | None] = False, None
        if params.get("do_remote_decode"):
            kept = False, {"carryback_reuse": _report(request, _Match(reason=FAULT))}
        with self._guarded(lambda: self._let_go(request, params)):
            kept = self._keep(request, params, block_ids, hold, record, match)
        return kept

    def _leave(self, request: Request, params: dict[str, Any] | None) -> None:
        """Forget a request that has ended; tell the holder of what it never came to read."""
        self._waiting.pop(request.request_id, None)
        self._leave_line(request.request_id)
        if params is None:
            return
        if (record_id := params.pop("_carryback_reads", None)) is not None:
            self._readers.pop(record_id, None)
        if self._peers is not None and request.request_id not in self._reading:
            self._end_lease(request, params)
        if (
            params.get("do_remote_decode")
            and params.get("remote_block_ids")
            and not params.get("_remote_blocks_processed")
        ):
            # Aborted before it was scheduled. Tell the decode engine that nothing will be read, by an
            # empty read, as stock code does in the other direction.
            self._reqs_need_recv[request.request_id] = (request, [], (), False)
            params["_remote_blocks_processed"] = True

    def _let_go(self, request: Request, params: dict[str, Any]) -> None:
        """After a fault of ours: the scheduler frees a finished request's blocks at once, and no router waits for them."""
        self._reqs_need_send.pop(request.request_id, None)
        self._reqs_not_processed.add(request.request_id)
        self._unpin(request.request_id)
        key = params.get("carryback_key")
        if not params.get("do_remote_decode") and isinstance(key, str) and self._publisher is not None:
            self._publisher.held(
                key,
                request.request_id,
                tokens=0,
                blocks=0,
                hold_s=0.0,
                record=b"",
                digests=b"",
                generated=request.num_output_tokens,
            )

    def _keep(
        self,
        request: Request,
        params: dict[str, Any],
        block_ids: BlockIds,
        hold: bool,
        record: dict[str, Any],
        match: _Match | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide how long a finished request's blocks are held, seal the record of them, and announce it.

        Returns:
            Whether they are held, and the answer's `kv_transfer_params`.
        """
        is_prefill = bool(params.get("do_remote_decode"))
        hold_s = params.get("hold_s")
        if not isinstance(hold_s, int | float) or not math.isfinite(hold_s):
            # A decode engine holds for routers that ask it to; what it does not hold is found while it lies there.
            hold_s = self._kv_lease_duration if is_prefill else 0.0
        blocks = [block for group in block_ids for block in group if block]
        full_blocks = self._full_blocks_held(request, is_prefill)
        # A decode engine's record is worth holding only for what a later prompt can read of it.
        useful = is_prefill or (
            not self._cannot_cut and full_blocks > 0 and self._cut(block_ids, full_blocks) is not None
        )
        # Of one epoch from beginning to end. Nothing may be held during a pause, which waits for it.
        useful = useful and params.get("_carryback_epoch") == self._epoch.name
        useful = useful and (is_prefill or not self._is_paused)
        digests = b""
        if hold and hold_s > 0 and useful and (is_prefill or self._has_room(blocks)):
            digests = self._pin(request, record, block_ids, full_blocks, hold_s, is_prefill)
        else:
            if hold:
                self._reqs_need_send.pop(request.request_id, None)
                self._reqs_not_processed.add(request.request_id)
            hold, hold_s = False, 0.0
            _forget_remote(record)
        key = params.get("carryback_key")
        if is_prefill:
            record["carryback_reuse"] = reuse = _report(request, match)
            record["remote_prefill_cached_tokens"] = reuse["tokens"] + reuse["cached"]
            if match is not None and match.began:
                compute_s, computed = time.perf_counter() - match.began, self._scheduled - match.scheduled
                record["carryback_work"] = {
                    "read_s": match.read_s,
                    "compute_s": compute_s,
                    "computed": computed,
                }
                self._line.learn(compute_s, computed)
            if params.get("carryback_tell") and isinstance(key, str) and self._publisher is not None:
                self._publisher.prefilled(key, msgspec.json.encode(record))
            return hold, record
        if not isinstance(key, str) or self._publisher is None:
            return hold, record
        if hold:
            del record["carryback"]["digests"]  # base64; the event has the bytes
        self._publisher.held(
            key,
            request.request_id,
            tokens=record.get("remote_num_tokens", 0),
            blocks=len(blocks) if hold else 0,
            hold_s=hold_s,
            record=msgspec.json.encode(record) if hold else b"",
            digests=digests,
            generated=request.num_output_tokens,
        )
        # The router has it from the event; a client has no use for block ids and addresses.
        return hold, None

    def _full_blocks_held(self, request: Request, is_prefill: bool) -> int:
        """Full blocks whose KV is computed for certain, and whose hashes are known."""
        # With asynchronous scheduling the count of computed tokens runs ahead of what was sampled; the
        # last sampled token's KV is never needed.
        tokens = request.num_prompt_tokens
        if not is_prefill:
            tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return min(tokens // self._hash_block_size, len(request.block_hashes))

    def _has_room(self, blocks: list[int]) -> bool:
        """Whether these blocks may be held, besides those that are."""
        more = sum(block not in self._pinned for block in blocks)
        if len(self._pinned) + more <= self._max_pinned:
            return True
        logger.warning_once(
            "carryback: %d KV blocks are the most that this engine holds for conversations' next turns "
            "(carryback_max_pinned), and there are more; give the routers a smaller pin budget",
            self._max_pinned,
        )
        return False

    def _pin(
        self,
        request: Request,
        record: dict[str, Any],
        block_ids: BlockIds,
        full_blocks: int,
        hold_s: float,
        is_prefill: bool,
    ) -> bytes:
        """Hold the request's blocks for a reader, and seal the record of them; the blocks' digests."""
        blocks = [block for group in block_ids for block in group if block]
        deadline = time.perf_counter() + hold_s
        expires = deadline + (0 if is_prefill else READ_GRACE_S)
        key = request.kv_transfer_params.get("carryback_key")
        has_listener = not is_prefill and isinstance(key, str)
        self._pins[request.request_id] = _Pin(key if has_listener else None, expires, blocks)
        self._pinned.update(blocks)
        self._tell_pinned()
        self._reqs_need_send[request.request_id] = expires
        record["remote_blocks_expiry_time"] = deadline
        if is_prefill:
            # The whole prompt, less what the model needs recomputed.
            record["remote_num_tokens"] = request.num_prompt_tokens
            record["remote_block_ids"] = [list(group) for group in record["remote_block_ids"]]
        else:
            # Only full blocks have a hash to verify them by. The reader cuts, so it needs to know of each
            # block that a window has moved past: stock code leaves those out.
            record["remote_num_tokens"] = full_blocks * self._hash_block_size
            record["remote_block_ids"] = [list(group[:full_blocks]) for group in block_ids]
        digests = self._sealer.digests(request.block_hashes[:full_blocks])
        self._sealer.seal(
            record,
            digests=digests,
            tail=self._tail(request, record["remote_num_tokens"]) if is_prefill else "",
            block_size=self._hash_block_size,
            epoch=self._epoch.name,
            made=time.perf_counter(),
        )
        return digests

    def _unpin(self, request_id: str) -> None:
        """The scheduler frees a finished request's blocks now: they were read, or nobody may read them."""
        asked = request_id in self._asked
        self._asked.discard(request_id)
        if (pin := self._pins.pop(request_id, None)) is None:
            return
        self._pinned.subtract(pin.blocks)
        for block in pin.blocks:
            if not self._pinned[block]:
                del self._pinned[block]
        self._tell_pinned()
        if pin.key is not None and self._publisher is not None:
            expired = time.perf_counter() >= pin.expires
            self._publisher.released(pin.key, "asked" if asked else "expired" if expired else "read")

    def _tell_pinned(self) -> None:
        if self._publisher is not None:
            self._publisher.pinned = len(self._pinned)


class CarrybackWorker(NixlPullConnectorWorker):
    """The worker's side: no read of a prompt's KV after the prefill engine's lease on it ended.

    Stock code checks this for what a decode engine holds, by the deadline in the record and the clock
    offset from the handshake. A prefill engine's record now has a deadline as well, but a decode engine
    extends that lease with heartbeats, so we count those that can have arrived in time. The engines must
    have the same `kv_lease_duration`.

    And it connects again to an engine from which a read failed; and asks the holder, after each read, whether what
    was read was good all the time (`carryback_vllm.forget`).
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        self._guarded = Guard()
        self._is_prefill = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._beats: dict[str, list[float]] = {}
        self._asker = Asker()
        # What each request's record says; and of those that have read, the answers to come.
        self._sealed: dict[str, Sealed] = {}
        self._to_confirm: dict[str, Future[float | None]] = {}
        self._voided = -math.inf
        # Whoever has read under a lease says so to the scheduler's side; NIXL tells the worker's, too.
        new_notifs = self.nixl_wrapper.get_new_notifs
        prefix = LEASE.encode()
        self.nixl_wrapper.get_new_notifs = lambda: {
            agent: [each for each in notifs if not each.startswith(prefix)]
            for agent, notifs in new_notifs().items()
        }

    def shutdown(self) -> None:
        self._asker.close()
        super().shutdown()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        self._sealed.update(metadata.carryback_sealed)
        if metadata.carryback_epoch_s is not None:
            self._voided = time.perf_counter() - metadata.carryback_epoch_s
        super().start_load_kv(metadata)
        with self._guarded():
            for request_id in self._sealed.keys() - self._recving_metadata.keys():
                del self._sealed[request_id]

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._recving_transfers:
            with self._guarded(lambda: failed.update(done)):
                self._confirm(done, failed)
        return done, failed

    def _confirm(self, done: set[str], failed: set[str]) -> None:
        """Leave in `done` only those that have read what is known to be good; add to `failed` what is known not to be."""
        for request_id in done - failed - self._recv_failures:
            remote = self._recving_metadata[request_id].remote
            sealed = self._sealed.pop(request_id, Sealed("", 0))
            self._to_confirm[request_id] = self._asker.ask(remote.host, remote.port, sealed)
            done.remove(request_id)
        if self._is_prefill and self._to_confirm:
            # Else they would be looked at after the next step only: of a prefill engine that is busy, a long one.
            wait(self._to_confirm.values(), timeout=CONFIRM_WAIT_S)
        for request_id in [each for each, answer in self._to_confirm.items() if answer.done()]:
            answer = self._to_confirm.pop(request_id)
            made = None if answer.exception() is not None else answer.result()
            # What another engine made before this one's own reset is of other weights, perhaps.
            if made is not None and made > self._voided:
                done.add(request_id)
            else:
                logger.warning("carryback: what request %s has read is void, and is not used", request_id)
                failed.add(request_id)

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        super()._send_heartbeats(metadata)
        if metadata.heartbeat_by_engine:
            with self._guarded():
                self._remember_beats(metadata)

    def _remember_beats(self, metadata: NixlConnectorMetadata) -> None:
        now = time.perf_counter()
        beats: dict[str, list[float]] = {}
        for engine_id, info in metadata.heartbeat_by_engine.items():
            # Without a handshake the heartbeat was not sent.
            if engine_id in self._remote_agents:
                for request_id in info.req_ids:
                    beats[request_id] = [*self._beats.get(request_id, ()), now]
        self._beats = beats

    def _cleanup_remote_engines(self) -> None:
        # NIXL refuses all reads from an engine to which a connection broke, for ever, and says that it knows it
        # well, which is what stock code asks. (vLLM before 0.32 has no such connecting again.)
        with self._guarded():
            for engine_id in getattr(self, "_failed_remote_engines", set()) & self._remote_agents.keys():
                if engine_id not in self._invalid_remote_engines:
                    self._mark_remote_engine_invalid(engine_id, time.perf_counter())
        super()._cleanup_remote_engines()

    def _is_turn2_read_expired(self, meta: ReqMeta) -> bool:
        remote = meta.remote
        if self._is_prefill or remote is None or remote.blocks_expiry_time is None:
            return super()._is_turn2_read_expired(meta)
        is_late = True
        with self._guarded():
            is_late = self._is_lease_over(remote)
        return is_late

    def _is_lease_over(self, remote: RemoteMeta) -> bool:
        deadline = remote.blocks_expiry_time - self._engine_clock_offset[remote.engine_id]
        for beat in self._beats.get(remote.request_id, ()):
            if beat + LEASE_MARGIN_S < deadline:
                deadline = max(deadline, beat + self._lease_extension)
        return time.perf_counter() + LEASE_MARGIN_S >= deadline


def address_of_rank(address: str, rank: int) -> str:
    """Where a data-parallel rank publishes, given the engine's ZMQ address: the port plus the rank.

    Raises:
        RuntimeError: there are several ranks, and the address has no port.
    """
    if rank == 0:
        return address
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise RuntimeError(
            f"carryback: carryback_events is {address}; ranks of a data-parallel engine need an address "
            "with a port, like tcp://127.0.0.1:5701"
        )
    return f"{host}:{int(port) + rank}"


def split_kv_heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int | None:
    """How many KV heads tensor-parallel ranks have to split; None where they all have the same (MLA), or where stock
    code knows what to do with copies (Mamba)."""
    if vllm_config.model_config.use_mla or kv_cache_config.has_mamba_layers:
        return None
    return vllm_config.model_config.get_total_num_kv_heads()


def _why_not_cut(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hash_block_size: int) -> str:
    """Why a record cannot be cut at a block for this model and layout; empty if it can.

    A block of attention holds the KV of its own tokens, which depends on the tokens before it and on
    nothing else. So a prompt can go on after any block if, in each layer, all that its next token sees is
    there. What other layouts keep (a running state, shares of several ranks) is whole or useless, and is
    not read back.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups or len(kv_cache_config.transfer_groups) != len(groups):
        return "the model keeps something that is no KV cache, or that is not transferred"
    for spec in (group.kv_cache_spec for group in groups):
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
            return f"a part of the model's KV cache is {type(spec).__name__}, which cannot be cut at a block"
        # (A window of a FullAttentionSpec is one of the computation only: its KV is all kept.)
        if getattr(spec, "non_causal", False) or spec.tokens_per_state != 1:
            return "the model's attention is not causal, or its KV cache is compressed"
        if spec.block_size != hash_block_size:
            return f"blocks of {spec.block_size} tokens are hashed by {hash_block_size}"
    if current_platform.is_cpu() and vllm_config.model_config.use_mla:
        # Its decode and its prefill do not compute the same, so KV of the one is not that of the other
        # (docs/support.md). vLLM turns prefix caching off for it.
        return "vLLM's MLA on a CPU does not go on from KV that is there already"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block over ranks"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism spreads a block's layers over ranks, and reads of those were never tried"
    if vllm_config.speculative_config is not None:
        return "a speculative decoder keeps KV of its own"
    return ""


def _forget_remote(params: dict[str, Any], reason: str = "unverified") -> None:
    """Take out all that stock code would act on; the reason is for the report."""
    if params.get("remote_block_ids"):
        params["_carryback_refused"] = reason
    for name in [each for each in params if each.startswith("remote_") or each == "carryback"]:
        del params[name]


def _sealed_of(request: Request) -> Sealed:
    """What the record says that a request is about to read; the seal was verified."""
    seal = (request.kv_transfer_params or {}).get("carryback") or {}
    name = str((request.kv_transfer_params or {}).get("remote_request_id"))
    lease = name if name.startswith(LEASE) else ""
    return Sealed(str(seal.get("epoch")), float(seal.get("made", 0)), lease)


def _may_have_stopped(request: Request) -> bool:
    """Whether an aborted request may have come to its end.

    vLLM looks for stop strings outside of the scheduler, and aborts the request when it finds one. If the
    client went away instead, the router lets go of what is held.
    """
    return (
        request.status == RequestStatus.FINISHED_ABORTED
        and request.num_output_tokens > 0
        and request.sampling_params is not None
        and bool(request.sampling_params.stop)
        and isinstance((request.kv_transfer_params or {}).get("carryback_key"), str)
    )


def _report(request: Request, match: _Match | None) -> dict[str, Any]:
    """What a prefill did, for the router: tokens read, computed and cached, and why."""
    match = match or _Match()
    prompt = request.num_prompt_tokens
    reused = match.read_tokens
    return {
        "outcome": "hit" if match.whole else "partial" if reused else "miss",
        "tokens": reused,
        "cached": match.cached_tokens,
        "recomputed": max(prompt - reused - match.cached_tokens, 0),
        "reason": match.reason,
        "found": match.found,
        "holder": match.holder,
        "asked": match.asked,
    }
