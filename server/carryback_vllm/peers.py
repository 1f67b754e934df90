"""What a prefill engine asks decode engines, engine to engine: what do you have of this prompt?

The questions go over the links on which decode engines publish their events, so they have those links' key. Asking
costs one round trip, beside whatever the scheduler does: a decode engine answers from a thread, also in the middle of a
step. An engine that does not answer costs `timeout_s` once, and is left out for a while.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import zmq
from carryback.wire.curve import key_pair
from carryback.wire.events import (
    KEEP_INTERVAL_S,
    MAX_FRAME_BYTES,
    Ask,
    Command,
    Done,
    Keep,
    Leased,
    decode,
    encode_command,
)
from carryback.wire.outside import Malformed

from carryback_vllm.guard import Guard
from carryback_vllm.holds import LEASE

# How long a prompt waits for answers, in seconds. One comes within a few milliseconds, or the engine is in trouble.
TIMEOUT_S = 1.0
# An engine that did not answer is left out so long, doubled each time in a row.
LEFT_OUT_S, MAX_LEFT_OUT_S = 5.0, 120.0
# A link that was not used for so long is closed.
_IDLE_S = 600.0


@dataclass
class Question:
    """What was asked for one prompt.

    Attributes:
        leases: those asked for, each at its engine's address, that have not ended.
        answers: what came back, by address.
        waits_for: the addresses that have not answered.
        until: on `time.monotonic`, how long they are waited for.
        best: the lease that is read, once that is decided.
    """

    leases: dict[str, str]
    until: float
    waits_for: set[str]
    answers: dict[str, Leased] = field(default_factory=dict)
    best: Leased | None = None
    is_decided: bool = False


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    used: float
    silent: int = 0
    "How often in a row it has not answered in time."
    left_out_until: float = -math.inf


class Peers:
    """Asks decode engines, from a thread of its own, and keeps the leases on what they have.

    Args:
        engine: this engine's id.
        secret: what engines and routers share; None: the links are open to anybody.
        timeout_s: how long a prompt waits for answers, in seconds.
        guarded: the owner's, for the thread's own faults.
    """

    def __init__(
        self, engine: str, *, secret: str | None, timeout_s: float = TIMEOUT_S, guarded: Guard | None = None
    ) -> None:
        # Nobody else asks under this name, whatever else this engine's id is used for.
        self._asker = f"ask.{secrets.token_hex(4)}.{engine}"[:120]
        self._key_pair = key_pair(secret) if secret else None
        self._timeout_s = timeout_s
        self._guarded = guarded or Guard()
        self._lock = threading.Lock()
        self._questions: dict[str, Question] = {}
        self._by_lease: dict[str, str] = {}
        self._peers: dict[str, _Peer] = {}
        self._queue: queue.SimpleQueue[tuple[str, Command] | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for each in (self._wake, self._woken):
            each.setsockopt(zmq.SNDHWM, 0)  # whoever asks never waits, and never fails
            each.setsockopt(zmq.RCVHWM, 0)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._is_over = False
        self._keep_due = 0.0
        self._thread = threading.Thread(target=self._run, name="carryback-peers", daemon=True)
        self._thread.start()

    # -- for the scheduler

    def ask(
        self,
        request: str,
        addresses: Collection[str],
        hashes: Sequence[bytes],
        *,
        block_size: int,
        max_tokens: int,
    ) -> None:
        """Ask engines what they have of a prompt.

        Args:
            request: this engine's name for it; `answer` and `end` take it.
            addresses: of the engines' events.
            hashes: of its full blocks.
            block_size: tokens of each.
            max_tokens: the most that can be used.
        """
        now = time.monotonic()
        joined = b"".join(hashes)
        with self._lock:
            asked = [
                each for each in dict.fromkeys(addresses) if not self._is_left_out(each, now)
            ] if joined else []  # fmt: skip
            leases = {f"{LEASE}{secrets.token_hex(12)}": each for each in asked}
            self._questions[request] = Question(leases, now + self._timeout_s, set(asked))
            self._by_lease.update(dict.fromkeys(leases, request))
        for lease, address in leases.items():
            self._send(address, Ask(self._asker, lease, joined, block_size, max_tokens))

    def is_asked(self, request: str) -> bool:
        """Whether anything was asked for it."""
        return request in self._questions

    def answer(self, request: str) -> Question | None:
        """What is known of a prompt; None while an answer is waited for.

        Raises:
            KeyError: nothing was asked for it.
        """
        question = self._questions[request]
        if question.is_decided:
            return question
        now = time.monotonic()
        with self._lock:
            if question.waits_for and now < question.until:
                return None
            for address in question.waits_for:
                self._was_silent(address, now)
            question.waits_for.clear()
            with_lease = [each for each in question.answers.values() if each.record]
            question.best = max(with_lease, key=lambda each: each.tokens, default=None)
            question.is_decided = True
            best = question.best.lease if question.best is not None else None
            others = [lease for lease in question.leases if lease != best]
        self._end(request, others)
        return question

    def end(self, request: str) -> None:
        """A prompt has read what it reads, or will not read."""
        if (question := self._questions.get(request)) is None:
            return
        self._end(request, list(question.leases))
        with self._lock:
            del self._questions[request]

    def close(self) -> None:
        """End the thread and the links. The engines end the leases by themselves."""
        self._queue.put(None)
        self._wake.send(b"", zmq.NOBLOCK)
        self._thread.join(timeout=5)

    def _end(self, request: str, leases: Iterable[str]) -> None:
        question = self._questions[request]
        by_address: dict[str, list[str]] = {}
        with self._lock:
            for lease in leases:
                by_address.setdefault(question.leases.pop(lease), []).append(lease)
                self._by_lease.pop(lease, None)
        for address, ended in by_address.items():
            self._send(address, Done(ended))

    def _send(self, address: str, command: Command) -> None:
        self._queue.put((address, command))
        self._wake.send(b"", zmq.NOBLOCK)

    def _is_left_out(self, address: str, now: float) -> bool:
        peer = self._peers.get(address)
        return peer is not None and now < peer.left_out_until

    def _was_silent(self, address: str, now: float) -> None:
        # (Of the many prompts that wait at the same time, one counts.)
        if (peer := self._peers.get(address)) is not None and now >= peer.left_out_until:
            peer.silent += 1
            peer.left_out_until = now + min(LEFT_OUT_S * 2 ** min(peer.silent - 1, 16), MAX_LEFT_OUT_S)

    # -- the thread

    def _run(self) -> None:
        while not self._is_over:
            with self._guarded(lambda: time.sleep(0.01)):
                self._work()
        for peer in self._peers.values():
            peer.socket.close(linger=0)
        for socket in (self._wake, self._woken):
            socket.close(linger=0)
        self._context.term()

    def _work(self) -> None:
        wait_s = self._keep_due - time.monotonic()
        if wait_s <= 0:
            self._keep_due = time.monotonic() + KEEP_INTERVAL_S
            self._keep()
            return
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._woken in ready:
            self._woken.recv()
            item = self._queue.get()
            if item is None:
                self._is_over = True
                return
            self._peer(item[0]).socket.send(encode_command(item[1]), zmq.NOBLOCK)
        for address, peer in list(self._peers.items()):
            if peer.socket in ready:
                self._hear(address, peer, peer.socket.recv_multipart())

    def _peer(self, address: str) -> _Peer:
        if (peer := self._peers.get(address)) is None:
            socket = self._context.socket(zmq.XSUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            if self._key_pair is not None:
                public, private = self._key_pair
                socket.curve_publickey = socket.curve_serverkey = public
                socket.curve_secretkey = private
            socket.connect(address)
            socket.send(b"\x01" + self._asker.encode())
            self._poller.register(socket, zmq.POLLIN)
            peer = self._peers[address] = _Peer(socket, 0.0)
        peer.used = time.monotonic()
        return peer

    def _hear(self, address: str, peer: _Peer, frames: Sequence[bytes]) -> None:
        try:
            event = decode(frames[-1])
        except Malformed:
            event = None  # of another release: it does not answer
        if not isinstance(event, Leased) or event.key != self._asker:
            return
        with self._lock:
            peer.silent, peer.left_out_until = 0, -math.inf
            request = self._by_lease.get(event.lease)
            question = self._questions.get(request) if request is not None else None
            # (Of one that comes too late, the lease was ended already. And an engine publishes on all its links.)
            if (
                question is not None
                and not question.is_decided
                and question.leases.get(event.lease) == address
            ):
                question.answers[address] = event
                question.waits_for.discard(address)

    def _keep(self) -> None:
        now = time.monotonic()
        with self._lock:
            by_address: dict[str, list[str]] = {}
            for question in self._questions.values():
                for lease, address in question.leases.items():
                    by_address.setdefault(address, []).append(lease)
            idle = [
                address
                for address, peer in self._peers.items()
                if address not in by_address and now - peer.used > _IDLE_S
            ]
        for address, leases in by_address.items():
            self._peer(address).socket.send(encode_command(Keep(leases)), zmq.NOBLOCK)
        for address in idle:
            peer = self._peers.pop(address)
            self._poller.unregister(peer.socket)
            peer.socket.close(linger=0)
