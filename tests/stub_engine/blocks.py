"""The KV cache of one engine: blocks with contents, found by the hash of what they hold, handed out in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Block:
    """One block.

    Attributes:
        kv: what it holds.
        hash: by which it is found; empty: by none.
        users: how many requests, pins, and leases have it.
    """

    block_id: int
    kv: bytes = b""
    hash: bytes = b""
    users: int = 0


class BlockPool:
    """Blocks of KV. One that nobody has keeps its content, and is found, until it is handed out and written again, as on
    a GPU; the one that nobody has had for longest is handed out first.

    Args:
        capacity: how many there are.

    Attributes:
        starved: requests that had to wait for blocks, ever.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.starved = 0
        self._blocks: list[Block] = []  # those that were used, ever
        self._free: OrderedDict[Block, None] = OrderedDict()
        self._by_hash: dict[bytes, dict[Block, None]] = {}
        self._waiting: deque[tuple[int, Sequence[bytes], asyncio.Event]] = deque()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return self.capacity - len(self._blocks) + len(self._free)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    def of(self, block_ids: Sequence[int]) -> list[bytes]:
        """What these blocks hold now, whatever they were written for."""
        return [self._blocks[each].kv for each in block_ids]

    def find(self, hashes: Sequence[bytes]) -> list[Block]:
        """The longest beginning of what has these hashes."""
        found = []
        for each in hashes:
            if not (blocks := self._by_hash.get(each)):
                break
            found.append(next(iter(blocks)))
        return found

    async def take(self, count: int, hashes: Sequence[bytes] = ()) -> tuple[list[Block], int]:
        """So many blocks, and how many of them hold the beginning of what has these hashes, and are shared; waits, first
        come first served, until there are so many."""
        if self._waiting or not self._has_room(count, hashes):
            self.starved += 1
            waiter = (count, hashes, asyncio.Event())
            self._waiting.append(waiter)
            try:
                while self._waiting[0] is not waiter or not self._has_room(count, hashes):
                    waiter[2].clear()
                    await waiter[2].wait()
            except asyncio.CancelledError:
                self._waiting.remove(waiter)
                self._wake()
                raise
            self._waiting.popleft()
        shared = self.find(hashes)[:count]
        self.touch(shared)
        new = [self._next() for _ in range(count - len(shared))]
        self.touch(new)
        self._wake()
        return [*shared, *new], len(shared)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Keep blocks, until they are freed as often."""
        for block in blocks:
            block.users += 1
            self._free.pop(block, None)

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Undo `touch`. The last ones are overwritten first."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._free[block] = None
        self._wake()

    def fill(self, block: Block, kv: bytes, hash: bytes = b"") -> None:
        """Write a block that somebody has."""
        block.kv = kv
        if hash and not block.hash:
            block.hash = hash
            self._by_hash.setdefault(hash, {})[block] = None

    def forget(self) -> None:
        """Find nothing of what was written until now."""
        for block in self._blocks:
            block.hash = b""
        self._by_hash.clear()

    def spoil(self) -> None:
        """Overwrite all that blocks hold, without a sign of it: what a real engine never does."""
        for block in self._blocks:
            block.kv = b"other"

    def _has_room(self, count: int, hashes: Sequence[bytes]) -> bool:
        shared = self.find(hashes)[:count]
        return count - len(shared) <= self.free - sum(not block.users for block in shared)

    def _next(self) -> Block:
        if len(self._blocks) < self.capacity:
            self._blocks.append(block := Block(len(self._blocks)))
            return block
        block, _ = self._free.popitem(last=False)
        if block.hash:
            same = self._by_hash[block.hash]
            del same[block]
            if not same:
                del self._by_hash[block.hash]
            block.hash = b""
        return block

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0][2].set()
