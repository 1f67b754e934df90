"""The pin budget, on a decode engine whose KV cache is too small for all that comes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from carryback_server.supervisor import Engines
from pair import BLOCK, Answer, Client, Pair, document

CAPACITY = 900  # KV blocks
BUDGET = 0.3
ONE_SHOTS = 50
CONVERSATIONS = 20
TURNS = 3
AT_ONCE = 4
TOKENS = 8


@pytest_asyncio.fixture(loop_scope="session")
async def small(pair: Pair, tmp_path: Path) -> AsyncIterator[Pair]:
    """The prefill engine, and a decode engine with a small KV cache in the place of the other one."""
    decode = pair.another("decode", "small", "--num-gpu-blocks-override", str(CAPACITY))
    with pair.paused("decode"):
        async with Engines([decode], log_dir=tmp_path) as engines:
            await engines.wait_ready()
            yield Pair(engines, [pair.commands[0], decode], pair.session)


class Load:
    """Keeps the engines busy, and remembers what came back."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.blocks = 0
        "Of all requests, each counted by itself."
        self.last_blocks = 0
        "Of the last request of each conversation, and of each one-shot: what is held if all is held."
        self.known: list[Answer] = []
        "Following turns of conversations that have a name, or were recognised before."
        self.recognised: list[Answer] = []
        "Second turns of those without one: the first may have been a one-shot, for all the router knew."
        self._places = asyncio.Semaphore(AT_ONCE)

    async def one_shot(self, number: int) -> None:
        answer = await self._ask([{"role": "user", "content": document(1000 + number, 14)}], None)
        self.last_blocks += blocks(answer)

    async def conversation(self, number: int) -> None:
        # Half of them say who they are; the others are recognised by their messages.
        name = uuid.uuid4().hex if number % 2 else None
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": document(100 * number + turn, 1 if turn else 3)})
            answer = await self._ask(messages, name)
            messages.append({"role": "assistant", "content": answer.text})
            if turn:
                (self.known if name or turn > 1 else self.recognised).append(answer)
        self.last_blocks += blocks(answer)

    async def _ask(self, messages: list[dict[str, Any]], name: str | None) -> Answer:
        async with self._places:
            answer = await self.client.chat(messages, name, tokens=TOKENS)
        assert answer.status == 200, answer.raw
        self.blocks += blocks(answer)
        return answer


def blocks(answer: Answer) -> int:
    """KV blocks of a request with its answer."""
    return -(-(answer.reuse.prompt_tokens + TOKENS) // BLOCK)


async def test_one_shots_do_not_crowd_conversations_out(small: Pair) -> None:
    async with small.router(pin_budget=BUDGET) as client:
        usage, waiting = [], []

        async def watch() -> None:
            while True:
                usage.append(await small.pinned("decode"))
                waiting.append(await small.metric("decode", "vllm:num_requests_waiting"))
                await asyncio.sleep(0.1)

        load = Load(client)
        watching = asyncio.create_task(watch())
        await asyncio.gather(
            *(load.conversation(number) for number in range(CONVERSATIONS)),
            *(load.one_shot(number) for number in range(ONE_SHOTS)),
        )
        watching.cancel()
        engine = await client.engine("decode")
        metrics = await client.metrics()
        assert await small.metric("decode", "vllm:num_preemptions_total") == 0
    hits = {
        name: f"{sum(answer.reuse.outcome == 'hit' for answer in answers)} of {len(answers)}"
        for name, answers in (("known", load.known), ("recognised", load.recognised))
    }
    print(
        f"\n{load.blocks} blocks went through a cache of {engine['capacity_blocks']}, of which {BUDGET:.0%} may be "
        f"pinned; at most {max(usage):.0%} were in use, and {max(waiting):.0f} requests waited; following turns "
        f"that hit: {hits}; given up: { {k: v for k, v in metrics.items() if 'pins_given_up_total' in k} }"
    )
    # It would have run out.
    assert load.last_blocks > engine["capacity_blocks"]
    assert max(usage) < 0.9
    assert engine["pinned_blocks"] <= BUDGET * engine["capacity_blocks"]
    assert sum(answer.reuse.outcome == "hit" for answer in load.known) >= 0.9 * len(load.known)
    await small.assert_unpinned()
