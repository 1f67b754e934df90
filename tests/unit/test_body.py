from __future__ import annotations

import json
from typing import Any

import pytest
from carryback.identity import Identifier
from carryback_server.body import Body
from carryback_server.endpoints import ENDPOINTS
from carryback_server.errors import ApiError
from carryback_server.hints import identify
from hypothesis import given
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def of(**fields: Any) -> Body:
    return Body(json.dumps(fields).encode())


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), JSON, max_size=6))
def test_every_field_goes_on_as_it_came(fields: dict[str, Any]) -> None:
    fields.pop("kv_transfer_params", None)
    sent = json.loads(Body(json.dumps(fields).encode()).encode({"kv_transfer_params": {"a": 1}}))
    assert sent.pop("kv_transfer_params") == {"a": 1}
    assert sent == fields
    assert list(sent) == list(fields)


def test_values_keep_their_spelling() -> None:
    value = b'{"a": [1.0, 1e2, 12345678901234567890, "\\u2028\xc3\xa9"]}'
    body = Body(b'{"x": ' + value + b', "seed": 1}')
    assert body.raw("x") == value
    assert body.encode({"seed": 2}, {"y"}) == b'{"x":' + value + b',"seed":2}'


def test_fields_are_set_in_their_place_and_left_out() -> None:
    body = Body(b'{"a": 1, "b": 2, "c": 3}')
    size = body.size
    body.put("b", [0, 0])
    body.put("d", None)
    assert body.size > size
    assert body.encode({"c": 4, "e": 5}, {"a", "c"}) == b'{"b":[0,0],"c":4,"d":null,"e":5}'


def test_absent_null_and_true() -> None:
    body = Body(b'{"yes": true, "no": false, "null": null, "zero": 0, "text": "true"}')
    assert [body.flag(name) for name in ("yes", "no", "null", "text", "absent")] == [True] + [False] * 4
    assert [body.has(name) for name in ("no", "zero", "null", "absent")] == [True, True, False, False]
    assert (body.starts("text"), body.starts("absent"), body.raw("absent")) == (b'"true"', b"", None)


@pytest.mark.parametrize("value", [b"", b"{", b"[1]", b"7", b"null", b'{"a": }', b"\xff\xfe"])
def test_what_is_no_object_is_refused(value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Body(value)
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["code"] == "invalid_json"


CHAT = ENDPOINTS["/v1/chat/completions"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"X-Conversation-ID": "a", "X-Session-ID": "b"}, {"conversation_id": "c"}, "a"),
        ({"X-Session-ID": "b"}, {"conversation_id": "c", "session_id": "d"}, "c"),
        ({"X-Session-ID": "b"}, {"session_id": "d"}, "b"),
        ({"X-Correlation-ID": "e"}, {"session_params": {"session_id": "f"}}, "f"),
        ({"X-Correlation-ID": "e", "session-id": "g"}, {}, "g"),
        # What others write and is no id counts for nothing.
        ({"X-Session-ID": "a\tb", "session-id": "g"}, {}, "g"),
        (
            {"X-Session-ID": "x" * 257, "session_id": ""},
            {"session_id": 7, "session_params": {"session_id": "f"}},
            "f",
        ),
        ({"session_id": "h"}, {}, "h"),
    ],
)
def test_the_first_hint_wins(headers: dict[str, str], fields: dict[str, Any], expected: str) -> None:
    body = of(messages=MESSAGES, **fields)
    who = identify(headers, body, CHAT, Identifier(), tenant="t")
    assert (who.conversation, who.turn, who.step, who.is_guess) == (expected, "1", 1, False)
    sent = json.loads(body.encode({}))
    assert "conversation_id" not in sent
    assert sent.get("session_id") == fields.get("session_id")


def test_which_headers_are_hints_is_the_operators_to_say() -> None:
    def named(headers: dict[str, str], *hints: str) -> tuple[str, str]:
        who = identify(headers, of(messages=MESSAGES), CHAT, Identifier(), tenant="t", hints=hints)
        return who.conversation if not who.is_guess else "", who.named_by

    headers = {"X-Session-ID": "s", "X-Correlation-ID": "c"}
    assert named(headers, "X-Correlation-ID", "X-Session-ID") == ("c", "X-Correlation-ID")
    assert named(headers, "X-Session-ID", "X-Correlation-ID") == ("s", "X-Session-ID")
    assert named(headers) == ("", "")
    assert named({**headers, "X-Conversation-ID": "own"}, "X-Session-ID") == ("own", "")


def test_without_a_hint_the_messages_tell() -> None:
    identifier = Identifier()

    def ask(messages: list[dict[str, str]], **fields: Any) -> Any:
        return identify({}, of(messages=messages, **fields), CHAT, identifier, tenant="t")

    first = ask(MESSAGES)
    assert first.is_guess
    grown = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    second = ask(grown)
    assert (second.conversation, second.turn, second.is_guess) == (first.conversation, "2", False)
    assert ask(grown, prompt_cache_key="g").conversation != first.conversation
    completions = ENDPOINTS["/v1/completions"]
    assert identify({}, of(prompt="x"), completions, identifier, tenant="t").conversation == ""


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"X-Conversation-ID": "x" * 257}, "X-Conversation-ID"),
        ({"X-Turn-Step": "one"}, "X-Turn-Step"),
        ({"X-Turn-ID": ""}, "X-Turn-ID"),
        ({"X-Conversation-Parent": "é"}, "X-Conversation-Parent"),
    ],
)
def test_bad_ids_are_named(headers: dict[str, str], named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        identify(headers, Body(b"{}"), CHAT, Identifier(), tenant="t")
    assert (caught.value.status, caught.value.param) == (400, named)
