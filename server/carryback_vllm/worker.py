"""The worker's side of the connector: reads that are good all the time, or not at all."""

from __future__ import annotations

import math
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from carryback_vllm.forget import Asker, Sealed
from carryback_vllm.guard import Guard
from carryback_vllm.holds import LEASE

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        RemoteMeta,
        ReqMeta,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.carryback")

# A read of a prompt's KV must be under way this long before the prefill engine's lease ends.
# (For what a decode engine holds, stock code wants 5 s.)
LEASE_MARGIN_S = 1.0
# A prefill engine waits so long for holders to say that what was read is good; most say it in a few milliseconds.
CONFIRM_WAIT_S = 0.02


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
