"""Endpoints: bodies of both hops, and what a stream's bytes say, in whatever pieces they come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from carryback_server.body import Body
from carryback_server.endpoints import (
    ENDPOINTS,
    FORWARDED,
    LAST_BYTES,
    REFUSED,
    TAIL_BYTES,
    Boundary,
    Endpoint,
    error_response,
    final_response,
    refused,
)
from carryback_server.errors import ApiError
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

CHAT = ENDPOINTS["/v1/chat/completions"]
COMPLETIONS = ENDPOINTS["/v1/completions"]
RESPONSES = ENDPOINTS["/v1/responses"]
MESSAGES = ENDPOINTS["/v1/messages"]

# What a model may say to be taken for something else.
TRAPS = [
    "data: [DONE]", "\n\ndata: [DONE]\n\n", '"finish_reason":"tool_calls"', "event: message_stop\n\n",
    'data: {"error": {"message": "x"}}\n\n', "event: response.completed\ndata: {}\n\n", "event: error\n\n",
    '{"stop_reason":"tool_use","type":"response.completed"}', '{"type":"function_call"}',
]  # fmt: skip


def of(**fields: Any) -> Body:
    return Body(json.dumps(fields).encode())


def events(*each: tuple[str, object]) -> bytes:
    """A stream of named events; unnamed ones have an empty name."""
    return b"".join(
        (f"event: {name}\n" if name else "").encode()
        + f"data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n".encode()
        for name, data in each
    )


# As vLLM 0.32 streams them: what comes before the first token, then the answer.


def chat(text: str, finish: str | None = "stop", **delta: Any) -> tuple[bytes, bytes]:
    def chunk(finish_reason: str | None = None, **delta: Any) -> tuple[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return "", {"id": "1", "object": "chat.completion.chunk", "choices": [choice]}

    usage = {"id": "1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    greeting = events(chunk(role="assistant", content=""))
    return greeting, events(chunk(content=text), chunk(finish, **delta), ("", usage), ("", "[DONE]"))


def completion(text: str, finish: str | None = "stop") -> tuple[bytes, bytes]:
    def chunk(text: str, finish_reason: str | None = None) -> tuple[str, object]:
        return "", {"id": "1", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}

    return b"", events(chunk(text), chunk("", finish), ("", "[DONE]"))


def responses(text: str, status: str = "completed", *types: str) -> tuple[bytes, bytes]:
    created = {"response": {"id": "r1", "output": [], "status": "in_progress"}, "sequence_number": 0}
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    output = [said, *({"type": type} for type in types)]
    last = {"response": {"id": "r1", "output": output, "status": status}, "sequence_number": 3}
    return (
        events(
            ("response.created", {**created, "type": "response.created"}),
            ("response.in_progress", {**created, "type": "response.in_progress"}),
        ),
        events(
            ("response.output_item.added", {"item": {}, "sequence_number": 1}),
            ("response.output_text.delta", {"delta": text, "sequence_number": 2}),
            ("response.completed", {**last, "type": "response.completed"}),
        ),
    )


def messages(text: str, stop: str | None = "end_turn") -> tuple[bytes, bytes]:
    return (
        events(("message_start", {"type": "message_start", "message": {"id": "m", "stop_reason": None}})),
        events(
            ("content_block_start", {"type": "content_block_start", "index": 0}),
            ("content_block_delta", {"type": "content_block_delta", "delta": {"text": text}}),
            ("message_delta", {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {}}),
            ("message_stop", {"type": "message_stop"}),
        ),
    )


STREAMS = {CHAT: chat, COMPLETIONS: completion, RESPONSES: responses, MESSAGES: messages}
LINE_ENDS = (b"\n", b"\r\n", b"\r")


def respelled(stream: bytes, line_end: bytes, *, space: bool) -> bytes:
    """The same events, with other line ends, and with or without a space behind the field's name."""
    lines = [line if space else line.replace(b": ", b":", 1) for line in stream.split(b"\n")]
    return line_end.join(lines)


