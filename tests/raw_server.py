"""A server whose answers a test writes byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

Handler = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """An ordinary answer; `more` are header lines, each with its CRLF."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class RawServer:
    """Reads requests, and lets a handler write what is to be the answer: `async with RawServer(handle): ...`.

    Args:
        handle: called with method and path, the body, and where to write. The connection stays open after
            it, unless it closes it.

    Attributes:
        accepted: connections, from the start.
        open: connections now.
        requests: method and path, head and body of each request.
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()
        self.accepted = 0
        self.open = 0
        self.requests: list[tuple[str, bytes, bytes]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self.open += 1
        try:
            with suppress(OSError, EOFError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._exchange(reader, writer)
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.transport.abort() if not writer.is_closing() else None

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        target = head.split(b" HTTP/", 1)[0].decode()
        self.requests.append((target, head, body))
        answering = asyncio.ensure_future(self._handle(target, body, writer))
        # A client that goes while it is answered ends that.
        gone = asyncio.ensure_future(_gone(reader))
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EOFError
            await answering
            await writer.drain()
        finally:
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)


async def _gone(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110  (it has no event)
        await asyncio.sleep(0.005)
