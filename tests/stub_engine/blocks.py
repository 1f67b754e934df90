"""The KV cache of one engine: blocks with contents, handed out in turn."""

from __future__ import annotations

import asyncio
from collections import deque


class BlockPool:
    """Blocks of KV. A freed block keeps its content until it is handed out and written again, as on a GPU.

    Args:
        capacity: how many there are.

    Attributes:
        kv: what each block holds.
        starved: requests that had to wait for blocks, ever.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kv = [b""] * capacity
        self.starved = 0
        self._free = deque(range(capacity))
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    async def take(self, count: int) -> list[int]:
        """So many blocks; waits, first come first served, until they are free."""
        if self._waiting or count > len(self._free):
            self.starved += 1
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting = deque(each for each in self._waiting if each[1] is not turn)
                self._wake()
                raise
            self._waiting.popleft()
            taken = [self._free.popleft() for _ in range(count)]
            self._wake()
            return taken
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks; those freed first are handed out first."""
        self._free.extend(blocks)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            count, turn = self._waiting[0]
            if count <= len(self._free) and not turn.done():
                turn.set_result(None)