def in_pieces(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    return [piece for piece in [*pieces, stream] if piece]


# The end of a stream


@given(
    endpoint=st.sampled_from(list(STREAMS)),
    text=st.sampled_from(TRAPS) | st.text(),
    line_end=st.sampled_from(LINE_ENDS),
    space=st.booleans(),
    sizes=st.lists(st.integers(1, 400), max_size=30) | st.just([1] * 2000),
)
def test_the_end_is_seen_with_the_last_piece_and_not_before(
    endpoint: Endpoint, text: str, line_end: bytes, space: bool, sizes: list[int]
) -> None:
    stream = respelled(b"".join(STREAMS[endpoint](text)), line_end, space=space)
    watch = endpoint.watch()
    seen = [watch.ends(piece) for piece in in_pieces(stream, sizes)]
    assert seen[-1]
    # A CR alone may be an empty line, or half of a line end.
    assert sum(seen) == 1 or line_end == b"\r\n"
    assert endpoint.boundary(watch.tail, True) == "turn_end"


@pytest.mark.parametrize("endpoint", STREAMS)
def test_a_stream_that_breaks_off_has_no_end(endpoint: Endpoint) -> None:
    greeting, answer = STREAMS[endpoint]("x" * 3 * TAIL_BYTES)
    watch = endpoint.watch()
    assert not watch.ends(greeting + answer[:-1])
    assert watch.ends(answer[-1:])


@pytest.mark.parametrize("endpoint", STREAMS)
def test_memory_of_a_long_stream_is_bounded(endpoint: Endpoint) -> None:
    greeting, answer = STREAMS[endpoint]("x")
    event = answer[: answer.index(b"\n\n") + 2]
    watch = endpoint.watch()
    for piece in [greeting, *[event] * 1000, 100 * event]:
        assert not watch.ends(piece)
        assert len(watch.tail) <= TAIL_BYTES


def test_the_whole_response_is_in_the_last_event() -> None:
    text = "y" * 50_000
    stream = b"".join(responses(text))
    watch = RESPONSES.watch()
    for piece in in_pieces(stream, [1000] * 200):
        watch.ends(piece)
    response = json.loads(final_response(watch.tail, True))
    assert (response["id"], response["output"][0]["content"][0]["text"]) == ("r1", text)
    assert final_response(b'{"id":"r1"}', False) == b'{"id":"r1"}'


# Where an answer leaves its turn


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ("stop", "turn_end"), ("length", "turn_end"), ("content_filter", "turn_end"),
        ("tool_calls", "mid_turn"), ("function_call", "mid_turn"),
        (None, "unfinished"), ("abort", "unfinished"), ("error", "unfinished"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trap", TRAPS)
def test_the_boundary_of_a_chat_answer(finish: str | None, expected: Boundary, trap: str) -> None:
    watch = CHAT.watch()
    assert watch.ends(b"".join(chat(trap, finish)))
    assert CHAT.boundary(watch.tail, True) == expected
    choice = {"finish_reason": finish, "message": {"content": trap, "tool_calls": []}}
    assert CHAT.boundary(json.dumps({"choices": [choice]}).encode(), False) == expected


def test_a_call_forced_by_name_is_mid_turn() -> None:
    call = [{"index": 0, "function": {"arguments": "}"}}]
    watch = CHAT.watch()
    assert watch.ends(b"".join(chat("", "stop", tool_calls=call)))
    assert CHAT.boundary(watch.tail, True) == "mid_turn"
    whole = {"choices": [{"finish_reason": "stop", "message": {"content": None, "tool_calls": call}}]}
    assert CHAT.boundary(json.dumps(whole).encode(), False) == "mid_turn"


@pytest.mark.parametrize(
    ("status", "types", "expected"),
    [
        ("completed", [], "turn_end"),
        ("incomplete", [], "turn_end"),
        ("completed", ["reasoning", "function_call"], "mid_turn"),
        ("completed", ["custom_tool_call"], "mid_turn"),
        ("completed", ["web_search_call", "message"], "turn_end"),
        ("failed", ["function_call"], "unfinished"),
        ("cancelled", [], "unfinished"),
    ],
)
@pytest.mark.parametrize("trap", TRAPS)
def test_the_boundary_of_a_response(status: str, types: list[str], expected: Boundary, trap: str) -> None:
    stream = b"".join(responses(trap, status, *types))
    watch = RESPONSES.watch()
    assert watch.ends(stream)
    assert RESPONSES.boundary(watch.tail, True) == expected
    assert RESPONSES.boundary(final_response(watch.tail, True), False) == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("end_turn", "turn_end"), ("max_tokens", "turn_end"), ("stop_sequence", "turn_end"),
        ("refusal", "turn_end"), ("tool_use", "mid_turn"), ("pause_turn", "mid_turn"), (None, "unfinished"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trap", TRAPS)
def test_the_boundary_of_a_message(stop: str | None, expected: Boundary, trap: str) -> None:
    watch = MESSAGES.watch()
    assert watch.ends(b"".join(messages(trap, stop)))
    assert MESSAGES.boundary(watch.tail, True) == expected
    whole = {"content": [{"type": "text", "text": trap}], "stop_reason": stop}
    assert MESSAGES.boundary(json.dumps(whole).encode(), False) == expected


@pytest.mark.parametrize("endpoint", STREAMS)
@given(data=st.binary(max_size=200), streamed=st.booleans())
def test_anything_else_is_unfinished(endpoint: Endpoint, data: bytes, streamed: bool) -> None:
    assert endpoint.boundary(data, streamed) == "unfinished"
    assert endpoint.stream_error(data) is None
    endpoint.is_preliminary(data)
    endpoint.error_event(ApiError(502, "x", code="x"), data)


# The beginning of a stream


@pytest.mark.parametrize("endpoint", STREAMS)
@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("space", [True, False])
def test_a_greeting_is_no_answer(endpoint: Endpoint, line_end: bytes, space: bool) -> None:
    greeting, answer = STREAMS[endpoint]("x")
    wait = b": wait\n\n"
    greeting, answer = (respelled(each, line_end, space=space) for each in (greeting, answer))
    first = answer[: answer.index(2 * line_end) + 2 * len(line_end)]
    for end in range(len(greeting) + 1):
        assert endpoint.is_preliminary(greeting[:end])
    for head in (wait + greeting + wait, wait + greeting + first[: -2 * len(line_end)]):
        assert endpoint.is_preliminary(head)
    assert not endpoint.is_preliminary(wait + greeting + first)
    assert endpoint.stream_error(greeting + answer) is None


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "x"}},
        {"delta": {"reasoning": "x"}},
        {"delta": {"role": "assistant", "tool_calls": [{}]}},
        {"delta": {}, "finish_reason": "stop"},
        {"delta": {}, "token_ids": [7]},
        {"delta": {"content": ""}, "logprobs": {"content": []}},
    ],
)
def test_a_chat_chunk_of_any_kind_is_an_answer(choice: dict[str, Any]) -> None:
    greeting, _ = chat("")
    assert not CHAT.is_preliminary(greeting + greeting + events(("", {"choices": [{"index": 1, **choice}]})))


