"""What two tenants may tell the engines: every byte that both hops get, on all endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster
from service import TEXT
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

KEYS = {"acme": "acme-key-0123456789-0123456789", "beta": "beta-key-0123456789-0123456789"}
ONE_HOP = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
HOSTILE = {
    "kv_hints": {"actions": [{"type": "retain"}, {"type": "evict", "session_id": "forged"}]},
    "session_id": "forged",
    "agentic_context": {"session_id": "forged"},
    "priority": -1000,
    "request_id": "forged",
    "data_parallel_rank": 7,
    "ec_transfer_params": {"do": "forged"},
    "a_field_of_tomorrow": "forged",
}
HEADERS = {
    "X-Session-ID": "forged", "X-data-parallel-rank": "7", "X-Request-Id": "forged", "X-Priority": "-1000",
    "X-Conversation-ID": "mine",
}  # fmt: skip


def asked(path: str) -> dict[str, Any]:
    """What an endpoint wants, and all that no client may say."""
    said = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
    own: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": TEXT},
        RESPONSES: {"input": TEXT},
        "/tokenize": {"prompt": TEXT},
        "/detokenize": {"tokens": [1, 2, 3]},
    }
    return {"model": "stub", **own.get(path, said), **HOSTILE, "vllm_xargs": {**HOSTILE, "mine": 1}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, *ONE_HOP])
async def test_no_tenant_commands_an_engine_or_meets_another_there(cluster: Cluster, path: str) -> None:
    engines = await cluster.pair()
    router = await cluster.router(api_keys=[f"{name}={key}" for name, key in KEYS.items()])
    sessions = []
    for key in KEYS.values():
        before = [len(each.received) for each in engines]
        answer = await cluster.post(router, path, asked(path), key=key, headers=HEADERS)
        assert answer.status == 200, answer.raw
        got = [
            each
            for engine, seen in zip(engines, before, strict=True)
            for each in engine.received[seen:]
            if each.path == path
        ]
        assert len(got) == (1 if path in ONE_HOP else 2)
        for each in got:
            assert b"forged" not in each.raw
            assert b"-1000" not in each.raw
            assert b"vllm_xargs" not in each.raw
            # Nor by a header.
            assert not {"x-session-id", "x-data-parallel-rank", "x-priority"} & each.headers.keys()
            assert each.headers["x-request-id"] != "forged"
        hops = [(each.body or {})["session_id"] for each in got]
        assert len(set(hops)) == 1
        sessions += hops[:1]
    assert len(set(sessions)) == len(KEYS)
    assert await cluster.metric(router, "fields_dropped_total", field="kv_hints") == len(KEYS)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/tokenize", "/v1/messages/count_tokens"])
async def test_a_media_id_is_refused_wherever_it_is(cluster: Cluster, path: str) -> None:
    engines = await cluster.pair()
    router = await cluster.router(api_keys=[f"{name}={key}" for name, key in KEYS.items()])
    image = {"type": "image_url", "image_url": None, "uuid": "of-another"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    body: dict[str, Any] = {
        "model": "stub",
        "messages": [{"role": "user", "content": [result]}],
        "max_tokens": 8,
    }
    if path == RESPONSES:
        body = {"input": [{"type": "function_call_output", "call_id": "c", "output": [image]}]}
    answer = await cluster.post(router, path, body, key=KEYS["acme"])
    assert answer.status == 400
    assert "uuid" in answer.error["message"]
    assert not any(each.path == path for engine in engines for each in engine.received)
