"""What a prefill and a decode engine must have in common for either to read the other's KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carryback.wire.events import ranks_fit


@dataclass(frozen=True)
class Need:
    """A fact (`carryback.wire.events.about_of`) that has to be equal, or has to fit.

    Attributes:
        fact: its key.
        name: in words.
        set_by: what an operator sets it with, at the engines.
        outcome: what happens where it does not.
        fits: whether what two engines say of themselves goes together, where equal is not all that does.
    """

    fact: str
    name: str
    set_by: str
    outcome: str
    fits: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] | None = None

    def is_met(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether two engines go together, as far as they say. What either does not say counts as equal."""
        if self.fact not in one or self.fact not in other or one[self.fact] == other[self.fact]:
            return True
        return self.fits is not None and self.fits(one, other)


def _ranks_fit(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    here, there = one["tensor_parallel_size"], other["tensor_parallel_size"]
    heads = one.get("kv_heads", other.get("kv_heads"))
    # Each engine reads from the other.
    return ranks_fit(here, there, heads) and ranks_fit(there, here, heads)


_REFUSED = "NIXL refuses the connection between them, and every read fails (load_failed)"

NEEDS = (
    Need("key", "key", "CARRYBACK_KEY", "what one holds is refused by the other (unverified)"),
    Need("model", "model", "--model", _REFUSED),
    Need("block_size", "block size", "--block-size", "their blocks never match (layouts_differ)"),
    Need("hash_seed", "hash seed", "PYTHONHASHSEED", "their block hashes never match (history_changed)"),
    Need("vllm", "vLLM version", "the vLLM that is installed", _REFUSED),
    Need("dtype", "data type", "--dtype", _REFUSED),
    Need(
        "tensor_parallel_size",
        "tensor parallel size",
        "--tensor-parallel-size",
        "vLLM's connector reads both ways only where one divides the other and is not above the model's count of KV "
        "heads (layouts_differ)",
        _ranks_fit,
    ),
    Need(
        "pipeline_parallel_size",
        "pipeline parallel size",
        "--pipeline-parallel-size",
        "vLLM's connector reads neither way then (layouts_differ)",
    ),
    Need("kv_cache_dtype", "KV cache data type", "--kv-cache-dtype", _REFUSED),
)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Need]:
    """Why neither of two engines can read the other's KV; empty if nothing is known that stands in the way.

    Args:
        one, other: what they said of themselves. What either does not say counts as equal.
    """
    return [need for need in NEEDS if not need.is_met(one, other)]
