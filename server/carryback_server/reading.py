"""Reads requests' bodies: decoded and counted as they come, within limits, and without holding the event loop.

Nothing is read before it is known whose request it is. What takes long to look at, for its size or for what is in it,
is looked at by another process (`carryback_server.body_worker`): a thread would not do, since one call of a JSON parser
keeps all others from running until it is over.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from carryback_server.body import Body
from carryback_server.body_worker import Answer, Job
from carryback_server.config import RouterConfig
from carryback_server.errors import ApiError
from carryback_server.identify import Looked
from carryback_server.tenants import Tenant

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger("carryback")

ENCODINGS = ("gzip", "deflate", "zstd")
# Of what is decoded in one go, before others have their turn: half a millisecond's work.
_SLICE_BYTES = 2**18
# 8 MiB, which all decoders are to support (RFC 8878, 3.1.1.1.2); a stream may ask for 2 GiB of memory otherwise.
_ZSTD_WINDOW_LOG = 23
# A body is looked at on the event loop up to this size, and with so many commas (or of that size, in which there are not
# many more). Nothing that is costly can be in it then: 8,000 empty messages take 20 ms. Requests of agents with
# hundreds of KB of history and code are well within it.
LIGHT_BYTES = 2**19
LIGHT_COMMAS = 8192
_UNCOUNTED_BYTES = 24 * 1024
# Above these, there is a turn of the event loop between two bodies.
_QUICK_BYTES = 2**17
_QUICK_COMMAS = 1024
# What is sent to a worker in one go.
_PIECE_BYTES = 2**18


class _Decoder(Protocol):
    """As `zlib` and `zstd` have them, made alike."""

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@dataclass
class Read:
    """A body, plain.

    Attributes:
        is_light: it can be looked at on the event loop.
        is_quick: many can be, one at once after the other.
    """

    data: bytes
    is_light: bool
    is_quick: bool = True


def is_light(data: bytes, commas: int | None = None) -> bool:
    """Whether JSON can be looked at on the event loop.

    Args:
        commas: in it, if they have been counted.
    """
    return len(data) <= _UNCOUNTED_BYTES or (
        len(data) <= LIGHT_BYTES and (data.count(b",") if commas is None else commas) <= LIGHT_COMMAS
    )


class Room:
    """The memory that one request's body takes of what all may take."""

    def __init__(self, bodies: Bodies, tenant: Tenant) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._taken = 0

    def take(self, count: int) -> None:
        """So many bytes more.

        Raises:
            ApiError: 429, the tenant's requests have its share; 503, all requests have all there is.
        """
        self._bodies.take(self._tenant, count)
        self._taken += count

    def free(self) -> None:
        """The body is not needed any more."""
        self._bodies.give_back(self._tenant.name, self._taken)
        self._taken = 0


