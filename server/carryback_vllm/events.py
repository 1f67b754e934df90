"""Publishes what this engine holds, over ZMQ XPUB (see `carryback.wire.events`)."""

from __future__ import annotations

import hmac
import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from carryback.wire.curve import key_pair
from carryback.wire.events import (
    Declined,
    Event,
    Held,
    Hello,
    Prefilled,
    Released,
    ReleaseReason,
    decode_go,
    encode,
)
from carryback.wire.events import about as encode_about
from zmq.auth.thread import ThreadAuthenticator

KEY_VARIABLE = "CARRYBACK_EVENTS_KEY"
HELLO_INTERVAL_S = 0.5
# Told by routers, and not taken yet by the requests that it is for: those may still be on their way.
MAX_TOLD_BYTES = 64 * 1024 * 1024
MAX_TOLD = 10_000

logger = logging.getLogger("vllm.carryback")


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
    """Sends events from a thread of its own, so that the scheduler never waits for a socket; the same thread
    takes in what routers tell waiting requests.

    Args:
        address: where to bind, e.g. `tcp://127.0.0.1:5701`.
        engine: this engine's id, new with every start.
        capacity: KV blocks that the engine has.
        secret: what engines and routers share; only who has it can subscribe. None: anybody can.
        about: what this engine is, for `wire.events.about_of`.

    Attributes:
        pinned: KV blocks held for absent readers now. The owner sets it before it announces a change.

    Raises:
        RuntimeError: the address cannot be bound; names the setting.
    """

    def __init__(
        self,
        address: str,
        engine: str,
        *,
        capacity: int,
        secret: str | None = None,
        about: Mapping[str, Any] = {},
    ) -> None:
        self.engine = engine
        self.pinned = 0
        self._about = encode_about(about)
        self._capacity = capacity
        self._seq = 0
        self._complaint = ""
        # By the requests' keys, the latest last; None once it was taken, since routers say it again.
        self._told: OrderedDict[str, bytes | None] = OrderedDict()
        self._told_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Event | _Stop] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for each in (self._wake, self._woken):
            each.setsockopt(zmq.SNDHWM, 0)  # as the queue: whoever announces never waits, and never fails
            each.setsockopt(zmq.RCVHWM, 0)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_TOLD_BYTES // 8)
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
            self._close_sockets()
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
        self._put(
            Held(
                self.engine, self._next(), key, request, tokens, blocks, hold_s, record, digests,
                self.pinned, generated,
            )
        )  # fmt: skip

    def released(self, key: str, reason: ReleaseReason) -> None:
        """Take an announcement back."""
        self._put(Released(self.engine, self._next(), key, reason, self.pinned))

    def declined(self, key: str, reason: str) -> None:
        """Say that this engine computed a prompt itself instead of reading its KV."""
        self._put(Declined(self.engine, self._next(), key, reason))

    def prefilled(self, key: str, params: bytes) -> None:
        """Say that a prompt has its first token; arguments as in `wire.events.Prefilled`."""
        self._put(Prefilled(self.engine, self._next(), key, params))

    def told(self, key: str) -> bytes | None:
        """What a router has told the waiting request with this key, once; None if it has not."""
        if key not in self._told:
            return None
        with self._lock:
            params = self._told.get(key)
            if params is not None:
                self._told[key] = None
                self._told_bytes -= len(params)
            return params

    def close(self) -> None:
        """End the thread and close the socket."""
        self._put(_Stop())
        self._thread.join(timeout=5)

    def _put(self, event: Event | _Stop) -> None:
        self._queue.put(event)
        self._wake.send(b"", zmq.NOBLOCK)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _run(self) -> None:
        sent = 0
        hello_due = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            # However many events there are: a router hears only those for it, and this.
            wait = hello_due - time.monotonic()
            if wait <= 0:
                hello = Hello(
                    self.engine, sent, self.pinned, self._capacity,
                    takes_go=True, about=self._about, time_ns=time.time_ns(),
                )  # fmt: skip
                self._socket.send_multipart(encode(hello))
                hello_due = time.monotonic() + HELLO_INTERVAL_S
                continue
            ready = dict(poller.poll(math.ceil(wait * 1000)))
            if self._socket in ready:
                self._hear(self._socket.recv())
            if self._woken not in ready:
                continue
            self._woken.recv()
            event = self._queue.get()
            if isinstance(event, _Stop):
                break
            self._socket.send_multipart(encode(event))
            sent = event.seq
        self._close_sockets()

    def _hear(self, frame: bytes) -> None:
        """A subscriber has sent something."""
        try:
            go = decode_go(frame)
        except ValueError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("carryback: from a router: %s", error)
            return
        if go is None:
            return
        with self._lock:
            if go.key in self._told:
                return
            self._told[go.key] = go.params
            self._told_bytes += len(go.params)
            while self._told_bytes > MAX_TOLD_BYTES or len(self._told) > MAX_TOLD:
                self._told_bytes -= len(self._told.popitem(last=False)[1] or b"")

    def _close_sockets(self) -> None:
        for socket in (self._socket, self._wake, self._woken):
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
