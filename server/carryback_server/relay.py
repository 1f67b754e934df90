"""Step 5, second half: a decode engine's answer, to the client byte for byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from carryback_server.engines import Engine, EngineDown
from carryback_server.errors import ApiError

_DONE = b"data: [DONE]"
_ERROR = re.compile(rb'^data: ?(\{"error":.*)$', re.MULTILINE)


@dataclass
class Answer:
    """A decode engine's answer, begun: its status and its first bytes are there.

    Attributes:
        first: the first bytes, with the first token in them; all, if it is not a stream of events.
        rest: what follows, of a stream of events.
    """

    status: int
    content_type: str
    first: bytes
    rest: AsyncIterator[bytes] | None
    upstream: aiohttp.ClientResponse

    @property
    def error(self) -> bytes | None:
        """The error object, JSON, of a stream that failed before it had a token."""
        found = _ERROR.search(self.first) if self.rest is not None else None
        return found and found[1]

    @property
    def has_failed(self) -> bool:
        """The engine failed, before it generated anything, whatever the status says."""
        return self.status >= 500 or self.error is not None

    def close(self) -> None:
        """Break off; the engine aborts the request."""
        self.upstream.close()


async def begin(engine: Engine, upstream: aiohttp.ClientResponse, timeout_s: float) -> Answer:
    """Wait for an answer's first bytes.

    A stream's status says nothing: vLLM sends it before it knows whether the request will work.

    Args:
        timeout_s: until the first bytes, in seconds.

    Raises:
        EngineDown: broken off, or too late.
    """
    content_type = upstream.headers.get("Content-Type", "application/json")
    try:
        async with asyncio.timeout(timeout_s):
            if not content_type.startswith("text/event-stream"):
                return Answer(upstream.status, content_type, await upstream.read(), None, upstream)
            chunks = upstream.content.iter_any()
            first = await anext(chunks, b"")
            # vLLM says the role even if there will be no token.
            if first.count(b"\ndata:") == 0 and b'"delta":{"role":"assistant","content":""' in first:
                first += await anext(chunks, b"")
    except TimeoutError as error:
        upstream.close()
        raise EngineDown(engine, f"no first byte within {timeout_s:g} s", is_timeout=True) from error
    except (aiohttp.ClientError, OSError) as error:
        upstream.close()
        raise EngineDown(engine, f"broke off ({type(error).__name__})") from error
    except BaseException:
        upstream.close()
        raise
    if not first:
        raise EngineDown(engine, "an empty answer")
    return Answer(upstream.status, content_type, first, chunks, upstream)


async def relay(
    request: web.Request, answer: Answer, headers: dict[str, str], on_end: Callable[[], None]
) -> web.StreamResponse:
    """Send an answer on to the client.

    Args:
        headers: of ours, to send with it.
        on_end: called once the answer has come to its regular end, whether or not the client gets it.
    """
    headers = {**headers, "Content-Type": answer.content_type}
    if answer.rest is None:
        if answer.status < 400:
            on_end()
        return web.Response(status=answer.status, body=answer.first, headers=headers)
    headers["Cache-Control"] = "no-cache"
    headers["X-Accel-Buffering"] = "no"
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    tail = b""
    chunk = answer.first
    try:
        while chunk:
            # Before it is sent: the official client hangs up as soon as it has seen the end, and may
            # send its next request at once.
            if _DONE in (tail := (tail + chunk)[-64:]):
                on_end()
            await response.write(chunk)
            chunk = await anext(answer.rest, b"")
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.SocketTimeoutError) as error:
        late = isinstance(error, aiohttp.SocketTimeoutError)
        message = "sent nothing for too long (idle_timeout_s)" if late else "broke off"
        problem = ApiError(
            502, f"the decode engine {message}; the answer is not complete", code="engine_lost"
        )
        await response.write(problem.event())
    with suppress(ConnectionResetError):
        await response.write_eof()
    return response
