"""Headers and fields of others that may name a conversation, and headers that only look as if they did."""

from __future__ import annotations

from itertools import count

import pytest
from cluster import Cluster
from service import TEXT
from stub_engine.prompts import CHAT

STABLE: list[tuple[dict[str, str], dict[str, str]]] = [
    ({}, {}),
    ({"X-Claude-Code-Session-Id": "s"}, {}),
    ({"session-id": "s"}, {}),
    ({}, {"prompt_cache_key": "s"}),
    ({}, {"session_id": "s"}),
]


@pytest.mark.parametrize(("headers", "fields"), STABLE, ids=str)
async def test_a_header_that_is_new_with_each_request_costs_no_reuse(
    cluster: Cluster, headers: dict[str, str], fields: dict[str, str]
) -> None:
    """As gateways stamp `X-Correlation-ID`."""
    await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router, None, **fields)
    outcomes = []
    for number in range(4):
        answer = await chat.say(headers={"X-Correlation-ID": f"request-{number}", **headers})
        outcomes.append(answer.reuse.outcome)
    assert outcomes == ["miss", "hit", "hit", "hit"]
    listed = (await cluster.get(router, "/v1/conversations")).json["data"]
    assert [each["requests"] for each in listed] == [4]


async def test_one_such_header_on_many_conversations_joins_none(cluster: Cluster) -> None:
    """As a batch job's, whose requests have one cause."""
    await cluster.pair()
    router = await cluster.router()
    chats = [cluster.chat(router, None) for _ in range(5)]
    for turn in ("miss", "hit"):
        for number, chat in enumerate(chats):
            answer = await chat.say(f"{number}. {TEXT}", headers={"X-Correlation-ID": "job"})
            assert answer.reuse.outcome == turn
    listed = (await cluster.get(router, "/v1/conversations")).json["data"]
    assert len(listed) == len(chats)
    assert {each["parent"] for each in listed} == {None}


async def test_a_hint_that_changes_costs_nothing_while_the_kv_is_there(cluster: Cluster) -> None:
    await cluster.pair()
    chat = cluster.chat(await cluster.router(conversation_headers="X-Correlation-ID"), None)
    for number in range(3):
        answer = await chat.say(headers={"X-Correlation-ID": f"request-{number}"})
        assert answer.reuse.outcome == ("hit" if number else "miss")


async def test_a_hint_that_changes_is_named_as_the_cause(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router(explain_bytes=2**24, conversation_headers="X-Correlation-ID")
    chat = cluster.chat(router, None)
    for number in range(3):
        answer = await chat.say(headers={"X-Correlation-ID": f"request-{number}"})
        assert answer.reuse.reason == "new"
        # Nothing is left of it, and its name is of no help.
        forgot = await cluster.admin(router, "POST", f"/admin/engines/{decode.url[7:]}/forget")
        assert forgot.status == 200

    async def causes(id: str) -> list[dict[str, str]]:
        told = await cluster.admin(router, "GET", f"/admin/conversations/default/{id}/explain")
        found: list[dict[str, str]] = told.json["causes"]
        return found

    (cause,) = await causes("request-2")
    assert cause["code"] == "hint_changed"
    assert "X-Correlation-ID" in cause["what"]
    assert "'request-1'" in cause["what"]
    assert "conversation_headers" in cause["do"]
    assert await causes("request-0") == []
    # A conversation that only begins like another one is not that one.
    await cluster.chat(router, None).say("Else.", headers={"X-Correlation-ID": "other"})
    assert await causes("other") == []


async def test_what_others_write_in_headers_is_never_an_error(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    numbers = count()
    for bad in ("x" * 257, "tab\there", "é", ""):
        body = {"messages": [{"role": "user", "content": f"{next(numbers)}. {TEXT}"}]}
        for name in ("X-Session-ID", "session_id", "X-Correlation-ID"):
            answer = await cluster.post(router, CHAT, body, headers={name: bad})
            assert answer.status == 200
            assert answer.headers["x-carryback-conversation"] not in (bad, "")
        own = await cluster.post(router, CHAT, body, headers={"X-Conversation-ID": bad})
        assert (own.status, own.error["param"]) == (400, "X-Conversation-ID")
