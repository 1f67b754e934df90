"""What is reused, and that every answer is the one that a full recompute gives."""

from __future__ import annotations

import asyncio
import json
import uuid
from copy import deepcopy
from typing import Any

import pytest
from pair import BLOCK, NAME, Answer, Client, document
from tiny_model import no_whitespace

Messages = list[dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_document",
            "description": "Search the document.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "maximum": 9}},
                "required": ["query", "limit"],
                "additionalProperties": False,
            },
        },
    }
]  # fmt: skip


def new_id() -> str:
    return uuid.uuid4().hex


def start(seed: int = 0, sentences: int = 20) -> Messages:
    return [
        {"role": "system", "content": "You are a careful assistant. " + document(seed + 100, 4)},
        {"role": "user", "content": document(seed, sentences)},
    ]


def go_on(messages: Messages, answer: Answer, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


async def first_turn(
    client: Client, conversation: str | None, seed: int = 0, **fields: Any
) -> tuple[Messages, Answer]:
    """A conversation of one turn, held by the decode engine; its messages and the answer."""
    messages = start(seed)
    answer = await client.chat(messages, conversation, **fields)
    assert answer.status == 200, answer.raw
    assert answer.reuse is not None
    assert answer.reuse.outcome == "miss"
    return messages, answer


async def assert_right(client: Client, messages: Messages, answer: Answer, **fields: Any) -> None:
    """Assert that an answer is that of a full recompute."""
    recomputed = await client.chat(messages, reuse=False, **fields)
    assert recomputed.reuse is not None
    assert (recomputed.reuse.tokens, recomputed.reuse.reason) == (0, "off")
    answer.assert_same(recomputed)


@pytest.mark.parametrize("stream", [False, True])
async def test_same_history_reuses_every_full_block(client: Client, stream: bool) -> None:
    conversation = new_id()
    messages, answer = await first_turn(client, conversation, stream=stream)
    for turn in range(3):
        held = answer.reuse.prompt_tokens + 32 - 1  # the last token's KV was not computed
        messages = go_on(messages, answer, f"And what about number {turn}?")
        answer = await client.chat(messages, conversation, stream=stream)
        assert answer.reuse.outcome == "hit"
        assert answer.reuse.reason == "verified"
        assert answer.reuse.tokens == held // BLOCK * BLOCK
        assert answer.reuse.prompt_tokens == answer.reuse.tokens + answer.reuse.recomputed
        await assert_right(client, messages, answer)


async def test_edited_middle_reuses_what_is_before_it(client: Client) -> None:
    conversation = new_id()
    messages, answer = await first_turn(client, conversation, seed=1)
    held = answer.reuse.prompt_tokens
    edited = go_on(messages, answer, "Which animal is it?")
    text = edited[1]["content"]
    assert text.count("1-10: the dog") == 1
    edited[1]["content"] = text.replace("1-10: the dog", "1-20: the fox")
    answer = await client.chat(edited, conversation)
    assert answer.reuse.outcome == "partial"
    assert answer.reuse.reason == "history_changed"
    assert held / 3 < answer.reuse.tokens < held
    await assert_right(client, edited, answer)


async def test_trimmed_oldest_messages(client: Client) -> None:
    conversation = new_id()
    messages, answer = await first_turn(client, conversation, seed=2)
    messages = go_on(messages, answer, document(77, 10))
    answer = await client.chat(messages, conversation)
    trimmed = [messages[0], *go_on(messages, answer, "Go on.")[2:]]
    answer = await client.chat(trimmed, conversation)
    # What is left in common is the system prompt.
    assert answer.reuse.outcome in ("partial", "miss")
    assert answer.reuse.tokens < answer.reuse.prompt_tokens / 3
    await assert_right(client, trimmed, answer)


async def test_changed_system_prompt_reuses_nothing(client: Client) -> None:
    conversation = new_id()
    messages, answer = await first_turn(client, conversation, seed=3)
    changed = go_on(messages, answer, "Go on.")
    changed[0] = {"role": "system", "content": "Be brief. " + changed[0]["content"]}
    answer = await client.chat(changed, conversation)
    assert (answer.reuse.outcome, answer.reuse.tokens) == ("miss", 0)
    assert answer.reuse.reason == "history_changed"
    await assert_right(client, changed, answer)


async def test_a_new_conversation_finds_what_another_began_with(client: Client) -> None:
    await first_turn(client, new_id(), seed=9)
    other = [start(9)[0], {"role": "user", "content": document(99, 20)}]
    answer = await client.chat(other, new_id())
    assert (answer.reuse.outcome, answer.reuse.reason) == ("hit", "verified")
    assert answer.reuse.tokens >= 2 * BLOCK
    await assert_right(client, other, answer)


async def test_what_was_broken_off_is_found(client: Client) -> None:
    """A client that pressed stop, or waited for too long, asks again."""
    conversation = new_id()
    messages = start(10)
    body = {"model": NAME, "messages": messages, "max_tokens": 2000, "min_tokens": 2000, "stream": True}
    body["cache_salt"] = client.salt
    async with client.session.post(
        f"{client.url}/v1/chat/completions", json=body, headers={"X-Conversation-ID": conversation}
    ) as response:
        for _ in range(5):
            assert await response.content.readline()
        response.close()
    answer = await client.chat(messages, conversation)
    assert answer.reuse.tokens == (answer.reuse.prompt_tokens - 1) // BLOCK * BLOCK
    await assert_right(client, messages, answer)


async def test_changed_tools_reuse_nothing(client: Client) -> None:
    conversation = new_id()
    fields = {"tools": TOOLS, "tool_choice": "none"}
    messages, answer = await first_turn(client, conversation, seed=4, **fields)
    messages = go_on(messages, answer, "Go on.")
    tools = deepcopy(TOOLS)
    tools[0]["function"]["description"] = "Search all of it."
    fields = {"tools": tools, "tool_choice": "none"}
    answer = await client.chat(messages, conversation, **fields)
    # The tools are in the system prompt, behind its text, before all else.
    assert answer.reuse.tokens < answer.reuse.prompt_tokens / 3
    await assert_right(client, messages, answer, **fields)


async def test_a_foreign_conversation_id_leaks_nothing(client: Client) -> None:
    conversation = new_id()
    await first_turn(client, conversation, seed=5)
    stranger = [{"role": "user", "content": document(55, 20)}]
    answer = await client.chat(stranger, conversation)
    assert (answer.reuse.outcome, answer.reuse.tokens) == ("miss", 0)
    await assert_right(client, stranger, answer)


async def test_parallel_continuations_of_one_state(client: Client) -> None:
    conversation = new_id()
    messages, answer = await first_turn(client, conversation, seed=6)
    branches = [go_on(messages, answer, f"Question {n}: {document(n, 3)}") for n in range(3)]
    answers = await asyncio.gather(*(client.chat(branch, conversation) for branch in branches))
    assert {(each.reuse.outcome, each.reuse.reason) for each in answers} == {("hit", "verified")}
    for branch, each in zip(branches, answers, strict=True):
        await assert_right(client, branch, each)


async def test_a_repeated_request(client: Client) -> None:
    conversation = new_id()
    messages, first = await first_turn(client, conversation, seed=7)
    again = await client.chat(messages, conversation)
    # One token is left to compute, whatever is held.
    assert again.reuse.tokens == (first.reuse.prompt_tokens - 1) // BLOCK * BLOCK
    assert again.reuse.outcome == "hit"
    again.assert_same(first)
    await assert_right(client, messages, again)


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_and_the_step_behind_them(client: Client, stream: bool) -> None:
    conversation = new_id()
    messages = start(8)
    forced = {
        "model": NAME, "messages": messages, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
        "max_tokens": 200, "stream": stream, "logit_bias": no_whitespace(), "cache_salt": client.salt,
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", forced, {"X-Conversation-ID": conversation})
    assert answer.status == 200, answer.raw
    chunks = answer.body if isinstance(answer.body, list) else [answer.body]
    name, arguments, call_id, finish = "", "", "", None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for call in (choice.get("message") or choice["delta"]).get("tool_calls") or ():
            call_id = call_id or call.get("id") or ""
            name = name or call["function"].get("name") or ""
            arguments += call["function"].get("arguments") or ""
        finish = choice["finish_reason"] or finish
    assert name == "search_document"
    assert json.loads(arguments).keys() == {"query", "limit"}
    assert finish == "tool_calls"
    messages = [
        *messages,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        ]},
        {"role": "tool", "tool_call_id": call_id, "content": document(81, 5)},
    ]  # fmt: skip
    following = await client.chat(messages, conversation, tools=TOOLS, tool_choice="none", stream=stream)
    assert following.reuse.outcome in ("hit", "partial")
    assert following.reuse.tokens >= answer.reuse.prompt_tokens // BLOCK * BLOCK
    await assert_right(client, messages, following, tools=TOOLS, tool_choice="none")


async def test_a_client_that_sends_no_id_is_recognised(client: Client) -> None:
    messages, answer = await first_turn(client, None, seed=11)
    assert answer.headers["X-Carryback-Conversation"]
    messages = go_on(messages, answer, "Go on.")
    following = await client.chat(messages)
    assert following.headers["X-Carryback-Conversation"] == answer.headers["X-Carryback-Conversation"]
    assert following.headers["X-Carryback-Turn"] == "2"
    assert following.reuse.outcome == "hit"
    await assert_right(client, messages, following)
