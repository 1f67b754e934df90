"""Clients' connections: how many there may be, and how long each may take.

aiohttp times a connection that is idle between two requests. This adds what a hostile client makes use of otherwise:
a head that never ends, any number of connections, heads pipelined behind a long answer, an answer that is not taken.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from aiohttp.web_server import Server

from carryback_server.errors import ApiError

logger = logging.getLogger("carryback")

OWNER = web.RequestKey("owner", str)
"The tenant that sent a request; whoever answers it says so."
# Of open files, kept for the operators' port, Redis, events, health probes, logs and what Python itself opens.
RESERVED_FILES = 256
# A request takes its client's connection, one to a prefill engine and one to a decode engine.
FILES_EACH = 3
# Of requests that wait behind another on the same connection; then no more is read from it.
MAX_PIPELINED = 4
# For the rest of a body that nobody reads, so that its client can take the answer; then the connection is closed.
LINGER_S = 2.0
_SWEEP_S = 1.0
# When a client that has ended its side before the answer began is asked whether it is there: at once, and so many
# seconds after that. If it is gone, its system says so after the first time, and the next one finds out.
_PROBES_S = (0.1, 1.0, 5.0, 30.0)


@dataclass(frozen=True)
class Limits:
    """Of one port.

    Attributes:
        connections: at a time.
        per_address: of one peer's address; None: as many.
        head_bytes: of a request's line and headers, all of them.
        head_timeout_s: for a head to come, in seconds: from its first byte, or from the connection's begin.
        send_timeout_s: in which a client takes nothing of what there is for it.
    """

    connections: int
    per_address: int | None
    head_bytes: int
    head_timeout_s: float
    send_timeout_s: float


def raise_open_files() -> int:
    """Let this process open as many files as it may; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(wanted: int, open_files: int) -> int:
    """So many connections of clients that there are always files left for the engines, operators and Redis."""
    most = max((open_files - RESERVED_FILES) // FILES_EACH, 1)
    if wanted > most:
        logger.warning(
            "%d files can be open (ulimit -n), which is enough for %d connections of clients; max_connections is %d",
            open_files,
            most,
            wanted,
        )
    return min(wanted, most)


class Connections:
    """All connections of one port.

    Args:
        on_closed: called with a reason for each connection that is closed or refused for a limit: `too_many`,
            `too_many_of_address`, `head_timeout`.
        on_malformed: called with the status of the answer to each request that is no HTTP.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        on_closed: Callable[[str], None],
        on_malformed: Callable[[int], None],
    ) -> None:
        self.limits = limits
        self.on_closed = on_closed
        self.on_malformed = on_malformed
        self._open: dict[Connection, None] = {}  # the oldest first
        # Those that have not sent a request yet; the oldest first.
        self._strangers: dict[Connection, None] = {}
        # Those that wait for their next request, by the owner of the last one; those that wait longest first.
        self._idle: dict[str, dict[Connection, None]] = {}
        self._of_address: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._open)

    def admit(self, connection: Connection) -> bool:
        """Whether a new connection may stay. One that has nothing to do is closed to make room, if there is one."""
        limits = self.limits
        if limits.per_address is not None and self._of_address[connection.address] >= limits.per_address:
            self.on_closed("too_many_of_address")
            return False
        if len(self._open) >= limits.connections:
            self.on_closed("too_many")
            idle = next(iter(self._strangers), None) or self._longest_idle()
            if idle is None:
                return False
            self._close(idle)
        self._open[connection] = self._strangers[connection] = None
        self._of_address[connection.address] += 1
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        return True

    def _longest_idle(self) -> Connection | None:
        """Of whoever has most of the idle connections, or has no key, the one that has been idle for longest."""
        if not self._idle:
            return None
        whose = "" if "" in self._idle else max(self._idle, key=lambda owner: len(self._idle[owner]))
        return next(iter(self._idle[whose]))

    def asks(self, connection: Connection) -> None:
        """A request came."""
        self._strangers.pop(connection, None)
        if connection in (idle := self._idle.get(connection.owner, {})):
            del idle[connection]
            if not idle:
                del self._idle[connection.owner]

    def rests(self, connection: Connection, owner: str) -> None:
        """All of its requests are answered, the last one of this tenant; empty if of none."""
        if connection in self._open:
            connection.owner = owner
            self._idle.setdefault(connection.owner, {})[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self.asks(connection)
        if connection in self._open:
            del self._open[connection]
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]

    def _sweep(self) -> None:
        """Close those whose head takes too long."""
        loop = asyncio.get_running_loop()
        before = loop.time() - self.limits.head_timeout_s
        for connection in [each for each in self._open if each.waits_for_head_since(before)]:
            self.on_closed("head_timeout")
            self._close(connection)
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep) if self._open else None

    def _close(self, connection: Connection) -> None:
        self.forget(connection)
        connection.force_close()
        if connection.transport is not None:
            connection.transport.abort()


class Connection(RequestHandler):
    """One client's connection: aiohttp's, with limits."""

    def __init__(self, server: Server, connections: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self._connections = connections
        # aiohttp's own limit is 32: with heads of the largest size, 32 times `head_bytes` of memory each.
        self._max_msg_queue_size = MAX_PIPELINED
        self._msg_queue_resume_size = MAX_PIPELINED // 2
        self._newest: StreamReader | None = None  # body of the newest request
        self._head_bytes = 0
        self._head_since: float | None = None
        self._is_half_closed = False
        self._answered = 0
        self.address = ""
        self.owner = ""

    @property
    def is_waiting(self) -> bool:
        """All that it has asked for is answered."""
        return self._answered >= self._request_count

    def waits_for_head_since(self, before: float) -> bool:
        """Whether a head began before that time, and is not there yet."""
        return self._head_since is not None and self._head_since < before and self.is_waiting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if not self._connections.admit(self):
            self._force_close = True
            cast(asyncio.Transport, transport).write(_REFUSAL)
            transport.close()
            return
        self._head_since = self._loop.time()
        if (plain := transport.get_extra_info("socket")) is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel knows what a client takes, whoever writes it, and aborts the connection.
            timeout_ms = int(self._connections.limits.send_timeout_s * 1000)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._head_bytes > self._connections.limits.head_bytes:
            return  # it is answered, and closed
        count, is_head = self._request_count, self._newest is None or self._newest.is_eof()
        super().data_received(data)
        if self._request_count != count:
            self._connections.asks(self)
            self._newest = self._messages[-1][1]
            self._head_bytes, self._head_since = 0, None
        elif data and is_head:
            self._head_bytes += len(data)
            if self._head_since is None:
                self._head_since = self._loop.time()
            if self._head_bytes > self._connections.limits.head_bytes:
                self._request_count += 1
                self._messages.append((_ErrInfo(431, LineTooLong(b""), ""), EMPTY_PAYLOAD))
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(None)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp never keeps it
        """The client has ended its side. It gets what it has asked for, unless it is gone.

        It cannot be told which, but by sending something: `100 Continue`, which says nothing, is allowed before each
        answer of HTTP/1.1. A client that ends its side when its answer has begun is taken to be gone.
        """
        request, newest = self._current_request, self._newest
        is_whole = newest is not None and newest.is_eof()
        if not is_whole or self.is_waiting or (request is not None and not self._can_probe(request)):
            return False
        self._is_half_closed = True
        self._probe(0)
        return True

    def _can_probe(self, request: web.BaseRequest) -> bool:
        return request.version >= HttpVersion11 and request.writer.output_size == 0

    def _probe(self, number: int) -> None:
        request = self._current_request
        if self.transport is None or self.transport.is_closing():
            return
        if request is not None and not self._can_probe(request):
            return  # the answer has begun; writing it finds out
        if request is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if number < len(_PROBES_S):
            self._loop.call_later(_PROBES_S[number], self._probe, number + 1)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """After the last answer to a client that has ended its side, the connection ends."""
        finished = await super().finish_response(request, resp, start_time)
        self._answered += 1
        if self.is_waiting:
            self._connections.rests(self, request.get(OWNER, ""))
        if self._is_half_closed and not self._messages:
            self.close()
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or after a failure that nothing has caught.

        aiohttp's own repeats, and logs, the line that it could not read, which may have a key in it.
        """
        if status >= 500:
            logger.error("the HTTP server failed (%s)", type(exc).__name__)
            error = ApiError(500, "the router failed; its log says why", code="router_failed")
        else:
            error = _malformed(exc, self._connections.limits)
            self._connections.on_malformed(error.status)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = error.response({"Server": "carryback"})
        response.force_close()
        return response


class Port(web.AppRunner):
    """Serves an application to connections with limits."""

    def __init__(self, app: web.Application, connections: Connections, **options: Any) -> None:
        super().__init__(app, **options)
        self._connections = connections

    async def _make_server(self) -> Server:
        made = await super()._make_server()
        return _Server(made, self._connections)


class _Server(Server):
    def __init__(self, made: Server, connections: Connections) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self._limited = connections

    def __call__(self) -> RequestHandler:
        return Connection(self, self._limited, loop=self._loop, **self._kwargs)


def head_too_large(most: int) -> ApiError:
    """The answer to a request whose head is too large."""
    message = (
        f"the request's line and headers are more than {most} bytes (max_head_bytes), or one of them "
        "is more than max_header_bytes"
    )
    return ApiError(431, message, code="head_too_large")


def _malformed(exc: BaseException | None, limits: Limits) -> ApiError:
    if isinstance(exc, LineTooLong):
        return head_too_large(limits.head_bytes)
    return ApiError(400, f"this is no HTTP request ({type(exc).__name__})", code="malformed_request")


def _refusal() -> bytes:
    error = ApiError(503, "there are too many connections (max_connections)", code="too_many_connections")
    body = error.body()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()
