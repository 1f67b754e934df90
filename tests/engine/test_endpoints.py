"""All endpoints, streamed and not: the same reuse, right answers, and nothing of the engines in them."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

import anthropic
import carryback
import openai
import pytest
from pair import BLOCK, NAME, Answer, Client, Pair, document
from test_plugin import ENDPOINTS
from test_reuse import TOOLS
from tiny_model import no_whitespace

TOKENS = 16
OFF = {"X-Carryback-Reuse": "off"}


@dataclass(frozen=True)
class Form:
    """A way to hold a conversation.

    Attributes:
        is_chained: what was said before is named by `previous_response_id`.
        by_ids: the prompt is token ids.
    """

    path: str
    stream: bool = False
    is_chained: bool = False
    by_ids: bool = False

    def __str__(self) -> str:
        kind = ", chained" if self.is_chained else ", token ids" if self.by_ids else ""
        return self.path.removeprefix("/v1/") + kind + (", streamed" if self.stream else "")


FORMS = [
    *(Form(path, stream) for path in ENDPOINTS for stream in (False, True)),
    *(Form("/v1/completions", stream, by_ids=True) for stream in (False, True)),
    *(Form("/v1/responses", stream, is_chained=True) for stream in (False, True)),
]


class Talk:
    """One conversation in one form."""

    def __init__(self, client: Client, form: Form, headers: dict[str, str]) -> None:
        self.client = client
        self.form = form
        self.headers = headers
        self.history: list[Any] = []
        self.previous: str | None = None
        self.conversations: set[str] = set()

    async def ask(self, text: str, **fields: Any) -> tuple[Answer, str]:
        """Say something more; the answer, and what it says."""
        self.history += await self._items(text)
        answer = await self._post(
            self.history if self.previous is None else await self._items(text), **fields
        )
        assert answer.status == 200, answer.raw
        self.conversations.add(answer.headers["X-Carryback-Conversation"])
        said, items, response_id = spoken(self.form, answer)
        self.history += items
        if self.form.is_chained:
            self.previous = response_id
        return answer, said

    async def recomputed(self, **fields: Any) -> str:
        """What the newest request is answered without reuse, and without a chain."""
        end = 1 if self.form.path != "/v1/completions" or not self.form.by_ids else TOKENS
        self.previous = None
        answer = await self._post(self.history[:-end], OFF, **{**fields, "cache_salt": uuid.uuid4().hex})
        assert (answer.reuse.tokens, answer.reuse.reason) == (0, "off")
        return spoken(self.form, answer)[0]

    async def _items(self, text: str) -> list[Any]:
        """A user's words, as this form writes them."""
        if self.form.by_ids:
            answer = await self.client.post("/tokenize", {"model": NAME, "prompt": text})
            return answer.body["tokens"]
        return [text] if self.form.path == "/v1/completions" else [{"role": "user", "content": text}]

    async def _post(self, items: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        limit, name = ENDPOINTS[self.form.path]
        is_text = self.form.path == "/v1/completions" and not self.form.by_ids
        body = {
            "model": NAME, name: "".join(items) if is_text else items, limit: TOKENS, "temperature": 0,
            "stream": self.form.stream, **fields,
        }  # fmt: skip
        if self.form.by_ids:
            body["return_token_ids"] = True
        if self.previous is not None:
            body["previous_response_id"] = self.previous
        return await self.client.post(self.form.path, body, {**self.headers, **(headers or {})})


def spoken(form: Form, answer: Answer) -> tuple[str, list[Any], str]:
    """What an answer says, what a client adds to its history for it, and its id."""
    chunks = answer.body if isinstance(answer.body, list) else [answer.body]
    if form.path == "/v1/responses":
        response = chunks[-1]["response"] if form.stream else answer.body
        (item,) = response["output"]
        text = item["content"][0]["text"]
        if form.stream:
            deltas = [chunk["delta"] for chunk in chunks if chunk["type"] == "response.output_text.delta"]
            assert "".join(deltas) == text
        return text, [item], response["id"]
    if form.path == "/v1/messages":
        if form.stream:
            text = "".join(c["delta"]["text"] for c in chunks if c["type"] == "content_block_delta")
        else:
            text = answer.body["content"][0]["text"]
        return text, [{"role": "assistant", "content": [{"type": "text", "text": text}]}], ""
    if form.by_ids:
        ids = [one for chunk in chunks for choice in chunk["choices"] for one in choice["token_ids"] or ()]
        return answer.text, ids, ""
    is_text = form.path == "/v1/completions"
    return answer.text, [answer.text if is_text else {"role": "assistant", "content": answer.text}], ""


def cached_tokens(form: Form, answer: Answer) -> int | None:
    """The tokens of the prompt that were not computed, as an answer's usage has it; None if it has no usage."""
    body = answer.body[-1] if form.stream else answer.body
    if form.path == "/v1/responses":
        body = body["response"] if form.stream else body
        cached: int = body["usage"]["input_tokens_details"]["cached_tokens"]
        return cached
    if form.path == "/v1/messages":
        usage = (answer.body[-2] if form.stream else body)["usage"]
        return usage.get("cache_read_input_tokens") or 0
    usage = body.get("usage")
    return None if usage is None else (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def assert_clean(answer: Answer, pair: Pair) -> None:
    """Assert that nothing of the engines' business is in what a client got."""
    for secret in (b"remote_", b"block_ids", b"carryback", b"engine_id", b"hold_s"):
        assert secret not in answer.raw
    for command in pair.commands:
        for address in (command.url, command.events, command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]):
            assert address not in str(answer.headers)
            assert address.encode() not in answer.raw or address.isdigit()
    assert not re.search(rb'"kv_transfer_params": ?[^n]', answer.raw)


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a7_all_forms_reuse_the_same_and_none_tells(pair: Pair, client: Client, form: Form) -> None:
    # A chain says by itself where it belongs.
    headers = {} if form.is_chained else {"X-Conversation-ID": uuid.uuid4().hex}
    talk = Talk(client, form, headers)
    held = 0
    for turn in range(3):
        answer, said = await talk.ask(document(8 + turn, 3 if turn else 15))
        assert_clean(answer, pair)
        if turn:
            assert (answer.reuse.outcome, answer.reuse.reason) == ("hit", "verified")
            assert answer.reuse.tokens == held // BLOCK * BLOCK
        else:
            assert answer.reuse.outcome == "miss"
            assert answer.reuse.prompt_tokens > 500
        if (cached := cached_tokens(form, answer)) is not None:
            assert cached == answer.reuse.tokens + answer.reuse.cached
        held = answer.reuse.prompt_tokens + TOKENS - 1  # the last token's KV was not computed
    assert len(talk.conversations) == 1
    assert said == await talk.recomputed()
    assert len(said) == TOKENS


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_hits_for_each_tenant(pair: Pair, path: str) -> None:
    # (What tenants of these names have said before is not found.)
    keys = {f"{name}{uuid.uuid4().hex[:8]}": f"key-of-tenant-{uuid.uuid4().hex}" for name in ("one", "two")}
    async with pair.router(api_keys=[f"{name}={key}" for name, key in keys.items()]) as client:
        # Both use the same id and the same words, and the engines are given a salt for each.
        talks = [
            Talk(client, Form(path), {"Authorization": f"Bearer {key}", "X-Conversation-ID": "same"})
            for key in keys.values()
        ]
        firsts = [await talk.ask(document(20, 15)) for talk in talks]
        assert {answer.reuse.reason for answer, _ in firsts} == {"new"}
        assert len({said for _, said in firsts}) == 1
        for talk in talks:
            following, _ = await talk.ask(document(21, 3))
            assert (following.reuse.outcome, following.reuse.reason) == ("hit", "verified")
        # A salt of the client's own goes into the tenant's, on both hops.
        salted, said = await talks[0].ask(document(22, 3), cache_salt="mine")
        assert (salted.reuse.tokens, salted.reuse.reason) == (0, "history_changed")
        assert said == await talks[0].recomputed()
        again, _ = await talks[0].ask(document(23, 3), cache_salt="mine")
        assert again.reuse.outcome == "hit"


async def test_a_chain_of_responses_goes_on_behind_a_tool_call(client: Client) -> None:
    sdk = openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    said: list[Any] = [{"role": "user", "content": document(30, 15)}]
    first = await sdk.responses.with_raw_response.create(
        model=NAME, input=said, tools=tools, tool_choice="required", temperature=0, max_output_tokens=200,
        extra_body={"logit_bias": no_whitespace()},
    )  # fmt: skip
    response = first.parse()
    calls = response.output
    assert {call.type for call in calls} == {"function_call"}
    assert all(json.loads(call.arguments).keys() == {"query", "limit"} for call in calls)
    prompt_tokens = reuse_of(first.headers).prompt_tokens

    asked: Any = {
        "model": NAME,
        "tools": tools,
        "tool_choice": "none",
        "temperature": 0,
        "max_output_tokens": TOKENS,
    }
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": document(31, 5)} for call in calls
    ]
    second = await sdk.responses.with_raw_response.create(
        previous_response_id=response.id, input=results, **asked
    )
    reuse = reuse_of(second.headers)
    assert reuse.outcome in ("hit", "partial")
    assert reuse.tokens >= prompt_tokens // BLOCK * BLOCK
    said += [*(call.model_dump(exclude_none=True) for call in calls), *results]
    whole = await sdk.responses.create(input=said, store=False, extra_headers=OFF, **asked)
    assert second.parse().output_text == whole.output_text

    third = await sdk.responses.with_raw_response.create(
        previous_response_id=second.parse().id, input="Go on.", **asked
    )
    assert reuse_of(third.headers).outcome == "hit"
    conversations = {each.headers["X-Carryback-Conversation"] for each in (first, second, third)}
    assert len(conversations) == 1
    kept = await sdk.responses.retrieve(response.id)
    assert kept.output == calls


