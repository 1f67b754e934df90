"""What an engine's model, its KV cache and its ranks allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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


def why_not_read(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hash_block_size: int) -> str:
    """Why no beginning of a prompt can be read from another engine, with this model and layout; empty if it can.

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