class Bodies:
    """Reads the bodies of all requests.

    Args:
        on_worker_lost: called when a worker process has ended, or took too long and was ended.
    """

    def __init__(self, config: RouterConfig, on_worker_lost: Callable[[], None] = lambda: None) -> None:
        self._config = config
        self._taken: Counter[str] = Counter()
        self._in_all = 0
        # One body that is not light at a time, of each tenant, and of all.
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._next = asyncio.Lock()
        self._worker = _Worker(config.body_work_timeout_s, on_worker_lost)

    async def stop(self) -> None:
        """End the worker process, if there is one."""
        await self._worker.stop()

    @asynccontextmanager
    async def room(self, tenant: Tenant) -> AsyncIterator[Room]:
        """Count what a request's body takes."""
        room = Room(self, tenant)
        try:
            yield room
        finally:
            room.free()

    def take(self, tenant: Tenant, count: int) -> None:
        """See `Room.take`."""
        most = self._config.max_body_bytes_in_all
        if not tenant.is_alone and self._taken[tenant.name] + count > most // 2:
            raise ApiError(
                429,
                "the bodies of your requests take all the memory that one tenant may have "
                "(half of max_body_bytes_in_all)",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        if self._in_all + count > most:
            raise ApiError(
                503,
                "the bodies of all requests take all the memory that they may (max_body_bytes_in_all)",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self._taken[tenant.name] += count
        self._in_all += count

    def give_back(self, tenant: str, count: int) -> None:
        """See `Room.free`."""
        self._in_all -= count
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]

    async def read(self, request: web.Request, room: Room) -> Read:
        """A request's body, decoded.

        Raises:
            ApiError: 413, it is too large, or there is too much in it; 415, its encoding is not known; 408, it did not
                come in time; 400, it cannot be decoded; 429 or 503, there is no room for it.
        """
        decoder = _decoder(request.headers.getall("Content-Encoding", []))
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise self._too_large()
        try:
            if request.content.is_eof():  # all there: no need for a timer
                return await self._read(request, room, decoder)
            async with asyncio.timeout(self._config.body_timeout_s):
                return await self._read(request, room, decoder)
        except web.RequestPayloadError as error:
            message = "the body cannot be read: its chunks are wrong"
            raise ApiError(400, message, code="invalid_body") from error
        except TimeoutError as error:
            message = f"the body did not come within {self._config.body_timeout_s:g} s (body_timeout_s)"
            raise ApiError(408, message, code="body_timeout") from error

    async def _read(self, request: web.Request, room: Room, decoder: _Decoder | None) -> Read:
        pieces: list[bytes] = []
        size = commas = 0
        while coming := await request.content.readany():
            piece = coming if decoder is None else _decode(decoder, coming)
            while piece:
                size += len(piece)
                if size > self._config.max_body_bytes:
                    raise self._too_large()
                room.take(len(piece))
                pieces.append(piece)
                commas += piece.count(b",")
                if commas > self._config.max_body_values:
                    raise self._too_much()
                if decoder is None or len(piece) < _SLICE_BYTES:
                    break
                await self._my_turn()
                piece = _decode(decoder, b"")
        if decoder is not None and not decoder.eof:
            raise _wrong_encoding()
        is_quick = size <= _QUICK_BYTES and commas <= _QUICK_COMMAS
        if len(pieces) > 1 and not is_quick:
            await self._my_turn()  # to copy it
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Read(data, is_light(data, commas), is_quick)

    async def _my_turn(self) -> None:
        """Wait for a turn of the event loop in which no other body is worked on: what all ask for has a turn between."""
        async with self._next:
            await asyncio.sleep(0)

    async def parse(self, read: Read, path: str, tenant: Tenant) -> tuple[Body, Looked | None]:
        """A body's fields; and, of one that is not light, all that the endpoint has to know of it.

        Raises:
            ApiError: 400, it is malformed; 413, there is too much in it, or it took too long; 503, the worker ended.
        """
        if read.is_light:
            if not read.is_quick:
                await self._my_turn()
            return Body(read.data), None
        answer = await self._ask(tenant, path, read.data, fields=True)
        return Body.of(read.data, answer.fields), answer.looked

    async def look(self, body: Body, path: str, tenant: Tenant) -> Looked:
        """All that the endpoint has to know of a body that is not light any more.

        Raises:
            ApiError: as `parse`.
        """
        return (await self._ask(tenant, path, body.encode({}), fields=False)).looked

    async def _ask(self, tenant: Tenant, path: str, data: bytes, *, fields: bool) -> Answer:
        name = tenant.name
        job = Job(path, name, not tenant.is_alone, self._config.max_messages, fields)
        turn = self._turns.setdefault(name, asyncio.Lock())
        self._waiting[name] += 1
        try:
            async with turn:
                answer = await self._worker.ask(job, data)
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._turns[name]
        if answer.status:
            raise ApiError(answer.status, answer.message, code=answer.code, param=answer.param)
        return answer

    def _too_large(self) -> ApiError:
        most = self._config.max_body_bytes
        return ApiError(
            413, f"the body is larger than {most} bytes, the router's max_body_bytes", code="body_too_large"
        )

    def _too_much(self) -> ApiError:
        most = self._config.max_body_values
        return ApiError(
            413,
            f"there are more than {most} values in the body, the router's max_body_values",
            code="body_too_large",
        )


class _Worker:
    """The process that looks at bodies; started when it is needed, and again when it has ended."""

    def __init__(self, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[Answer]] = set()

    async def ask(self, job: Job, data: bytes) -> Answer:
        """Its answer. A request that is cancelled meanwhile does not disturb the next one's."""
        self._asking.add(task := asyncio.create_task(self._exchange(job, data)))
        task.add_done_callback(self._asking.discard)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        for task in list(self._asking):
            task.cancel()
        await self._end()

    async def _exchange(self, job: Job, data: bytes) -> Answer:
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._say(job, data)
            except TimeoutError:
                self._on_lost()
                await self._end()
                logger.warning(
                    "a request's body took longer than %g s to look at (body_work_timeout_s)", self._timeout_s
                )
                message = f"the body takes longer than {self._timeout_s:g} s to look at (body_work_timeout_s)"
                return Answer(status=413, message=message, code="body_too_large")
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                self._on_lost()
                await self._end()
                logger.error("the process that looks at large bodies ended (%s)", type(error).__name__)
                message = "the process that looks at large bodies ended; try again"
                return Answer(status=503, message=message, code="body_worker_lost")
            except asyncio.CancelledError:
                await self._end()
                raise

    async def _say(self, job: Job, data: bytes) -> Answer:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "carryback_server.body_worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        head = msgspec.msgpack.encode(job)
        stdin.write(len(head).to_bytes(8, "big") + len(data).to_bytes(8, "big") + head)
        for at in range(0, len(data), _PIECE_BYTES):
            stdin.write(data[at : at + _PIECE_BYTES])
            await stdin.drain()
        size = int.from_bytes(await stdout.readexactly(8), "big")
        return msgspec.msgpack.decode(await stdout.readexactly(size), type=Answer)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# -- content encodings


class _Inflate:
    """`gzip` and `deflate`; of the latter both forms that are in use, with a header of zlib's and without.

    A gzip file can have several members, one after the other (RFC 1952, 2.2); no client sends those.
    """

    def __init__(self, *, is_gzip: bool) -> None:
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_gzip else None

    @property
    def eof(self) -> bool:
        return self._inflate is not None and self._inflate.eof

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._inflate is None:
            # RFC 1950, 2.2: the method is 8, deflate, in the low four bits.
            self._inflate = zlib.decompressobj(
                zlib.MAX_WBITS if data[:1] and data[0] & 15 == 8 else -zlib.MAX_WBITS
            )
        if data and self._inflate.eof:
            raise ValueError("bytes after the end")
        decoded = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        if self._inflate.unused_data:
            raise ValueError("bytes after the end")
        return decoded


class _Zstd:
    def __init__(self) -> None:
        self._zstd = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        )

    @property
    def eof(self) -> bool:
        return bool(self._zstd.eof)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._zstd.eof:
            if data:
                raise ValueError("bytes after the end")
            return b""
        decoded = self._zstd.decompress(data, max_length)
        if self._zstd.unused_data:
            raise ValueError("bytes after the end")
        return bytes(decoded)


