"""What the plug-in uses of vLLM that is no interface of it: a canary for each, which says what is no longer there.

The plug-in refuses versions of vLLM that it was not tried with (`carryback_vllm.version`); this is what to look at before
another is let in.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="these are vLLM's")

from private_names import defined, uses
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

PLUGIN = Path(__file__).parents[2] / "server" / "carryback_vllm"

# Private names that a file uses, and where vLLM has them.
PRIVATE: dict[str, dict[str, type[Any]]] = {
    "about.py": {"_kv_lease_duration": NixlPullConnectorScheduler},
    "scheduler.py": {
        **dict.fromkeys(
            ("_TRANSFER_MODE", "_get_remote_prefill_token_count", "_kv_lease_duration", "_nixl_handshake_listener",
             "_reqs_need_recv", "_reqs_need_send", "_reqs_not_processed"),
            NixlPullConnectorScheduler,
        ),
        "_free_blocks": Scheduler,
    },
    "worker.py": dict.fromkeys(
        ("_cleanup_remote_engines", "_engine_clock_offset", "_invalid_remote_engines", "_is_turn2_read_expired",
         "_lease_extension", "_mark_remote_engine_invalid", "_pop_done_transfers", "_recv_failures", "_recving_metadata",
         "_recving_transfers", "_remote_agents", "_send_heartbeats"),
        NixlPullConnectorWorker,
    ),
}  # fmt: skip


def source(owner: type[Any]) -> str:
    """Of a class and of those that it is made from."""
    return "".join(inspect.getsource(each) for each in owner.__mro__ if each.__module__.startswith("vllm."))


def test_each_private_name_is_listed() -> None:
    files = sorted(PLUGIN.glob("*.py"))
    ours = {name for path in files for name in defined(path)}
    found = {path.name: set(uses(path, ours)) for path in files}
    assert {name: used for name, used in found.items() if used} == {
        name: set(listed) for name, listed in PRIVATE.items()
    }


@pytest.mark.parametrize(
    ("name", "owner"), [(name, owner) for listed in PRIVATE.values() for name, owner in listed.items()]
)
def test_private_names_are_there(name: str, owner: type[Any]) -> None:
    assert hasattr(owner, name) or f"self.{name}" in source(owner), f"vLLM's {owner.__name__} has no {name}"


def takes(function: Any, *names: str) -> None:
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    assert found[: len(names)] == list(names), f"vLLM's {function.__qualname__} takes {found}"


def test_the_prefix_cache() -> None:
    """carryback_vllm/found.py."""
    takes(BlockPool.cache_full_blocks, "request", "blocks", "num_cached_blocks", "num_full_blocks")
    takes(BlockPool.touch, "blocks")
    takes(BlockPool.free_blocks, "ordered_blocks")
    takes(KVCacheManager.evict_blocks, "block_ids")
    takes(KVCacheManager.get_computed_blocks, "request")
    takes(KVCacheManager.get_computed_blocks_for_connector, "request")
    takes(KVCacheCoordinator.find_longest_cache_hit, "block_hashes", "max_cache_hit_length")
    takes(BlockPool.cache_partial_block, "request", "block")
    takes(BlockPool.move_block_hashes, "src_block", "dst_block")
    takes(KVConnectorBase_V1.bind_kv_cache_manager, "kv_cache_manager")
    for owner, names in (
        (BlockPool, ("num_gpu_blocks",)),
        (KVCacheManager, ("coordinator", "block_pool", "enable_caching")),
        (KVCacheCoordinator, ("single_type_managers",)),
        (SingleTypeKVCacheManager, ("num_cached_block", "block_size", "block_pool")),
        (Request, ("skip_reading_prefix_cache", "block_hashes", "prefill_stats", "kv_transfer_params")),
    ):
        for name in names:
            assert f"self.{name}" in source(owner), f"vLLM's {owner.__name__} has no {name}"


def test_a_block_gets_its_hash_nowhere_else() -> None:
    """Else it would be found before it is stamped."""
    callers = {
        name
        for name, member in vars(BlockPool).items()
        if inspect.isfunction(member) and "self._insert_block_hash(" in inspect.getsource(member)
    }
    assert callers == {"cache_full_blocks", "cache_partial_block", "move_block_hashes"}


def test_a_request_that_is_skipped_is_hashed_no_further() -> None:
    text = inspect.getsource(SingleTypeKVCacheManager.cache_blocks)
    assert "if num_cached_blocks >= num_full_blocks:" in text
    assert "self.num_cached_block.pop(" in source(SingleTypeKVCacheManager), (
        "after a preemption it is hashed again"
    )


def test_the_scheduler_and_the_core() -> None:
    """carryback_vllm/forget.py."""
    takes(Scheduler.set_pause_state, "pause_state")
    takes(EngineCore.collective_rpc, "method")
    takes(EngineCore.add_lora, "lora_request")
    takes(EngineCore.remove_lora, "lora_id")
    takes(Scheduler.update_from_output, "scheduler_output")
    assert isinstance(metadata.GET_META_MSG, bytes)
    takes(kv_cache_utils._gen_lora_extra_hash_keys, "request")
    assert "_gen_lora_extra_hash_keys(request)" in inspect.getsource(
        kv_cache_utils.generate_block_hash_extra_keys
    )
    listener = inspect.getsource(
        next(
            vars(each)["_nixl_handshake_listener"].__func__
            for each in reversed(NixlPullConnectorScheduler.__mro__)
            if "_nixl_handshake_listener" in vars(each)
        )
    )
    assert "encoded_data[(target_pp_rank, target_tp_rank)]" in listener, "what `Answers` answers"
    assert "time.perf_counter()" in listener, "vLLM adds its clock"
