"""Connections that want nothing, too much, or never take what they asked for: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httptools
import pytest
from carryback_server.connections import MAX_PIPELINED, Connection, affordable
from live_router import LIMIT_S, LiveRouter, wait_until
from service import ENDPOINTS, TEXT, Serve, request_to, until, user
from stub_engine import expected
from stub_engine.prompts import CHAT

KEY = "sk-secret-0123456789-0123456789"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """A router, as a process, that gives up soon and takes 24 connections."""
    limits = {
        "head_timeout_s": 3.0,  # a busy machine can keep a client from sending for longer than one
        "send_timeout_s": 2.0,
        "max_connections": 24,
        "keepalive_timeout_s": 60,
        "trial_timeout_s": 1.0,
    }
    with LiveRouter(tmp_path_factory.mktemp("router"), **limits) as router:
        yield router
        router.check_well()
        router.stop()
        router.check_log()


def connect(router: LiveRouter, *, is_admin: bool = False, receives: int = 0) -> socket.socket:
    connection = socket.socket()
    if receives:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    connection.settimeout(LIMIT_S)
    url = router.admin_url if is_admin else router.url
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the router closes it."""
    received = b""
    try:
        while data := connection.recv(2**16):
            received += data
    except ConnectionResetError:
        pass
    return received


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    parts: list[bytes] = []
    over: list[int] = []

    class Reader:
        def on_body(self, body: bytes) -> None:
            parts.append(body)

        def on_message_complete(self) -> None:
            if parser.get_status_code() >= 200:
                over.append(parser.get_status_code())

    parser = httptools.HttpResponseParser(Reader())
    while not over:
        data = connection.recv(2**16)
        assert data, "it was closed"
        parser.feed_data(data)
    return over[0], b"".join(parts)


def asking(path: str, body: dict[str, Any], more: str = "") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data


# -- what is no HTTP


@pytest.mark.parametrize("is_admin", [False, True])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer {KEY}\r\n\r\n", 400),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\0\r\n\r\n", 400),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {KEY}\r\n\r\n", 400),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nAuthorization: x\r\n"
         "Content-Length: x\r\n\r\n", 400),
        (f"{KEY} / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (f"GET /?{KEY}\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (f"GET {KEY} HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (f"GET / HTTP/{KEY}\r\nHost: x\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}{'k' * 20_000}\r\n\r\n", 431),
        (f"GET /{KEY}{'k' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        ("GET / HTTP/1.1\r\nHost: x\r\n" + f"a: {KEY}{'k' * 9000}\r\n" * 9 + "\r\n", 431),
        ("GET / HTTP/1.1\r\nHost: x\r\n" + f"a: {KEY}{'k' * 9000}\r\n" * 100, 431),
    ],
)  # fmt: skip
def test_a_malformed_head_is_answered_without_a_byte_of_it(
    router: LiveRouter, head: str, status: int, is_admin: bool
) -> None:
    with connect(router, is_admin=is_admin) as connection:
        connection.sendall(head.encode())
        received = read_all(connection) if status == 400 else connection.recv(2**16)
    top, _, body = received.partition(b"\r\n\r\n")
    assert int(top.split()[1]) == status
    assert b"application/json" in top
    assert b"aiohttp" not in top
    error = json.loads(body)["error"]
    assert error["code"] == {400: "malformed_request", 431: "head_too_large"}[status]
    assert b"sk-secret" not in received
    assert "sk-secret" not in router.log.read_text()


def test_many_headers_within_the_limit_are_read(router: LiveRouter) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"a%d: %b\r\n" % (at, b"k" * 9000) for at in range(6)
    )
    with connect(router) as connection:
        connection.sendall(head + b"\r\n")
        assert answer(connection)[0] == 200


# -- silent, half-sent, many


@pytest.mark.parametrize("is_admin", [False, True])
@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_given_up(router: LiveRouter, sent: bytes, is_admin: bool) -> None:
    with connect(router, is_admin=is_admin) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_a_head_that_comes_a_byte_at_a_time_is_given_up(router: LiveRouter) -> None:
    with connect(router) as connection:
        connection.settimeout(0.05)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe|closed"):  # noqa: PT012
            for _ in range(int(LIMIT_S / 0.05)):
                connection.sendall(b"a")
                try:
                    assert connection.recv(100), "closed"
                except TimeoutError:
                    continue
                except AssertionError as error:
                    raise ConnectionResetError("closed") from error


def test_a_connection_that_is_idle_between_requests_stays(router: LiveRouter) -> None:
    with connect(router) as idle, connect(router) as silent:
        idle.sendall(HEALTH)
        assert answer(idle)[0] == 200
        assert read_all(silent) == b""  # so much later
        idle.sendall(HEALTH)
        assert answer(idle)[0] == 200
        idle.sendall(HEALTH[:9])
        assert read_all(idle) == b""


def test_any_number_of_silent_connections_is_no_bar_to_others(router: LiveRouter) -> None:
    with ExitStack() as stack:
        honest = stack.enter_context(connect(router))
        for number in range(300):
            silent = stack.enter_context(connect(router, is_admin=bool(number % 2)))
            silent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" if number % 3 else b"")
            if number % 50 == 0:
                honest.sendall(HEALTH)
                assert answer(honest)[0] == 200
        honest.sendall(asking(CHAT, {"messages": [user(TEXT)]}))
        status, body = answer(honest)
        assert status == 200
        assert json.loads(body)["choices"]
    assert router.metric("connections_closed_total") > 100
    assert router.metric("engine_up") == 2


def test_above_the_limit_a_connection_is_refused_if_none_is_idle(router: LiveRouter) -> None:
    fault = router.decode.fault(times=None, hang=True)
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(router)) for _ in range(24)]
        for connection in busy:
            connection.sendall(asking(CHAT, {"messages": [user(TEXT)]}))
        wait_until(lambda: router.metric("in_flight_requests") == 24, "all are there")
        with connect(router) as refused:
            received = read_all(refused)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        with connect(router, is_admin=True) as operator:
            operator.sendall(HEALTH)
            assert answer(operator)[0] == 200
    router.decode.faults.remove(fault)


async def test_idle_connections_of_a_tenant_push_out_its_own(serve: Serve) -> None:
    keys = [f"{name}=sk-{name}-0123456789-0123456789" for name in ("one", "other")]
    service = await serve(1, 1, max_connections=4, api_keys=keys)
    host, _, port = service.url.removeprefix("http://").rpartition(":")

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> bytes:
        writer.write(
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-{name}-0123456789-0123456789\r\n\r\n".encode()
        )
        line = await reader.readline()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(each for each in head.lower().split(b"\r\n") if each.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        return line

    kept = await asyncio.open_connection(host, int(port))
    assert await ask(*kept, "one") == b"HTTP/1.1 200 OK\r\n"
    flood = []
    for _ in range(12):
        flood.append(await asyncio.open_connection(host, int(port)))
        assert await ask(*flood[-1], "other") == b"HTTP/1.1 200 OK\r\n"
    assert await ask(*kept, "one") == b"HTTP/1.1 200 OK\r\n"
    assert await flood[0][0].read() == b""
    for _, writer in [kept, *flood]:
        writer.close()


async def test_one_address_has_no_more_than_its_share(serve: Serve) -> None:
    service = await serve(1, 1, max_connections_per_address=2)
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    kept = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    for reader, writer in kept:
        writer.write(HEALTH)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    for _, each in [*kept, (reader, writer)]:
        each.close()


def test_descriptors_are_left_for_engines_and_operators() -> None:
    assert affordable(4096, 1_000_000) == 4096
    assert affordable(4096, 1024) == 256
    assert affordable(4096, 100) == 1


# -- many requests on one connection


async def test_heads_behind_a_long_answer_are_not_gathered(serve: Serve) -> None:
    service = await serve()
    service.decode.fault(hang=True)
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(asking(CHAT, {"messages": [user(TEXT)]}))
    padded = HEALTH[:-2] + b"".join(b"a%d: %b\r\n" % (at, b"k" * 10_000) for at in range(6)) + b"\r\n"
    for _ in range(1000):
        writer.write(padded)
    (connection,) = (
        each
        for runner in service.router._runners
        for each in runner.server.connections  # type: ignore[union-attr]
    )
    assert isinstance(connection, Connection)
    await until(lambda: connection._buffer_paused, "no more is read")
    # What had been read at once may be there beyond the limit.
    assert MAX_PIPELINED <= len(connection._messages) <= MAX_PIPELINED + 2**18 // len(padded) + 1
    assert len(await service.conversation("x")) == 1  # another connection is served
    writer.transport.abort()


# -- clients that end their side


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_client_that_ends_its_side_gets_its_answer(router: LiveRouter, path: str, streamed: bool) -> None:
    router.decode.fault(status_delay_s=0.3)
    body = request_to(path, stream=streamed)
    with connect(router) as connection:
        connection.sendall(asking(path, body))
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    assert b"HTTP/1.1 200 OK" in received
    said = expected(body, path).text
    if not streamed:
        assert said.encode() in received.replace(b"\\u00e9", "é".encode())
    else:
        assert received.endswith(b"0\r\n\r\n")


def test_all_that_was_asked_before_the_end_is_answered(router: LiveRouter) -> None:
    with connect(router) as connection:
        connection.sendall(
            asking(CHAT, {"messages": [user(TEXT)]}) + HEALTH + asking(CHAT, {"messages": [user("b")]})
        )
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_is_gone_ends_its_request(router: LiveRouter, streamed: bool) -> None:
    fault = router.decode.fault(times=None, hang=True)
    connection = connect(router)
    connection.sendall(asking(CHAT, {"messages": [user(TEXT)], "stream": streamed}))
    wait_until(lambda: router.metric("in_flight_requests") == 1, "it is there")
    connection.close()
    wait_until(router.is_idle, "it is given up")
    router.decode.faults.remove(fault)


# -- clients that take nothing


def test_clients_that_stop_reading_are_given_up(router: LiveRouter) -> None:
    """Wherever they stop, so in the last bytes as well: those that the router does not wait for the engine with."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"a" * 1000 + b'"}}]}\n\n'
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    with ExitStack() as stack:
        # Kernels take some MB, whoever reads.
        for size in range(100_000, 8_000_000, 400_000):
            router.decode.fault(
                hop="decode", contains=f"size {size}.", script=[(0.0, event * (size // len(event)) + end)]
            )
            stalled = stack.enter_context(connect(router, receives=4096))
            stalled.sendall(asking(CHAT, {"messages": [user(f"size {size}. {TEXT}")], "stream": True}))
        wait_until(lambda: router.metric("active_streams") > 0, "some are under way")
        wait_until(router.is_idle, "all are given up")
        wait_until(lambda: not router.decode.running, "the engine is free")


async def test_a_whole_answer_that_nobody_takes_is_given_up(serve: Serve) -> None:
    service = await serve(1, 1, send_timeout_s=1.0)
    service.prefill.fault(
        path="/tokenize", status=400, error=json.dumps({"error": {"message": "a" * 20_000_000}})
    )
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
    with plain:
        await asyncio.get_running_loop().sock_sendall(plain, asking("/tokenize", {"prompt": "a"}))
        await until(lambda: service.prefill.faults == [], "it is answered")
        await until(lambda: len(service.router.connections["clients"]) == 0, "it is given up")
