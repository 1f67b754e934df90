"""The engine's events, as `carryback_vllm.events` sends them, and what routers and other engines say to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import zmq
from carryback.wire.curve import key_pair
from carryback.wire.events import Command, Event, Go, Hello, Leased, about, decode_command, encode
from carryback.wire.outside import Malformed

HELLO_INTERVAL_S = 0.5


class Publisher:
    """Publishes one rank's events.

    Args:
        address: ZMQ address to bind; the port may be 0.
        engine: the engine's id.
        pinned, leased: tell how many blocks are pinned, and leased, now.
        capacity: blocks that there are.
        facts: what the engine says that it is; where its events are is added.
        clock_offset_s: by how much its wall clock is wrong: a fault.
        secret: of the events; None: anybody hears them.
        frames: makes the frames of an event.
        is_silent: nothing listens at the address, and nothing is sent: an engine without the plug-in.

    Attributes:
        address: with the port that was bound.
        dropped: how many of the next events are lost on the way: faults.
        deaf: what routers and other engines say is lost on the way: a fault.
        on_command: called with each command that is no `Go`, and with None twice a second.
    """

    def __init__(
        self,
        address: str,
        engine: str,
        pinned: Callable[[], int],
        capacity: int,
        facts: Mapping[str, Any] = {},
        clock_offset_s: float = 0.0,
        secret: str | None = None,
        frames: Callable[[Event], tuple[bytes, bytes]] = encode,
        *,
        leased: Callable[[], int] = lambda: 0,
        is_silent: bool = False,
    ) -> None:
        self.engine = engine
        self._frames = frames
        self._clock_offset_s = clock_offset_s
        self.seq = 0
        self.dropped = 0
        self.deaf = False
        self.is_paused = False
        self.on_command: Callable[[Command | None], None] = lambda command: None
        self._told: dict[str, asyncio.Future[bytes]] = {}
        self._pinned, self._leased = pinned, leased
        self._capacity = capacity
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        if secret is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(secret)
            self._socket.curve_server = True
        self._socket.bind(address)
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._about = about({**facts, "events": self.address} if facts else {})
        if is_silent:
            self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
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
                try:
                    command = decode_command(self._socket.recv(zmq.NOBLOCK))
                except Malformed:
                    continue  # of another release
                if command is None or self.deaf:
                    continue
                if not isinstance(command, Go):
                    self.on_command(command)
                elif not self.of(command.key).done():
                    self.of(command.key).set_result(command.params)

    def next(self) -> int:
        """The number of the next event."""
        self.seq += 1
        return self.seq

    def send(self, event: Event) -> None:
        """Send an event; never waits."""
        if self.dropped and not isinstance(event, Hello | Leased):
            self.dropped -= 1
        else:
            self._socket.send_multipart(self._frames(event), zmq.NOBLOCK)
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
            now = time.time_ns() + int(self._clock_offset_s * 1e9)
            hello = Hello(
                self.engine, self.seq, self._pinned(), self._capacity, True, self._about, now,
                is_paused=self.is_paused, leased=self._leased(),
            )  # fmt: skip
            self.send(hello)
            self.on_command(None)
            await asyncio.sleep(HELLO_INTERVAL_S)
