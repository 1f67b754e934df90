"""Decode engines for `test_ask.py`: one whose steps take long between scheduling and computing, and the mutant of it that
leases blocks whose KV is not there yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from carryback_vllm.connector import CarrybackConnector
from carryback_vllm.found import PrefixCache

STEP_S = 0.15


class SlowConnector(CarrybackConnector):
    """Waits before each step computes."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        super().start_load_kv(*args, **kwargs)
        time.sleep(STEP_S)


class UnsettledConnector(SlowConnector):
    """And takes a block's hash for its KV, as a lookup in vLLM's prefix cache does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        PrefixCache._settled = _trusting  # type: ignore[method-assign]


def _trusting(self: PrefixCache, groups: Sequence[Sequence[Any]], tokens: int) -> int:
    return tokens