def test_other_chat_chunks() -> None:
    assert CHAT.is_preliminary(events(("", {"choices": []})))
    assert not CHAT.is_preliminary(events(("", "[DONE]")))
    assert not CHAT.is_preliminary(events(("", {"object": "?"})))
    assert not CHAT.is_preliminary(events(("", "not JSON")))


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_a_stream_that_begins_with_an_error(endpoint: Endpoint) -> None:
    greeting, answer = STREAMS[endpoint]("x")
    error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
    failed = greeting + events(("", error), ("", "[DONE]"))
    assert not endpoint.is_preliminary(failed)
    assert json.loads(endpoint.stream_error(failed) or b"") == error
    assert endpoint.stream_error(greeting + answer + failed) is None  # too late for another try
    watch = endpoint.watch()
    assert watch.ends(failed)
    assert endpoint.boundary(watch.tail, True) == "unfinished"


def test_a_message_that_begins_with_an_error() -> None:
    greeting, answer = messages("x")
    error = {"type": "error", "error": {"type": "internal_error", "message": "x"}}
    failed = greeting + events(("error", error))
    assert not MESSAGES.is_preliminary(failed)
    assert json.loads(MESSAGES.stream_error(failed) or b"") == error
    assert MESSAGES.stream_error(greeting + answer + failed) is None


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("error", {"type": "error", "code": "x", "message": "broken", "param": None, "sequence_number": 2}),
        ("error", {"type": "error", "error": {"type": "t", "code": "x", "message": "broken"}}),
        ("response.failed", {"response": {"status": "failed", "error": {"code": "x", "message": "broken"}}}),
        ("", {"error": {"code": "x", "message": "broken"}}),
    ],
)
def test_a_response_that_begins_with_an_error(name: str, event: object) -> None:
    greeting, answer = responses("x")
    failed = greeting + events((name, event))
    assert not RESPONSES.is_preliminary(failed)
    error = json.loads(RESPONSES.stream_error(failed) or b"")["error"]
    assert (error["message"], error["code"]) == ("broken", "x")
    assert RESPONSES.stream_error(greeting + answer + failed) is None


