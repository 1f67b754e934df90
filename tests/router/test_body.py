"""Requests' bodies: what of them reaches which engine, and how large they may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from raw_server import RawServer, whole
from service import ENDPOINTS, TEXT, Serve, Service, request_to, said, user
from stub_engine import CALL_MARKER, StubEngine, expected
from stub_engine.prompts import CHAT, COMPLETIONS, LIMITS, MESSAGES, RESPONSES


def bodies(service: Service) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the newest request, as the prefill and as the decode engine got it, without transfers."""
    hops = []
    for engine in (service.prefill, service.decode):
        body = dict(engine.requests[-1].body or {})
        assert body.pop("kv_transfer_params")
        hops.append(body)
    return hops[0], hops[1]


# -- A10, A11


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a10_a_minimum_is_for_the_answer_alone(serve: Serve, path: str, stream: bool) -> None:
    service = await serve()
    body = request_to(path, max_tokens=150, min_tokens=100, stream=stream)
    answer = await service.post(path, body)
    assert answer.status == 200
    assert answer.text == expected(body, path).text
    prefill, decode = bodies(service)
    assert "min_tokens" not in prefill
    assert decode == body
    assert service.prefill.pinned == 0  # it was read

    refused = await service.post(path, {**body, "min_tokens": 600, "max_tokens": 500})
    assert (refused.status, refused.error["code"]) == (400, 400)
    assert "min_tokens" in refused.error["message"]
    assert len(service.decode.requests) == 2  # one that is refused is not tried again


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a11_a_prefill_engine_generates_one_token_however_the_limit_is_spelt(
    serve: Serve, path: str
) -> None:
    service = await serve(engine={"answer_tokens": 30})
    names = LIMITS[path]
    spelt = [{}, *({name: 7} for name in names), {name: 7 + at for at, name in enumerate(names)}]
    for fields in spelt:
        body = {**request_to(path), **fields}
        answer = await service.post(path, body)
        assert answer.status == 200
        assert answer.text == expected(body, path, length=30).text
        prefill, decode = bodies(service)
        assert [prefill[name] for name in LIMITS[path] if name in prefill] == [1]
        assert {name: decode[name] for name in names if name in decode} == fields


async def test_the_prefill_hop_has_no_grammar_and_does_not_stream(serve: Serve) -> None:
    service = await serve()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = request_to(
        CHAT, stream=True, stream_options={"include_usage": True}, stop=["x"], logprobs=True, top_logprobs=2,
        response_format={"type": "json_object"}, tools=tools, tool_choice="required", seed=3, n=1,
    )  # fmt: skip
    answer = await service.post(CHAT, body)
    assert answer.status == 200
    prefill, decode = bodies(service)
    assert decode == body
    assert prefill.pop("max_completion_tokens") == 1
    assert prefill.pop("tool_choice") == "auto"  # the tools are rendered as for the client's own choice
    assert prefill == {"messages": body["messages"], "tools": tools, "seed": 3}


# -- A12


async def test_a12_logprobs_and_several_answers_are_as_from_one_engine(serve: Serve) -> None:
    service = await serve()
    cases: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"echo": True, "logprobs": 2, "max_tokens": 3}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "max_tokens": 3}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": 2, "max_tokens": 3}, ""),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, ""),
        (COMPLETIONS, {"n": 3}, "several_answers"),
        (CHAT, {"n": 2}, "several_answers"),
        (COMPLETIONS, {"prompt": ["one", "two"]}, "several_prompts"),
    ]
    for path, fields, alone in cases:
        body = request_to(path, **fields)
        service.prefill.received.clear()
        answer = await service.post(path, body)
        async with service.session.post(service.decode.url + path, json=body) as response:
            single = await response.json()
        assert answer.status == response.status == 200
        assert answer.json["choices"] == single["choices"]
        assert answer.json["usage"] == single["usage"]
        assert bool(service.prefill.requests) is not bool(alone)
        if alone:
            assert answer.reuse.reason == alone


# -- A21


