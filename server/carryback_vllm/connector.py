"""vLLM's NIXL connector, made to read KV back from decode to prefill, and to do that safely.

Loaded by vLLM with `--kv-transfer-config '{"kv_connector": "CarrybackConnector",
"kv_connector_module_path": "carryback_vllm.connector", ...}'`.

A prefill engine asks decode engines what they have of a prompt (`carryback_vllm.peers`). They look it up in vLLM's own
prefix cache, by content (`carryback_vllm.found`), and answer with a record of the blocks, under a short lease
(`carryback_vllm.holds`) and sealed (`carryback_vllm.seal`). The prefill engine verifies the record against the prompt
and reads. In the other direction a decode engine reads a prompt's KV only if it is that prompt's. What was made before
a reset, a sleep or other weights is void (`carryback_vllm.forget`). Prompts that have little to compute go before those
that have much (`carryback_vllm.line`).

Routers that know nothing of this need not: their requests are looked up among the engines of `carryback_peers`. What
those that do put into a request's `kv_transfer_params`:

- `carryback_key`: the router's key of the request. What the engine does with it is published as events under it.
- `carryback_ask`: addresses of decode engines' events, which a prefill engine asks in the place of `carryback_peers`.
- `carryback_tip`: `{"tokens": n, "digest": hex}`, what the conversation's last request left (`wire.events.Held.tip`); the
  engine then knows whether the history has changed or was overwritten.
- `carryback_threshold`: tokens below which KV is computed rather than read, in place of the engine's
  `kv_recompute_threshold`.
- `carryback_tell`: true: a prefill engine says in an event that it is done, before its answer has left.
- `carryback_find`: true: a decode engine says in an event what it has of the prompt itself.
- `carryback_await`: seconds for which a request waits, before it is scheduled, for a router to say how it goes on
  (`carryback.wire.events.Go`); then it goes on by itself.
- `carryback_cached`: how many of the prompt's tokens usage says were cached, whatever this engine's own prefix cache does.
- `hold_s`: how long, in seconds, a decode engine pins what a request leaves, 0 unless given; and how long a prefill
  engine keeps the prompt's KV for a decode engine.

A prefill engine's answer says what was reused, in `kv_transfer_params["carryback_reuse"]`, and how long that took, in
`kv_transfer_params["carryback_work"]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from carryback_vllm.cpu import calm_new_threads
from carryback_vllm.forget import watch
from carryback_vllm.scheduler import CarrybackScheduler
from carryback_vllm.version import check_version
from carryback_vllm.worker import CarrybackWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class CarrybackConnector(NixlPullConnector):
    """`NixlPullConnector` with verified reads, retention per request, and events.

    Extra settings, in `kv_connector_extra_config`:

    - `carryback_events`: the ZMQ address on which the engine publishes; each data-parallel rank takes the
      port that is its rank further. With the environment variable `CARRYBACK_EVENTS_KEY`, only who has
      that secret hears.
    - `carryback_max_pinned`: the share of its KV blocks, 0 to 1, that a decode engine pins at most, 0.9 unless given.
      What would exceed it is not pinned. Routers have budgets of their own; this is for when they fail.
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
