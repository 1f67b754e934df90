"""Blocks that an engine keeps from being overwritten for somebody else: leases and pins.

A *lease* is a prefill engine's, on what it is about to read. It ends when its reader says so, or when nothing was heard
of the reader for `LEASE_S`. A *pin* is a router's, on what a later turn will ask for; it ends when its time is over, or
when the router says so. Both end when all that the engine has made becomes void. Whoever has read asks whether the
lease was still there at the end (`carryback_vllm.forget`), so a lease that ends too early costs a computation and never
an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# The name of a lease begins so; an engine's own requests never do.
LEASE = "carryback-lease-"
# The share of a decode engine's KV blocks that one prefill engine may lease, and that all may.
MAX_LEASED, MAX_LEASED_BY_ALL = 0.3, 0.6


@dataclass
class _Hold:
    owner: str
    blocks: Sequence[KVCacheBlock]
    until: float


class Holds:
    """Some of an engine's holds, by name, under the scheduler's lock.

    Args:
        touch, free: keep blocks from being overwritten, and no longer.
        each, all: the most blocks that one owner may hold, and that all may together.
    """

    def __init__(
        self,
        touch: Callable[[Sequence[KVCacheBlock]], None],
        free: Callable[[Sequence[KVCacheBlock]], None],
        *,
        each: int,
        all: int,
    ) -> None:
        self._touch, self._free = touch, free
        self._each, self._all = each, all
        self._holds: dict[str, _Hold] = {}
        # How many holds there are on a block: by the owner, and by all (None).
        self._counts: dict[str | None, Counter[int]] = {None: Counter()}
        # Names by the id of the hold's last block.
        self._by_last: dict[int, set[str]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def blocks(self) -> int:
        """Blocks that are held now, once or several times."""
        return len(self._counts[None])

    def take(self, name: str, blocks: Sequence[KVCacheBlock], until: float, owner: str = "") -> bool:
        """Hold blocks; whether that is within the limits.

        Args:
            until: on the caller's clock.
        """
        if name in self._holds or not blocks:
            return name in self._holds
        ids = [block.block_id for block in blocks]
        for who, limit in ((owner, self._each), (None, self._all)):
            count = self._counts.get(who, ())
            if len(count) + sum(each not in count for each in ids) > limit:
                return False
        for who in (owner, None):
            self._counts.setdefault(who, Counter()).update(ids)
        self._by_last.setdefault(ids[-1], set()).add(name)
        self._touch(blocks)
        self._holds[name] = _Hold(owner, blocks, until)
        return True

    def covered(self, name: str) -> list[str]:
        """The other holds that end no later, and have no block that this one has not."""
        hold = self._holds[name]
        ids = {block.block_id for block in hold.blocks}
        return [
            other
            for last in ids & self._by_last.keys()
            for other in self._by_last[last]
            if other != name
            and self._holds[other].until <= hold.until
            and all(block.block_id in ids for block in self._holds[other].blocks)
        ]

    def extend(self, names: Iterable[str], until: float) -> None:
        """Hold these for longer."""
        for name in names:
            if (hold := self._holds.get(name)) is not None:
                hold.until = until

    def end(self, names: Iterable[str]) -> list[str]:
        """End holds; those that there were."""
        ended = []
        for name in names:
            if (hold := self._holds.pop(name, None)) is None:
                continue
            ended.append(name)
            ids = [block.block_id for block in hold.blocks]
            for who in (hold.owner, None):
                count = self._counts[who]
                count.subtract(ids)
                for each in ids:
                    if not count[each]:
                        del count[each]
            if hold.owner in self._counts and not self._counts[hold.owner]:
                del self._counts[hold.owner]
            self._by_last[ids[-1]].discard(name)
            if not self._by_last[ids[-1]]:
                del self._by_last[ids[-1]]
            self._free(hold.blocks)
        return ended

    def end_late(self, now: float) -> list[str]:
        """End those whose time is over; their names."""
        return self.end([name for name, hold in self._holds.items() if now >= hold.until])

    def end_all(self) -> list[str]:
        """What was held is void; the names."""
        return self.end(list(self._holds))
