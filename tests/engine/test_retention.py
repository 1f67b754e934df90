"""How long KV is held. What is pinned is read from the decode engine's own metric."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import aiohttp
import carryback
import pytest
from pair import NAME, Client, Pair, document, eventually
from test_reuse import TOOLS
from tiny_model import no_whitespace


def prompt(seed: int, sentences: int = 20) -> list[dict[str, Any]]:
    return [{"role": "user", "content": document(seed, sentences)}]


async def held(pair: Pair, client: Client, conversation: str) -> None:
    """A conversation of one turn whose KV the decode engine has pinned."""
    await pair.assert_unpinned()
    answer = await client.chat(prompt(1), conversation)
    assert answer.status == 200
    await eventually(lambda: is_held(client, conversation), 10, "nothing is held")
    assert await pair.pinned("decode") > 0


async def is_held(client: Client, conversation: str) -> bool:
    async with client.session.get(f"{client.url}/v1/conversations/{conversation}") as response:
        location = (await response.json()).get("location") or {}
        return response.status == 200 and location.get("pinned_s", 0) > 0


async def test_delete_releases(pair: Pair) -> None:
    async with pair.router() as client:
        conversation = uuid.uuid4().hex
        await held(pair, client, conversation)
        url = f"{client.url}/v1/conversations/{conversation}"
        async with client.session.get(url) as response:
            view = await response.json()
        assert view["location"]["tokens"] % 32 == 0
        assert view["location"]["tokens"] > 0
        assert view["last_reuse"].startswith("miss; tokens=0; reason=new")
        async with client.session.delete(url) as response:
            assert response.status == 200
            assert (await response.json())["deleted"] is True
        await pair.assert_unpinned("decode")
        async with client.session.get(url) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "conversation_not_found"
        async with client.session.delete(url) as response:
            assert response.status == 404


async def test_end_of_a_conversation_releases(pair: Pair) -> None:
    async with pair.router() as client:
        await pair.assert_unpinned()
        openai = carryback.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")
        with carryback.conversation() as conversation:
            await openai.chat.completions.create(model=NAME, messages=prompt(2), max_tokens=8)
            await eventually(lambda: is_held(client, conversation.id), 10, "nothing is held")
            assert await pair.pinned("decode") > 0
            await conversation.aend()
        await pair.assert_unpinned("decode")


async def test_a_last_request_is_not_held(pair: Pair) -> None:
    async with pair.router() as client:
        conversation = uuid.uuid4().hex
        await held(pair, client, conversation)
        answer = await client.chat(prompt(1), conversation, headers={"X-Conversation-End": "true"})
        assert answer.reuse.outcome == "hit"
        await pair.assert_unpinned("decode")
        assert not await is_held(client, conversation)


async def test_time_to_live(pair: Pair) -> None:
    async with pair.router(hold_s=8) as client:
        conversation = uuid.uuid4().hex
        await held(pair, client, conversation)
        await pair.assert_unpinned("decode", within_s=30)
        assert not await is_held(client, conversation)
        # What is not pinned any more is there for as long as nobody needs the room.
        answer = await client.chat(prompt(1), conversation)
        assert (answer.reuse.outcome, answer.reuse.reason) == ("hit", "verified")


async def test_an_answer_that_calls_a_tool_is_held_for_the_tools_time(pair: Pair) -> None:
    async with pair.router(hold_mid_turn_s=4) as client:
        await pair.assert_unpinned()
        conversation = uuid.uuid4().hex
        answer = await client.chat(
            prompt(6), conversation, tools=TOOLS, tool_choice="required", tokens=200, min_tokens=0,
            logit_bias=no_whitespace(),
        )  # fmt: skip
        assert answer.body["choices"][0]["finish_reason"] == "tool_calls"
        view = await viewed(client, conversation)
        assert view["boundary"] == "mid_turn"
        await pair.assert_unpinned("decode")
        assert not await is_held(client, conversation)


async def test_an_answer_that_stops_is_held_for_longer(pair: Pair) -> None:
    async with pair.router(hold_mid_turn_s=4) as client:
        await pair.assert_unpinned()
        text = (await client.chat(prompt(7), reuse=False)).text
        conversation = uuid.uuid4().hex
        # vLLM itself takes this for an abort.
        stop = text[10:14]
        answer = await client.chat(prompt(7), conversation, stop=[stop], min_tokens=0)
        assert answer.text == text[: text.index(stop)]
        assert answer.body["choices"][0]["finish_reason"] == "stop"
        await eventually(lambda: is_held(client, conversation), 10, "nothing is held")
        view = await viewed(client, conversation)
        assert view["boundary"] == "turn_end"
        assert 100 < view["location"]["pinned_s"] <= 480
        # What the router says of the engine is what the engine says of itself.
        assert await pair.pinned("decode") > 0
        await eventually(lambda: agree(pair, client), 10, "the router counts otherwise than the engine")
        assert (await client.engine("decode"))["pinned_blocks"] == view["location"]["tokens"] // 32
        messages = [*prompt(7), {"role": "assistant", "content": answer.text}, *prompt(8, 2)]
        following = await client.chat(messages, conversation)
        assert following.reuse.outcome in ("hit", "partial")  # the stop string is not in the text
        assert following.reuse.tokens >= answer.reuse.prompt_tokens // 32 * 32
        following.assert_same(await client.chat(messages, reuse=False))


async def viewed(client: Client, conversation: str) -> dict[str, Any]:
    async with client.session.get(f"{client.url}/v1/conversations/{conversation}") as response:
        view: dict[str, Any] = await response.json()
        return view


async def agree(pair: Pair, client: Client) -> bool:
    engine = await client.engine("decode")
    share = engine["pinned_blocks"] / engine["capacity_blocks"]
    return abs(share - await pair.pinned("decode")) < 0.5 / engine["capacity_blocks"]


async def test_each_turn_is_held_anew(pair: Pair) -> None:
    # A23: a lifetime that is set on the first turn only would have ended by the last one.
    hold_s = 8
    async with pair.router(hold_s=hold_s) as client:
        conversation = uuid.uuid4().hex
        messages = prompt(3)
        answer = await client.chat(messages, conversation, tokens=8)
        for turn in range(3):
            await asyncio.sleep(0.6 * hold_s)
            assert await is_held(client, conversation), turn
            messages = [*messages, {"role": "assistant", "content": answer.text}, *prompt(turn, 2)]
            answer = await client.chat(messages, conversation, tokens=8)
            assert answer.reuse.outcome == "hit", turn


@pytest.mark.parametrize("stop", [None, "no such text"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(pair: Pair, stream: bool, stop: str | None) -> None:
    # A16
    async with pair.router() as client:
        await pair.assert_unpinned()
        conversation = uuid.uuid4().hex
        body = {
            "model": NAME, "messages": prompt(4), "max_tokens": 2000, "min_tokens": 2000, "stream": stream,
            "stop": stop,
        }  # fmt: skip
        headers = {"X-Conversation-ID": conversation}
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                if stream:
                    async with session.post(
                        f"{client.url}/v1/chat/completions", json=body, headers=headers
                    ) as response:
                        for _ in range(5):
                            assert await response.content.readline()
                        assert await pair.metric("decode", "vllm:num_requests_running") == 1
                        response.close()
                else:
                    call = asyncio.create_task(
                        session.post(f"{client.url}/v1/chat/completions", json=body, headers=headers)
                    )
                    await eventually(lambda: is_running(pair), 30, "the request did not reach decode")
                    call.cancel()
        await eventually(lambda: is_idle(pair), 30, "decode still works for nobody")
        await pair.assert_unpinned()
        answer = await client.chat(prompt(4), conversation)
        answer.assert_same(await client.chat(prompt(4), reuse=False))


async def test_a_client_that_leaves_during_prefill(pair: Pair) -> None:
    """What was leased for the turn that nobody waits for any more is let go of, read or not."""
    async with pair.router() as client:
        for seconds in (0.0, 0.05, 0.2, 0.5):
            conversation = uuid.uuid4().hex
            await held(pair, client, conversation)
            busy = [
                asyncio.create_task(client.chat(prompt(seed, 90), reuse=False, tokens=1)) for seed in range(4)
            ]
            call = asyncio.create_task(client.chat(prompt(1), conversation))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.gather(*busy)
            await asyncio.wait([call])
            async with client.session.delete(f"{client.url}/v1/conversations/{conversation}"):
                pass
            await pair.assert_unpinned()


async def is_running(pair: Pair) -> bool:
    return await pair.metric("decode", "vllm:num_requests_running") > 0


async def is_idle(pair: Pair) -> bool:
    return not await is_running(pair)


async def test_no_conversation_is_not_held(pair: Pair) -> None:
    async with pair.router() as client:
        await pair.assert_unpinned()
        body = {"model": NAME, "prompt": document(5, 20), "max_tokens": 4}
        answer = await client.post("/v1/completions", body)
        assert answer.reuse.reason == "new"
        await pair.assert_unpinned(within_s=10)


async def test_metrics_tell_what_is_held(pair: Pair) -> None:
    async with pair.router() as client:
        conversation = uuid.uuid4().hex
        await held(pair, client, conversation)
        values = await client.metrics()
        assert values['carryback_held_pins{engine="decode"}'] == 1
        assert values['carryback_held_tokens{engine="decode"}'] > 0
        assert values['carryback_reuse_total{outcome="miss",reason="new"}'] == 1
        assert values['carryback_prompt_tokens_total{source="recomputed"}'] > 500
        assert values['carryback_time_to_first_token_seconds_count{outcome="miss"}'] == 1
        assert values['carryback_engine_up{engine="decode",role="decode"}'] == 1
        async with client.session.get(f"{client.url}/v1/conversations") as response:
            listing = json.loads(await response.read())
        assert [each["id"] for each in listing["data"]] == [conversation]
    await pair.assert_unpinned()  # a router that stops takes nothing with it
