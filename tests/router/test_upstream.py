"""The client of the engines, against a server whose every byte the test writes."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest
from carryback_server import upstream
from carryback_server.upstream import BadAnswer, BrokeOff, ConnectFailed, IdleTimeout, Reply, Upstream
from raw_server import Handler, RawServer, whole
from service import until

Start = Callable[[Handler], Awaitable[tuple[RawServer, Upstream]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a server, and a client of it."""
    async with AsyncExitStack() as stack:

        async def begin(handle: Handler) -> tuple[RawServer, Upstream]:
            server = await stack.enter_async_context(RawServer(handle))
            client = Upstream(server.url, connect_timeout_s=5, headers={"X-Own": "1"})
            stack.callback(client.close)
            return server, client

        async with asyncio.timeout(60):
            yield begin


def answers(*writes: bytes, closes: bool = False) -> Handler:
    """Answers every request with these writes."""

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.002)  # so that each is a packet of its own
        if closes:
            writer.close()

    return handle


async def echo(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(body))


async def ask(client: Upstream, body: bytes = b"x") -> bytes:
    return await (await client.request("POST", "/v1/x", body)).read()


async def take(reply: Reply, how: str, pieces: list[bytes]) -> None:
    """All of the body, in one of the ways to take it."""
    if how == "read":
        pieces.append(await reply.read())
    elif how == "pipe":
        await reply.pipe(pieces.append, 30)
    else:
        while piece := await reply.read_some():
            pieces.append(piece)


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


async def test_a_connection_is_used_again(start: Start) -> None:
    server, client = await start(echo)
    for body in (b"one", b"", b"three"):
        assert await ask(client, body) == body
    assert server.accepted == 1


async def test_what_is_sent(start: Start) -> None:
    server, client = await start(echo)
    big = random.Random(1).randbytes(300_000)
    reply = await client.request("POST", "/v1/x?y=1", big, {"X-More": "2"})
    assert (reply.status, reply.content_type, await reply.read()) == (200, "application/json", big)
    target, head, _ = server.requests[0]
    assert target == "POST /v1/x?y=1"
    for line in (b"Host: 127.0.0.1:%d" % server.port, b"X-Own: 1", b"X-More: 2", b"Content-Length: 300000"):
        assert b"\r\n" + line + b"\r\n" in head
    await (await client.request("GET", "/health")).read()
    assert b"Content-Length" not in server.requests[1][1]


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb"])
async def test_a_header_cannot_begin_another(start: Start, value: str) -> None:
    server, client = await start(echo)
    with pytest.raises(ValueError, match="line break"):
        await client.request("GET", "/", headers={"X": value})
    assert server.requests == []


