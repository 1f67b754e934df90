"""Engines that are killed. Runs last: each kill costs an engine's start."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import Any

import pytest
from carryback_server.supervisor import Engines
from pair import NAME, Client, Pair, document, eventually


def prompt(seed: int, sentences: int = 20) -> list[dict[str, Any]]:
    return [{"role": "user", "content": document(seed, sentences)}]


def supervised(pair: Pair) -> Engines:
    if pair.engines is None:
        pytest.skip("these engines were started by hand")
    return pair.engines


def kill(pair: Pair, role: str) -> None:
    """SIGKILL to an engine and its workers, as when the machine runs out of memory."""
    os.killpg(supervised(pair).pid(role), signal.SIGKILL)


async def recovered(pair: Pair, client: Client) -> None:
    """Wait until both engines serve again, and assert that they reuse."""
    await eventually(lambda: serves_by_both(client), 300, "the engine was not restarted")
    conversation = uuid.uuid4().hex
    messages = prompt(99)
    answer = await client.chat(messages, conversation)
    messages = [*messages, {"role": "assistant", "content": answer.text}, *prompt(98, 2)]
    answer = await client.chat(messages, conversation)
    assert answer.reuse.outcome == "hit"
    answer.assert_same(await client.chat(messages, reuse=False))


async def serves_by_both(client: Client) -> bool:
    answer = await client.chat(prompt(97, 2), tokens=1)
    return answer.status == 200 and answer.reuse.reason == "new"


async def is_ready(client: Client) -> bool:
    async with client.session.get(f"{client.url}/ready") as response:
        return response.status == 200


async def is_not_ready(client: Client) -> bool:
    return not await is_ready(client)


async def test_decode_is_killed_in_the_middle_of_a_stream(pair: Pair) -> None:
    async with pair.router() as client:
        await client.chat(prompt(1), "idle")
        body = {"model": NAME, "messages": prompt(3), "max_tokens": 2000, "min_tokens": 2000, "stream": True}
        async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            for _ in range(5):
                assert await response.content.readline()
            kill(pair, "decode")
            rest = await response.read()
        last = rest.strip().split(b"\n\n")[-1]
        assert last.startswith(b'data: {"error"')
        assert b"engine_lost" in last
        answer = await client.chat(prompt(1), "idle")
        assert answer.status in (502, 503)
        assert answer.body["error"]["code"] in ("no_engine", "engine_failed")
        await recovered(pair, client)
        # What the dead engine held is forgotten, and the conversation goes on.
        answer = await client.chat(prompt(1), "idle")
        assert answer.reuse.outcome == "miss"
        answer.assert_same(await client.chat(prompt(1), reuse=False))


async def test_prefill_is_killed_in_the_middle_of_a_prefill(pair: Pair) -> None:
    async with pair.router() as client:
        expected = await client.chat(prompt(2), "idle")
        calls = [
            asyncio.create_task(client.chat(prompt(seed, 80), f"mid{seed}", tokens=8)) for seed in range(6)
        ]
        await asyncio.sleep(0.3)
        kill(pair, "prefill")
        answers = await asyncio.gather(*calls)
        assert [answer.status for answer in answers] == [200] * 6
        # The decode engine does the whole request.
        answer = await client.chat(prompt(2), "other")
        assert answer.reuse.reason in ("prefill_failed", "prefill_unavailable")
        answer.assert_same(expected)
        await eventually(lambda: is_not_ready(client), 10, "a dead engine counts as ready")
        await recovered(pair, client)
        for seed, answer in enumerate(answers):
            answer.assert_same(await client.chat(prompt(seed, 80), reuse=False, tokens=8))
        await pair.assert_unpinned("prefill", within_s=60)
