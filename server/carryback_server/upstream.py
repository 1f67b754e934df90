"""HTTP/1.1 to one engine, over kept connections: as little work for each streamed chunk as can be.

The parser is llhttp (by `httptools`). A piece of an answer's body goes to whoever takes the answer in the
same callback in which it was read from the socket, without a task being woken for it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httptools

# uvicorn, under vLLM, closes an idle connection after 5 s; ours must not be used any more by then.
KEEPALIVE_S = 2.0
# Of an answer that nobody takes; then no more of it is read from the socket.
MAX_WAITING_BYTES = 2**20
# Of an answer's head with all that precedes it, and of what frames its body. vLLM sends some 300 bytes in 7 headers, meshes
# add to that.
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Of a compressed answer, what one read from the socket (at most 256 KiB) may become.
MAX_DECODED_BYTES = 2**24
# A host that has lost its power or its link closes no connection: the kernel asks whether it is there, not the engine,
# which may be busy for longer.
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)


class UpstreamError(OSError):
    """An exchange with an engine failed."""


class ConnectFailed(UpstreamError):
    """No connection. `is_refused`: nothing listens there."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"cannot connect ({error or type(error).__name__})")
        refused = errno.ECONNREFUSED
        # Several addresses, several errors: then there is only the text.
        self.is_refused = getattr(error, "errno", None) == refused or f"[Errno {refused}]" in str(error)


class BrokeOff(UpstreamError):
    """The connection ended before the answer did, or what came is not HTTP."""


class BadAnswer(BrokeOff):
    """HTTP, and nothing that an engine answers."""


class IdleTimeout(UpstreamError):
    """Nothing came of an answer for too long."""


