"""Publishes what this engine holds, over ZMQ PUB (see `carryback.wire.events`)."""

from __future__ import annotations

import hmac
import queue
import threading
import time
from dataclasses import dataclass

import zmq
from carryback.wire.curve import key_pair
from carryback.wire.events import Declined, Event, Held, Hello, Released, ReleaseReason, encode
from zmq.auth.thread import ThreadAuthenticator

KEY_VARIABLE = "CARRYBACK_EVENTS_KEY"
HELLO_INTERVAL_S = 0.5


@dataclass(frozen=True)
class _Stop:
    """Ends the publisher's thread."""


@dataclass(frozen=True)
class _OnlyKey:
    """Admits subscribers with one public key; pyzmq calls `callback`."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self.public)


class Publisher:
    """Sends events from a thread of its own, so that the scheduler never waits for a socket.

    Args:
        address: where to bind, e.g. `tcp://127.0.0.1:5701`.
        engine: this engine's id, new with every start.
        capacity: KV blocks that the engine has.
        secret: what engines and routers share; only who has it can subscribe. None: anybody can.

    Attributes:
        pinned: KV blocks held for absent readers now. The owner sets it before it announces a change.

    Raises:
        RuntimeError: the address cannot be bound; names the setting.
    """

    def __init__(self, address: str, engine: str, *, capacity: int, secret: str | None = None) -> None:
        self.engine = engine
        self.pinned = 0
        self._capacity = capacity
        self._seq = 0
        self._queue: queue.SimpleQueue[Event | _Stop] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        # CURVE alone lets in whoever knows the server's public key; the authenticator asks for the secret's.
        self._authenticator = ThreadAuthenticator(self._context) if secret else None
        try:
            if secret and self._authenticator is not None:
                public, private = key_pair(secret)
                self._authenticator.start()
                self._authenticator.configure_curve_callback("*", _OnlyKey(public))
                self._socket.curve_publickey = public
                self._socket.curve_secretkey = private
                self._socket.curve_server = True
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_socket()
            raise RuntimeError(
                f"carryback: cannot publish events on {address} ({error}); set carryback_events in "
                "kv_connector_extra_config to a free address"
            ) from error
        self._thread = threading.Thread(target=self._run, name="carryback-events", daemon=True)
        self._thread.start()

    def held(
        self,
        key: str,
        request: str,
        tokens: int,
        blocks: int,
        hold_s: float,
        record: bytes,
        digests: bytes,
        generated: int,
    ) -> None:
        """Announce a finished request's KV; arguments as in `wire.events.Held`."""
        self._queue.put(
            Held(
                self.engine, self._next(), key, request, tokens, blocks, hold_s, record, digests,
                self.pinned, generated,
            )
        )  # fmt: skip

    def released(self, key: str, reason: ReleaseReason) -> None:
        """Take an announcement back."""
        self._queue.put(Released(self.engine, self._next(), key, reason, self.pinned))

    def declined(self, key: str, reason: str) -> None:
        """Say that this engine computed a prompt itself instead of reading its KV."""
        self._queue.put(Declined(self.engine, self._next(), key, reason))

    def close(self) -> None:
        """End the thread and close the socket."""
        self._queue.put(_Stop())
        self._thread.join(timeout=5)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _run(self) -> None:
        sent = 0
        hello_due = time.monotonic()
        while True:
            # However many events there are: a router hears only those for it, and this.
            wait = hello_due - time.monotonic()
            if wait <= 0:
                self._socket.send_multipart(encode(Hello(self.engine, sent, self.pinned, self._capacity)))
                hello_due = time.monotonic() + HELLO_INTERVAL_S
                continue
            try:
                event = self._queue.get(timeout=wait)
            except queue.Empty:
                continue
            if isinstance(event, _Stop):
                break
            self._socket.send_multipart(encode(event))
            sent = event.seq
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
