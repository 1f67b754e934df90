"""Fields of trust: what reaches an engine of what a client sends."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from carryback_server import trust
from carryback_server.body import Body
from carryback_server.config import ConfigError, RouterSettings, load
from carryback_server.errors import ApiError
from carryback_server.tenants import Tenant, Tenants
from carryback_server.trust import FIELDS, Trust, check_media
from multidict import CIMultiDict

DOCS = Path(__file__).parents[2] / "docs"
ACME, BETA = "acme-key-0123456789-0123456789", "beta-key-0123456789-0123456789"

# vLLM's requests on the endpoints that the router serves.
REQUESTS = {
    "/v1/chat/completions": ("openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    "/v1/completions": ("openai/completion/protocol.py", "CompletionRequest"),
    "/v1/responses": ("openai/responses/protocol.py", "ResponsesRequest"),
    "/v1/messages": ("anthropic/protocol.py", "AnthropicMessagesRequest"),
    "/v1/messages/count_tokens": ("anthropic/protocol.py", "AnthropicCountTokensRequest"),
    "/tokenize": ("serve/tokenize/protocol.py", "TokenizeChatRequest"),
    "/tokenize, of a text": ("serve/tokenize/protocol.py", "TokenizeCompletionRequest"),
    "/detokenize": ("serve/tokenize/protocol.py", "DetokenizeRequest"),
}


def fields_of(file: str, name: str) -> set[str]:
    """The fields of one of vLLM's models, read and not imported: that takes torch."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM's source")
    tree = ast.parse((Path(spec.origin).parent / "entrypoints" / file).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assert {ast.unparse(base) for base in found.bases} <= {"OpenAIBaseModel", "BaseModel"}
    declared = [each for each in found.body if isinstance(each, ast.AnnAssign)]
    names = {each.target.id for each in declared if isinstance(each.target, ast.Name)}
    return {each for each in names if not each.startswith("_")}


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_each_field_of_the_engine_is_decided_on(endpoint: str) -> None:
    """One that is new in a later vLLM: decide what becomes of it, in `trust.py` and in `security.md`."""
    assert fields_of(*REQUESTS[endpoint]) - FIELDS.keys() == set()


def test_the_fields_are_documented() -> None:
    text = (DOCS / "security.md").read_text()
    section = text.split("## Fields of trust", 1)[1].split("\n## ", 1)[0]
    documented = {
        name: rule
        for names, rule in re.findall(r"^\| (`.*?`) \| (\w+) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert documented == {name: rule for name, rule in FIELDS.items() if rule != "passed"}
    passed = section.split("These pass as they are", 1)[1]
    assert set(re.findall(r"`(\w+)`", passed)) == {name for name, rule in FIELDS.items() if rule == "passed"}


def tenants() -> tuple[Tenant, Tenant]:
    """Two of several."""
    all_of_them = Tenants(None, [f"acme={ACME}", f"beta={BETA}"])
    acme, beta = (all_of_them.of(CIMultiDict({"Authorization": f"Bearer {key}"})) for key in (ACME, BETA))
    return acme, beta


def sent(fields: dict[str, Any], tenant: Tenant | None, *pass_fields: str) -> tuple[Any, list[str]]:
    """What an engine gets, and what was dropped."""
    dropped: list[str] = []
    body = Body(json.dumps(fields).encode())
    Trust(pass_fields, dropped.append).apply(body, None if tenant is None else tenant.own)
    return json.loads(body.encode({})), dropped


OF_TRUST = {
    "kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"a": 1},
    "kv_hints": {"actions": [{"type": "evict"}]}, "agent_hint": {}, "agentic_context": {"session_id": "s"},
    "kv_cache_report_mode": "full", "request_id": "r", "data_parallel_rank": 1, "priority": -1000,
    "session_id": "s", "prompt_cache_key": "p", "watermarking": False,
    "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "kv_hints": "z", "session_id": "s",
                   "kv_cache_report_mode": "full", "mine": 1},
    "x_new": {"evict": "all"},
}  # fmt: skip


def test_of_several_tenants_none_commands_an_engine() -> None:
    acme, beta = tenants()
    fields = {"model": "m", **OF_TRUST, "temperature": 0.5}
    (of_acme, dropped), (of_beta, _) = sent(fields, acme), sent(fields, beta)
    assert of_acme.keys() == {"model", "session_id", "prompt_cache_key", "temperature"}
    assert list(of_acme) == ["model", "session_id", "prompt_cache_key", "temperature"]
    for name in ("session_id", "prompt_cache_key"):
        assert len({of_acme[name], of_beta[name], fields[name]}) == 3
        assert of_acme[name] == sent(fields, acme)[0][name]
    assert sorted({*dropped}) == sorted(
        OF_TRUST.keys() - {"session_id", "prompt_cache_key", "x_new"} | {"other"}
    )


def test_a_value_of_one_field_is_never_that_of_another() -> None:
    acme, _ = tenants()
    given, _ = sent({"session_id": "s", "prompt_cache_key": "s"}, acme)
    assert given["session_id"] != given["prompt_cache_key"] != acme.salt("s")


@pytest.mark.parametrize("value", [1, ["s"], {"a": 1}, True])
def test_a_session_that_is_none(value: object) -> None:
    acme, _ = tenants()
    assert sent({"session_id": value}, acme) == ({}, ["session_id"])


def test_a_tenant_that_is_alone_sends_what_harms_nobody_else() -> None:
    given, dropped = sent({"model": "m", **OF_TRUST}, None)
    assert given == {
        "model": "m", "priority": -1000, "session_id": "s", "prompt_cache_key": "p", "watermarking": False,
        "vllm_xargs": {"session_id": "s", "mine": 1}, "x_new": {"evict": "all"},
    }  # fmt: skip
    assert "kv_hints" in dropped


def test_an_operator_lets_fields_pass() -> None:
    acme, _ = tenants()
    given, _ = sent(OF_TRUST, acme, "priority", "x_new", "vllm_xargs.mine")
    assert given.pop("session_id")
    assert given.pop("prompt_cache_key")
    assert given == {"priority": -1000, "vllm_xargs": {"mine": 1}, "x_new": {"evict": "all"}}


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_hints", "session_id", "vllm_xargs.kv_hints"])
def test_what_no_operator_can_let_pass(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'pass_fields'.*{name} can never be passed"):
        load(RouterSettings, pass_fields=name)


# -- media

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}, "uuid": "sku-1"}
# Where an engine looks for media, at each endpoint.
HIDDEN: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"content": [IMAGE]}]}]}]},
    {"messages": [{"role": "tool", "content": IMAGE}]},
    {"system": [IMAGE], "messages": []},
    {"input": [{"role": "user", "content": [IMAGE]}]},
    {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
    {"input": [{"type": "custom_tool_call_output", "output": [{"type": "x", "inner": [[IMAGE]]}]}]},
    {"input": [IMAGE]},
    {"input": "x", "previous_input_messages": [{"content": [IMAGE]}]},
]