async def test_an_old_connection_is_not_used(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = await start(echo)
    await ask(client)
    monkeypatch.setattr(upstream, "KEEPALIVE_S", 0.0)
    await ask(client)
    assert server.accepted == 2
    await until(lambda: server.open == 1, "the old connection is closed")


async def test_a_connection_that_the_server_closed_is_not_used(start: Start) -> None:
    server, client = await start(answers(whole(b"1"), closes=True))
    for _ in range(3):
        assert await ask(client) == b"1"
        await until(lambda: server.open == 0, "closed")
        await until(lambda: not client._idle, "the client has seen the connection's end")
    assert server.accepted == 3


async def test_connection_close_is_heeded(start: Start) -> None:
    server, client = await start(answers(whole(b"1", more="connection: close\r\n")))
    assert await ask(client) == b"1"
    assert await ask(client) == b"1"
    assert server.accepted == 2


@pytest.mark.parametrize("how", ["read", "read_some", "pipe"])
@pytest.mark.parametrize(
    "data",
    [
        whole(b"abcdef"),
        chunked(b"abc", b"def"),
        chunked(b"abc", b"def", end=b"0\r\nX-Trailer: 1\r\n\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"abcdef"),
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + chunked(b"abcdef"),
        whole(b"abcdef", more=f"x-huge: {'h' * 60_000}\r\n"),
        whole(b"abcdef", more="".join(f"x-{number}: 1\r\n" for number in range(250))),
    ],
    ids=["length", "chunked", "trailers", "continue", "hints", "huge header", "many headers"],
)
async def test_framings_of_an_answer(start: Start, data: bytes, how: str) -> None:
    for cut in (len(data), 40, len(data) - 3):
        server, client = await start(answers(data[:cut], data[cut:]))
        for _ in range(2):
            reply = await client.request("POST", "/", b"x")
            assert reply.status == 200
            pieces: list[bytes] = []
            await take(reply, how, pieces)
            assert b"".join(pieces) == b"abcdef"
        assert server.accepted == 1


async def test_an_answer_that_ends_with_its_connection(start: Start) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
    server, client = await start(answers(head + b"abc", b"def", closes=True))
    for _ in range(2):
        assert await ask(client) == b"abcdef"
    assert server.accepted == 2


@pytest.mark.parametrize("how", ["read", "read_some", "pipe"])
@pytest.mark.parametrize(
    "data", [whole(b"abc" + b"d" * 9)[:-9], chunked(b"abc", end=b""), chunked(b"abc", end=b"5\r\nab")]
)
async def test_an_answer_that_breaks_off_is_an_error(start: Start, data: bytes, how: str) -> None:
    _, client = await start(answers(data, closes=True))
    reply = await client.request("POST", "/", b"x")
    pieces: list[bytes] = []
    with pytest.raises(BrokeOff):
        await take(reply, how, pieces)
    if how != "read":
        assert b"".join(pieces).startswith(b"abc")


NO_HTTP = [
    b"",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"HTTP/1.1 100 Continue\r\n\r\n",
]


@pytest.mark.parametrize("data", NO_HTTP)
async def test_what_is_not_http_is_an_error_and_harms_no_other_exchange(start: Start, data: bytes) -> None:
    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if body == b"bad":
            writer.write(data)
            await writer.drain()
            writer.close()
        else:
            await asyncio.sleep(0.05)
            writer.write(whole(body))

    _, client = await start(handle)
    good = [asyncio.create_task(ask(client, b"%d" % number)) for number in range(5)]
    with pytest.raises(BrokeOff):
        await ask(client, b"bad")
    assert await asyncio.gather(*good) == [b"%d" % number for number in range(5)]
    assert await ask(client, b"after") == b"after"


SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
STRANGE = [
    whole(b"", status="302 Found", more="location: /\r\n"), whole(b"x", status="300 Choices"),
    b"HTTP/1.1 304 Not Modified\r\n\r\n", whole(b"x", status="201 Created"), b"HTTP/1.1 204 No Content\r\n\r\n",
    whole(b"x", status="206 Partial"), whole(b"x", status="600 Odd"), whole(b"x", status="999 Odd"),
    SWITCH, SWITCH + b"\x81\x05hello",
    whole(b"x", more="content-encoding: br\r\n"), whole(b"x", more="content-encoding: gzip, br\r\n"),
    whole(b"x", more="content-encoding: gzip\r\ncontent-encoding: gzip\r\n"),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    whole(b"x", more="".join(f"x-{number}: 1\r\n" for number in range(300))),
    whole(b"x", more="".join(f"x-{number}: {'h' * 1000}\r\n" for number in range(80))),
]  # fmt: skip


@pytest.mark.parametrize("data", STRANGE, ids=lambda each: repr(each[:60]))
async def test_what_no_engine_answers_is_an_error_and_nothing_else(
    start: Start, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = await start(answers(data))
    with pytest.raises(BadAnswer):
        await ask(client)
    await until(lambda: server.open == 0, "its connection is closed")
    assert not caplog.records  # no traceback


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"HTTP/1.1 200 OK\r\nx-endless: ", b"h" * 10_000),
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"h" * 10_000 + b"\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 400),
        (chunked(b"abc", end=b"0\r\nx-trailer: "), b"h" * 10_000),
        (chunked(b"abc", end=b"1;extension="), b"h" * 10_000),
    ],
    ids=["header", "headers", "interim", "trailer", "chunk extension"],
)
async def test_a_head_that_never_ends_is_not_kept(start: Start, begin: bytes, more: bytes) -> None:
    sent = 0

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        while sent < 2**28:
            writer.write(more)
            await writer.drain()
            sent += len(more)

    server, client = await start(handle)
    with pytest.raises(BadAnswer, match="head"):
        await ask(client)
    await until(lambda: server.open == 0, "its connection is closed")
    assert sent < 2**25  # what was in the sockets' buffers


def bare(data: bytes) -> bytes:
    """Deflated without zlib's header, as some servers send it."""
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


SAID = b"".join(b"data: %d %r\n\n" % (number, random.Random(number).randbytes(20)) for number in range(500))
CODED = [
    ("gzip", gzip.compress(SAID)), ("x-gzip", gzip.compress(SAID)), ("GZip", gzip.compress(SAID)),
    ("gzip, identity", gzip.compress(SAID[:100]) + gzip.compress(SAID[100:])), ("deflate", zlib.compress(SAID)),
    ("deflate", zlib.compress(SAID, 1)), ("deflate", bare(SAID)), ("identity", SAID), ("", SAID), ("gzip", b""),
]  # fmt: skip


