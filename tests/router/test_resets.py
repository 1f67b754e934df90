"""Clients that reset their connections."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from service import TEXT, Serve, user
from stub_engine.prompts import CHAT

PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'


async def test_a_reset_as_the_answer_begins_is_counted_and_is_no_error_of_the_routers(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    service = await serve(prefill_lease_s=0.5)
    where = urlsplit(service.url)
    client = socket.create_connection((where.hostname or "", where.port or 0))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def script() -> Iterator[tuple[float, bytes]]:
        yield 0.05, PIECE
        client.close()  # both reach the router at once, the answer first
        yield 0.05, PIECE

    service.decode.fault(hop="decode", script=script())
    body = json.dumps({"messages": [user(TEXT)], "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(30):
        while 'status="499"' not in await service.metrics():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []
