"""The attacks of `hostile.py`: what each does, and what has to come of it.

Each is bounded in time and number, and talks to addresses of this machine alone.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import signal
import socket
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import zmq
import zmq.asyncio
from raw_server import RawServer, whole
from scene import ATTACKER_KEY, ENGINE_KEY, Reply, Scene, parsed

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
)  # fmt: skip
MIB = 2**20
BACK_S = 12.0
"For what an attack has brought down to be up again."


@dataclass(frozen=True)
class Outcome:
    """What came of an attack, beside what the innocent tenant saw.

    Attributes:
        said: in a few words.
        held: what was attacked did what it should.
    """

    said: str
    held: bool = True


Run = Callable[[Scene], Awaitable[Outcome]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        about: one line.
        is_fast: see `scene.scene`.
        settings, limits: of the router, and of the attacking tenant.
        redis: options of the server.
        rss_mib: by which the router may grow.
        spares_reuse: the innocent tenant's reuse must not suffer either.
        seconds: after which it is over, whatever it has done.
    """

    name: str
    about: str
    run: Run
    is_fast: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    redis: tuple[str, ...] = ()
    rss_mib: float = 256.0
    spares_reuse: bool = True
    seconds: float = 120.0


ATTACKS: dict[str, Attack] = {}


def attack(name: str, **fields: Any) -> Callable[[Run], Run]:
    """Put a function into the table; its docstring says what it does."""

    def add(run: Run) -> Run:
        ATTACKS[name] = Attack(name, (run.__doc__ or "").strip(), run, **fields)
        return run

    return add


def _counted(replies: Iterable[object]) -> str:
    return ", ".join(
        f"{said} x {times}" if times > 1 else str(said) for said, times in Counter(map(str, replies)).items()
    )


def _answered(replies: list[Reply], *allowed: int) -> Outcome:
    """Each was answered, with one of these statuses if any are given, and never failed."""
    held = all(reply.status in allowed if allowed else 200 <= reply.status < 500 for reply in replies)
    return Outcome(_counted(replies), held)


@attack("none")
@attack("none-fast", is_fast=True)
async def none(scene: Scene) -> Outcome:
    """nothing: what this machine makes of the figures"""
    await asyncio.sleep(6)
    return Outcome("")


# -- bodies

_CHAT_HEAD = b'{"model":"stub","max_tokens":4,"messages":['


def _chat_of(item: bytes, count: int) -> bytes:
    return _CHAT_HEAD + item * (count - 1) + item.rstrip(b",") + b"]}"


@attack("messages-gzip", is_fast=True)
async def messages_gzip(scene: Scene) -> Outcome:
    """3,500,000 messages in 10 KB of gzip"""
    body = gzip.compress(_chat_of(b"{},", 3_500_000))
    return _answered([await scene.ask("POST", CHAT, body, {"Content-Encoding": "gzip"})])


@attack("messages-plain", is_fast=True)
async def messages_plain(scene: Scene) -> Outcome:
    """7,000,000 messages in 20 MiB, as they are"""
    return _answered([await scene.ask("POST", CHAT, _chat_of(b"{},", 7_000_000))])


@attack("messages-full", is_fast=True, rss_mib=512)
async def messages_full(scene: Scene) -> Outcome:
    """7,500 messages of 4 KB each, four requests of it at a time"""
    item = b'{"role":"user","content":"%b"},' % (b"word " * 800)
    body = _chat_of(item, 7_500)
    return _answered(await asyncio.gather(*(scene.ask("POST", CHAT, body) for _ in range(4))))


@attack("tools", is_fast=True, rss_mib=512)
async def tools(scene: Scene) -> Outcome:
    """40 MiB of tools"""
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}},'
    body = (
        _CHAT_HEAD
        + b'{"role":"user","content":"Hello"}],"tools":['
        + tool * (40 * MIB // len(tool))
        + tool[:-1]
        + b"]}"
    )
    return _answered([await scene.ask("POST", CHAT, body)])


@attack("large", is_fast=True, rss_mib=512)
async def large(scene: Scene) -> Outcome:
    """60 MiB of what each endpoint takes, many small pieces of it"""
    part = b'{"type":"text","text":"a"},'
    parts = b"[" + part * (60 * MIB // len(part)) + part[:-1] + b"]"
    items = b"[" + b'{"role":"user","content":"a"},' * (2 * MIB) + b'{"role":"user","content":"a"}]'
    numbers = b"[" + b"1," * (30 * MIB) + b"1]"
    message = b'{"messages":[{"role":"user","content":%b}],"max_tokens":1}' % parts
    bodies = [
        (CHAT, message), (COMPLETIONS, b'{"prompt":%b,"max_tokens":1}' % numbers),
        (RESPONSES, b'{"input":%b}' % items), (MESSAGES, message), ("/tokenize", message),
        ("/detokenize", b'{"tokens":%b}' % numbers), ("/v1/messages/count_tokens", message),
        ("/v1/embeddings", b'{"input":%b}' % numbers),
    ]  # fmt: skip
    replies = [await scene.ask("POST", path, body) for path, body in bodies]
    # The stub engines behind it have not all of these endpoints.
    return _answered(replies)


@attack("within", is_fast=True, rss_mib=640)
async def within(scene: Scene) -> Outcome:
    """as much as a request may have: 30 MiB in 19,000 messages, 950,000 values, one text of 30 MiB; two at a time"""
    said = b'{"role":"user","content":"%b"},'
    messages = _chat_of(said % (b"word " * 320), 19_000)
    tool = b'{"type":"function","function":{"name":"f","description":"d"}},'
    tools = _CHAT_HEAD + said[:-1] % b"Hello" + b'],"tools":[' + tool * 150_000 + tool[:-1] + b"]}"
    numbers = b"[" + b"11," * 950_000 + b"11]"
    text = _CHAT_HEAD + said[:-1] % (b"word " * (6 * MIB)) + b"]}"
    part = b'{"type":"text","text":"a"},' * 200_000
    parts = _CHAT_HEAD + b'{"role":"user","content":[%b]}]}' % part[:-1]
    bodies = [
        (CHAT, messages), (CHAT, tools), (CHAT, text), (CHAT, parts), (RESPONSES, messages.replace(b"messages", b"input")),
        (MESSAGES, messages), (COMPLETIONS, b'{"prompt":%b,"max_tokens":1}' % numbers), ("/tokenize", messages),
    ]  # fmt: skip
    replies = []
    for path, body in bodies:
        replies += await asyncio.gather(*(scene.ask("POST", path, body) for _ in range(2)))
    return _answered(replies)


@attack("bomb-no-key", is_fast=True)
async def bomb_no_key(scene: Scene) -> Outcome:
    """five gzip bombs of 510 KB, 500 MiB each, without a key"""
    body = _bomb(500)
    headers = {"Content-Encoding": "gzip"}
    asked = (scene.ask("POST", CHAT, body, headers, key="") for _ in range(5))
    return _answered(await asyncio.gather(*asked), 401)


@attack("bomb", is_fast=True, rss_mib=320)
async def bomb(scene: Scene) -> Outcome:
    """ten gzip bombs of 204 KB, 200 MiB each, with a key"""
    body = _bomb(200)
    headers = {"Content-Encoding": "gzip"}
    asked = (scene.ask("POST", CHAT, body, headers) for _ in range(10))
    return _answered(await asyncio.gather(*asked), 413, 415, 429)


@attack("bomb-within", is_fast=True, rss_mib=640)
async def bomb_within(scene: Scene) -> Outcome:
    """twenty bodies of 30 KB that become 30 MiB, just within the limit, on all endpoints, those that refuse too"""
    body = _bomb(30)
    headers = {"Content-Encoding": "gzip"}
    paths = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize", "/v1/embeddings", "/nowhere"]
    asked = (scene.ask("POST", paths[number % len(paths)], body, headers) for number in range(20))
    return _answered(await asyncio.gather(*asked))


def _bomb(mib: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(mib)), packer.flush()])


@attack("encodings", is_fast=True)
async def encodings(scene: Scene) -> Outcome:
    """bodies in zstd (a bomb, too), br, deflate, gzip twice, and with wrong labels"""
    plain = _chat_of(b'{"role":"user","content":"Hello"},', 1)
    bodies = {
        "zstd": _zstd(plain), "br": b"\x0b\x02\x80" + plain[:5] + b"\x03", "gzip": plain,
        "deflate": b"no deflate", "gzip, gzip": gzip.compress(gzip.compress(plain)), "whatever": plain,
    }  # fmt: skip
    replies = {
        name: await scene.ask("POST", CHAT, body, {"Content-Encoding": name}) for name, body in bodies.items()
    }
    replies["zstd bomb"] = await scene.ask("POST", CHAT, _zstd_bomb(500), {"Content-Encoding": "zstd"})
    wrong = [name for name, reply in replies.items() if reply.status not in (200, 400, 413, 415)]
    wrong += [name for name, reply in replies.items() if reply.status >= 400 and not reply.is_error_object]
    said = _counted(replies.values())
    return Outcome(f"{said}; no error object: {', '.join(wrong)}" if wrong else said, not wrong)


def _zstd(data: bytes) -> bytes:
    """A frame of one raw block (RFC 8878, 3.1.1)."""
    return (
        b"\x28\xb5\x2f\xfd\xa0"
        + len(data).to_bytes(4, "little")
        + (len(data) << 3 | 1).to_bytes(3, "little")
        + data
    )


def _zstd_bomb(mib: int) -> bytes:
    """Blocks of one byte, each to be repeated 128 KiB times."""
    block = (2**17 << 3 | 2).to_bytes(3, "little") + b"\0"
    last = (2**17 << 3 | 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * (8 * mib - 1) + last


# -- connections

_HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER_KEY}\r\nContent-Type: application/json\r\n"


async def _crowd(scene: Scene, count: int, data: bytes = b"") -> list[Connection]:
    """So many connections, as far as they can be had."""
    found = []
    for start in range(0, count, 100):
        made = await asyncio.gather(
            *(asyncio.wait_for(scene.connect(data), 5) for _ in range(start, min(start + 100, count))),
            return_exceptions=True,
        )
        found += [each for each in made if not isinstance(each, BaseException)]
    return found


async def _closed(readers: Iterable[asyncio.StreamReader], within_s: float) -> tuple[int, float]:
    """How many of these the router has closed, at the latest after so long; and when the last."""
    began, last = time.monotonic(), 0.0

    async def end(reader: asyncio.StreamReader) -> bool:
        nonlocal last
        with suppress(OSError):
            while await reader.read(2**16):
                pass
        last = time.monotonic() - began
        return True

    tasks = [asyncio.create_task(end(reader)) for reader in readers]
    done, rest = await asyncio.wait(tasks, timeout=within_s)
    for task in rest:
        task.cancel()
    return len(done), last


async def all_up(scene: Scene) -> bool:
    """All engines that are not drained are up, sooner or later."""
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        states = await scene.states()
        if states and all(state in ("up", "draining") for state in states.values()):
            return True
        await asyncio.sleep(0.2)
    return False


async def _stay(scene: Scene, seconds: float) -> str:
    """What an engine was, apart from up, in this time; empty if nothing else."""
    seen: set[str] = set()
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        seen |= set((await scene.states()).values()) or {"not known"}
    return ", ".join(sorted(seen - {"up", "draining"}))


@attack("silent")
async def silent(scene: Scene) -> Outcome:
    """1,200 connections that say nothing, without a key, before 1,024 descriptors"""
    crowd = await _crowd(scene, 1200)
    worse = await _stay(scene, 8)
    return Outcome(f"{len(crowd)} connections" + (f", engines {worse}" if worse else ""), not worse)


@attack("idle")
async def idle(scene: Scene) -> Outcome:
    """1,200 connections that are kept after one answer"""
    crowd = await _crowd(scene, 1200, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    worse = await _stay(scene, 8)
    return Outcome(f"{len(crowd)} connections" + (f", engines {worse}" if worse else ""), not worse)


@attack("half-head")
async def half_head(scene: Scene) -> Outcome:
    """300 heads that go on for ever, a byte a second"""
    crowd = await _crowd(scene, 300, b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    async with _trickling(crowd):
        closed, last = await _closed([reader for reader, _ in crowd], 45)
    if closed == len(crowd):
        return Outcome(f"all closed after {last:.0f} s")
    return Outcome(f"{len(crowd) - closed} open after 45 s", False)


@attack("slow-body")
async def slow_body(scene: Scene) -> Outcome:
    """200 bodies of a megabyte, a byte a second: half of them with a key, half without, which is a 401 at once"""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n"
    with_key = await _crowd(scene, 100, f"{head}Authorization: Bearer {ATTACKER_KEY}\r\n\r\n{{".encode())
    without = await _crowd(scene, 100, f"{head}\r\n{{".encode())
    async with _trickling([*with_key, *without]):
        answers = await asyncio.gather(*(_first(reader, 8) for reader, _ in without))
    refused = sum(parsed(answer).status == 401 for answer in answers)
    return Outcome(f"{refused} of 100 without a key refused in 8 s", refused == 100)


@asynccontextmanager
async def _trickling(crowd: Iterable[Connection]) -> AsyncIterator[None]:
    """A byte a second over each connection, as long as the block runs."""
    task = asyncio.create_task(_trickle([writer for _, writer in crowd]))  # noqa: RUF006
    try:
        yield
    finally:
        task.cancel()


async def _trickle(writers: list[asyncio.StreamWriter]) -> None:
    while True:
        await asyncio.sleep(1)
        for writer in writers:
            if not writer.is_closing():
                writer.write(b" ")


async def _first(reader: asyncio.StreamReader, within_s: float) -> bytes:
    with suppress(OSError, TimeoutError):
        return await asyncio.wait_for(reader.read(2**16), within_s)
    return b""


@attack("pipelining", is_fast=True, rss_mib=64)
async def pipelining(scene: Scene) -> Outcome:
    """200 MB of requests' heads in a pipeline behind a stream, on four connections"""
    body = b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"stream":true,"max_tokens":100000000}'
    first = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
    more = (
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 8000) for n in range(8))
        + b"\r\n"
    )
    sent = [0] * 4

    async def send(number: int) -> None:
        with suppress(OSError):
            _, writer = await scene.connect(first)
            await asyncio.sleep(0.5)
            while sent[number] < 50_000_000:
                writer.write(more)
                sent[number] += len(more)
                await writer.drain()

    with suppress(TimeoutError):
        async with asyncio.timeout(10):
            await asyncio.gather(*(send(number) for number in range(4)))
    return Outcome(f"{sum(sent) / MIB:.0f} MiB taken")


@attack("half-closed")
async def half_closed(scene: Scene) -> Outcome:
    """20 clients that close their side when they have asked; each has to get its answer"""
    complete = 0
    for number in range(20):
        wants = b',"stream":true' if number % 2 else b""
        body = b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"max_tokens":32%b}' % wants
        reader, writer = await scene.connect(
            f"{_HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        writer.write_eof()
        with suppress(OSError, TimeoutError):
            answer = await asyncio.wait_for(reader.read(-1), 10)
            complete += parsed(answer).status == 200 and (not wants or b"[DONE]" in answer)
    return Outcome(f"{complete} of 20 answered", complete == 20)


@attack("stops-reading", is_fast=True, settings={"idle_timeout_s": 3.0, "send_timeout_s": 3.0})
async def stops_reading(scene: Scene) -> Outcome:
    """20 clients that stop reading in the last 256 KiB of an answer: given up, sooner or later"""
    crowd = await asyncio.gather(*(_unread(scene, 1000) for _ in range(20)))
    await asyncio.sleep(20)
    left = _peers(scene, crowd)
    return Outcome(f"{left} of 20 open after 20 s", left == 0)


@attack("slow-readers", is_fast=True, settings={"idle_timeout_s": 3.0, "send_timeout_s": 3.0}, rss_mib=64)
async def slow_readers(scene: Scene) -> Outcome:
    """20 clients that read a kilobyte a second of endless streams, and then nothing; the engines have to be free after"""
    crowd = await asyncio.gather(*(_unread(scene, 100_000_000) for _ in range(20)))
    for _ in range(5):
        await asyncio.sleep(1)
        for each in crowd:
            with suppress(OSError):
                each.recv(1024, socket.MSG_DONTWAIT)
    await asyncio.sleep(20)
    left, busy = _peers(scene, crowd), await _busy(scene)
    return Outcome(f"{left} of 20 open after 20 s, {busy} at the engines", left == 0 and busy == 0)


async def _unread(scene: Scene, tokens: int) -> socket.socket:
    """A client's socket with a stream of so many tokens, of which nothing is read."""
    client = socket.socket()
    scene.stack.callback(client.close)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    body = (
        b'{"model":"stub","messages":[{"role":"user","content":"Hello"}],"stream":true,"max_tokens":%d}'
        % tokens
    )
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", scene.port))
    await loop.sock_sendall(client, f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def _peers(scene: Scene, crowd: Iterable[socket.socket]) -> int:
    """Clients whose connections the router still has."""
    mine = {each.getsockname()[1] for each in crowd}
    connections = psutil.Process(scene.pid).net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port in mine for each in connections)


async def _busy(scene: Scene) -> int:
    """Requests at the engines that take new ones, as the router counts them, but for the innocent tenant's."""
    least = 1000
    for _ in range(20):
        listed = (await scene.operate("GET", "/admin/engines")).json or {"data": []}
        least = min(least, sum(each["in_flight"] for each in listed["data"] if each["name"] in ("d0", "d1")))
        await asyncio.sleep(0.1)
    return least


# -- state


@attack("cursors")
async def cursors(scene: Scene) -> Outcome:
    """listings after cursors that no page ends with: not a number, infinite, huge, junk"""
    given = [
        "k8t_-AAAAAAAAKF0oWk=", _cursor(b"\xcb\x7f\xf0" + bytes(6)), _cursor(b"\xcb\xff\xf0" + bytes(6)),
        _cursor(b"\xcb\x7f\xef" + b"\xff" * 6), _cursor(b"\xcf" + b"\xff" * 8), "k8t_", "\u00e9", "=", "a" * 9000,
        base64.urlsafe_b64encode(b"\x91" * 6000).decode(), base64.urlsafe_b64encode(b"\x93\xcb" + bytes(8) + b"\xa3a\x00b\xa3\x00\r\n").decode(),
    ]  # fmt: skip
    replies = []
    for _ in range(3):
        for each in given:
            path = f"/v1/conversations?after={each}".encode().decode("latin-1")
            replies.append(
                await scene.ask("GET", path.replace("\u00e9", "%C3%A9").replace("\u00c3\u00a9", "%C3%A9"))
            )
    return _answered(replies, 200, 400)


def _cursor(number: bytes) -> str:
    return base64.urlsafe_b64encode(b"\x93" + number + b"\xa1t\xa1i").decode()


@attack("listings", limits={"max_in_flight": 4})
async def listings(scene: Scene) -> Outcome:
    """16 listings of 1,000 conversations at a time, for six seconds, by a tenant that may have four requests at a time"""
    await _many(scene, 1000, 4, lambda number: scene.chat(f"{number}", conversation_id=f"mine-{number}"))
    until = time.monotonic() + 6
    replies: list[Reply] = []

    async def ask() -> None:
        while time.monotonic() < until:
            replies.append(await scene.ask("GET", "/v1/conversations?limit=1000"))
            if replies[-1].status == 429:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(ask() for _ in range(16)))
    return _answered(replies, 200, 429)


async def _many(
    scene: Scene, count: int, at_once: int, ask: Callable[[int], Awaitable[Reply]]
) -> list[Reply]:
    """So many requests, a few at a time."""
    numbers, replies = iter(range(count)), []

    async def one_after_the_other() -> None:
        for number in numbers:
            replies.append(await ask(number))

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return replies


@attack(
    "responses", settings={"responses_max_bytes": 24 * MIB},
    redis=("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl"),
)  # fmt: skip
async def responses(scene: Scene) -> Outcome:
    """40 stored responses of 2 MB, where 24 MiB are to be kept, into a Redis that has 64 MiB: nothing is evicted"""
    for number in range(40):
        script = [(0.0, event) for event in _events(f"resp_{number}", 2_000_000)]
        await scene.fault(path=RESPONSES, contains=f"FILL {number}.", hop="decode", script=script, times=None)
    before = scene.redis.client.info("stats")["evicted_keys"]
    replies = await _many(scene, 40, 4, lambda number: _response(scene, number))
    evicted = scene.redis.client.info("stats")["evicted_keys"] - before
    used = scene.redis.client.info("memory")["used_memory"] / MIB
    outcome = _answered(replies, 200, 413, 429, 507)
    return Outcome(f"{outcome.said}; {used:.0f} MiB in Redis, {evicted} keys evicted", outcome.held)


