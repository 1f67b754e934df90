"""Streams: the client gets the engine's bytes, whatever they are, and the router notices how they end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import openai
import pytest
from raw_server import RawServer
from service import ENDPOINTS, TEXT, Answer, Serve, Service, request_to, said, user
from stub_engine import CALL_MARKER, StubEngine, expected
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

PARAMETERS = {"type": "object", "required": ["where"]}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
    RESPONSES: [{"type": "function", "name": "look", "parameters": PARAMETERS}],
    MESSAGES: [{"name": "look", "input_schema": PARAMETERS}],
}
FRAMINGS = ["", "crlf", "cr", "no_space"]


def asking(path: str, *, calls: bool, **fields: Any) -> dict[str, Any]:
    """A streamed request, whose answer calls a tool or does not."""
    if not calls:
        return request_to(path, stream=True, **fields)
    return request_to(path, TEXT + CALL_MARKER, stream=True, tools=TOOLS[path], max_tokens=100, **fields)


async def straight(engine: StubEngine, service: Service, path: str, body: dict[str, Any]) -> bytes:
    """The stream that an engine gives when it is asked directly."""
    async with service.session.post(engine.url + path, json=body) as response:
        assert response.status == 200
        return await response.read()


def framed(stream: bytes, framing: str) -> bytes:
    if framing == "no_space":
        return stream.replace(b"data: ", b"data:").replace(b"event: ", b"event:")
    return stream.replace(b"\n", {"": b"\n", "crlf": b"\r\n", "cr": b"\r"}[framing])


def cut(stream: bytes, chance: random.Random) -> Iterator[tuple[float, bytes]]:
    """In writes of any size, some of a byte."""
    while stream:
        size = chance.choice([1, 1, 2, 3, 40, 300, 3000])
        yield chance.choice([0, 0, 0, 0.001]), stream[:size]
        stream = stream[size:]


# -- A17


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a17_the_clients_bytes_are_the_engines(serve: Serve, path: str, calls: bool) -> None:
    if calls and path == COMPLETIONS:
        pytest.skip("completions have no tools")
    service = await serve(prefill_lease_s=0.1)
    body = asking(path, calls=calls)
    stream = (await straight(service.decode, service, path, body)).replace("é".encode(), "🙂".encode())
    boundary = "mid_turn" if calls else "turn_end"
    for number in range(20):
        data = framed(stream, FRAMINGS[number % 4])
        script = list(cut(data, random.Random(number))) if number < 16 else [(0.0, data)]
        service.decode.fault(hop="decode", script=script)
        answer = await service.post(path, body, conversation=f"a17-{number}")
        assert (answer.status, answer.is_cut) == (200, False)
        assert answer.raw == data
        assert (await service.conversation(f"a17-{number}"))["boundary"] == boundary


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a17_a_stream_in_any_framing_is_held_for_the_next_turn(serve: Serve, path: str) -> None:
    service = await serve()
    for framing in FRAMINGS:
        for split in (False, True):
            body = request_to(path, stream=True)
            name = f"{framing or 'lf'}-{split}"
            service.decode.fault(hop="decode", framing=framing, split=split)
            answer = await service.post(path, body, conversation=name)
            text = answer.text if framing != "cr" else expected(body, path).text
            if path == COMPLETIONS:
                body = request_to(path, TEXT + text + TEXT)
            else:
                field = "input" if path == RESPONSES else "messages"
                body[field] = [*body[field], said(text), user("And then?")]
            following = await service.post(path, body, conversation=name)
            # The text of a completion and its answer are other tokens together, where they meet.
            assert following.reuse.outcome == ("partial" if path == COMPLETIONS else "hit")
            assert following.text == expected(body, path).text


async def test_a17_the_official_client_gets_the_same_chunks(serve: Serve) -> None:
    service = await serve()
    body = asking(CHAT, calls=True)
    call = expected(body).call
    assert call is not None
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as client:
        for framing in FRAMINGS:
            service.decode.fault(hop="decode", framing=framing, split=True)
            stream = await client.chat.completions.create(model="stub", **body)
            arguments, reason = "", None
            async for chunk in stream:
                for choice in chunk.choices:
                    for each in choice.delta.tool_calls or ():
                        assert each.function is not None
                        arguments += each.function.arguments or ""
                    reason = choice.finish_reason or reason
            assert (arguments, reason) == (call[1], "tool_calls")


# -- A18


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a18_comments_pass_as_comments(serve: Serve, path: str) -> None:
    service = await serve()
    body = request_to(path, stream=True)
    service.decode.fault(hop="decode", comments=5, comment_interval_s=0.02)
    answer = await service.post(path, body, conversation="a18")
    assert answer.raw.startswith(b": wait\n\n" * 5)
    assert answer.raw.count(b": wait") == 5
    assert answer.text == expected(body, path).text
    assert (await service.conversation("a18"))["boundary"] == "turn_end"
    if path in (CHAT, COMPLETIONS):
        service.decode.fault(hop="decode", comments=5)
        async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as client:
            api: Any = client.chat.completions if path == CHAT else client.completions
            text = ""
            async for chunk in await api.create(model="stub", **body):
                for choice in chunk.choices:
                    text += (choice.text if path == COMPLETIONS else choice.delta.content) or ""
        assert text == expected(body, path).text


async def test_a18_no_idle_timeout_fires_while_comments_come(serve: Serve) -> None:
    service = await serve(idle_timeout_s=1.0, prefill_lease_s=0.1)
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    script = [(0.0, chunk), *[(0.25, b": wait\n\n")] * 8, (0.25, chunk), (0.0, b"data: [DONE]\n\n")]
    service.decode.fault(hop="decode", script=script)
    answer = await service.post(CHAT, request_to(CHAT, stream=True))
    assert answer.raw == b"".join(data for _, data in script)


async def test_a18_a_failure_after_comments_is_still_tried_again(serve: Serve) -> None:
    service = await serve(1, 2)
    for engine in service.decodes:
        engine.fault(hop="decode", comments=2, error_after=0)
    body = request_to(CHAT, stream=True)
    answers = [await service.post(CHAT, body) for _ in range(2)]
    for answer in answers[1:]:
        assert answer.text == expected(body).text


# -- A19


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a19_a_stream_without_its_end_is_relayed_and_its_turn_is_unfinished(
    serve: Serve, path: str
) -> None:
    service = await serve()
    body = request_to(path, stream=True)
    right = expected(body, path).text
    whole = await straight(service.decode, service, path, body)
    for number, lacks in enumerate(
        ({"omit_finish": True}, {"omit_done": True}, {"omit_finish": True, "omit_done": True})
    ):
        name = f"a19-{number}"
        assert (await service.post(path, body, conversation=name)).text == right
        assert (await service.conversation(name))["boundary"] == "turn_end"
        service.decode.fault(hop="decode", **lacks)
        answer = await service.post(path, body, conversation=name)
        assert (answer.status, answer.is_cut) == (200, False)
        assert answer.text == right
        events = whole.count(b"data:") - bool(lacks.get("omit_done"))
        assert answer.raw.count(b"data:") == events
        assert b'"error"' not in answer.raw.replace(b'"error":null', b"")
        ends = path == RESPONSES and not lacks.get("omit_done")  # there the status says it, not a reason
        assert (await service.conversation(name))["boundary"] == ("turn_end" if ends else "unfinished")
        # The client throws the turn away, and asks again.
        again = await service.post(path, body, conversation=name)
        assert again.text == right
        assert (await service.conversation(name))["boundary"] == "turn_end"


async def test_a19_the_official_client_does_not_hang(serve: Serve) -> None:
    service = await serve()
    service.decode.fault(hop="decode", omit_finish=True, omit_done=True)
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as client:
        body = request_to(CHAT, stream=True)
        text = ""
        async for chunk in await client.chat.completions.create(model="stub", **body):
            text += chunk.choices[0].delta.content or ""
    assert text == expected(body).text


# -- A20


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a20_usage_comes_if_it_was_asked_for_and_once(serve: Serve, path: str) -> None:
    service = await serve()
    plain = await service.post(path, request_to(path, stream=True), conversation="a20")
    assert all("usage" not in event for event in plain.events)
    asked = await service.post(
        path, request_to(path, stream=True, stream_options={"include_usage": True}), conversation="a20"
    )
    [usage] = [event for event in asked.events if event.get("usage")]
    assert usage == asked.events[-1]
    assert usage["choices"] == []
    assert usage["id"]
    assert usage["model"] == "stub"
    right = expected(request_to(path), path)
    assert usage["usage"]["completion_tokens"] == len(right.tokens)  # the prefill's one is not among them
    assert usage["usage"]["prompt_tokens"] == asked.reuse.prompt_tokens
    whole = await service.post(path, request_to(path), conversation="a20")
    assert whole.json["usage"] == usage["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    steady = await service.post(path, request_to(path, stream=True, stream_options=options))
    assert all(event["usage"]["prompt_tokens"] == whole.reuse.prompt_tokens for event in steady.events)


async def test_a20_odd_chunks_pass(serve: Serve) -> None:
    service = await serve(prefill_lease_s=0.1)
    chunks: list[Any] = [
        {"choices": []},
        {"id": "", "model": "", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"usage": {"prompt_tokens": 1}},
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": []},
        {"choices": None},
        {"choices": [{"index": 0}]},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [{"index": 0, "delta": {"content": "data: [DONE]\n\n"}}]},
        [1],
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 1}},
    ]
    data = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks)
    data += b"id: 7\nretry: 10\nevent: x\n\ndata: no JSON\n\ndata: [DONE]\n\n"
    service.decode.fault(hop="decode", script=[(0, data[:9]), (0.01, data[9:])])
    answer = await service.post(CHAT, request_to(CHAT, stream=True), conversation="odd")
    assert answer.raw == data
    assert (await service.conversation("odd"))["boundary"] == "turn_end"


# -- an answer may be of any kind


async def test_each_chunk_is_passed_on_when_it_comes(serve: Serve) -> None:
    """The engine sends the next one only once the client has the one before."""
    service = await serve(prefill_lease_s=0.1)
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not target.startswith("POST"):
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"data":[]}')
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head)
        for number in range(20):
            chunk = b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % number
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            assert await got.get() == chunk
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with RawServer(handle) as raw, asyncio.timeout(30):
        config = service.decode.config().model_copy(update={"url": raw.url})
        async with Service(1, 0, engines=[config], prefill_lease_s=0.1) as other:
            data = json.dumps(request_to(CHAT, stream=True))
            async with other.session.post(other.url + CHAT, data=data) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        got.put_nowait(line + await response.content.readline())
            assert got.empty()


# -- clients of other kinds


class Client:
    """A client on a bare connection."""

    def __init__(self, service: Service) -> None:
        self._parts = urlsplit(service.url)
        self.answers: list[Answer] = []
        self._piece = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._piece += body

    def on_message_complete(self) -> None:
        self.answers.append(Answer(self._parser.get_status_code(), self._headers, self._piece))
        self._piece, self._headers = b"", {}

    async def read(self, count: int) -> None:
        """Until so many answers are there."""
        while len(self.answers) < count:
            data = await self.reader.read(2**16)
            assert data, "the router closed the connection"
            self._parser.feed_data(data)


def request(path: str, body: dict[str, Any], version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_http_1_0_client_gets_the_stream_as_it_is(serve: Serve, path: str) -> None:
    service = await serve(prefill_lease_s=0.1)
    body = request_to(path, stream=True)
    stream = await straight(service.decode, service, path, body)
    for script in ([(0.0, stream)], list(cut(stream, random.Random(3)))):
        service.decode.fault(hop="decode", script=script)
        client = Client(service)
        await client.connect()
        client.writer.write(request(path, body, "1.0"))
        head, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
        assert head.split()[1] == b"200"
        assert b"chunked" not in head.lower()
        assert rest == stream
        client.writer.close()


async def test_requests_may_be_sent_before_the_answers_are_there(serve: Serve) -> None:
    service = await serve()
    bodies = [
        request_to(path, f"{number} {TEXT}", stream=bool(number % 2))
        for number, path in enumerate(ENDPOINTS * 2)
    ]
    client = Client(service)
    await client.connect()
    client.writer.write(b"".join(map(request, ENDPOINTS * 2, bodies)))
    await client.read(len(bodies))
    for path, body, answer in zip(ENDPOINTS * 2, bodies, client.answers, strict=True):
        assert answer.status == 200
        assert answer.text == expected(body, path).text
    client.writer.write(request(CHAT, bodies[0]))
    await client.read(len(bodies) + 1)
    client.writer.close()


async def test_a_client_that_wants_its_connection_closed(serve: Serve) -> None:
    service = await serve()
    for stream in (False, True):
        body = request_to(CHAT, stream=stream)
        client = Client(service)
        await client.connect()
        client.writer.write(request(CHAT, body, more="Connection: close\r\n"))
        await client.read(1)
        assert client.answers[0].text == expected(body).text
        assert await client.reader.read() == b""
        client.writer.close()
