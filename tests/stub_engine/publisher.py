"""The engine's events, as `carryback_vllm.events` sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq
from carryback.wire.events import Event, Hello, decode_go, encode

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
        deaf: what routers say is lost on the way: a fault.
    """

    def __init__(self, address: str, engine: str, pinned: Callable[[], int], capacity: int) -> None:
        self.engine = engine
        self.seq = 0
        self.dropped = 0
        self.deaf = False
        self._told: dict[str, asyncio.Future[bytes]] = {}
        self._pinned = pinned
        self._capacity = capacity
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(address)
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._hello = asyncio.create_task(self._say_hello())
        self._descriptor: int = self._socket.FD
        asyncio.get_running_loop().add_reader(self._descriptor, self._hear)

    async def told(self, key: str, timeout_s: float) -> bytes:
        """Wait for what a router tells the request with this key; `{}` if it tells nothing in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.of(key)
        return b"{}"

    def of(self, key: str) -> asyncio.Future[bytes]:
        """Done when a router has told the request with this key how it goes on."""
        return self._told.setdefault(key, asyncio.get_running_loop().create_future())

    def _hear(self) -> None:
        with suppress(zmq.Again):
            while True:
                go = decode_go(self._socket.recv(zmq.NOBLOCK))
                if go is not None and not self.deaf and not self.of(go.key).done():
                    self.of(go.key).set_result(go.params)

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
            # Sending may take the descriptor's sign that something has come.
            asyncio.get_running_loop().call_soon(self._hear_on)

    def _hear_on(self) -> None:
        if not self._socket.closed:
            self._hear()

    def close(self) -> None:
        """Stop at once; what is not sent yet is lost."""
        self._hello.cancel()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._socket.close(linger=0)
        self._context.term()

    async def _say_hello(self) -> None:
        while True:
            # However many events there are: a router hears only those for it, and this.
            self.send(Hello(self.engine, self.seq, self._pinned(), self._capacity, takes_go=True))
            await asyncio.sleep(HELLO_INTERVAL_S)