@pytest.mark.parametrize("how", ["read", "read_some", "pipe"])
@pytest.mark.parametrize(("coding", "data"), CODED)
async def test_a_compressed_answer_is_read(start: Start, coding: str, data: bytes, how: str) -> None:
    """No engine is asked for one; a mesh may compress all the same."""
    more = f"content-encoding: {coding}\r\n"
    head = f"HTTP/1.1 200 OK\r\n{more}transfer-encoding: chunked\r\n\r\n".encode()
    cuts = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    frames = [b"%x\r\n%b\r\n" % (len(each), each) for each in cuts]
    for server_answers in (answers(whole(data, more=more)), answers(head, *frames, b"0\r\n\r\n")):
        server, client = await start(server_answers)
        for _ in range(2):
            pieces: list[bytes] = []
            await take(await client.request("POST", "/", b"x"), how, pieces)
            assert b"".join(pieces) == (SAID if data else b"")
        assert server.accepted == 1
        assert b"\r\nAccept-Encoding: identity\r\n" in server.requests[0][1]


@pytest.mark.parametrize("how", ["read", "read_some", "pipe"])
@pytest.mark.parametrize(
    "data",
    [gzip.compress(SAID)[:-20], SAID, gzip.compress(SAID) + b"more", gzip.compress(bytes(2**25))],
    ids=["cut off", "plain", "with more", "bomb"],
)
async def test_what_is_not_compressed_as_it_says_is_an_error(start: Start, data: bytes, how: str) -> None:
    for closes in (False, True):
        answer = whole(data, more="content-encoding: gzip\r\n")
        if closes:  # an answer that ends with its connection
            answer = answer.replace(b"content-length", b"x-length")
        _, client = await start(answers(answer, closes=closes))
        with pytest.raises(BadAnswer, match="compressed"):
            await take(await client.request("POST", "/", b"x"), how, [])


async def test_a_body_that_is_not_chunked_as_it_says_is_an_error(start: Start) -> None:
    _, client = await start(answers(chunked(b"abc", end=b"zz\r\nabc")))
    with pytest.raises(BrokeOff):
        await ask(client)


@pytest.mark.parametrize("more", [whole(b"2"), b"HTTP/1.1 200 OK\r\n", b"HTTP", b"junk"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_what_nobody_asked_for_is_nobodys_answer(start: Start, more: bytes, is_late: bool) -> None:
    first = True

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal first
        if first:
            first = False
            writer.write(whole(body) if is_late else whole(body) + more)
            if is_late:
                asyncio.get_running_loop().call_later(0.02, writer.write, more)
        else:
            writer.write(whole(body))

    server, client = await start(handle)
    assert await ask(client, b"1") == b"1"
    if is_late:
        await until(lambda: server.open == 0, "a connection with more on it is closed")
    assert await ask(client, b"3") == b"3"
    assert server.accepted == 2


async def test_a_cancelled_exchange_ends_its_connection_and_no_other(start: Start) -> None:
    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if body == b"never":
            await asyncio.Event().wait()
        writer.write(whole(body))

    server, client = await start(handle)
    await asyncio.gather(*(ask(client, b"warm") for _ in range(2)))
    waiting = asyncio.create_task(ask(client, b"never"))
    await until(lambda: len(server.requests) == 3, "asked")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: server.open == 1, "its connection is closed")
    assert await ask(client, b"after") == b"after"
    assert server.accepted == 2


async def test_each_of_many_exchanges_gets_its_own_answer(start: Start) -> None:
    """Over connections that are used again at once, while others are cancelled or break off at any moment."""
    chance = random.Random(7)

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        fate = chance.random()
        if fate < 0.3:
            await asyncio.sleep(chance.random() / 100)
        data = whole(body) if fate < 0.7 else chunked(body)
        if fate > 0.97:
            writer.write(data[: chance.randrange(len(data))])
            writer.close()
            return
        cut = chance.randrange(len(data))
        writer.write(data[:cut])
        if fate < 0.5:
            await asyncio.sleep(0)
        writer.write(data[cut:])

    server, client = await start(handle)
    done = cut = 0

    async def one(worker: int) -> None:
        nonlocal done, cut
        for number in range(60):
            body = b"%d.%d" % (worker, number)
            patience = chance.choice([0.0, 0.001, 0.004, 30, 30, 30])
            with suppress(TimeoutError, BrokeOff):
                async with asyncio.timeout(patience):
                    reply = await client.request("POST", "/", body)
                    try:
                        if chance.random() < 0.1:
                            cut += 1
                            continue
                        assert await reply.read() == body
                        done += 1
                    finally:
                        reply.close()

    await asyncio.gather(*(one(worker) for worker in range(12)))
    assert done > 200
    assert cut > 10
    assert server.accepted < len(server.requests)
    assert await ask(client, b"last") == b"last"


async def test_an_answer_that_nobody_takes_is_not_read_on(start: Start) -> None:
    sent = 0
    piece = b"p" * 2**16
    count = 640  # 40 MiB

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (count * len(piece)))
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
            sent += 1

    _, client = await start(handle)
    reply = await client.request("POST", "/", b"x")
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.2)
    assert sent < count // 2  # the rest of it is in the sockets' buffers
    received = 0
    while taken := await reply.read_some():
        received += len(taken)
    assert received == count * len(piece)


