"""The stub engine for benchmarks: the same bytes on the wire, and next to no work for them.

Answers are pieces prepared beforehand; a record has as many blocks as a prompt of its size would fill, and
its digests and block ids are of the right length and mean nothing.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import time
import uuid
from functools import lru_cache
from itertools import count
from typing import Literal

import msgspec
from carryback.wire.events import Held, Prefilled, Released

from stub_engine.http_server import Connection, HttpServer, Request, framed
from stub_engine.publisher import Publisher

BLOCK_SIZE = 16
# Bytes of a JSON body that make a token, roughly.
BYTES_A_TOKEN = 4
_MAX_BLOCKS = 65_536
_DIGEST_BYTES = 16
_DIGESTS = os.urandom(_MAX_BLOCKS * _DIGEST_BYTES)
_TOKEN = " token"


class _Record(msgspec.Struct):
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None


class _Params(_Record):
    do_remote_decode: bool = False
    carryback_record: _Record | None = None
    carryback_key: str | None = None
    carryback_release: list[str] = []
    carryback_await: float | None = None
    carryback_tell: bool = False
    hold_s: float | None = None


class _Body(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    kv_transfer_params: _Params | None = None


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class _Pin:
    __slots__ = ("blocks", "deadline", "key")

    def __init__(self, key: str, blocks: int, deadline: float) -> None:
        self.key = key
        self.blocks = blocks
        self.deadline = deadline


class FastEngine:
    """An engine that costs next to nothing.

    Args:
        role: `prefill` answers with a record, `decode` with tokens.
        port: of its HTTP server; 0: a free one.
        events_port: of its event publisher; 0: a free one.
        chunks: tokens of an answer that has no smaller limit.
        chunk_interval_s: seconds between two chunks of a stream; 0: as fast as the loop turns, one chunk
            of each stream a turn.
        ttft_s: seconds before the answer, or its first chunk.
        capacity: KV blocks that it says it has.
    """

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        events_port: int = 0,
        model: str = "stub",
        chunks: int = 128,
        chunk_interval_s: float = 0.0,
        ttft_s: float = 0.0,
        capacity: int = 1_000_000,
    ) -> None:
        self.role = role
        self.model = model
        self.id = uuid.uuid4().hex
        self._host = host
        self._port = port
        self._events_port = events_port
        self._chunks = chunks
        self._interval_s = chunk_interval_s
        self._ttft_s = ttft_s
        self._capacity = capacity
        self._pins: dict[str, _Pin] = {}
        self._pinned = 0
        self._numbers = count(1)
        self._http = HttpServer(self._handle)
        self.requests = 0

    async def start(self) -> None:
        """Bind all ports."""
        self._loop = asyncio.get_running_loop()
        bracketed = f"[{self._host}]" if ":" in self._host else self._host
        self.publisher = Publisher(
            f"tcp://{bracketed}:{self._events_port}", self.id, lambda: self._pinned, self._capacity
        )
        self.events = self.publisher.address
        port = await self._http.start(self._host, self._port)
        self.url = f"http://{bracketed}:{port}"
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # The side channel: datagrams with the name of a record that was read.
        self._side, _ = await self._loop.create_datagram_endpoint(
            lambda: _Reads(self), local_addr=(self._host, 0), family=family
        )
        self._side_port: int = self._side.get_extra_info("sockname")[1]
        self._expirer = asyncio.create_task(self._expire())

    async def kill(self) -> None:
        """Close everything."""
        self._expirer.cancel()
        self._side.close()
        self.publisher.close()
        await self._http.kill()

    # -- requests

    def _handle(self, request: Request, connection: Connection) -> None:
        self.requests += 1
        path = request.path
        if path == "/v1/chat/completions" or path == "/v1/completions":
            try:
                body = _decode_body(request.body)
            except msgspec.MsgspecError as error:
                connection.respond(400, b'{"error":{"message":%b,"type":"BadRequestError","param":null,"code":400}}' % msgspec.json.encode(str(error)))  # fmt: skip
                return
            if self._ttft_s:
                self._loop.call_later(self._ttft_s, self._answer, request, body, connection)
            else:
                self._answer(request, body, connection)
        elif path in ("/health", "/ping"):
            connection.respond(200, b"")
        elif path == "/v1/models":
            connection.respond(200, b'{"object":"list","data":[{"id":"%b","object":"model","created":%d,"owned_by":"vllm","root":"%b","parent":null,"max_model_len":131072}]}' % (self.model.encode(), time.time(), self.model.encode()))  # fmt: skip
        elif path == "/metrics":
            used = self._pinned / self._capacity
            connection.respond(
                200, b"vllm:kv_cache_usage_perc %g\n" % used, "text/plain; version=0.0.4; charset=utf-8"
            )
        elif path == "/stub/state":
            state = {"pinned": self._pinned, "requests": self.requests, "held": len(self._pins)}
            connection.respond(200, msgspec.json.encode(state))
        else:
            connection.respond(
                404, b'{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}'
            )

    def _answer(self, request: Request, body: _Body, connection: Connection) -> None:
        if connection.transport.is_closing():
            return
        waiting = body.kv_transfer_params
        if waiting is not None and waiting.carryback_key and waiting.carryback_await is not None:
            told = self.publisher.of(waiting.carryback_key)
            told.add_done_callback(lambda told: self._go_on(told, waiting, request, body, connection))
            return
        is_chat = request.path == "/v1/chat/completions"
        number = request.headers.get("x-request-id") or f"{next(self._numbers):032x}"
        name = f"chatcmpl-{number}" if is_chat else f"cmpl-{number}"
        params = body.kv_transfer_params
        prompt = len(request.body) // BYTES_A_TOKEN
        if params is not None:
            if params.carryback_release:
                for each in params.carryback_release:
                    self._let_go(each, "asked")
            if params.do_remote_decode:
                self._prefilled(name, is_chat, prompt, params, connection)
                return
            prompt = params.remote_num_tokens or prompt
        limit = body.max_completion_tokens or body.max_tokens or self._chunks
        tokens = min(limit, self._chunks)
        finish = "length" if tokens == limit else "stop"
        if body.stream:
            wants_usage = bool(body.stream_options and body.stream_options.get("include_usage"))
            _Stream(self, connection, name, is_chat, prompt, tokens, finish, wants_usage, params)
            return
        self.hold(name, prompt + tokens, params)
        text = _TOKEN * tokens
        if is_chat:
            choice = (
                f'"message":{{"role":"assistant","content":"{text}","refusal":null,"annotations":null,'
                f'"audio":null,"function_call":null,"reasoning":null}},"logprobs":null,'
                f'"finish_reason":"{finish}","stop_reason":null,"token_ids":null'
            )
        else:
            choice = f'"text":"{text}","logprobs":null,"finish_reason":"{finish}","stop_reason":null'
        connection.respond(200, self._whole(name, is_chat, choice, prompt, tokens, b"null"))

    def _go_on(
        self,
        told: asyncio.Future[bytes],
        params: _Params,
        request: Request,
        body: _Body,
        connection: Connection,
    ) -> None:
        if not told.cancelled():
            params.carryback_await = None
            params.remote_num_tokens = _decode_params(told.result()).remote_num_tokens
            self._answer(request, body, connection)

    def _prefilled(
        self, name: str, is_chat: bool, prompt: int, params: _Params, connection: Connection
    ) -> None:
        blocks = min(-(-prompt // BLOCK_SIZE), _MAX_BLOCKS)
        record = params.carryback_record or params
        reused = min(record.remote_num_tokens or 0, prompt)
        if record.remote_request_id and record.remote_host and record.remote_port:
            self._side.sendto(record.remote_request_id.encode(), (record.remote_host, record.remote_port))
        reuse = (
            f'{{"outcome":"{"hit" if reused else "miss"}","tokens":{reused},"cached":0,'
            f'"recomputed":{prompt - reused},"reason":"{"verified" if reused else "no_record"}"}}'
        )
        held = self._record(name, blocks, prompt, params.hold_s or 30.0, is_prefill=True)
        digests = base64.b64encode(_DIGESTS[: blocks * _DIGEST_BYTES])
        seal = b'"carryback":{"digests":"%b",' % digests
        held = held.replace(b'"carryback":{', seal, 1)[:-1] + b',"carryback_reuse":%b}' % reuse.encode()
        if params.carryback_tell and params.carryback_key:
            self.publisher.send(Prefilled(self.id, self.publisher.next(), params.carryback_key, held))
        text = '"text":" token"' if not is_chat else '"message":{"role":"assistant","content":" token"}'
        choice = f'{text},"logprobs":null,"finish_reason":"length","stop_reason":null'
        connection.respond(200, self._whole(name, is_chat, choice, prompt, 1, held))

    def _whole(self, name: str, is_chat: bool, choice: str, prompt: int, tokens: int, params: bytes) -> bytes:
        kind = "chat.completion" if is_chat else "text_completion"
        return (
            f'{{"id":"{name}","object":"{kind}","created":{int(time.time())},"model":"{self.model}",'
            f'"choices":[{{"index":0,{choice}}}],"service_tier":null,"system_fingerprint":null,'
            f'"usage":{_usage(prompt, tokens)},"prompt_logprobs":null,"kv_transfer_params":'
        ).encode() + params + b"}"  # fmt: skip

    # -- records

    def hold(self, name: str, tokens: int, params: _Params | None) -> None:
        """Say what is held of a finished request."""
        if params is None or params.carryback_key is None:
            return
        hold_s = 480.0 if params.hold_s is None else params.hold_s
        blocks = min((tokens - 1) // BLOCK_SIZE, _MAX_BLOCKS) if hold_s > 0 else 0
        request = f"{name}-{next(self._numbers):08x}"
        record, digests = b"", b""
        if blocks:
            record = self._record(request, blocks, blocks * BLOCK_SIZE, hold_s, is_prefill=False)
            digests = _DIGESTS[: blocks * _DIGEST_BYTES]
            self._pins[request] = _Pin(params.carryback_key, blocks, time.monotonic() + hold_s)
            self._pinned += blocks
        self.publisher.send(
            Held(
                self.id, self.publisher.next(), params.carryback_key, request, blocks * BLOCK_SIZE, blocks,
                hold_s, record, digests, self._pinned,
            )
        )  # fmt: skip

    def _record(self, request: str, blocks: int, tokens: int, hold_s: float, *, is_prefill: bool) -> bytes:
        first = next(self._numbers) % 16 * 1000  # few, so that the text of most is known
        return (
            f'{{"do_remote_prefill":{"true" if is_prefill else "false"},'
            f'"do_remote_decode":{"false" if is_prefill else "true"},'
            f'"remote_block_ids":[{_block_ids(first, blocks)}],"remote_engine_id":"{self.id}",'
            f'"remote_request_id":"{request}","remote_host":"{self._host}","remote_port":{self._side_port},'
            f'"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":{tokens},'
            f'"remote_blocks_expiry_time":{time.perf_counter() + hold_s},"transfer_mode":"pull",'
            f'"carryback":{{"v":1,"block_size":{BLOCK_SIZE},"tail":"","mac":"{"0" * 64}"}}}}'
        ).encode()

    def _let_go(self, request: str, reason: Literal["read", "expired", "asked"]) -> None:
        if (pin := self._pins.pop(request, None)) is None:
            return
        self._pinned -= pin.blocks
        self.publisher.send(Released(self.id, self.publisher.next(), pin.key, reason, self._pinned))

    def was_read(self, request: str) -> None:
        """A prefill engine has read what is held for this request."""
        self._let_go(request, "read")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            for request in [name for name, pin in self._pins.items() if pin.deadline <= now]:
                self._let_go(request, "expired")


class _Reads(asyncio.DatagramProtocol):
    """The side channel."""

    def __init__(self, engine: FastEngine) -> None:
        self._engine = engine

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._engine.was_read(data.decode())


class _Stream:
    """One streamed answer: a write for each chunk, from callbacks of the loop, without a task."""

    def __init__(
        self, engine: FastEngine, connection: Connection, name: str, is_chat: bool, prompt: int,
        tokens: int, finish: str, wants_usage: bool, params: _Params | None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._connection = connection
        self._left = tokens
        self._loop = engine._loop
        self._interval_s = engine._interval_s
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = (
            f'data: {{"id":"{name}","object":"{kind}","created":{int(time.time())},"model":"{engine.model}",'
            '"choices":['
        )
        if is_chat:
            start = head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'  # fmt: skip
            token = head + f'{{"index":0,"delta":{{"content":"{_TOKEN}"}},"logprobs":null,"finish_reason":null,"token_ids":null}}]}}\n\n'  # fmt: skip
            last = head + f'{{"index":0,"delta":{{"content":"{_TOKEN}"}},"logprobs":null,"finish_reason":"{finish}","stop_reason":null,"token_ids":null}}]}}\n\n'  # fmt: skip
        else:
            start = ""
            token = head + f'{{"index":0,"text":"{_TOKEN}","logprobs":null,"finish_reason":null,"stop_reason":null}}],"usage":null}}\n\n'  # fmt: skip
            last = head + f'{{"index":0,"text":"{_TOKEN}","logprobs":null,"finish_reason":"{finish}","stop_reason":null}}],"usage":null}}\n\n'  # fmt: skip
        self._token = framed(token.encode())
        self._last = framed(last.encode())
        self._tail = b""
        if wants_usage:
            usage = head + f'],"usage":{_usage(prompt, tokens)}}}\n\n'
            self._tail = framed(usage.encode())
        self._tail += framed(b"data: [DONE]\n\n")
        self._held = (name, prompt + tokens, params)
        connection.begin_events()
        if start:
            connection.write(framed(start.encode()))
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        connection = self._connection
        if connection.transport.is_closing():
            return
        if connection.is_full:
            connection.on_resume = self._step
            return
        if self._left > 1:
            self._left -= 1
            connection.write(self._token)
            if self._interval_s:
                self._loop.call_later(self._interval_s, self._step)
            else:
                self._loop.call_soon(self._step)
            return
        self._engine.hold(*self._held)
        connection.write(self._last)
        connection.write(self._tail)
        connection.end_events()


def _usage(prompt: int, tokens: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + tokens},"completion_tokens":{tokens},'
        '"prompt_tokens_details":null}'
    )


@lru_cache(16_384)
def _block_ids(first: int, blocks: int) -> str:
    return "[" + ",".join(map(str, range(first, first + blocks))) + "]"
