"""Publishes what this engine holds, over ZMQ PUB (see `carryback.wire.events`)."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import zmq
from carryback.wire.events import Declined, Event, Held, Hello, Released, ReleaseReason, encode

HELLO_INTERVAL_S = 0.5


@dataclass(frozen=True)
class _Stop:
    """Ends the publisher's thread."""


class Publisher:
    """Sends events from a thread of its own, so that the scheduler never waits for a socket.

    Args:
        address: where to bind, e.g. `tcp://127.0.0.1:5701`.
        engine: this engine's id, new with every start.

    Raises:
        RuntimeError: the address cannot be bound; names the setting.
    """

    def __init__(self, address: str, engine: str) -> None:
        self.engine = engine
        self._seq = 0
        self._queue: queue.SimpleQueue[Event | _Stop] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise RuntimeError(
                f"carryback: cannot publish events on {address} ({error}); set carryback_events in "
                "kv_connector_extra_config to a free address"
            ) from error
        self._thread = threading.Thread(target=self._run, name="carryback-events", daemon=True)
        self._thread.start()

    def held(self, key: str, request: str, tokens: int, blocks: int, hold_s: float, record: bytes) -> None:
        """Announce a finished request's KV; arguments as in `wire.events.Held`."""
        self._put(Held(self.engine, self._next(), key, request, tokens, blocks, hold_s, record))

    def released(self, key: str, reason: ReleaseReason) -> None:
        """Take an announcement back."""
        self._put(Released(self.engine, self._next(), key, reason))

    def declined(self, key: str, reason: str) -> None:
        """Say that this engine computed a prompt itself instead of reading its KV."""
        self._put(Declined(self.engine, self._next(), key, reason))

    def close(self) -> None:
        """End the thread and close the socket."""
        self._queue.put(_Stop())
        self._thread.join(timeout=5)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _put(self, event: Event) -> None:
        self._queue.put(event)

    def _run(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=HELLO_INTERVAL_S)
            except queue.Empty:
                event = Hello(self.engine, self._seq)
            if isinstance(event, _Stop):
                break
            self._socket.send_multipart(encode(event))
        self._socket.close()
        self._context.term()