# Errors of the router's own

LOST = ApiError(502, "the decode engine broke off", code="engine_lost")


def raised(stream: bytes) -> list[dict[str, Any]]:
    """What the official client's decoder reads as errors."""
    found = []
    for event in SSEDecoder().iter_bytes(iter([stream])):
        data = None if event.data == "[DONE]" else json.loads(event.data)
        if isinstance(data, dict) and data.get("error"):
            found.append({"event": event.event, **data})
    return found


@pytest.mark.parametrize("endpoint", STREAMS)
@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_an_error_ends_a_stream(endpoint: Endpoint, line_end: bytes) -> None:
    greeting, answer = STREAMS[endpoint]("x")
    begun = respelled(greeting + answer[: answer.index(b"\n\n") + 2], line_end, space=True)
    watch = endpoint.watch()
    watch.ends(begun)
    [error] = raised(begun + endpoint.error_event(LOST, watch.tail))
    assert error["error"]["message"] == LOST.message
    assert error["event"] == (None if endpoint in (CHAT, COMPLETIONS) else "error")


@pytest.mark.parametrize("endpoint", STREAMS)
@pytest.mark.parametrize("cut", [1, 2, 9])
def test_an_error_is_an_event_of_its_own_wherever_the_stream_broke_off(endpoint: Endpoint, cut: int) -> None:
    begun = STREAMS[endpoint]("x")[1]
    begun = begun[: begun.index(b"\n\n") + 2][:-cut]
    last = endpoint.error_event(LOST, begun)
    own = [event.data for event in SSEDecoder().iter_bytes(iter([begun + last]))][-1]
    assert json.loads(own)["error"]["message"] == LOST.message


def test_an_error_of_a_response_counts_on() -> None:
    greeting, answer = responses('{"sequence_number":999,')
    tail = greeting + answer[: answer.index(b"event: response.completed")]
    event = json.loads(RESPONSES.error_event(LOST, tail).split(b"data: ")[1])
    assert event == {
        "type": "error", "code": "engine_lost", "message": LOST.message, "param": None, "sequence_number": 3,
        "error": {"message": LOST.message, "type": "server_error", "param": None, "code": "engine_lost"},
    }  # fmt: skip