def reuse_of(headers: Any) -> carryback.wire.Reuse:
    return carryback.wire.Reuse.parse(headers["X-Carryback-Reuse"])


async def test_the_official_anthropic_client(client: Client) -> None:
    sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="none")
    said: list[Any] = [{"role": "user", "content": document(40, 15)}]
    asked: Any = {"model": NAME, "system": document(41, 2), "max_tokens": TOKENS}
    async with sdk.messages.stream(messages=said, **asked) as stream:
        first = await stream.get_final_message()
        assert reuse_of(stream.response.headers).outcome == "miss"
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
    counted = await sdk.messages.count_tokens(model=NAME, system=asked["system"], messages=said)
    second = await sdk.messages.with_raw_response.create(messages=said, **asked)
    reuse = reuse_of(second.headers)
    assert reuse.outcome == "hit"
    usage = (await second.parse()).usage
    assert usage.cache_read_input_tokens == reuse.tokens + reuse.cached
    assert reuse.prompt_tokens == counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        await sdk.messages.create(model="other", max_tokens=1, messages=said)


async def test_tokenize_and_detokenize(client: Client) -> None:
    text = document(50, 2)
    answer = await client.post("/tokenize", {"model": NAME, "prompt": text})
    assert answer.status == 200, answer.raw
    assert answer.body["count"] == len(answer.body["tokens"]) == len(text)
    back = await client.post("/detokenize", {"model": NAME, "tokens": answer.body["tokens"]})
    assert back.body["prompt"] == text
    messages = [{"role": "user", "content": text}]
    counted = await client.post("/tokenize", {"model": NAME, "messages": messages})
    assert counted.body["count"] == (await client.chat(messages, tokens=1)).reuse.prompt_tokens
