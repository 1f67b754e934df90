"""What an engine says of itself in its `Hello`s, for routers, operators and `carryback doctor`."""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib import metadata
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

    from carryback_vllm.seal import Sealer

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
# What UCX is told about transports. Others of its variables are of no use to an operator.
_UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_GPU_DIRECT_RDMA")


def about_engine(
    scheduler: NixlPullConnectorScheduler,
    vllm_config: VllmConfig,
    sealer: Sealer,
    block_size: int,
    kv_heads: int | None,
    events: str,
) -> dict[str, Any]:
    """This engine, for `carryback.wire.events.about`; no secret is in it.

    Args:
        scheduler: the connector's part that knows the engine's address and its times.
        sealer: with the engine's key.
        block_size: tokens of a block that is hashed.
        kv_heads: what tensor-parallel ranks split; None if they do not.
        events: the address where it publishes. Where that is all of a machine's interfaces, other engines use the one
            of the side channel.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    served = model.served_model_name
    return {
        "carryback": _version("carryback"),
        "vllm": vllm.__version__,
        "nixl": _version("nixl", "nixl-cu12", "nixl-cu13"),
        "role": _ROLES.get(str(transfer.kv_role), "both"),
        "model": model.model,
        "served_model": served[0] if isinstance(served, list) else served,
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "key": sealer.fingerprint,
        "hash_seed": _hash_seed(os.environ.get("PYTHONHASHSEED")),
        "hold_s": scheduler.decoder_kv_blocks_ttl,
        "lease_s": scheduler._kv_lease_duration,
        "side_channel_host": scheduler.side_channel_host,
        "side_channel_port": scheduler.side_channel_port,
        "events": _reachable(events, scheduler.side_channel_host),
        "backends": transfer.get_from_extra_config("backends", ["UCX"]),
        "kv_buffer_device": transfer.kv_buffer_device,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
        **({} if kv_heads is None else {"kv_heads": kv_heads}),
        "ucx": {name: os.environ[name] for name in _UCX_VARIABLES if name in os.environ},
    }


def _reachable(address: str, host: str) -> str:
    start, _, port = address.rpartition(":")
    is_every = start in ("tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://::")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}" if is_every else address


def _hash_seed(seed: str | None) -> str:
    """A fingerprint; empty if none is set."""
    return "" if seed is None else blake2b(seed.encode(), digest_size=4).hexdigest()


def _version(*distributions: str) -> str:
    """The version of the first of these that is installed; empty if none is."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
