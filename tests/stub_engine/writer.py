"""Events on their way to the client, and what a fault does to them."""

from __future__ import annotations

import asyncio

from stub_engine.faults import Fault
from stub_engine.http_server import Connection, framed


class Dropped(Exception):
    """Told to break off."""


class Failed(Exception):
    """Told to fail."""


class Writer:
    """Writes events, and does to them what the fault says."""

    def __init__(self, connection: Connection, fault: Fault) -> None:
        self._connection = connection
        self._fault = fault
        self._count = 0

    async def comments(self) -> None:
        """SSE comments, if there are to be some."""
        for _ in range(self._fault.comments):
            self._connection.write(framed(b": wait\n\n"))
            await asyncio.sleep(self._fault.comment_interval_s)

    async def send(self, event: str) -> None:
        """One event.

        Raises:
            Dropped, Failed: as told.
        """
        fault = self._fault
        if fault.drop != "" and fault.drop == self._count:
            raise Dropped
        if fault.error_after == self._count:
            self._count += 1
            raise Failed
        if self._count:
            await asyncio.sleep(fault.chunk_delay_s)
        self._count += 1
        for number, data in enumerate(fault.writes(event)):
            if number:
                await asyncio.sleep(0.002)  # so that it is a packet of its own
            self._connection.write(framed(data))
        await self._connection.drained()