@pytest.mark.parametrize(
    "spelled", [b"uuid", b"\\u0075uid", b"u\\u0075i\\u0064", b"\\u0075\\u0075\\u0069\\u0064"]
)
@pytest.mark.parametrize("fields", HIDDEN, ids=lambda each: json.dumps(each)[:60])
def test_media_ids_of_the_clients_own(fields: dict[str, Any], spelled: bytes) -> None:
    for space in (b"", b" \n"):
        data = json.dumps(fields).encode().replace(b'"uuid"', b'"%b"%b' % (spelled, space))
        with pytest.raises(ApiError) as caught:
            check_media(Body(data))
        assert (caught.value.status, caught.value.param) == (400, "uuid")


def test_media_ids_at_any_depth() -> None:
    """As deep as JSON is read at all."""
    deep = b'{"messages":[{"content":' + b"[" * 500 + b'{"uuid":"u"}' + b"]" * 500 + b"}]}"
    with pytest.raises(ApiError, match="uuid"):
        check_media(Body(deep))
    with pytest.raises(ApiError) as caught:
        check_media(Body(b'{"input":[{"uuid":1},' + b"[" * 100_000 + b"]" * 100_000 + b"]}"))
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": None}]}]},
        {"messages": [{"role": "user", "uuid": "of the message", "content": "x"}]},
        {"messages": [{"role": "tool", "content": '{"uuid": "u"}'}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": '"uuid":'}]}]},
        {"messages": [{"content": [{"type": "tool_use", "input": {"uuid": "u"}}]}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": {"uuid": "u"}}}]}]},
        {
            "messages": [],
            "tools": [{"function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}],
        },
        {"input": 'what is a "uuid": it?'},
        {"input": [{"type": "function_call", "arguments": '{"uuid": 1}'}]},
        {"uuid": 1, "metadata": {"uuid": 2}, "prompt": "x"},
        {"messages": {"uuid": 1}},
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_what_is_no_media_id(fields: dict[str, Any]) -> None:
    check_media(Body(json.dumps(fields).encode()))


def test_a_body_without_the_word_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it costs one look at the bytes, escapes in other words included."""
    monkeypatch.setattr(trust, "_objects", lambda value: pytest.fail("decoded"))
    check_media(Body(b'{"messages":[{"role":"user","content":"\\u00e9t\\u00e9, \\"uuid\\": no"}]}'))