ODD = (
    b'{"model":"stub","return_token_ids":false,"chat_template_kwargs":{"enable_thinking":false,"z":{"a":null}},'
    b'"vllm_xargs":{"k":"v"}, "top_k" : 20 ,"parallel_tool_calls":false,'
    b'"x_unknown":{"a":[1.0, 1e2, 12345678901234567890, -0.0, 1E+400, "\\u2028\xc3\xa9\\ud83d\\ude42\\/"],"b":{"a":1,"a":2}},'
    b'"\\u00e9":  true,%b}'
)


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a21_fields_of_no_schema_reach_both_engines_unchanged(
    serve: Serve, path: str, stream: bytes
) -> None:
    service = await serve()
    asked = json.dumps(request_to(path), separators=(",", ":")).encode()[1:-1]
    answer = await service.post(path, ODD % (asked + b',"stream":' + stream))
    assert answer.status == 200, answer.raw
    for engine in (service.prefill, service.decode):
        raw = engine.requests[-1].raw
        for kept in (
            b'"chat_template_kwargs":{"enable_thinking":false,"z":{"a":null}}',
            b'"vllm_xargs":{"k":"v"}',
            b'"x_unknown":{"a":[1.0, 1e2, 12345678901234567890, -0.0, 1E+400, "\\u2028\xc3\xa9\\ud83d\\ude42\\/"],"b":{"a":1,"a":2}}',
            asked,
        ):
            assert kept in raw
    prefill, decode = bodies(service)
    assert decode["\u00e9"] is prefill["\u00e9"] is True
    assert decode["top_k"] == prefill["top_k"] == 20
    assert decode["parallel_tool_calls"] is decode["return_token_ids"] is False
    # And the order of what the decode engine gets is the client's.
    client = list(json.loads(ODD % (asked + b',"stream":' + stream)))
    assert [name for name in (service.decode.requests[-1].body or {}) if name in client] == client


async def test_a21_unknown_fields_of_an_answer_come_back(serve: Serve) -> None:
    service = await serve(prefill_lease_s=0.1)
    odd = b'data: {"id":"1","x":{"a":[1.0,1e2,12345678901234567890]},"choices":[{"index":0,"delta":{"content":"a","y":1e0}}]}\n\n'
    end = b"data: [DONE]\n\n"
    service.decode.fault(hop="decode", script=[(0, odd), (0, end)])
    answer = await service.post(CHAT, request_to(CHAT, stream=True))
    assert answer.raw == odd + end


async def test_what_is_no_json_object_reaches_no_engine(serve: Serve) -> None:
    service = await serve()
    for body in (
        b"", b"{", b"[]", b"null", b'"x"', b"{}x", b'{"a":\xff}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"prompt":' + b"[" * 50_000 + b"}",
    ):  # fmt: skip
        for path in ENDPOINTS:
            answer = await service.post(path, body)
            assert answer.status == 400, body[:20]
            assert "JSON" in answer.error["message"]
    assert service.prefill.requests == service.decode.requests == []


# -- A22


async def test_a22_a_long_message_passes(serve: Serve) -> None:
    service = await serve(engine={"capacity": 20_000})
    messages = [user("w" * 150_000)]
    others = [asyncio.create_task(service.chat([user(f"{n} {TEXT}")], stream=True)) for n in range(5)]
    answer = await service.chat(messages)
    assert answer.status == 200
    assert answer.text == expected({"messages": messages}).text
    for number, other in enumerate(await asyncio.gather(*others)):
        assert other.text == expected({"messages": [user(f"{number} {TEXT}")]}).text


async def test_a22_a_long_history_of_tools_passes() -> None:
    """3 MB in a thousand messages: the engines get all of it."""
    received: list[bytes] = []

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if body:
            received.append(body)
        writer.write(whole(b'{"choices":[],"data":[]}'))

    async with StubEngine("decode") as heard, RawServer(answer) as raw:
        config = heard.config().model_copy(update={"url": raw.url})
        engines = [config.model_copy(update={"role": role}) for role in ("prefill", "decode")]
        async with Service(0, 0, engines=engines) as service:
            messages: list[dict[str, Any]] = [user("Look at all of it.")]
            for number in range(500):
                function = {"name": "look", "arguments": json.dumps({"at": number})}
                calls = [{"id": f"c{number}", "type": "function", "function": function}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "é" * 3000})
            body = json.dumps({"messages": messages}, ensure_ascii=False).encode()
            assert len(body) > 3_000_000
            assert (await service.post(CHAT, body)).status == 200
    assert [json.loads(each)["messages"] for each in received] == [messages, messages]


