"""How one stub engine reads another's blocks: a line of JSON each way, for real NIXL's reads and notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

READ_TIMEOUT_S = 10.0
_LINE_LIMIT = 2**24


@dataclass
class Contents:
    """What was read.

    Attributes:
        kv: what each block holds.
        epoch: the one that the holder is in, now that it was read.
        is_held: it was held for the reader all the time.
    """

    kv: list[bytes]
    epoch: str
    is_held: bool


# Engine id, request or lease, and block ids in. Raises KeyError for an unknown engine.
Reader = Callable[[str, str, list[int]], Contents]


class ReadFailed(Exception):
    """The other engine is not there, or is another one now."""


class SideChannel:
    """Lets others read.

    Args:
        read: called for each read; one of no blocks only says that nothing (more) will be read.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Bind; the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_LINE_LIMIT)
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def kill(self) -> None:
        """Close the port and break off all connections."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                ask = json.loads(line)
                try:
                    found = self._read(ask["engine"], ask["request"], ask["blocks"])
                    reply: dict[str, object] = {
                        "kv": [each.hex() for each in found.kv], "epoch": found.epoch, "is_held": found.is_held,
                    }  # fmt: skip
                except KeyError as error:
                    reply = {"error": f"no engine {error}"}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def read(host: str, port: int, engine: str, request: str, blocks: Sequence[int]) -> Contents:
    """What another engine's blocks hold; of a prompt it is told that it was read.

    Raises:
        ReadFailed: nobody there, another engine there, or no answer.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT)
            try:
                ask = {"engine": engine, "request": request, "blocks": list(blocks)}
                writer.write(json.dumps(ask).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except OSError as error:
        raise ReadFailed(f"{engine} at {host} port {port}: {error}") from error
    reply: dict[str, Any] = json.loads(line) if line else {"error": "broke off"}
    if "error" in reply:
        raise ReadFailed(reply["error"])
    return Contents([bytes.fromhex(each) for each in reply["kv"]], reply["epoch"], reply["is_held"])