class Reply:
    """An engine's answer, from its headers on.

    Its body is taken in one of three ways: `read()`, `read_some()` until it gives nothing, or `pipe()`.

    Attributes:
        status: of HTTP.
        headers: by lower-case names.
        headed: done once status and headers are there, or never will be.
        is_complete: all of it has come.
    """

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._connection = connection
        self._error: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_piece = 0.0
        self._is_left = False
        self.headed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def content_type(self) -> str:
        """As the engine says; JSON if it says nothing."""
        return self.headers.get("content-type", "application/json")

    async def read(self) -> bytes:
        """The body, all of it.

        Raises:
            BrokeOff: it did not come to its end.
        """
        self._sink = self._keep
        self._connection.resume()
        while not self.is_complete:
            await self._wait()
        return self._take()

    async def read_some(self) -> bytes:
        """What has come of the body since the last call, at least one byte; nothing at its end.

        Raises:
            BrokeOff: it did not come to its end.
        """
        while not self._pieces and not self.is_complete:
            await self._wait()
        self._connection.resume()
        return self._take()

    async def pipe(self, sink: Callable[[bytes], None], idle_timeout_s: float) -> None:
        """Give each piece of the body to `sink` as it comes, until the end, or until `leave()`.

        Args:
            sink: must not wait; what it raises ends the exchange.
            idle_timeout_s: the longest time between two pieces, in seconds.

        Raises:
            BrokeOff: it did not come to its end.
            IdleTimeout: nothing came, or nothing was taken, for too long.
        """
        self._connection.resume()  # first: the sink may pause it
        if waiting := self._take():
            sink(waiting)
        if not self._is_left:
            self._sink = sink
        self._last_piece = time.monotonic()
        self._idle_timeout_s = idle_timeout_s
        self._idle_timer = asyncio.get_running_loop().call_later(idle_timeout_s, self._check_idle)
        try:
            while not (self.is_complete or self._is_left):
                await self._wait()
        finally:
            self._idle_timer.cancel()

    def leave(self) -> None:
        """Take no more pieces: `pipe()` returns, and what may still come is left aside."""
        self._is_left = True
        self._sink = _leave_aside
        self._wake()

    async def finish(self, timeout_s: float) -> None:
        """Wait, so long at most, for the end of the framing, so that the connection can be kept."""
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(timeout_s):
                while not self.is_complete:
                    await self._wait()

    def pause(self) -> None:
        """Read no more from the socket for now."""
        self._connection.pause()

    def resume(self) -> None:
        """Go on reading."""
        self._last_piece = time.monotonic()
        self._connection.resume()

    def close(self) -> None:
        """Be done with it. An answer that is not complete is broken off: the engine aborts the request."""
        if not self.is_complete:
            self._connection.abort()

    def _check_idle(self) -> None:
        # One timer for all pieces: it is cheaper to look when the last one came than to set it again.
        left = self._last_piece + self._idle_timeout_s - time.monotonic()
        if left > 0:
            self._idle_timer = asyncio.get_running_loop().call_later(left, self._check_idle)
        elif not self.is_complete:
            self._error = IdleTimeout("nothing came for too long")
            self._wake()
            self._connection.abort()

    # -- called by the connection

    def body(self, piece: bytes) -> None:
        """Some of the body came."""
        self._last_piece = time.monotonic()
        if self._sink is not None:
            self._sink(piece)
            return
        self._keep(piece)
        self._wake()
        if self._waiting > MAX_WAITING_BYTES:
            self._connection.pause()

    def end(self, error: UpstreamError | None = None) -> None:
        """The body is complete, or will never be."""
        self.is_complete = error is None
        self._error = self._error or error
        self._wake()

    def _keep(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._waiting += len(piece)

    def _take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        return taken

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Decoder:
    """Undoes an answer's `Content-Encoding`. The router asks for none; a mesh may compress all the same.

    Raises:
        BadAnswer: it is another than gzip and deflate.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise BadAnswer(f"Content-Encoding {encoding[:100]!r}, which nobody asked for")
        self._is_gzip = encoding != "deflate"
        self._member: Any = None

    def feed(self, data: bytes) -> bytes:
        """What a piece of the body says.

        Raises:
            BadAnswer: it is not compressed as it says, or becomes too much.
        """
        decoded, left = [], MAX_DECODED_BYTES
        while data:
            if self._member is None or self._member.eof:
                self._member = self._begin(data)
            try:
                decoded.append(self._member.decompress(data, left))
            except zlib.error as error:
                raise BadAnswer(f"a body that is not compressed as it says ({error})") from error
            left -= len(decoded[-1])
            if self._member.unconsumed_tail or left <= 0:
                raise BadAnswer(f"a compressed body, {MAX_DECODED_BYTES} bytes of it at once")
            data = self._member.unused_data
        return b"".join(decoded)

    def end(self) -> None:
        """The body is over.

        Raises:
            BadAnswer: it has not come to its own end.
        """
        if self._member is not None and not self._member.eof:
            raise BadAnswer("a compressed body that is cut off")

    def _begin(self, data: bytes) -> Any:
        if self._is_gzip:
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        # RFC 9110, 8.4.1.2: in zlib's format, and some servers send it bare. A zlib header begins with method 8.
        return zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._pieces: list[bytes] = []
        self._framed = False
        self._is_interim = False
        self._decoder: _Decoder | None = None
        self._header_count = self._header_bytes = 0
        # Bytes that came since some of a body did.
        self._overhead = 0
        self.is_open = False
        self.is_paused = False
        self.idle_since = 0.0

    async def exchange(self, head: bytes, body: bytes) -> Reply:
        """Send a request; its answer, once the headers are there."""
        self._reply = reply = Reply(self)
        self._framed = False
        self._decoder = None
        self._header_count = self._header_bytes = self._overhead = 0
        self._transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self._transport.write(body)
        try:
            await reply.headed
        except BaseException:
            if self._reply is reply:  # it may be over, and the connection at work for another
                self.abort()
            raise
        return reply

    def pause(self) -> None:
        if self.is_open and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            if self.is_open:
                self._transport.resume_reading()

    def abort(self) -> None:
        self.is_open = False
        self._fail(BrokeOff("broke off"))
        self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.is_open = True
        for option in _ALIVE:
            transport.get_extra_info("socket").setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
            if self._pieces:
                self._pass_on()
            if self._overhead > MAX_HEAD_BYTES:
                raise BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, BadAnswer) as error:
            # What a sink raises, too.
            cause = error if isinstance(error, BadAnswer) else error.__context__ or error
            self._fail(cause if isinstance(cause, BadAnswer) else BrokeOff(f"broke off ({cause})"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self in self._idle:
            self._idle.remove(self)
        if self._reply is not None and self._reply.status and not self._framed and exc is None:
            try:
                self.on_message_complete()  # an answer that ends with its connection
            except BadAnswer as error:
                self._fail(error)
        else:
            self._fail(BrokeOff(f"broke off ({exc or 'connection closed'})"))

    def _fail(self, error: UpstreamError) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if not reply.headed.done():
            reply.headed.set_exception(error)
        else:
            reply.end(error)

    # -- httptools

    def on_message_begin(self) -> None:
        if self._reply is None:
            raise BrokeOff("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._header_count += 1
            self._header_bytes += len(name) + len(value)
            if self._header_count > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
                raise BadAnswer(f"more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES} bytes of them")
            lower = name.decode("latin-1").lower()
            text = value.decode("latin-1")
            if lower in ("content-encoding", "transfer-encoding") and lower in self._reply.headers:
                text = f"{self._reply.headers[lower]}, {text}"
            self._reply.headers[lower] = text
            if lower in ("content-length", "transfer-encoding"):
                self._framed = True

    def on_headers_complete(self) -> None:
        if self._reply is None:
            return
        status = self._parser.get_status_code()
        self._is_interim = status < 200  # the answer is yet to come
        if self._is_interim and status != 101:
            self._reply.headers.clear()
            return
        if status != 200 and not 400 <= status < 600:
            raise BadAnswer(f"status {status}, which no engine answers with")
        if codings := _codings(self._reply.headers.get("content-encoding", "")):
            self._decoder = _Decoder(codings)
        if (codings := _codings(self._reply.headers.get("transfer-encoding", ""))) not in ("", "chunked"):
            raise BadAnswer(f"Transfer-Encoding {codings[:100]!r}, which nobody asked for")
        self._reply.status = status
        if not self._reply.headed.done():
            self._reply.headed.set_result(None)

    def on_body(self, body: bytes) -> None:
        # An engine that is quick sends many chunks at once: they go on as one piece.
        self._overhead = 0
        self._pieces.append(body)

    def _pass_on(self) -> None:
        pieces, self._pieces = self._pieces, []
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._decoder is not None:
            piece = self._decoder.feed(piece)
        if self._reply is not None and piece:
            self._reply.body(piece)

    def on_message_complete(self) -> None:
        if self._is_interim:
            return
        self._overhead = 0
        if self._pieces:
            self._pass_on()
        if self._decoder is not None:
            self._decoder.end()
        reply, self._reply = self._reply, None
        if reply is None:
            return
        reply.end()
        if self.is_open and self._parser.should_keep_alive():
            self.resume()
            self.idle_since = time.monotonic()
            self._idle.append(self)
        elif self.is_open:
            self.is_open = False
            self._transport.close()


class Upstream:
    """A client of one HTTP server.

    Args:
        url: `http://` or `https://`, host and port; a path before all paths is allowed.
        connect_timeout_s: for a new connection, in seconds.
        headers: sent with every request.

    Raises:
        ValueError: the URL is not one.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, headers: Mapping[str, str] = {}) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: want http://host:port")
        self._host, self._is_tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._tls = ssl.create_default_context() if self._is_tls else None
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        host = parts.netloc.rpartition("@")[2]
        self._headers = f"Host: {host}\r\nAccept-Encoding: identity\r\n{_lines(headers)}"
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> Reply:
        """Send a request; return when the answer's status and headers are there.

        Cancelling it, or a timeout around it, breaks the exchange off.

        Raises:
            ConnectFailed: the engine never got it.
            BrokeOff: the engine may have got it.
        """
        length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{_lines(headers)}{length}\r\n"
        connection = self._kept() or await self._connect()
        return await connection.exchange(head.encode("latin-1"), body)

    def close(self) -> None:
        """Close the connections that are idle; those in use close with their exchange."""
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last is the freshest
            if connection.is_open and time.monotonic() - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: no name that DNS could have
            raise ConnectFailed(error) from error
        return connection


def _codings(header: str) -> str:
    """The codings of a header that change anything."""
    codings = (each.strip().lower() for each in header.split(","))
    return ", ".join(each for each in codings if each not in ("", "identity"))


def _leave_aside(piece: bytes) -> None:
    """Takes what nobody wants."""


def _lines(headers: Mapping[str, str]) -> str:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a line break in a header")
    return lines