def test_a_stream_that_broke_off_within_an_endless_number_ends_with_an_error() -> None:
    tail = b'data: {"sequence_number": 7}\n\ndata: {"sequence_number": ' + b"9" * 16_000
    event = json.loads(RESPONSES.error_event(LOST, tail).split(b"data: ")[-1])
    assert event["sequence_number"] == 8


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (413, "request_too_large"), (418, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "api_error"), (502, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropic_clients_get_their_errors(status: int, kind: str, path: str) -> None:
    error = ApiError(status, "no", code="x", headers={"Retry-After": "1"})
    response = error_response(path, error, {"X-Request-Id": "r"})
    assert json.loads(bytes(response.body)) == {"type": "error", "error": {"type": kind, "message": "no"}}  # type: ignore[arg-type]
    assert (response.status, response.headers["Retry-After"], response.headers["X-Request-Id"]) == (
        status, "1", "r",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/nowhere"])
def test_others_get_openai_error_objects(path: str) -> None:
    response = error_response(path, ApiError(404, "no", code="x"), {})
    assert json.loads(bytes(response.body))["error"]["code"] == "x"  # type: ignore[arg-type]


def test_pooling_is_refused() -> None:
    assert not {*REFUSED} & {*ENDPOINTS, *FORWARDED}
    error = refused("/v1/embeddings")
    assert error.status == 404
    assert "/v1/embeddings" in error.message


# The two hops' bodies


def sent(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    return fields


ANSWER_ONLY = {
    "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"], "stop_token_ids": [1],
    "min_tokens": 100, "logprobs": True, "top_logprobs": 5, "logprob_token_ids": [1], "n": 1,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a*"},
    "parallel_tool_calls": False, "return_token_ids": True, "return_prompt_text": True,
}  # fmt: skip
PROMPT = {
    "model": "m", "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False},
    "cache_salt": "s", "truncate_prompt_tokens": 10, "temperature": 0, "x_unknown": {"a": 1},
    "reasoning_effort": "low", "documents": [{"title": "t"}],
}  # fmt: skip


def test_prefill_of_a_chat_keeps_the_prompt_and_asks_for_one_token() -> None:
    said = {"messages": [{"role": "user", "content": "x"}]}
    body = of(**PROMPT, **said, **ANSWER_ONLY, max_tokens=500, max_completion_tokens=400)
    params = {"do_remote_decode": True}
    assert sent(CHAT.for_prefill(body, params)) == {
        **PROMPT, **said, "max_completion_tokens": 1, "kv_transfer_params": params,
    }  # fmt: skip
    assert sent(CHAT.for_decode(body, params)) == {
        **PROMPT, **said, **ANSWER_ONLY, "max_tokens": 500, "max_completion_tokens": 400,
        "kv_transfer_params": params,
    }  # fmt: skip


def test_prefill_of_a_completion() -> None:
    body = of(model="m", prompt=[1, 2, 3], suffix="s", max_tokens=500, logprobs=3, logprob_token_ids=[1])
    assert sent(COMPLETIONS.for_prefill(body, {})) == {
        "model": "m", "prompt": [1, 2, 3], "suffix": "s", "max_tokens": 1, "kv_transfer_params": {},
    }  # fmt: skip


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}, {"type": "allowed_tools"}])
def test_prefill_forces_no_call(endpoint: Endpoint, choice: object) -> None:
    assert sent(endpoint.for_prefill(of(tool_choice=choice), {}))["tool_choice"] == "auto"


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", ["none", "auto", None])
def test_prefill_keeps_other_choices(endpoint: Endpoint, choice: object) -> None:
    assert sent(endpoint.for_prefill(of(tool_choice=choice), {}))["tool_choice"] == choice
    assert "tool_choice" not in sent(endpoint.for_prefill(of(tools=[]), {}))


def test_prefill_of_a_response() -> None:
    prompt = {
        "model": "m", "input": "hi", "instructions": "be good", "tools": [{"type": "function", "name": "f"}],
        "reasoning": {"effort": "low"}, "truncation": "auto", "cache_salt": "s",
    }  # fmt: skip
    answer = {
        "max_output_tokens": 400, "stream": True, "text": {"format": {"type": "json_object"}},
        "include": ["message.output_text.logprobs"], "top_logprobs": 3, "max_tool_calls": 2,
        "background": False, "enable_response_messages": True,
    }  # fmt: skip
    assert sent(RESPONSES.for_prefill(of(**prompt, **answer, store=True), {})) == {
        **prompt, "max_output_tokens": 1, "store": False, "kv_transfer_params": {},
    }  # fmt: skip


def test_prefill_of_a_message() -> None:
    prompt = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "system": "s", "tools": [{"name": "f"}],
        "thinking": {"type": "enabled", "budget_tokens": 2048}, "cache_salt": "s",
    }  # fmt: skip
    answer = {
        "max_tokens": 4096, "stream": True, "stop_sequences": ["x"], "tool_choice": {"type": "any"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    }  # fmt: skip
    assert sent(MESSAGES.for_prefill(of(**prompt, **answer), {})) == {
        **prompt, "max_tokens": 1, "tool_choice": {"type": "auto"}, "output_config": {"effort": "high"},
        "kv_transfer_params": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "none"}, {"type": "none"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "auto"}),
        ({"type": "tool", "name": "f"}, {"type": "auto"}),
        (None, None),
    ],
)
def test_prefill_of_a_message_forces_no_call(choice: object, expected: object) -> None:
    assert sent(MESSAGES.for_prefill(of(tool_choice=choice), {}))["tool_choice"] == expected


