"""The stub engine for benchmarks: the same bytes on the wire, and next to no work for them.

Answers are pieces prepared beforehand; the record of a prompt has as many blocks as a prompt of its size would fill, and
its digests and block ids are of the right length and mean nothing. What a decode engine has is found by the bytes of the
messages, in large blocks: the prompts that it was sent, without the answers.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Literal

import msgspec
import zmq
from carryback.wire.events import (
    HASH_BYTES,
    LEASE_S,
    Ask,
    Command,
    Done,
    Forget,
    Found,
    Held,
    Leased,
    Prefilled,
    Release,
    Released,
    ReleaseReason,
    decode,
    encode_command,
)

from stub_engine.http_server import Connection, HttpServer, Request, framed
from stub_engine.publisher import Publisher

BLOCK_SIZE = 16
# Bytes of a JSON body that make a token, roughly.
BYTES_A_TOKEN = 4
_MAX_BLOCKS = 65_536
_DIGEST_BYTES = 16
_DIGESTS = os.urandom(_MAX_BLOCKS * _DIGEST_BYTES)
_TOKEN = " token"
# Content is hashed in blocks of so many tokens, and so many bytes.
_HASHED_TOKENS = 128
_HASHED_BYTES = _HASHED_TOKENS * BYTES_A_TOKEN
_MAX_HASHES = 200_000
_ASK_TIMEOUT_S = 1.0


class _Tip(msgspec.Struct):
    tokens: int = 0
    digest: str = ""


class _Params(msgspec.Struct):
    do_remote_decode: bool = False
    carryback_key: str | None = None
    carryback_await: float | None = None
    carryback_ask: list[str] = []
    carryback_tip: _Tip | None = None
    carryback_find: bool = False
    carryback_tell: bool = False
    hold_s: float | None = None
    remote_num_tokens: int | None = None


class _Body(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str | None = None
    kv_transfer_params: _Params | None = None


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class _Pin:
    __slots__ = ("blocks", "deadline", "last")

    def __init__(self, blocks: int, deadline: float, last: bytes) -> None:
        self.blocks = blocks
        self.deadline = deadline
        self.last = last


class FastEngine:
    """An engine that costs next to nothing.

    Args:
        role: of its configuration; it serves both hops.
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
        # What it has, the latest last; of pins, their keys by their last blocks' hashes.
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self._by_last: dict[bytes, str] = {}
        self._leases: dict[str, float] = {}
        self._links: dict[str, _Link] = {}
        self._numbers = count(1)
        self._http = HttpServer(self._handle)
        self.requests = 0

    async def start(self) -> None:
        """Bind all ports."""
        self._loop = asyncio.get_running_loop()
        bracketed = f"[{self._host}]" if ":" in self._host else self._host
        self.publisher = Publisher(
            f"tcp://{bracketed}:{self._events_port}", self.id, lambda: self._pinned, self._capacity,
            leased=lambda: len(self._leases),
        )  # fmt: skip
        self.publisher.on_command = self._on_command
        self.events = self.publisher.address
        port = await self._http.start(self._host, self._port)
        self.url = f"http://{bracketed}:{port}"

    async def kill(self) -> None:
        """Close everything."""
        for link in self._links.values():
            link.close()
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
        params = body.kv_transfer_params
        if params is not None and params.carryback_key:
            if params.carryback_find:
                params.carryback_find = False
                self._say_found(params.carryback_key, request, body)
            if params.carryback_await is not None:
                told = self.publisher.of(params.carryback_key)
                told.add_done_callback(lambda told: self._go_on(told, params, request, body, connection))
                return
        is_chat = request.path == "/v1/chat/completions"
        number = request.headers.get("x-request-id") or f"{next(self._numbers):032x}"
        name = f"chatcmpl-{number}" if is_chat else f"cmpl-{number}"
        prompt = len(request.body) // BYTES_A_TOKEN
        if params is not None:
            if params.do_remote_decode:
                self._ask(name, is_chat, prompt, body, connection)
                return
            prompt = params.remote_num_tokens or prompt
        limit = body.max_completion_tokens or body.max_tokens or self._chunks
        tokens = min(limit, self._chunks)
        finish = "length" if tokens == limit else "stop"
        if body.stream:
            wants_usage = bool(body.stream_options and body.stream_options.get("include_usage"))
            _Stream(self, connection, name, is_chat, prompt, tokens, finish, wants_usage, body)
            return
        self.hold(prompt + tokens, tokens, body)
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

    # -- a prompt is computed, or what of it is elsewhere is read

    def _ask(self, name: str, is_chat: bool, prompt: int, body: _Body, connection: Connection) -> None:
        """Ask what decode engines have; then the prompt is answered."""
        params = body.kv_transfer_params
        assert params is not None
        hashes = _hashes(body)
        left = len(params.carryback_ask) if hashes else 0
        answers: list[Leased] = []
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                if timer is not None:
                    timer.cancel()
                self._prefilled(name, is_chat, prompt, hashes, answers, params, connection)

        def answered(answer: Leased) -> None:
            nonlocal left
            left -= 1
            if not is_over:
                answers.append(answer)
                if not left:
                    end()

        timer = self._loop.call_later(_ASK_TIMEOUT_S, end) if left else None
        if not left:
            end()
            return
        joined = b"".join(hashes)
        most = len(hashes) * _HASHED_TOKENS
        for address in params.carryback_ask:
            if (link := self._links.get(address)) is None:
                link = self._links[address] = _Link(address, f"ask.{self.id}")
            link.ask(joined, most, answered)

    def _prefilled(
        self, name: str, is_chat: bool, prompt: int, hashes: list[bytes], answers: list[Leased],
        params: _Params, connection: Connection,
    ) -> None:  # fmt: skip
        best = max(answers, key=lambda each: each.tokens, default=None)
        found, holder = (best.tokens, best.engine if best.tokens else "") if best is not None else (0, "")
        tip = params.carryback_tip or _Tip()
        full = tip.tokens // _HASHED_TOKENS
        expected = min(full, len(hashes)) * _HASHED_TOKENS
        own = hashes[full - 1][:_DIGEST_BYTES].hex() if 0 < full <= len(hashes) else ""
        is_changed = full > 0 and own != tip.digest
        if best is None:
            reason = "no_answer" if params.carryback_ask and hashes else "off"
        elif is_changed:
            reason = "history_changed"
        elif found < expected:
            reason = "overwritten"
        else:
            reason = "verified" if found else "new"
        reused = min(found, prompt)
        outcome = "miss" if not reused else "hit" if reason == "verified" else "partial"
        reuse = (
            f'{{"outcome":"{outcome}","tokens":{reused},"cached":0,"recomputed":{prompt - reused},'
            f'"reason":"{reason}","found":{found},"holder":"{holder}","asked":{len(answers)}}}'
        )
        blocks = min(-(-prompt // BLOCK_SIZE), _MAX_BLOCKS)
        held = self._record(name, blocks, prompt, params.hold_s or 30.0)[:-1]
        held += b',"carryback_reuse":%b}' % reuse.encode()
        if params.carryback_tell and params.carryback_key:
            self.publisher.send(Prefilled(self.id, self.publisher.next(), params.carryback_key, held))
        text = '"text":" token"' if not is_chat else '"message":{"role":"assistant","content":" token"}'
        choice = f'{text},"logprobs":null,"finish_reason":"length","stop_reason":null'
        if not connection.transport.is_closing():
            connection.respond(200, self._whole(name, is_chat, choice, prompt, 1, held))

    def _whole(self, name: str, is_chat: bool, choice: str, prompt: int, tokens: int, params: bytes) -> bytes:
        kind = "chat.completion" if is_chat else "text_completion"
        return (
            f'{{"id":"{name}","object":"{kind}","created":{int(time.time())},"model":"{self.model}",'
            f'"choices":[{{"index":0,{choice}}}],"service_tier":null,"system_fingerprint":null,'
            f'"usage":{_usage(prompt, tokens)},"prompt_logprobs":null,"kv_transfer_params":'
        ).encode() + params + b"}"  # fmt: skip

    # -- what it has

    def hold(self, tokens: int, generated: int, body: _Body) -> None:
        """Say what it has of a finished request, and pin it."""
        params = body.kv_transfer_params
        hashes = _hashes(body)
        for each in hashes:
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > _MAX_HASHES:
            self._hashes.popitem(last=False)
        if params is None or params.carryback_key is None:
            return
        hold_s = params.hold_s or 0.0
        blocks = min((tokens - 1) // BLOCK_SIZE, _MAX_BLOCKS) if hold_s > 0 and hashes else 0
        if blocks:
            for each in hashes:
                if (older := self._by_last.get(each)) is not None:
                    self._let_go(older, "covered")
            self._pins[params.carryback_key] = _Pin(blocks, time.monotonic() + hold_s, hashes[-1])
            self._by_last[hashes[-1]] = params.carryback_key
            self._pinned += blocks
        self.publisher.send(
            Held(
                self.id, self.publisher.next(), params.carryback_key, len(hashes) * _HASHED_TOKENS, blocks,
                hold_s if blocks else 0.0, hashes[-1][:_DIGEST_BYTES] if hashes else b"", self._pinned, generated,
            )
        )  # fmt: skip

    def _say_found(self, key: str, request: Request, body: _Body) -> None:
        tokens = len(request.body) // BYTES_A_TOKEN
        found = min(self._find(_hashes(body)) * _HASHED_TOKENS, tokens)
        self.publisher.send(Found(self.id, self.publisher.next(), key, tokens, found))

    def _find(self, hashes: list[bytes]) -> int:
        for number, each in enumerate(hashes):
            if each not in self._hashes:
                return number
        return len(hashes)

    def _record(self, request: str, blocks: int, tokens: int, hold_s: float) -> bytes:
        first = next(self._numbers) % 16 * 1000  # few, so that the text of most is known
        digests = base64.b64encode(_DIGESTS[: blocks * _DIGEST_BYTES])
        head = (
            f'{{"do_remote_prefill":true,"do_remote_decode":false,'
            f'"remote_block_ids":[{_block_ids(first, blocks)}],"remote_engine_id":"{self.id}",'
            f'"remote_request_id":"{request}","remote_host":"{self._host}","remote_port":1,'
            f'"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":{tokens},'
            f'"remote_blocks_expiry_time":{time.perf_counter() + hold_s},"transfer_mode":"pull",'
            '"carryback":{"digests":"'
        ).encode()
        tail = f'","v":2,"block_size":{BLOCK_SIZE},"tail":"","mac":"{"0" * 64}"}}}}'
        return head + digests + tail.encode()

    def _on_command(self, command: Command | None) -> None:
        if isinstance(command, Ask):
            hashes = [
                command.hashes[at : at + HASH_BYTES] for at in range(0, len(command.hashes), HASH_BYTES)
            ]
            found = self._find(hashes)
            if found:
                self._leases[command.lease] = time.monotonic() + LEASE_S
            record, reason = (b"{}", "") if found else (b"", "nothing")
            self.publisher.send(
                Leased(
                    self.id, command.asker, command.lease, found * _HASHED_TOKENS, record,
                    _DIGESTS[: found * _DIGEST_BYTES], reason,
                )
            )  # fmt: skip
        elif isinstance(command, Done):
            for each in command.leases:
                self._leases.pop(each, None)
        elif isinstance(command, Release):
            for each in command.keys:
                self._let_go(each, "asked")
        elif isinstance(command, Forget):
            self._hashes.clear()
            self._leases.clear()
            for each in list(self._pins):
                self._let_go(each, "void")
        elif command is None:
            now = time.monotonic()
            for each in [key for key, pin in self._pins.items() if pin.deadline <= now]:
                self._let_go(each, "expired")
            for each in [lease for lease, until in self._leases.items() if until <= now]:
                del self._leases[each]

    def _let_go(self, key: str, reason: ReleaseReason) -> None:
        if (pin := self._pins.pop(key, None)) is None:
            return
        self._pinned -= pin.blocks
        if self._by_last.get(pin.last) == key:
            del self._by_last[pin.last]
        self.publisher.send(Released(self.id, self.publisher.next(), key, reason, self._pinned))


class _Link:
    """Asks one engine what it has."""

    def __init__(self, address: str, asker: str) -> None:
        self._asker = asker
        self._waiting: dict[str, Callable[[Leased], None]] = {}
        self._numbers = count()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XSUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(address)
        self._socket.send(b"\x01" + asker.encode())
        self._descriptor: int = self._socket.FD
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._hear)

    def ask(self, hashes: bytes, most: int, answered: Callable[[Leased], None]) -> None:
        """Ask; what is found is read at once."""
        lease = f"{self._asker}.{next(self._numbers)}"
        self._waiting[lease] = answered
        self._send(Ask(self._asker, lease, hashes, _HASHED_TOKENS, most))

    def close(self) -> None:
        """Stop at once."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, command: Command) -> None:
        self._socket.send(encode_command(command), zmq.NOBLOCK)
        # Sending may take the descriptor's sign that something has come.
        self._loop.call_soon(self._hear)

    def _hear(self) -> None:
        if self._socket.closed:
            return
        with suppress(zmq.Again):
            while True:
                event = decode(self._socket.recv_multipart(zmq.NOBLOCK)[1])
                if isinstance(event, Leased):
                    if event.record:
                        self._send(Done([event.lease]))
                    if (answered := self._waiting.pop(event.lease, None)) is not None:
                        answered(event)


class _Stream:
    """One streamed answer: a write for each chunk, from callbacks of the loop, without a task."""

    def __init__(
        self, engine: FastEngine, connection: Connection, name: str, is_chat: bool, prompt: int,
        tokens: int, finish: str, wants_usage: bool, body: _Body,
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
        self._held = (prompt + tokens, tokens, body)
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


def _hashes(body: _Body) -> list[bytes]:
    """Of all full blocks of what a body asks, each over all that is before it."""
    content = memoryview(body.messages or body.prompt)
    # (In the next turn's messages other bytes follow the last of these.)
    whole = blake2b((body.cache_salt or "").encode(), digest_size=HASH_BYTES)
    hashes = []
    for start in range(0, len(content) - _HASHED_BYTES, _HASHED_BYTES):
        whole.update(content[start : start + _HASHED_BYTES])
        hashes.append(whole.copy().digest())
    return hashes


def _usage(prompt: int, tokens: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + tokens},"completion_tokens":{tokens},'
        '"prompt_tokens_details":null}'
    )


@lru_cache(16_384)
def _block_ids(first: int, blocks: int) -> str:
    return "[" + ",".join(map(str, range(first, first + blocks))) + "]"
