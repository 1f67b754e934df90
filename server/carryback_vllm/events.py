"""Publishes what this engine holds, over ZMQ XPUB (see `carryback.wire.events`)."""

from __future__ import annotations

import hmac
import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from carryback.wire.curve import key_pair
from carryback.wire.events import (
    MAX_FRAME_BYTES,
    Command,
    Declined,
    Event,
    Found,
    Go,
    Held,
    Hello,
    Leased,
    Prefilled,
    Released,
    ReleaseReason,
    decode_command,
    encode,
)
from carryback.wire.events import about as encode_about
from carryback.wire.outside import Malformed
from zmq.auth.thread import ThreadAuthenticator

from carryback_vllm.guard import Guard

KEY_VARIABLE = "CARRYBACK_EVENTS_KEY"
HELLO_INTERVAL_S = 0.5
# Told by routers, and not taken yet by the requests that it is for: those may still be on their way. With the keys.
MAX_TOLD_BYTES = 64 * 1024 * 1024
MAX_TOLD = 10_000
# How often, at most, the log says that somebody sends what cannot be read.
COMPLAINT_INTERVAL_S = 60.0
# After a fault the thread goes on so much later, doubled each time in a row.
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 1.0

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
        guarded: the owner's, for the thread's own faults, and to tell routers how many there were.
        on_command: called in the thread with each command that is no `Go`, and with None at least twice a second.

    Attributes:
        pinned: KV blocks held for absent readers now. The owner sets it before it announces a change.
        leased: KV blocks that prefill engines are reading now, likewise.
        is_paused: the engine computes nothing until it is told to go on. The owner sets it.

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
        guarded: Guard | None = None,
        on_command: Callable[[Command | None], None] = lambda command: None,
    ) -> None:
        self.engine = engine
        self.pinned = self.leased = 0
        self.is_paused = False
        self._about = encode_about(about)
        self._capacity = capacity
        self._guarded = guarded or Guard()
        self._on_command = on_command
        self._seq = self._sent = 0
        self._hello_due = self._complaint_due = -math.inf
        self._is_over = False
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
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
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

    def held(self, key: str, *, tokens: int, blocks: int, hold_s: float, tip: bytes, generated: int) -> None:
        """Announce what a request has left; arguments as in `wire.events.Held`."""
        self._put(Held(self.engine, self._next(), key, tokens, blocks, hold_s, tip, self.pinned, generated))

    def released(self, key: str, reason: ReleaseReason) -> None:
        """Take an announcement back."""
        self._put(Released(self.engine, self._next(), key, reason, self.pinned))

    def declined(self, key: str, reason: str) -> None:
        """Say that this engine computed a prompt itself instead of reading its KV."""
        self._put(Declined(self.engine, self._next(), key, reason))

    def found(self, key: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Say what this engine has of a request's prompt; arguments as in `wire.events.Found`."""
        self._put(Found(self.engine, self._next(), key, prompt_tokens, cached_tokens))

    def answer(self, answer: Leased) -> None:
        """Answer another engine's question."""
        self._put(answer)

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

    def is_told(self, key: str) -> bool:
        """Whether a router has told the waiting request with this key how it goes on."""
        return self._told.get(key) is not None

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
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        pause_s = 0.0
        while not self._is_over:
            pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _MAX_PAUSE_S)
            with self._guarded(lambda: time.sleep(pause_s)):  # noqa: B023 (called within the loop's turn)
                self._work(poller)
                pause_s = 0.0
        self._close_sockets()

    def _work(self, poller: zmq.Poller) -> None:
        """Say hello, if it is time; take in what has come; send what is to be sent."""
        # However many events there are: a router hears only those for it, and the hellos.
        wait = self._hello_due - time.monotonic()
        if wait <= 0:
            self._hello_due = time.monotonic() + HELLO_INTERVAL_S
            hello = Hello(
                self.engine, self._sent, self.pinned, self._capacity,
                takes_go=True, about=self._about, time_ns=time.time_ns(), faults=self._guarded.failures,
                is_paused=self.is_paused, leased=self.leased,
            )  # fmt: skip
            self._socket.send_multipart(encode(hello))
            self._on_command(None)
            return
        ready = dict(poller.poll(math.ceil(wait * 1000)))
        if self._socket in ready:
            self._hear(self._socket.recv())
        if self._woken not in ready:
            return
        self._woken.recv()
        event = self._queue.get()
        if isinstance(event, _Stop):
            self._is_over = True
            return
        if not isinstance(event, Leased):
            self._sent = event.seq
        self._socket.send_multipart(encode(event))

    def _hear(self, frame: bytes) -> None:
        """A subscriber has sent something."""
        try:
            go = decode_command(frame)
        except Malformed as error:
            if (now := time.monotonic()) >= self._complaint_due:
                self._complaint_due = now + COMPLAINT_INTERVAL_S
                logger.error("carryback: from a router or an engine: %s", error)
            return
        if go is None:
            return
        if not isinstance(go, Go):
            self._on_command(go)
            return
        with self._lock:
            if go.key in self._told:
                return
            self._told[go.key] = go.params
            self._told_bytes += len(go.key) + len(go.params)
            while self._told_bytes > MAX_TOLD_BYTES or len(self._told) > MAX_TOLD:
                key, params = self._told.popitem(last=False)
                self._told_bytes -= len(key) + len(params or b"")

    def _close_sockets(self) -> None:
        for socket in (self._socket, self._wake, self._woken):
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
