"""Step 5: a decode engine's answer, to the client byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from carryback_server.answer import Answer
from carryback_server.endpoints import Endpoint
from carryback_server.errors import ApiError
from carryback_server.upstream import IdleTimeout, UpstreamError

# Of a stream that the client is slow to take; then the engine's is not read on.
MAX_UNSENT_BYTES = 2**18
_UNSENT_POLL_S = 0.01
# For the last bytes of the framing, after an answer's end; else its connection is not kept.
_FRAMING_S = 1.0


class _Stream(web.StreamResponse):
    # As `web.Response` has it: the headers go out with the first piece.
    _send_headers_immediately = False


class Relay:
    """One answer on its way to the client.

    Args:
        headers: of ours, to send with it.
        on_end: called once the answer has come to its regular end, with all of it or, of a stream, what
            `Watch.tail` has, before the client gets the end: the official client hangs up as soon as it has
            seen it, and may send its next request at once.
        before_end: waited for after that, with the same, before the end is sent on.

    Attributes:
        keep: called with each piece of the answer, if set.
    """

    def __init__(
        self,
        request: web.Request,
        endpoint: Endpoint,
        headers: dict[str, str],
        *,
        on_end: Callable[[bytes], None],
        before_end: Callable[[bytes], Awaitable[None]],
        idle_timeout_s: float,
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._headers = headers
        self._on_end = on_end
        self._before_end = before_end
        self._idle_timeout_s = idle_timeout_s
        self._watch = endpoint.watch()
        self._last: list[bytes] = []
        self._has_ended = False
        self._drain: asyncio.Task[None] | None = None
        self.keep: Callable[[bytes], None] | None = None
        self.bytes_out = 0
        self.error_code = ""

    async def send(self, answer: Answer) -> web.StreamResponse:
        """Send it; return when the client has it, or has an event that says why it ends early."""
        headers = {**self._headers, "Content-Type": answer.content_type}
        if not answer.is_stream:
            self.bytes_out = len(answer.first)
            if answer.status < 400:
                if self.keep is not None:
                    self.keep(answer.first)
                self._on_end(answer.first)
                await self._before_end(answer.first)
            return web.Response(status=answer.status, body=answer.first, headers=headers)
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
        response = _Stream(status=answer.status, headers=headers)
        await response.prepare(self._request)
        try:
            await self._stream(response, answer)
        finally:
            if self._drain is not None:
                self._drain.cancel()
        return response

    async def _stream(self, response: web.StreamResponse, answer: Answer) -> None:
        self._transport = self._request.transport
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._reply = answer.reply
        if self._look(answer.first):
            # By aiohttp, since the headers go out with it.
            await response.write(answer.first)
            self.bytes_out = len(answer.first)
        try:
            await answer.reply.pipe(self._piece, self._idle_timeout_s)
        except UpstreamError as error:
            if not self._has_ended:
                late = isinstance(error, IdleTimeout)
                if late and self._drain is not None and self._transport is not None:
                    # It is the client that took nothing for too long. It would not take an error either.
                    self._transport.abort()
                    raise ConnectionResetError("the client takes nothing") from error
                message = "sent nothing for too long (idle_timeout_s)" if late else "broke off"
                problem = ApiError(
                    502, f"the decode engine {message}; the answer is not complete", code="engine_lost"
                )
                self.error_code = problem.code
                await response.write(self._endpoint.error_event(problem, self._watch.tail))
        last = b"".join(self._last)
        if last:
            await self._before_end(self._watch.tail)
            self.bytes_out += len(last)
        await response.write_eof(last)
        await answer.reply.finish(_FRAMING_S)

    def _piece(self, piece: bytes) -> None:
        """A piece came from the engine: on to the client, in the same callback."""
        if not self._look(piece):
            return
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self.bytes_out += len(piece)
        transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES and self._drain is None:
            self._reply.pause()
            self._drain = asyncio.create_task(self._wait_for_client(transport))

    def _look(self, piece: bytes) -> bool:
        """Look for the answer's end; whether the piece may go out already."""
        if self.keep is not None:
            self.keep(piece)
        if not self._has_ended:
            if not self._watch.ends(piece):
                return True
            self._has_ended = True
            self._on_end(self._watch.tail)
            self._reply.leave()
        self._last.append(piece)
        return False

    async def _wait_for_client(self, transport: asyncio.WriteTransport) -> None:
        while transport.get_write_buffer_size() > MAX_UNSENT_BYTES // 2:  # noqa: ASYNC110  (it has no event)
            await asyncio.sleep(_UNSENT_POLL_S)
        self._drain = None
        self._reply.resume()