# Alone, or through both hops


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""), ({"n": 1, "best_of": None}, ""), ({"echo": False, "prompt_logprobs": None}, ""),
        ({"n": 2}, "several_answers"), ({"best_of": 2}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"), ({"echo": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_what_goes_to_a_decode_engine_alone(
    endpoint: Endpoint, fields: dict[str, Any], expected: str
) -> None:
    assert endpoint.alone(of(**fields)) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('"text"', ""), ("[1, 2, 3]", ""), ("[ \n 1]", ""), ("[]", ""), ('["one, [two]"]', ""), ("[[1, 2]]", ""),
        ('["a", "b"]', "several_prompts"), ("[[1], [2]]", "several_prompts"), ('[ "a" , "b" ]', "several_prompts"),
        ("null", ""), ("7", ""),
    ],
)  # fmt: skip
def test_several_prompts(prompt: str, expected: str) -> None:
    assert COMPLETIONS.alone(Body(f'{{"prompt": {prompt}}}'.encode())) == expected


def test_prompt_embeddings_are_computed_where_they_are_decoded() -> None:
    assert COMPLETIONS.alone(of(prompt_embeds="AAAA")) == "prompt_embeds"


def test_a_background_response_is_refused() -> None:
    with pytest.raises(ApiError, match="background") as caught:
        RESPONSES.alone(of(background=True))
    assert (caught.value.status, caught.value.param) == (400, "background")
    assert RESPONSES.alone(of(background=False)) == ""


# What was said

USER = {"role": "user", "content": "hi"}
TOOLS = [{"name": "f"}]


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (CHAT, {"messages": [USER]}, [USER]),
        (CHAT, {"messages": [USER, 1]}, None),
        (CHAT, {"messages": "hi"}, None),
        (COMPLETIONS, {"prompt": "hi"}, None),
        (RESPONSES, {"input": "hi"}, [USER]),
        (RESPONSES, {"input": [USER], "instructions": "s"}, [{"role": "system", "content": "s"}, USER]),
        (RESPONSES, {}, None),
        (MESSAGES, {"messages": [USER]}, [USER]),
        (MESSAGES, {"messages": [USER], "system": "s"}, [{"role": "system", "content": "s"}, USER]),
        (
            MESSAGES,
            {
                "messages": [USER],
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: cch=1f2e3d;"},
                    {"type": "text", "text": "s"},
                ],
            },
            [{"role": "system", "content": [{"type": "text", "text": "s"}]}, USER],
        ),
    ],
)
def test_what_was_said(endpoint: Endpoint, fields: dict[str, Any], expected: object) -> None:
    assert endpoint.messages(of(**fields)) == (None if expected is None else (expected, None))
    if expected is not None:
        assert endpoint.messages(of(**fields, tools=TOOLS)) == (expected, TOOLS)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_watch_keeps_no_stream_that_never_ends_its_line(path: str) -> None:
    """Whatever an engine sends: one line of any length, or an event of any number of lines."""
    begins = {
        "/v1/chat/completions": b"data: [DONE]", "/v1/completions": b"data: [DONE]",
        "/v1/responses": b"event: response.completed\ndata: ", "/v1/messages": b"event: message_stop\ndata: ",
    }  # fmt: skip
    for start in (b"data: ", b"data: a\n", b"\n\n" + begins[path]):
        watch = ENDPOINTS[path].watch()
        assert not watch.ends(start)
        for piece in (b"a" * 2**20, b"data: a\n" * 2**17):
            for _ in range(40):
                assert not watch.ends(piece)
        assert len(watch._last) <= LAST_BYTES + 2**20
        assert sum(map(len, watch._pieces)) <= 9 * 2**20
        assert len(watch.tail) <= LAST_BYTES + 2**20
    assert watch.ends(b"\n\n")
