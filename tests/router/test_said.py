"""Answers of all endpoints are read alike, whole or streamed, in the shapes that engines give them."""

from __future__ import annotations

from typing import Any

import pytest
from carryback_server.endpoints import ENDPOINTS
from carryback_server.said import Answered, Call, answered
from service import TEXT, Serve, request_to
from stub_engine import CALL_MARKER, expected
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

TOOL = {"name": "look", "description": "Looks."}
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {**TOOL, "parameters": SCHEMA}},
    RESPONSES: {"type": "function", **TOOL, "parameters": SCHEMA},
    MESSAGES: {**TOOL, "input_schema": SCHEMA},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("calls", [False, True])
async def test_answers(serve: Serve, path: str, stream: bool, calls: bool) -> None:
    if calls and path == COMPLETIONS:
        pytest.skip("completions have no tools")
    service = await serve()
    body = request_to(path, f"{CALL_MARKER} {TEXT}" if calls else TEXT, stream=stream)
    if calls:
        body["tools"] = [TOOLS[path]]
    if path == MESSAGES:
        body["max_tokens"] = 100
    answer = await service.post(path, body)
    assert answer.status == 200, answer.raw
    found, right = answered(ENDPOINTS[path], answer.raw, streamed=stream), expected(body, path)
    assert found is not None
    assert found.said.text == right.text
    assert found.said.calls == ((Call(*right.call),) if right.call else ())
    assert bool(right.call) == calls
    assert found.finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("data", [b"", b"null", b"[1]", b'{"choices":[1]}', b"data: {\n\n", b"event: content_block_delta\ndata: {}\n\n"])  # fmt: skip
def test_what_is_no_answer(path: str, stream: bool, data: bytes) -> None:
    found = answered(ENDPOINTS[path], data, streamed=stream)
    assert found is None or (isinstance(found, Answered) and found.said.text == "")