def _decoder(named: list[str]) -> _Decoder | None:
    """What decodes a body with these `Content-Encoding` headers; None if it is plain.

    Raises:
        ApiError: 415, it is not known.
    """
    names = [
        name
        for each in named
        for part in each.lower().split(",")
        if (name := part.strip()) and name != "identity"
    ]
    if not names:
        return None
    if len(names) == 1 and names[0] in ("gzip", "x-gzip", "deflate", "zstd"):
        return _Zstd() if names[0] == "zstd" else _Inflate(is_gzip=names[0] != "deflate")
    shown = ", ".join(names)[:64]
    raise ApiError(
        415,
        f"Content-Encoding {shown!r} is not taken; one of {', '.join(ENCODINGS)} is, or none",
        code="unsupported_encoding",
        param="Content-Encoding",
        headers={"Accept-Encoding": ", ".join(ENCODINGS)},
    )


def _decode(decoder: _Decoder, data: bytes) -> bytes:
    try:
        return decoder.decompress(data, _SLICE_BYTES)
    except (zlib.error, zstd.ZstdError, ValueError, EOFError) as error:
        raise _wrong_encoding() from error


def _wrong_encoding() -> ApiError:
    message = "the body is not what its Content-Encoding says, or not all of it"
    return ApiError(400, message, code="invalid_body", param="Content-Encoding")
