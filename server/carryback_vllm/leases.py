"""Blocks that a decode engine keeps from being overwritten while a prefill engine reads them.

A lease ends when its reader says so, when nothing was heard of the reader for `LEASE_S`, or when all that the engine
has made becomes void. Whoever has read asks whether the lease was still there at the end (`carryback_vllm.forget`), so
a lease that ends too early costs a computation and never an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carryback.wire.events import LEASE_S

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# The name of a lease begins so; an engine's own requests never do.
PREFIX = "carryback-lease-"
# The share of a decode engine's KV blocks that one prefill engine may lease, and that all may.
MAX_LEASED, MAX_LEASED_BY_ALL = 0.3, 0.6


@dataclass
class _Lease:
    asker: str
    blocks: Sequence[KVCacheBlock]
    until: float


class Leases:
    """All leases of one engine, under the scheduler's lock.

    Args:
        capacity: KV blocks that the engine has.
        touch, free: keep blocks from being overwritten, and no longer.
    """

    def __init__(
        self,
        capacity: int,
        touch: Callable[[Sequence[KVCacheBlock]], None],
        free: Callable[[Sequence[KVCacheBlock]], None],
    ) -> None:
        self._capacity = capacity
        self._touch, self._free = touch, free
        self._leases: dict[str, _Lease] = {}
        # How many leases there are on a block: by the asker, and by all ("").
        self._counts: dict[str, Counter[int]] = {"": Counter()}

    def __contains__(self, name: object) -> bool:
        return name in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def blocks(self) -> int:
        """Blocks under a lease now, or under several."""
        return len(self._counts[""])

    def take(self, name: str, asker: str, blocks: Sequence[KVCacheBlock], now: float) -> bool:
        """Take a lease; whether the asker, and all askers together, may have so much."""
        if name in self._leases:
            return True
        limits = ((asker, MAX_LEASED), ("", MAX_LEASED_BY_ALL))
        for who, share in limits:
            count = self._counts.setdefault(who, Counter())
            more = sum(block.block_id not in count for block in blocks)
            if len(count) + more > share * self._capacity:
                self._forget_if_empty(asker)
                return False
        for who, _ in limits:
            self._counts[who].update(block.block_id for block in blocks)
        self._touch(blocks)
        self._leases[name] = _Lease(asker, blocks, now + LEASE_S)
        return True

    def keep(self, names: Iterable[str], now: float) -> None:
        """Their reader is there, and needs these still."""
        for name in names:
            if (lease := self._leases.get(name)) is not None:
                lease.until = now + LEASE_S

    def end(self, names: Iterable[str]) -> None:
        """These are over."""
        for name in names:
            if (lease := self._leases.pop(name, None)) is None:
                continue
            for who in (lease.asker, ""):
                count = self._counts[who]
                count.subtract(block.block_id for block in lease.blocks)
                for block in lease.blocks:
                    if not count[block.block_id]:
                        del count[block.block_id]
            self._forget_if_empty(lease.asker)
            self._free(lease.blocks)

    def end_late(self, now: float) -> int:
        """End those whose reader was not heard of for too long; how many."""
        late = [name for name, lease in self._leases.items() if now >= lease.until]
        self.end(late)
        return len(late)

    def end_all(self) -> None:
        """What was leased is void."""
        self.end(list(self._leases))

    def _forget_if_empty(self, asker: str) -> None:
        if asker and not self._counts[asker]:
            del self._counts[asker]
