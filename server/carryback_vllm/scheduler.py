"""The scheduler's side of the connector: what other engines may read of this one, and this one of others."""

from __future__ import annotations

import base64
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from carryback.wire.events import (
    HASH_BYTES,
    LEASE_S,
    Ask,
    Command,
    Done,
    Forget,
    Keep,
    Leased,
    Release,
    ReleaseReason,
    ranks_fit,
    transfer_params,
)
from carryback.wire.outside import Malformed
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from carryback_vllm.about import about_engine
from carryback_vllm.events import KEY_VARIABLE, Publisher
from carryback_vllm.forget import ADAPTERS, Answers, Epoch, Sealed
from carryback_vllm.found import Found, PrefixCache
from carryback_vllm.guard import Guard
from carryback_vllm.holds import LEASE, MAX_LEASED, MAX_LEASED_BY_ALL, Holds
from carryback_vllm.layout import address_of_rank, split_kv_heads, why_not_read
from carryback_vllm.line import PATIENCE_S, Line
from carryback_vllm.match import Match
from carryback_vllm.peers import TIMEOUT_S, Peers, Question
from carryback_vllm.seal import VERSION, Sealer, sealed_as

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    BlockIds = tuple[list[int], ...]

logger = init_logger("vllm.carryback")

# The share of its KV blocks that a decode engine pins at most.
MAX_PINNED = 0.9
# Why nothing was reused, after a fault of the plug-in's own.
FAULT = "plugin_failed"
# Prompts that were let go of are remembered, the last ones: each for far longer than a read takes.
MAX_LET_GO = 10_000
# What a report calls a reason of `wire.events.Leased`; the others have the same name in both.
_ANSWERED = {"unsupported": "unsupported_layout", "paused": "no_answer"}


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
    """The scheduler's side: asks and answers, seals and verifies, pins, publishes.

    vLLM calls the hooks from its engine core, which ends with any exception. So in each hook our own code runs in
    `self._guarded`: after a fault of ours a request reads nothing and nothing of it is held.

    Attributes:
        lock: held while vLLM's scheduler does anything (`carryback_vllm.forget`), and by the publisher's thread while it
            answers: other engines and routers need not wait for a step to end.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if vllm_config.cache_config.prefix_caching_hash_algo != "sha256_cbor":
            raise RuntimeError(
                "carryback: engines must hash blocks alike; start both with "
                "--prefix-caching-hash-algo sha256_cbor and the same PYTHONHASHSEED"
            )
        self._guarded = Guard()
        self.lock = threading.RLock()
        self._settings = _Settings.of(vllm_config)
        self._sealer = Sealer.from_environment()
        # As the engine resolves it; only from 0.32 on it is in `kv_cache_config`, too.
        _, self._hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._pp_size = vllm_config.parallel_config.pipeline_parallel_size
        self._kv_heads = split_kv_heads(vllm_config, kv_cache_config)
        self._cannot_read = why_not_read(vllm_config, kv_cache_config, self._hash_block_size)
        if self._cannot_read:
            logger.warning("carryback: no KV is read back from decode to prefill: %s", self._cannot_read)
        # What was made in an earlier epoch is void.
        self._epoch = Epoch()
        self._is_paused = False
        self._scheduler: Scheduler | None = None

        # What others may read here. Until vLLM has a cache, there is nothing.
        self._capacity = kv_cache_config.num_blocks - 1  # block 0 is vLLM's placeholder
        self._cache: PrefixCache | None = None
        self._leases = self._pins = Holds(lambda blocks: None, lambda blocks: None, each=0, all=0)
        # Prompts whose KV waits for a decode engine: their blocks, by request; and their requests, by the router's key.
        self._prompts: dict[str, set[int]] = {}
        self._prompt_keys: dict[str, str] = {}
        # Prompts that were let go of, of which the worker will say so.
        self._dropped: set[str] = set()
        # The last prompts that were let go of; whoever is reading one still is told so.
        self._let_go: dict[str, None] = {}
        # Requests that wait to be told how to go on, and until when.
        self._waiting: dict[str, float] = {}

        # What this engine reads of others, by request.
        self._matches: dict[str, Match] = {}
        self._reading: set[str] = set()
        self._peers: Peers | None = None
        # Those of which decode engines are still to say what they have.
        self._unanswered: dict[str, Request] = {}
        self._threshold: int = self.kv_recompute_threshold
        # All tokens that this engine has scheduled, of whichever request.
        self._scheduled = 0
        self._line: Line[Request] = Line(self._settings.patience_s)
        # Of those in line, the ones that have read what they can, and may be computed now.
        self._loaded: set[str] = set()

        self._publisher: Publisher | None = None
        if address := self._settings.events:
            # The index is the rank also where vLLM treats ranks as engines of their own (dense models).
            address = address_of_rank(address, vllm_config.parallel_config.data_parallel_index)
            self._publisher = Publisher(
                address,
                engine_id,
                capacity=self._capacity,
                secret=os.environ.get(KEY_VARIABLE),
                about=about_engine(
                    self, vllm_config, self._sealer, self._hash_block_size, self._kv_heads, address
                ),
                guarded=self._guarded,
                on_command=self._on_command,
            )

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM has made its cache."""
        with self._guarded():
            self._cache = cache = PrefixCache(manager, self._is_held_back)
            each, all = (int(share * self._capacity) for share in (MAX_LEASED, MAX_LEASED_BY_ALL))
            self._leases = Holds(cache.touch, cache.free, each=each, all=all)
            most = int(self._settings.max_pinned * self._capacity)
            self._pins = Holds(cache.touch, cache.free, each=most, all=most)
            if not cache.is_on and self.vllm_config.kv_transfer_config.kv_role == "kv_consumer":
                logger.warning(
                    "carryback: this decode engine has no prefix cache, so nothing is read back from it: start it "
                    "with --enable-prefix-caching"
                )

    def shutdown(self) -> None:
        for part in (self._publisher, self._peers):
            with self._guarded():
                if part is not None:
                    part.close()
        super().shutdown()

    # -- vLLM's steps

    def scheduling(self, scheduler: Scheduler, is_scheduling: bool) -> None:
        """vLLM begins to schedule a step, or has scheduled it."""
        self._scheduler = scheduler
        if self._cache is not None:
            self._cache.scheduling(is_scheduling)
        with self._guarded():
            if is_scheduling and self._unanswered:
                self._take_answers()

    def _take_answers(self) -> None:
        """Take in what has been answered, before any prompt is chosen: vLLM comes only to those that it has room for."""
        for request in list(self._unanswered.values()):
            if self._decide(request, request.kv_transfer_params or {}) is not None:
                del self._unanswered[request.request_id]

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
        meta.carryback_epoch_s = time.perf_counter() - self._epoch.began if self._epoch.began else None
        meta.carryback_step = self._cache.step_begins() if self._cache is not None else 0
        return meta

    def step_ended(self, output: SchedulerOutput) -> None:
        """All workers have done a step."""
        with self._guarded():
            if self._cache is not None and output.kv_connector_metadata is not None:
                self._cache.step_ended(output.kv_connector_metadata.carryback_step)

    # -- what others may read: questions, pins, prompts

    def _on_command(self, command: Command | None) -> None:
        """In the publisher's thread: another engine or a router says something; None: time has passed."""
        now = time.perf_counter()
        with self.lock:
            if isinstance(command, Ask):
                answer = Leased(self.engine_id, command.asker, command.lease, 0, reason=FAULT)
                with self._guarded():
                    answer = self._answer(command, now)
                assert self._publisher is not None
                self._publisher.answer(answer)
            elif isinstance(command, Keep):
                self._leases.extend(command.leases, now + LEASE_S)
            elif isinstance(command, Done):
                self._leases.end(command.leases)
            elif isinstance(command, Release):
                self._unpin(self._pins.end(command.keys), "asked")
                self._drop([self._prompt_keys[key] for key in command.keys if key in self._prompt_keys])
            elif isinstance(command, Forget):
                self.forget("a router asks for it", weights_changed=True)
            elif command is None:
                self._unpin(self._pins.end_late(now), "expired")
                if late := self._leases.end_late(now):
                    logger.warning(
                        "carryback: %d leases ended, since nothing was heard of their readers", len(late)
                    )

    def _answer(self, ask: Ask, now: float) -> Leased:
        """What this engine has of a prompt that a prefill engine asks for, under a lease."""

        def no(reason: str, tokens: int = 0) -> Leased:
            return Leased(self.engine_id, ask.asker, ask.lease, tokens, reason=reason)

        if self._cannot_read or self._cache is None or not self._cache.is_on or self.use_host_buffer:
            return no("unsupported")
        if ask.block_size != self._hash_block_size or len(ask.hashes) % HASH_BYTES:
            return no("layouts_differ")
        if self._is_paused:
            return no("paused")
        hashes = [ask.hashes[at : at + HASH_BYTES] for at in range(0, len(ask.hashes), HASH_BYTES)]
        found = self._cache.find(hashes, ask.max_tokens)
        if not found.tokens:
            return no("nothing")
        if not self._leases.take(ask.lease, found.blocks, now + LEASE_S, ask.asker):
            return no("too_many_leases", found.tokens)
        self._tell_held()
        parallel = self.vllm_config.parallel_config
        record: dict[str, Any] = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [
                [block.block_id for block in group if not block.is_null] for group in found.groups
            ],
            "remote_engine_id": self.engine_id,
            "remote_request_id": ask.lease,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "remote_num_tokens": found.tokens,
            "remote_blocks_expiry_time": None,  # the reader asks, when it has read
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "transfer_mode": self._TRANSFER_MODE,
        }
        digests = self._sealer.digests(hashes[: found.tokens // self._hash_block_size])
        self._seal(record, digests, "", found.made)
        del record["carryback"]["digests"]  # base64; the event has the bytes
        return Leased(
            self.engine_id, ask.asker, ask.lease, found.tokens, msgspec.json.encode(record), digests
        )

    def _seal(self, record: dict[str, Any], digests: bytes, tail: str, made: float) -> None:
        self._sealer.seal(
            record,
            digests=digests,
            tail=tail,
            block_size=self._hash_block_size,
            epoch=self._epoch.name,
            made=made,
        )

    def _find(self, request: Request, max_tokens: int, *, is_settled: bool = True) -> Found:
        """What this engine has of a request's tokens."""
        if self._cache is None or not self._cache.is_on:
            return Found(0, (), 0.0)
        return self._cache.find(request.block_hashes, max_tokens, is_settled=is_settled)

    def _pin(self, request: Request) -> None:
        """A request of a router's has ended at a decode engine: pin what it left, and say what that is."""
        params = request.kv_transfer_params or {}
        key, hold_s = params.get("carryback_key"), params.get("hold_s")
        if not isinstance(key, str) or self._publisher is None:
            return
        # What its last step has computed is there by the time that anybody asks.
        found = self._find(request, request.num_tokens, is_settled=False)
        full = found.tokens // self._hash_block_size
        is_pinned = False
        if (
            not isinstance(hold_s, int | float)
            or not 0 < hold_s < math.inf
            or self._is_paused
            or self._cannot_read
        ):
            hold_s = 0.0
        elif _has_ended(request):
            is_pinned = self._pins.take(key, found.blocks, time.perf_counter() + hold_s)
            if is_pinned:
                self._unpin(self._pins.end(self._pins.covered(key)), "covered")
            elif found.tokens:
                logger.warning_once(
                    "carryback: %d KV blocks are the most that this engine pins for conversations' next turns "
                    "(carryback_max_pinned), and there are more; give the routers a smaller pin budget",
                    int(self._settings.max_pinned * self._capacity),
                )
        self._tell_held()
        self._publisher.held(
            key,
            tokens=0 if self._cannot_read else found.tokens,
            blocks=len(found.blocks) if is_pinned else 0,
            hold_s=hold_s if is_pinned else 0.0,
            tip=self._sealer.digests(request.block_hashes[full - 1 : full]) if full else b"",
            generated=request.num_output_tokens,
        )

    def _unpin(self, keys: Iterable[str], reason: ReleaseReason) -> None:
        """Say that pins have ended."""
        self._tell_held()
        for key in keys:
            if self._publisher is not None:
                self._publisher.released(key, reason)

    def _tell_held(self) -> None:
        if self._publisher is not None:
            self._publisher.pinned = self._pins.blocks + len(set().union(*self._prompts.values()))
            self._publisher.leased = self._leases.blocks

    def _hand_over(
        self, request: Request, record: dict[str, Any], block_ids: BlockIds, hold_s: object
    ) -> None:
        """Keep a prompt's KV for a decode engine, and seal the record of it."""
        lease_s = float(self._kv_lease_duration)
        if isinstance(hold_s, int | float) and math.isfinite(hold_s):
            lease_s = hold_s
        now = time.perf_counter()
        self._reqs_need_send[request.request_id] = now + lease_s
        self._prompts[request.request_id] = {block for group in block_ids for block in group if block}
        if isinstance(key := (request.kv_transfer_params or {}).get("carryback_key"), str):
            self._prompt_keys[key] = request.request_id
        self._tell_held()
        record["remote_blocks_expiry_time"] = now + lease_s
        # The whole prompt, less what the model needs recomputed.
        record["remote_num_tokens"] = request.num_prompt_tokens
        record["remote_block_ids"] = [list(group) for group in record["remote_block_ids"]]
        full = min(request.num_prompt_tokens // self._hash_block_size, len(request.block_hashes))
        digests = self._sealer.digests(request.block_hashes[:full])
        self._seal(record, digests, self._tail(request, request.num_prompt_tokens), now)

    def _handed_over(self, request_id: str) -> None:
        """A prompt's blocks are freed: they were read, or nobody may read them any more."""
        if self._prompts.pop(request_id, None) is not None:
            for key in [key for key, each in self._prompt_keys.items() if each == request_id]:
                del self._prompt_keys[key]
            self._tell_held()

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Free prompts' blocks now, though nobody has read them."""
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id) if self._scheduler is not None else None
            if request is None or not request.is_finished():
                continue
            # For the worker, a deadline that has passed.
            self._reqs_need_send[request_id] = time.perf_counter()
            self._dropped.add(request_id)
            self._let_go[request_id] = None  # before any block can be overwritten
            if len(self._let_go) > MAX_LET_GO:
                del self._let_go[next(iter(self._let_go))]
            self._handed_over(request_id)
            assert self._scheduler is not None
            self._scheduler._free_blocks(request)

    # -- what is void

    def forget(self, why: str, *, weights_changed: bool = False) -> None:
        """Void all that was made until now, and let go of what is held.

        Args:
            why: for the log.
            weights_changed: nothing is to be found in this engine's own prefix cache either.
        """
        with self.lock:
            self._epoch.change()  # before any block can be overwritten
            if weights_changed and self._cache is not None:
                self._cache.evict_all()
                for request in self._scheduler.requests.values() if self._scheduler is not None else ():
                    self._cache.skip(request)
            self._leases.end_all()
            pins, prompts = self._pins.end_all(), list(self._prompts)
            if pins or prompts:
                logger.info("carryback: %s: letting go of %d requests' KV", why, len(pins) + len(prompts))
            self._unpin(pins, "void")
            self._drop(prompts)

    def pause(self, is_paused: bool) -> None:
        """The engine is paused, or goes on."""
        self._is_paused = is_paused
        if self._publisher is not None:
            self._publisher.is_paused = is_paused

    def _is_kept(self, name: str) -> bool:
        """Whether what a record names was let go of by nobody but its reader. (A prompt goes when it was read, which its
        holder hears of before its reader asks.) In the side channel's thread."""
        return name in self._leases if name.startswith(LEASE) else name not in self._let_go

    def _nixl_handshake_listener(self, encoded_data: dict[Any, Any], *args: Any) -> None:
        answers = Answers(encoded_data, self._epoch, self._is_kept)
        super()._nixl_handshake_listener(answers, *args)

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
                self._look(request, params)

    def _take_in(self, request: Request, params: dict[str, Any]) -> None:
        """Verify what a request came with, and take out what stock code must not act on."""
        wait_s = params.pop("carryback_await", None)
        if isinstance(wait_s, int | float) and self._publisher is not None:
            self._waiting[request.request_id] = time.perf_counter() + wait_s
        if params.get("do_remote_decode"):
            _forget_remote(params)  # what a prefill engine reads it asks for
            if self._settings.patience_s > 0:
                self._line.join(
                    request.request_id,
                    request,
                    request.num_prompt_tokens,
                    time.perf_counter(),
                    request.priority,
                )
        elif reason := self._why_refused(params):
            if params.get("do_remote_prefill") and params.get("remote_block_ids"):
                self._declined(params, reason)
            _forget_remote(params)
        # Stock code takes any `do_remote_prefill` for a promise of blocks.
        if params.get("do_remote_prefill") and not params.get("remote_block_ids"):
            params["do_remote_prefill"] = False
        if isinstance(cached := params.get("carryback_cached"), int):
            request.prefill_stats = _Billed(max(min(cached, request.num_prompt_tokens - 1), 0))

    def _why_refused(self, params: dict[str, Any]) -> str:
        """Why a record must not be read: nobody with our key has sealed it, or the ranks do not fit; empty if it may."""
        if not self._sealer.is_authentic(params):
            if (version := sealed_as(params)) != str(VERSION):
                logger.warning_once(
                    "carryback: a record was sealed as version %s, and this is %d: engines of releases of "
                    "carryback that do not verify each other's records compute every prompt",
                    version,
                    VERSION,
                )
            return "unverified"
        if not self._ranks_fit(params.get("tp_size"), params.get("pp_size")):
            return "layouts_differ"
        return ""

    def _ranks_fit(self, holders: object, stages: object) -> bool:
        """Whether this engine's ranks can read from so many tensor- and pipeline-parallel ones. Stock code finds out
        with the first read, and fails."""
        if isinstance(stages, int) and stages != self._pp_size:
            return False
        if not isinstance(holders, int) or holders == self._tp_size:
            return True
        return ranks_fit(self._tp_size, holders, self._kv_heads)

    def _compute(self, request: Request) -> None:
        """After a fault of ours: the request reads nothing, waits for nobody, and is computed."""
        params = request.kv_transfer_params or {}
        self._matches[request.request_id] = Match(reason=FAULT)
        self._waiting.pop(request.request_id, None)
        self._read_nothing(request, params)
        params["do_remote_prefill"] = False
        self._leave_line(request.request_id)

    # -- what may it read?

    def _look(self, request: Request, params: dict[str, Any]) -> None:
        """Ask decode engines what they have of a prompt; or look here, for a router that wants to know."""
        addresses = params.pop("carryback_ask", self._settings.peers)
        if params.get("do_remote_decode"):
            params["_carryback_ask"] = addresses = (
                [each for each in addresses if isinstance(each, str)] if isinstance(addresses, list) else []
            )
            if addresses and not self._cannot_read:
                self._ask(request, addresses)
        elif params.pop("carryback_find", False) is True and self._publisher is not None:
            found = self._find(request, request.num_prompt_tokens - 1)
            self._publisher.found(str(params.get("carryback_key")), request.num_prompt_tokens, found.tokens)

    def _ask(self, request: Request, addresses: list[str]) -> None:
        if self._peers is None:
            self._peers = Peers(
                self.engine_id,
                secret=os.environ.get(KEY_VARIABLE),
                timeout_s=self._settings.ask_timeout_s,
                guarded=self._guarded,
            )
        self._unanswered[request.request_id] = request
        self._peers.ask(
            request.request_id,
            addresses,
            request.block_hashes,
            block_size=self._hash_block_size,
            max_tokens=request.num_prompt_tokens - 1,
        )

    def _is_asked(self, request: Request) -> bool:
        return self._peers is not None and self._peers.is_asked(request.request_id)

    def _is_unanswered(self, request: Request) -> bool:
        return request.request_id not in self._matches and self._is_asked(request)

    def _decide(self, request: Request, params: dict[str, Any]) -> Match | None:
        """What a request may read; None while decode engines are still to say what they have."""
        if (match := self._matches.get(request.request_id)) is not None:
            return match
        if params.get("do_remote_prefill"):
            match = self._match_prompt(request, params)
        elif not params.get("do_remote_decode"):
            match = Match()
        else:
            question = None
            if self._is_asked(request):
                assert self._peers is not None
                if (question := self._peers.answer(request.request_id)) is None:
                    return None
            match = self._match_found(request, params, question)
        self._matches[request.request_id] = match
        return match

    def _match_found(self, request: Request, params: dict[str, Any], question: Question | None) -> Match:
        """What a prefill engine reads of what decode engines have, and why not more."""
        match = self._expect(request, params)
        if question is None:
            match.reason = "unsupported_layout" if self._cannot_read else "off"
            return match
        match.asked = len(question.answers)
        most = max(question.answers.values(), key=lambda each: each.tokens, default=None)
        if most is None:
            match.reason = "no_answer"
        else:
            match.found, match.holder = most.tokens, most.engine if most.tokens else ""
            match.reason = _ANSWERED.get(most.reason, most.reason)
        if request.num_prompt_tokens <= self._hash_block_size:
            match.reason = "too_short"
        if (best := question.best) is not None:
            match.found, match.holder = best.tokens, best.engine
            match.reason = self._take_record(request, params, best)
            if not match.reason:
                match.blocks = best.tokens // self._hash_block_size
                self._line.shorten(request.request_id, request.num_prompt_tokens - best.tokens)
        if not match.blocks:
            self._read_nothing(request, params)
        return match

    def _expect(self, request: Request, params: dict[str, Any]) -> Match:
        """What a prompt can be expected to find, by what its conversation's last request left."""
        tip = params.get("carryback_tip")  # it stays: engines may be asked once more
        tokens, digest = (tip.get("tokens"), tip.get("digest")) if isinstance(tip, dict) else (0, "")
        if not isinstance(tokens, int) or not isinstance(digest, str) or tokens < self._hash_block_size:
            return Match()
        full = tokens // self._hash_block_size
        own = self._sealer.digests(request.block_hashes[full - 1 : full]).hex()
        usable = (request.num_prompt_tokens - 1) // self._hash_block_size
        # Of a prompt that is shorter nobody can tell.
        return Match(
            expected=min(full, usable) * self._hash_block_size, is_changed=own != digest if own else None
        )

    def _take_record(self, request: Request, params: dict[str, Any], best: Leased) -> str:
        """Have stock code read what a decode engine has; why it must not, or empty."""
        record = msgspec.json.decode(best.record)
        record["carryback"]["digests"] = base64.b64encode(best.digests).decode()
        record = transfer_params(record)
        if reason := self._why_refused(record):
            return reason
        common, held = self._sealer.common_blocks(record, request.block_hashes)
        tokens = record.get("remote_num_tokens")
        is_ours = (
            common == held == best.tokens // self._hash_block_size
            and tokens == best.tokens < request.num_prompt_tokens
            and record["carryback"].get("block_size") == self._hash_block_size
            and str(record.get("remote_request_id")).startswith(LEASE)
        )
        if not is_ours:
            return "unverified"
        if len(record["remote_block_ids"]) != len(self.kv_cache_config.kv_cache_groups):
            return "layouts_differ"
        params.update(record)
        return ""

    def _match_prompt(self, request: Request, params: dict[str, Any]) -> Match:
        """A decode engine reads a prompt's KV whole, or computes the prompt itself."""
        common, held = self._sealer.common_blocks(params, request.block_hashes)
        tokens = params.get("remote_num_tokens") or 0
        tail = self._tail(request, tokens)
        expected = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        if (
            tokens == expected
            and common == held == tokens // self._hash_block_size
            and tail == params["carryback"]["tail"]
        ):
            return Match(max(common, 1))
        logger.error(
            "carryback: request %s is not the prompt whose KV it came with (%d of %d tokens match); "
            "computing it here. The two hops must send the same prompt to engines of the same block size.",
            request.request_id,
            common * self._hash_block_size,
            tokens,
        )
        self._declined(params, "prompt_differs")
        return Match(reason="prompt_differs")

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

    def _read_nothing(self, request: Request, params: dict[str, Any]) -> None:
        """A request does not read, or has read: nobody needs to keep anything for it."""
        _forget_remote(params)
        if self._peers is not None:
            self._peers.end(request.request_id)

    # -- whose turn is it?

    def _is_next(self, request: Request) -> bool:
        """Whether no other waiting prompt goes before this one."""
        if request.request_id not in self._line:
            return True
        first = self._line.first(self._can_go)
        return first is None or first == request.request_id

    def _can_go(self, request: Request) -> bool:
        if self._is_unanswered(request):
            return False
        # vLLM gives what was read another status only when it comes to it, and it may stand behind others.
        return request.status == RequestStatus.WAITING or request.request_id in self._loaded

    def _is_held_back(self, request: Request) -> bool:
        """Whether a prompt is not scheduled in this step, so that vLLM need not look up what it has of it: it does so for
        each prompt that waits, in each step."""
        is_held_back = False
        with self._guarded():
            is_held_back = self._waits(request)
        return is_held_back

    def _waits(self, request: Request) -> bool:
        if (params := request.kv_transfer_params) is None:
            return False
        if (until := self._waiting.get(request.request_id)) is not None:
            assert self._publisher is not None
            return time.perf_counter() < until and not self._publisher.is_told(
                str(params.get("carryback_key"))
            )
        if self._is_unanswered(request):
            assert self._peers is not None
            return self._peers.answer(request.request_id) is None
        match = self._matches.get(request.request_id)
        return match is not None and match.is_looked_up and not self._is_next(request)

    def _leave_line(self, request_id: str) -> None:
        self._line.leave(request_id)
        self._loaded.discard(request_id)

    def _asks_again(self, request: Request, params: dict[str, Any], match: Match) -> bool:
        """Whether engines are asked once more, now that a prompt's turn has come: too much was leased before."""
        addresses = params.pop("_carryback_ask", None)
        if match.reason != "too_many_leases" or not addresses:
            return False
        self._read_nothing(request, params)
        del self._matches[request.request_id]
        self._ask(request, addresses)
        return True

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params is None:
            return 0, False
        match: Match | None = None
        with self._guarded(lambda: self._compute(request)):
            # "None": vLLM asks again in its next step, and goes on to who comes behind.
            if self._cache is not None and self._cache.skipped == request.request_id:
                self._cache.skipped = ""
                return None, False
            if request.request_id in self._waiting and not self._may_go_on(request, params):
                return None, False
            if (match := self._decide(request, params)) is None:
                return None, False
            match.is_looked_up = True
            self._line.shorten(request.request_id, request.num_prompt_tokens - num_computed_tokens)
            if not self._is_next(request) or self._asks_again(request, params, match):
                return None, False
            match.cached_tokens = num_computed_tokens
            self.kv_recompute_threshold = self._threshold_of(params)
        if match is None or match.blocks == 0 or params.get("_remote_blocks_processed"):
            # Nothing to read; or it was read before, and the request came back after a preemption or a failed load.
            return 0, False
        count, load_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count == 0 and params.get("do_remote_decode"):
            with self._guarded():
                is_here = num_computed_tokens >= match.blocks * self._hash_block_size
                match.reason = "local_cache" if is_here else "below_threshold"
                self._read_nothing(request, params)
        return count, load_async

    def _threshold_of(self, params: dict[str, Any]) -> int:
        threshold = params.get("carryback_threshold")
        return threshold if isinstance(threshold, int) else self._threshold

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

    # -- it reads, and is computed

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        first = params is not None and not params.get("_remote_blocks_processed")
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if params is None:
            return
        if not request.num_computed_tokens:  # all of its KV is from now on, or was found as good
            params["_carryback_epoch"] = self._epoch.name
        with self._guarded():
            self._given_blocks(request, num_external_tokens, is_first=first)

    def _given_blocks(self, request: Request, external_tokens: int, *, is_first: bool) -> None:
        is_read = is_first and external_tokens > 0
        if is_read:
            self._reading.add(request.request_id)
        else:
            self._leave_line(request.request_id)  # else it reads first, and keeps its place
        if (match := self._matches.get(request.request_id)) is None:
            return
        now = time.perf_counter()
        if is_first:
            match.read_tokens = external_tokens
        if is_read:
            match.allocated = now
        else:
            match.began, match.scheduled = now, self._scheduled

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        with self._guarded():
            if self._dropped and connector_output.finished_sending:
                # The scheduler has no such requests any more, and would fail.
                gone = connector_output.finished_sending & self._dropped
                connector_output.finished_sending -= gone
                self._dropped -= gone
        super().update_connector_output(connector_output)
        with self._guarded():
            self._reads_ended(connector_output.failed_recving or (), connector_output.finished_recving or ())
            for request_id in connector_output.finished_sending or ():
                self._handed_over(request_id)

    def _reads_ended(self, failed: Iterable[str], received: Iterable[str]) -> None:
        now = time.perf_counter()
        for request_id in failed:
            if (match := self._matches.get(request_id)) is not None:
                match.read_tokens, match.reason = 0, "load_failed"
        for request_id in self._reading.intersection((*received, *failed)):
            self._reading.discard(request_id)
            if self._peers is not None:
                self._peers.end(request_id)
        self._loaded.update(request_id for request_id in (*received, *failed) if request_id in self._line)
        for request_id in received:
            if (match := self._matches.get(request_id)) is not None and match.read_tokens:
                match.read_s = now - match.allocated

    # -- it has ended

    def request_finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        match = self._matches.pop(request.request_id, None) or Match()
        self._waiting.pop(request.request_id, None)
        self._unanswered.pop(request.request_id, None)
        with self._guarded():
            self._leave_line(request.request_id)
            if (
                request.request_id not in self._reading
                and params is not None
                and params.get("do_remote_decode")
            ):
                self._read_nothing(request, params)
        hold, record = super().request_finished(request, block_ids)
        if params is None:
            return hold, record
        if not params.get("do_remote_decode"):
            if hold:  # what a decode engine keeps, it keeps in its prefix cache
                self._reqs_need_send.pop(request.request_id, None)
                self._reqs_not_processed.add(request.request_id)
            with self._guarded():
                self._pin(request)
            return False, None
        if record is None:
            return hold, record
        is_kept = False
        with self._guarded(lambda: self._handed_over(request.request_id)):
            # Of one epoch from beginning to end.
            if hold and params.get("_carryback_epoch") == self._epoch.name:
                self._hand_over(request, record, block_ids, params.get("hold_s"))
                is_kept = True
        if not is_kept:
            self._reqs_need_send.pop(request.request_id, None)
            self._reqs_not_processed.add(request.request_id)
            _forget_remote(record)
        with self._guarded():
            self._say(request, record, match)
        return is_kept, record

    def _say(self, request: Request, record: dict[str, Any], match: Match) -> None:
        """Say what a prefill did, in its answer, and in an event for a router that waits."""
        params = request.kv_transfer_params or {}
        record["carryback_reuse"] = reuse = match.report(request.num_prompt_tokens)
        record["remote_prefill_cached_tokens"] = reuse["tokens"] + reuse["cached"]
        if match.began:
            compute_s, computed = time.perf_counter() - match.began, self._scheduled - match.scheduled
            record["carryback_work"] = {"read_s": match.read_s, "compute_s": compute_s, "computed": computed}
            self._line.learn(compute_s, computed)
        key = params.get("carryback_key")
        if params.get("carryback_tell") and isinstance(key, str) and self._publisher is not None:
            self._publisher.prefilled(key, msgspec.json.encode(record))


@dataclass(frozen=True)
class _Settings:
    """What is set in `kv_connector_extra_config`; see `CarrybackConnector`."""

    events: str
    peers: list[str]
    ask_timeout_s: float
    max_pinned: float
    patience_s: float

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> _Settings:
        """
        Raises:
            RuntimeError: one of them cannot work; names it.
        """
        assert vllm_config.kv_transfer_config is not None
        read = vllm_config.kv_transfer_config.get_from_extra_config
        peers = read("carryback_peers", [])
        if not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
            raise RuntimeError(
                f"carryback: carryback_peers must be a list of ZMQ addresses, and is {peers!r}"
            )

        def number(name: str, default: float, what: str, least: float, most: float = math.inf) -> float:
            value = read(name, default)
            if not isinstance(value, int | float) or not least <= value <= most or value == math.inf:
                raise RuntimeError(f"carryback: {name} must be {what}, and is {value!r}")
            return value

        return cls(
            events=read("carryback_events", None) or "",
            peers=peers,
            ask_timeout_s=number("carryback_ask_timeout_s", TIMEOUT_S, "0.001 or more", 0.001),
            max_pinned=number("carryback_max_pinned", MAX_PINNED, "from 0 to 1", 0, 1),
            patience_s=number("carryback_patience_s", PATIENCE_S, "0 or more", 0),
        )


def _forget_remote(params: dict[str, Any]) -> None:
    """Take out all that stock code would act on."""
    for name in [each for each in params if each.startswith("remote_") or each == "carryback"]:
        del params[name]


def _sealed_of(request: Request) -> Sealed:
    """What the record says that a request is about to read; the seal was verified."""
    params = request.kv_transfer_params or {}
    seal = params.get("carryback") or {}
    return Sealed(str(seal.get("epoch")), float(seal.get("made", 0)), str(params.get("remote_request_id")))


def _has_ended(request: Request) -> bool:
    """Whether a request came to its end, as far as the scheduler can know.

    vLLM looks for stop strings outside of the scheduler, and aborts the request when it finds one. If the client went
    away instead, the router lets go of what is pinned.
    """
    if request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
        return True
    return (
        request.status == RequestStatus.FINISHED_ABORTED
        and request.num_output_tokens > 0
        and request.sampling_params is not None
        and bool(request.sampling_params.stop)
    )