def _events(id: str, size: int) -> list[str]:
    """An answer of so many bytes, as `/v1/responses` streams it."""
    text = {"type": "output_text", "text": "a" * size, "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
    whole = {"id": id, "object": "response", "created_at": 1, "model": "stub", "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": {**whole, "status": "completed", "output": [item]}},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


async def _response(scene: Scene, number: int) -> Reply:
    body = {"model": "stub", "input": f"FILL {number}.", "stream": True}
    return await scene.ask(
        "POST", RESPONSES, json.dumps(body).encode(), {"X-Conversation-ID": f"fill-{number}"}
    )


@attack("identities", settings={"identity_capacity": 500})
async def identities(scene: Scene) -> Outcome:
    """600 one-off requests that name no conversation, where 500 are remembered"""
    return _answered(
        await _many(scene, 600, 8, lambda number: scene.chat(f"{number} {os.urandom(8).hex()}")), 200
    )


@attack("one-off", rss_mib=128)
async def one_off(scene: Scene) -> Outcome:
    """5,000 one-off requests, each of which is held for"""
    return _answered(
        await _many(scene, 5000, 16, lambda number: scene.chat(f"{number} {os.urandom(8).hex()}")), 200
    )


# -- engines


@attack("failing")
async def failing(scene: Scene) -> Outcome:
    """30 requests at once that every engine answers with 500"""
    await scene.fault(times=None, contains="POISON", status=500)
    replies = await _many(scene, 30, 30, lambda _: scene.chat("POISON"))
    return await _ejected(scene, replies)


@attack("failing-late")
async def failing_late(scene: Scene) -> Outcome:
    """60 requests at once with which every decode engine breaks off, before or after its first byte"""
    await scene.fault(times=None, contains="BEFORE", hop="decode", drop="before_status")
    await scene.fault(times=None, contains="WITHIN", hop="decode", error_after=2)
    words = ["BEFORE", "WITHIN"]
    replies = await _many(scene, 60, 60, lambda n: scene.chat(words[n % 2], stream=bool(n % 2)))
    return await _ejected(scene, replies)


@attack("long-answers", settings={"first_byte_timeout_s": 2.0})
async def long_answers(scene: Scene) -> Outcome:
    """16 answers at once that are not streamed and take longer than first_byte_timeout_s"""
    await scene.fault(times=None, contains="LONG", hop="decode", answer_delay_s=4.0)
    replies = await _many(scene, 16, 16, lambda _: scene.chat("LONG"))
    return await _ejected(scene, replies)


async def _ejected(scene: Scene, replies: list[Reply]) -> Outcome:
    """No engine was put out for it."""
    listed = (await scene.operate("GET", "/admin/engines")).json or {"data": []}
    out = [each["name"] for each in listed["data"] if each["ejections"] or each["state"] == "ejected"]
    said = _counted(replies)
    return Outcome(f"{said}; ejected: {', '.join(out)}" if out else said, not out)


@attack("tell-tale")
async def tell_tale(scene: Scene) -> Outcome:
    """event keys of one's own requests, read off the events: they must not tell the next one's"""
    hears = _subscriber(scene, [each["events"] for each in scene.engines if each["role"] == "decode"])
    keys: list[bytes] = []

    async def listen() -> None:
        while True:
            topic = (await hears.recv_multipart())[0]
            if topic != b"hello":
                keys.append(topic)

    task = asyncio.create_task(listen())
    await asyncio.sleep(1)
    for number in range(20):
        await scene.chat(f"Hello {number}")
    await asyncio.sleep(1)
    task.cancel()
    common = os.path.commonprefix(keys)  # noqa: RUF071  (of bytes, not of paths)
    tails = {key[len(common) :] for key in keys}
    counts = (
        bool(keys)
        and all(tail.isdigit() for tail in tails)
        and max(map(int, tails)) - min(map(int, tails)) < 10 * len(tails)
    )
    return Outcome(
        "keys count up" if counts else f"{len(tails)} keys, at random", not counts and len(tails) > 1
    )


def _subscriber(scene: Scene, addresses: list[str]) -> zmq.asyncio.Socket:
    """A socket that hears all events of these engines, as whoever reaches their ports can."""
    hears = _socket(scene, zmq.SUB)
    hears.subscribe(b"")
    for address in addresses:
        hears.connect(address)
    return hears


def _socket(scene: Scene, kind: int) -> zmq.asyncio.Socket:
    context = zmq.asyncio.Context()
    scene.stack.callback(context.destroy, linger=0)
    return context.socket(kind)


def _nested(head: bytes = b"\x91", depth: int = 100_000) -> bytes:
    """MessagePack that many levels deep."""
    return head * depth + b"\xc0"


@attack("nested-event")
async def nested_event(scene: Scene) -> Outcome:
    """what is no event, nested 100,000 levels deep, in an engine's place: the router has to hear on"""
    hears = _subscriber(scene, [scene.engines[1]["events"]])
    speaks = _socket(scene, zmq.PUB)
    port = speaks.bind_to_random_port("tcp://127.0.0.1")
    hello: list[bytes] = await hears.recv_multipart()
    version = hello[-1][:1]
    junk = [
        version + _nested(), version + _nested(b"\x81\xa1a"), version + b"\x84\xa4type\xa5hello\xa5about" + _nested() + b"\xa3seq\x01\xa1a" + _nested(),
        hello[-1][:-1] + _nested(), b"", b"\xff", version + b"\xc1", version + b"\x81\xa4type\xa5" + b"\xff" * 5,
    ]  # fmt: skip

    async def say(method: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        content = b'{"object":"list","data":[{"id":"stub"}]}' if "models" in method else b""
        writer.write(whole(content))

    async with RawServer(say) as server:
        evil = {"name": "evil", "role": "prefill", "url": server.url, "events": f"tcp://127.0.0.1:{port}"}
        reply = await scene.operate(
            "POST", "/admin/engines", json.dumps({"engines": [*scene.engines, evil]}).encode()
        )
        if reply.status != 202:
            return Outcome(f"operators cannot add an engine: {reply}", False)

        await _taken_in(scene)

        async def relay() -> None:
            while True:
                await speaks.send_multipart(await hears.recv_multipart())

        task = asyncio.create_task(relay())
        try:
            if not await _heard(scene, 5):
                return Outcome("never heard", False)
            for each in junk * 3:
                await speaks.send_multipart([b"hello", each])
            await asyncio.sleep(7)  # longer than an engine's last event counts
            deaf = not await _heard(scene, 5)
        finally:
            task.cancel()
    return Outcome("deaf after" if deaf else "heard on", not deaf)


async def _taken_in(scene: Scene) -> None:
    """The attacker's engine is known, and the router sends nothing to it."""
    async with asyncio.timeout(10):
        while "evil" not in await scene.states():  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.01)
    await scene.drain("evil")


async def _heard(scene: Scene, within_s: float) -> bool:
    """The router hears the attacker's engine."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        listed = (await scene.operate("GET", "/admin/engines")).json or {"data": []}
        if any(each["name"] == "evil" and each["events"] for each in listed["data"]):
            return True
        await asyncio.sleep(0.2)
    return False


_PUBLISHER = """
import sys, time
from carryback_vllm.events import Publisher
publisher = Publisher(sys.argv[1], "engine", capacity=1000)
print("ready", flush=True)
while True: time.sleep(1)
"""


@attack("nested-go")
async def nested_go(scene: Scene) -> Outcome:
    """what is no `Go`, nested 100,000 levels deep, to an engine's publisher: it has to go on"""
    process, hears, speaks, version = await _publisher(scene)
    for junk in (
        _nested(),
        _nested(b"\x81\xa1a"),
        b"\x82\xa4type\xa2go\xa3key" + _nested(),
        b"",
        b"\xc1" * 9,
    ):
        await speaks.send(b"\x02" + version + junk)
    await asyncio.sleep(1)
    with suppress(zmq.Again):
        while True:
            await hears.recv_multipart(zmq.NOBLOCK)
    goes_on = process.status() != psutil.STATUS_ZOMBIE and await _hears_one(hears)
    return Outcome("goes on" if goes_on else "the publisher is silent", goes_on)


@attack("told")
async def told(scene: Scene) -> Outcome:
    """50 `Go`s with keys of 8 MB to an engine's publisher"""
    process, hears, speaks, version = await _publisher(scene)
    before = process.memory_info().rss
    size = 8_000_000
    for number in range(50):
        key = b"%04d" % number + b"k" * (size - 4)
        message = b"\x83\xa4type\xa2go\xa3key\xdb" + size.to_bytes(4, "big") + key + b"\xa6params\xc4\x02{}"
        await speaks.send(b"\x02" + version + message)
        await asyncio.sleep(0.1)
    await asyncio.sleep(2)
    goes_on = process.status() != psutil.STATUS_ZOMBIE and await _hears_one(hears)
    grown = (process.memory_info().rss - before) / MIB if goes_on else 0
    return Outcome(
        f"+{grown:.0f} MiB at the engine" if goes_on else "the publisher is silent", goes_on and grown < 150
    )


async def _publisher(scene: Scene) -> tuple[psutil.Process, zmq.asyncio.Socket, zmq.asyncio.Socket, bytes]:
    """An engine's publisher, a socket that hears it, one that speaks to it, and the version of its events."""
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    probe.close()
    process = scene.start("publisher", _PUBLISHER, address)
    hears, speaks = _subscriber(scene, [address]), _socket(scene, zmq.XSUB)
    speaks.connect(address)
    try:
        hello = await asyncio.wait_for(hears.recv_multipart(), 20)
    except TimeoutError as error:
        raise RuntimeError(scene.read("publisher.log")) from error
    await asyncio.sleep(0.5)
    return process, hears, speaks, hello[-1][:1]


async def _hears_one(hears: zmq.asyncio.Socket) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(hears.recv_multipart(), 3)
        return True
    return False


# -- the operators' port, and Redis


@attack("rebinding")
async def rebinding(scene: Scene) -> Outcome:
    """a page of evil.example, in an operator's browser, whose name has become 127.0.0.1; and one of another site"""
    rebound = {"Host": f"evil.example:{scene.admin_port}"}
    cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Referer": "http://evil.example/"}
    async with RawServer(_engine_of_evil) as server:
        engines = json.dumps({"engines": [*scene.engines, _evil(server)]}).encode()
        origin = {
            **rebound,
            "Origin": f"http://evil.example:{scene.admin_port}",
            "Sec-Fetch-Site": "same-origin",
        }
        replies = [
            await scene.operate("GET", path, b"", headers)
            for headers in (rebound, cross)
            for path in ("/admin/conversations", "/admin/engines", "/metrics", "/admin/live")
        ]
        replies.append(await scene.operate("POST", "/admin/engines", engines, origin))
        replies.append(
            await scene.operate("POST", "/admin/reload", b"", {**cross, "Content-Type": "text/plain"})
        )
        replies.append(
            await scene.operate(
                "POST", "/admin/engines/d0/drain", b"", {**rebound, "Content-Type": "text/plain"}
            )
        )
        leaked = await _leaked(server)
    wrong = [reply for reply in replies if not 400 <= reply.status < 500]
    return Outcome(_counted(replies) + leaked, not wrong and not leaked)


def _evil(server: RawServer) -> dict[str, str]:
    return {"name": "evil", "role": "decode", "url": server.url, "events": "tcp://127.0.0.1:9"}


async def _engine_of_evil(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"object":"list","data":[{"id":"stub"}]}' if "models" in target else b"{}"))


async def _leaked(server: RawServer) -> str:
    """What an engine of the attacker's has been sent, if anything."""
    await asyncio.sleep(3)
    heads = b"".join(head for _, head, _ in server.requests)
    found = ["the engines' key leaked"] if ENGINE_KEY.encode() in heads else []
    found += ["prompts leaked"] if any(target.startswith("POST") for target, _, _ in server.requests) else []
    found += ["probed"] if server.requests and not found else []
    return "".join(f"; {each}" for each in found)


@attack("publish", spares_reuse=False)
async def publish(scene: Scene) -> Outcome:
    """whoever reaches Redis says that an operator gave the routers an engine of his"""
    heard = scene.redis.client.pubsub()
    heard.psubscribe("*")
    reply = await scene.operate("POST", "/admin/engines", json.dumps({"engines": scene.engines}).encode())
    channels = {channel.decode() for channel in scene.redis.client.pubsub_channels()}
    said: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        message = await asyncio.to_thread(heard.get_message, timeout=0.2)
        if message and message["type"] == "pmessage":
            said.append((message["channel"].decode(), message["data"]))
    heard.close()
    async with RawServer(_engine_of_evil) as server:
        plain = json.dumps({"engines": [*scene.engines, _evil(server)]}).encode()
        # As it was said, with another address in it, as long as the right one.
        forged = [
            (channel, data.replace(scene.engines[3]["url"][-5:].encode(), server.url[-5:].encode()))
            for channel, data in said
        ]
        for channel in channels:
            forged.append((channel, plain))
        for channel, data in forged:
            scene.redis.client.publish(channel, data)
        leaked = await _leaked(server)
    said_all = f"{len(forged)} forged messages{leaked or ' ignored'}"
    return Outcome(
        said_all if reply.status == 202 else f"operators: {reply}; {said_all}",
        not leaked and reply.status == 202,
    )


@attack("redis-junk", spares_reuse=False)
async def redis_junk(scene: Scene) -> Outcome:
    """whoever reaches Redis writes junk into every value, and publishes it"""
    redis = scene.redis.client
    deep = _nested()
    replies = []
    for number in range(20):
        await scene.chat("Hello", conversation_id=f"junk-{number}")
    for junk in (deep, b"\xff\xfe", b"", b"nan", b"\x93\xc0\xc0\xc0", b"1e999"):
        for key in redis.keys("*"):
            kind = redis.type(key)
            if kind == b"hash":
                for name in redis.hkeys(key):
                    redis.hset(key, name, junk)
            elif kind == b"string":
                redis.set(key, junk)
            elif kind == b"zset":
                redis.zadd(key, {junk[:100]: 1e300, b"attacker\0" + junk[:100]: 2e300})
        for channel in redis.pubsub_channels():
            for message in (
                junk,
                b"[" * 100_000,
                b'{"engines":' + b"[" * 100_000,
                b'{"engines":[1]}',
                b'{"engines":{}}',
            ):
                redis.publish(channel, message)
        for number in range(0, 20, 3):
            replies.append(await scene.ask("GET", f"/v1/conversations/junk-{number}"))
            replies.append(await scene.chat("Hello", conversation_id=f"junk-{number}"))
        replies.append(await scene.ask("GET", "/v1/conversations"))
        replies.append(await scene.operate("GET", "/admin/conversations"))
    reply = await scene.operate("POST", "/admin/engines", json.dumps({"engines": scene.engines}).encode())
    listens = reply.status == 202 and bool(scene.redis.client.pubsub_channels())
    outcome = _answered(replies, 200, 404)
    return Outcome(
        outcome.said + ("" if listens else "; nobody listens to other routers"), outcome.held and listens
    )


@attack("yaml")
async def deep_yaml(scene: Scene) -> Outcome:
    """a tenants' file and settings that are nested too deeply, at SIGHUP"""
    wrong = "x: " + "[" * 3000 + "\n"
    for name in ("tenants.yaml", "router.yaml"):
        right = scene.read(name)
        scene.write(name, wrong)
        os.kill(scene.pid, signal.SIGHUP)
        await asyncio.sleep(2)
        scene.write(name, right)
    # A tenant that is added has to be known after one more signal.
    key = "sk-another-0123456789abcdef0123456789"
    scene.write("tenants.yaml", scene.read("tenants.yaml") + f"- {{name: another, keys: [{key}]}}\n")
    os.kill(scene.pid, signal.SIGHUP)
    await asyncio.sleep(1)
    reply = await scene.ask("GET", "/v1/models", key=key)
    said = "reloads" if reply.status == 200 else f"no longer reloads ({reply})"
    is_clean = "Traceback" not in scene.read("router.log")
    return Outcome(said + ("" if is_clean else "; unhandled"), reply.status == 200 and is_clean)