async def test_pause_and_resume(start: Start) -> None:
    go_on = asyncio.Event()

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(b"one", end=b""))
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    _, client = await start(handle)
    reply = await client.request("POST", "/", b"x")
    pieces: list[bytes] = []

    def sink(piece: bytes) -> None:
        pieces.append(piece)
        if piece == b"one":
            reply.pause()
            go_on.set()

    piping = asyncio.create_task(reply.pipe(sink, 30))
    await go_on.wait()
    await asyncio.sleep(0.05)
    assert pieces == [b"one"]
    reply.resume()
    await piping
    assert pieces == [b"one", b"two"]
    assert reply.is_complete


@pytest.mark.parametrize("is_one_packet", [False, True])
async def test_an_answer_may_be_left_before_its_framing_ends(start: Start, is_one_packet: bool) -> None:
    data = chunked(b"one", b"last", b"after")
    at = data.index(b"5\r\n")
    server, client = await start(answers(data) if is_one_packet else answers(data[:at], data[at:]))
    for _ in range(2):
        reply = await client.request("POST", "/", b"x")
        pieces: list[bytes] = []

        def sink(piece: bytes, reply: Reply = reply, pieces: list[bytes] = pieces) -> None:
            pieces.append(piece)
            if piece.endswith(b"last"):
                reply.leave()

        await reply.pipe(sink, 30)
        assert b"".join(pieces).startswith(b"onelast")
        await reply.finish(30)
        reply.close()
    assert server.accepted == 1


async def test_an_answer_whose_framing_does_not_end_is_closed(start: Start) -> None:
    server, client = await start(answers(chunked(b"one", end=b"")))
    reply = await client.request("POST", "/", b"x")
    await reply.pipe(lambda piece: reply.leave(), 30)
    await reply.finish(0.01)
    reply.close()
    await until(lambda: server.open == 0, "the connection is closed")


async def test_a_pipe_that_nothing_comes_through_ends(start: Start) -> None:
    server, client = await start(answers(chunked(b"one", end=b"")))
    reply = await client.request("POST", "/", b"x")
    pieces: list[bytes] = []
    with pytest.raises(IdleTimeout):
        await reply.pipe(pieces.append, 0.2)
    assert pieces == [b"one"]
    await until(lambda: server.open == 0, "the connection is closed")


async def test_a_sink_that_fails_ends_the_exchange(start: Start) -> None:
    server, client = await start(answers(chunked(end=b""), b"3\r\none\r\n"))
    reply = await client.request("POST", "/", b"x")

    def sink(piece: bytes) -> None:
        raise RuntimeError("full")

    with pytest.raises(BrokeOff, match="full"):
        await reply.pipe(sink, 30)
    await until(lambda: server.open == 0, "the connection is closed")


async def test_nothing_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        client = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=5)
        with pytest.raises(ConnectFailed) as failed:
            await client.request("GET", "/")
        assert failed.value.is_refused


async def test_a_server_that_takes_no_connection_in_time() -> None:
    with socket.socket() as listener, socket.socket() as one, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for each in (one, other):  # they fill its queue
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        client = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.2)
        with pytest.raises(ConnectFailed) as failed:
            await client.request("GET", "/")
        assert not failed.value.is_refused


@pytest.mark.parametrize("url", ["ftp://x:1", "127.0.0.1:80", "http://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="want http"):
        Upstream(url, connect_timeout_s=1)