@pytest.mark.parametrize("has_length", [True, False])
async def test_a22_a_body_above_the_limit_is_a_413_that_names_the_setting(
    serve: Serve, has_length: bool
) -> None:
    service = await serve(max_body_bytes=100_000)
    data = b'{"prompt":"' + b"x" * 1_000_000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 50_000):
            yield data[at : at + 50_000]

    for path in (*ENDPOINTS, "/tokenize"):
        async with service.session.post(
            service.url + path, data=data if has_length else pieces()
        ) as response:
            error = (await response.json())["error"]
        assert response.status == 413
        assert "100000" in error["message"]
        assert "max_body_bytes" in error["message"]
        assert error["type"] == ("request_too_large" if path == MESSAGES else "invalid_request_error")
    assert service.prefill.received == service.decode.received == []
    assert (await service.post(CHAT, request_to(CHAT))).status == 200


async def test_a22_the_client_may_send_all_of_it_before_it_reads(serve: Serve) -> None:
    service = await serve(max_body_bytes=100_000)
    parts = urlsplit(service.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n")
    writer.write(b"x" * 8_000_000)
    await writer.drain()
    assert (await reader.readline()).split()[1] == b"413"
    writer.close()


async def test_a22_the_official_client_does_not_try_again(serve: Serve) -> None:
    service = await serve(max_body_bytes=10_000)
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as client:
        with pytest.raises(openai.APIStatusError, match="max_body_bytes") as failed:
            await client.chat.completions.create(
                model="stub", messages=[{"role": "user", "content": "x" * 20_000}]
            )
    assert failed.value.status_code == 413
    assert 'carryback_requests_total{endpoint="/v1/chat/completions",status="413"} 1.0' in (
        await service.metrics()
    )


async def test_a_body_that_does_not_come_is_given_up(serve: Serve) -> None:
    service = await serve(body_timeout_s=0.2)
    parts = urlsplit(service.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 80\r\n\r\n{")
    assert (await reader.readline()).split()[1] == b"408"
    assert b"body_timeout_s" in await reader.readuntil(b"}}")
    writer.close()


async def test_a_client_may_wait_to_be_told_to_go_on(serve: Serve) -> None:
    service = await serve()
    parts = urlsplit(service.url)
    body = json.dumps(request_to(CHAT)).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_a_tool_call_is_answered_on_all_endpoints(serve: Serve) -> None:
    """The prompts of both hops are the same, tools and forced choices or not: the transfer is verified."""
    service = await serve()
    function = {"name": "look", "parameters": {"type": "object", "required": ["where"]}}
    tools: dict[str, Any] = {
        CHAT: [{"type": "function", "function": function}],
        RESPONSES: [{"type": "function", **function}],
        MESSAGES: [{"name": "look", "input_schema": function["parameters"]}],
    }
    forced: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
    for path, its in tools.items():
        for choice in ({}, {"tool_choice": forced[path]}):
            body = request_to(path, TEXT + CALL_MARKER, tools=its, max_tokens=200, **choice)
            answer = await service.post(path, body)
            call = expected(body, path).call
            assert call is not None
            in_json = json.dumps(call[1], ensure_ascii=False).encode()
            assert in_json in answer.raw or call[1].encode() in answer.raw
    assert "carryback_decode_declined_total{" not in await service.metrics()


async def test_an_assistant_message_of_the_client_is_taken_as_it_is(serve: Serve) -> None:
    service = await serve()
    messages = [user(TEXT), said("I never said that."), user("Did you?")]
    answer = await service.chat(messages, "c")
    assert answer.text == expected({"messages": messages}).text


@pytest.mark.parametrize(
    ("request_line", "status", "allow"),
    [("GET /nowhere", 404, ""), ("DELETE /v1/models", 405, "GET,HEAD"), ("GET /v1/messages", 405, "POST")],
)
async def test_what_there_is_not_has_an_error_object_whatever_is_expected(
    serve: Serve, request_line: str, status: int, allow: str
) -> None:
    service = await serve(1, 1)
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"{request_line} HTTP/1.1\r\nHost: x\r\n".encode() + b"Expect: \xff\r\nConnection: close\r\n\r\n"
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert (f"\r\nAllow: {allow}\r\n".encode() in head) == bool(allow)
    assert json.loads(body)["error"]
