"""What a prefill and a decode engine must have in common for either to read the other's KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Need:
    """A fact (`carryback.wire.events.about_of`) that has to be equal.

    Attributes:
        fact: its key.
        name: in words.
        set_by: what an operator sets it with, at the engines.
        outcome: what happens where it differs.
    """

    fact: str
    name: str
    set_by: str
    outcome: str


_REFUSED = "NIXL refuses the connection between them, and every read fails (load_failed)"

NEEDS = (
    Need("key", "key", "CARRYBACK_KEY", "what one holds is refused by the other (unverified)"),
    Need("model", "model", "--model", _REFUSED),
    Need("block_size", "block size", "--block-size", "their blocks never match (layouts_differ)"),
    Need("hash_seed", "hash seed", "PYTHONHASHSEED", "their block hashes never match (history_changed)"),
    Need("vllm", "vLLM version", "the vLLM that is installed", _REFUSED),
    Need("dtype", "data type", "--dtype", _REFUSED),
    Need("kv_cache_dtype", "KV cache data type", "--kv-cache-dtype", _REFUSED),
)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Need]:
    """Why neither of two engines can read the other's KV; empty if nothing is known that stands in the way.

    Args:
        one, other: what they said of themselves. What either does not say counts as equal.
    """
    return [
        need
        for need in NEEDS
        if need.fact in one and need.fact in other and one[need.fact] != other[need.fact]
    ]
