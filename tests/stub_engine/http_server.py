"""A lean HTTP/1.1 server: httptools on an asyncio protocol. What it writes is what the test says, byte for
byte, and it costs little enough not to be the bottleneck of a benchmark."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import httptools

_SWEEP_INTERVAL_S = 1.0
_EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass(slots=True)
class Request:
    """One request, read to its end.

    Attributes:
        path: without the query.
        headers: names in lower case.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    received: float = field(default_factory=time.monotonic)


Handler = Callable[[Request, "Connection"], None]


class Connection(asyncio.Protocol):
    """One client's connection: hands requests to the handler one after the other, and writes the answers.

    Attributes:
        on_lost: called once if the client goes before the answer has ended.
        on_resume: called once when the client reads again, after `is_full` was true.
        is_full: the client does not read; write no more for now.
    """

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._waiting: deque[Request] = deque()
        self._is_busy = False
        self._keep_alive = True
        # uvicorn's time starts with the end of an answer.
        self.idle_since = math.inf
        self._is_receiving = False
        self.on_lost: Callable[[], object] | None = None
        self.on_resume: Callable[[], object] | None = None
        self.is_full = False

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.respond(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
        self.is_full = False
        for callback in (self.on_lost, self.on_resume):
            if callback is not None:
                callback()
        self.on_lost = self.on_resume = None

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if (callback := self.on_resume) is not None:
            self.on_resume = None
            callback()

    # -- httptools

    def on_message_begin(self) -> None:
        self._is_receiving = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = Request(
            self._parser.get_method().decode(),
            self._url.partition(b"?")[0].decode("latin-1"),
            self._headers,
            b"".join(self._body),
        )
        self._is_receiving = False
        self._keep_alive = self._parser.should_keep_alive()
        self._url, self._headers, self._body = b"", {}, []
        self._waiting.append(request)
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._handler(self._waiting.popleft(), self)

    # -- answers

    @property
    def is_idle(self) -> bool:
        """No request is being answered."""
        return not self._is_busy and not self._is_receiving

    def respond(
        self, status: int, body: bytes, content_type: str = "application/json", headers: str = ""
    ) -> None:
        """A whole answer in one write; `headers` are more header lines, each with its CRLF."""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nserver: uvicorn\r\n"
            f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        )
        self.transport.write(head.encode() + body)
        self._end()

    def begin_events(self) -> None:
        """Status 200 and headers of a stream of events, in a write of their own."""
        self.transport.write(_EVENTS_HEAD)

    def write(self, frame: bytes) -> None:
        """Bytes that `framed` made."""
        self.transport.write(frame)

    async def drained(self) -> None:
        """Wait until the client reads."""
        if self.is_full:
            resumed = asyncio.Event()
            self.on_resume = resumed.set
            await resumed.wait()

    def end_events(self) -> None:
        """The regular end of a stream."""
        self.transport.write(b"0\r\n\r\n")
        self._end()

    def drop(self) -> None:
        """Break the connection off, with a reset where the system allows."""
        self.on_lost = None
        self.transport.abort()

    def _end(self) -> None:
        self.on_lost = self.on_resume = None
        self._is_busy = False
        self.idle_since = time.monotonic()
        if not self._keep_alive:
            self.transport.close()
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


def framed(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class HttpServer:
    """Listens, and closes idle connections as uvicorn under vLLM does.

    Args:
        keep_alive_s: idle seconds after which a connection is closed.
    """

    def __init__(self, handler: Handler, keep_alive_s: float = 5.0) -> None:
        self._handler = handler
        self._keep_alive_s = keep_alive_s
        self._connections: set[Connection] = set()

    async def start(self, host: str, port: int) -> int:
        """Bind; the port, which is new if 0 was given."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections), host, port, backlog=2048
        )
        self._sweeper = asyncio.create_task(self._sweep())
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def kill(self) -> None:
        """Close the port and break off all connections."""
        self._sweeper.cancel()
        self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # connection_lost runs

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            oldest = time.monotonic() - self._keep_alive_s
            for connection in list(self._connections):
                if connection.is_idle and connection.idle_since < oldest:
                    connection.transport.close()
