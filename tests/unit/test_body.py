from __future__ import annotations

import json
from typing import Any

import pytest
from carryback.identity import Identifier
from carryback_server.body import Body
from carryback_server.errors import ApiError
from carryback_server.identify import identify
from hypothesis import given
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), JSON, max_size=6))
def test_decode_gets_every_field_as_it_came(fields: dict[str, Any]) -> None:
    fields.pop("kv_transfer_params", None)
    sent = json.loads(Body(json.dumps(fields).encode()).for_decode({"a": 1}))
    assert sent.pop("kv_transfer_params") == {"a": 1}
    assert sent == fields
    assert list(sent) == list(fields)


def test_values_keep_their_spelling() -> None:
    body = Body(b'{"x": {"a": [1.0, 1e2, 12345678901234567890, "\\u2028\xc3\xa9"]}, "seed": 1}')
    for sent in (body.for_decode({}), body.for_prefill("max_tokens", {})):
        assert b'{"a": [1.0, 1e2, 12345678901234567890, "\\u2028\xc3\xa9"]}' in sent


def test_prefill_keeps_the_prompt_and_asks_for_one_token() -> None:
    fields = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}],
        "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}, "lora": "a",
        "max_tokens": 500, "max_completion_tokens": 400, "min_tokens": 100, "n": 1, "stop": ["x"],
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 5,
        "response_format": {"type": "json_object"}, "temperature": 0, "cache_salt": "s",
        "truncate_prompt_tokens": 10,
    }  # fmt: skip
    sent = json.loads(Body(json.dumps(fields).encode()).for_prefill("max_completion_tokens", {"p": 1}))
    assert sent == {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}],
        "tool_choice": "none", "chat_template_kwargs": {"enable_thinking": False}, "lora": "a",
        "temperature": 0, "cache_salt": "s", "truncate_prompt_tokens": 10,
        "max_completion_tokens": 1, "kv_transfer_params": {"p": 1},
    }  # fmt: skip


@pytest.mark.parametrize("value", [b"", b"{", b"[1]", b"7", b"null", b'{"a": }', b"\xff\xfe"])
def test_what_is_no_object_is_refused(value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Body(value)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["code"] == "invalid_json"


def test_a_clients_transfer_parameters_go_nowhere() -> None:
    body = Body(b'{"kv_transfer_params": {"do_remote_prefill": true}, "prompt": "x"}')
    assert json.loads(body.for_decode({})) == {"prompt": "x", "kv_transfer_params": {}}


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"X-Conversation-ID": "a", "X-Session-ID": "b"}, {"conversation_id": "c"}, "a"),
        ({"X-Session-ID": "b"}, {"conversation_id": "c", "session_id": "d"}, "c"),
        ({"X-Session-ID": "b"}, {"session_id": "d"}, "b"),
        ({"X-Correlation-ID": "e"}, {"session_params": {"session_id": "f"}}, "f"),
        ({"X-Correlation-ID": "e", "session-id": "g"}, {}, "e"),
        ({"session_id": "h"}, {}, "h"),
    ],
)
def test_the_first_hint_wins(headers: dict[str, str], fields: dict[str, Any], expected: str) -> None:
    body = Body(json.dumps({"messages": MESSAGES, **fields}).encode())
    who = identify(headers, body, Identifier())
    assert (who.conversation, who.turn, who.step, who.is_guess) == (expected, "1", 1, False)
    sent = json.loads(body.for_decode({}))
    assert "conversation_id" not in sent
    assert sent.get("session_id") == fields.get("session_id")


def test_without_a_hint_the_messages_tell() -> None:
    identifier = Identifier()

    def ask(messages: list[dict[str, str]], **fields: Any) -> Any:
        return identify({}, Body(json.dumps({"messages": messages, **fields}).encode()), identifier)

    first = ask(MESSAGES)
    assert first.is_guess
    grown = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    second = ask(grown)
    assert (second.conversation, second.turn, second.is_guess) == (first.conversation, "2", False)
    assert ask(grown, prompt_cache_key="g").conversation != first.conversation
    assert identify({}, Body(b'{"prompt": "x"}'), identifier).conversation == ""


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"X-Conversation-ID": "x" * 257}, "X-Conversation-ID"),
        ({"X-Session-ID": "a\tb"}, "X-Session-ID"),
        ({"X-Turn-Step": "one"}, "X-Turn-Step"),
        ({"X-Turn-ID": ""}, "X-Turn-ID"),
        ({"X-Conversation-Parent": "é"}, "X-Conversation-Parent"),
    ],
)
def test_bad_ids_are_named(headers: dict[str, str], named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        identify(headers, Body(b"{}"), Identifier())
    assert (caught.value.status, caught.value.param) == (400, named)
