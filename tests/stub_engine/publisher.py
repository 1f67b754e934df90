"""The engine's events, as `carryback_vllm.events` sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from carryback.wire.events import Event, Hello, encode

HELLO_INTERVAL_S = 0.5


class Publisher:
    """Publishes one rank's events.

    Args:
        address: ZMQ address to bind; the port may be 0.
        engine: the engine's id.
        pinned: tells how many blocks are pinned now.
        capacity: blocks that there are.

    Attributes:
        address: with the port that was bound.
        dropped: how many of the next events are lost on the way: faults.
    """

    def __init__(self, address: str, engine: str, pinned: Callable[[], int], capacity: int) -> None:
        self.engine = engine
        self.seq = 0
        self.dropped = 0
        self._pinned = pinned
        self._capacity = capacity
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(address)
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._hello = asyncio.create_task(self._say_hello())

    def next(self) -> int:
        """The number of the next event."""
        self.seq += 1
        return self.seq

    def send(self, event: Event) -> None:
        """Send an event; never waits."""
        if self.dropped and not isinstance(event, Hello):
            self.dropped -= 1
        else:
            self._socket.send_multipart(encode(event), zmq.NOBLOCK)

    def close(self) -> None:
        """Stop at once; what is not sent yet is lost."""
        self._hello.cancel()
        self._socket.close(linger=0)
        self._context.term()

    async def _say_hello(self) -> None:
        while True:
            # However many events there are: a router hears only those for it, and this.
            self.send(Hello(self.engine, self.seq, self._pinned(), self._capacity))
            await asyncio.sleep(HELLO_INTERVAL_S)
