"""Random edits of growing conversations: whatever the router is told, every answer is right."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest_asyncio
from carryback_server.supervisor import Engines
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pair import Client, Pair, document

Messages = list[dict[str, Any]]

EDITS = ["grow", "grow", "grow", "change", "trim", "system", "repeat", "swap", "stranger"]
TOKENS = 12


def edit(messages: Messages, answer: str, how: str, dice: random.Random) -> Messages:
    """The next request's messages: a continuation, or something else that a client might send."""
    grown = [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": document(dice.randrange(1000), dice.randrange(1, 5))},
    ]
    if how == "change":
        at = dice.randrange(len(grown) - 1)
        text = grown[at]["content"]
        cut = dice.randrange(len(text))
        grown[at] = {**grown[at], "content": text[:cut] + dice.choice("!#%") + text[cut + 1 :]}
    elif how == "trim":
        del grown[1 : 1 + 2 * dice.randrange(1, 2)]
    elif how == "system":
        grown[0] = {"role": "system", "content": document(dice.randrange(1000), 3)}
    elif how == "repeat":
        return messages
    elif how == "swap" and len(grown) > 3:
        grown[1], grown[-1] = grown[-1], grown[1]
    elif how == "stranger":
        return [{"role": "user", "content": document(dice.randrange(1000), 12)}]
    return grown


async def check_history(
    client: Client,
    edits: list[str],
    seed: int,
    *,
    tokens: int = TOKENS,
    is_cached: bool = False,
    names: Sequence[str] = (),
) -> int:
    """Play a conversation and compare every answer with a full recompute; the tokens reused in all.

    Args:
        tokens: to generate for each answer.
        is_cached: the prefill engine has a prefix cache, too.
        names: conversations' ids, of which each request has one at random; one of its own if there are none.
    """
    dice = random.Random(seed)
    names = names or [uuid.uuid4().hex]
    messages: Messages = [
        {"role": "system", "content": document(seed, 3)},
        {"role": "user", "content": document(seed + 1, 10)},
    ]
    answer = await client.chat(messages, dice.choice(names), tokens=tokens)
    reused = 0
    for how in edits:
        messages = edit(messages, answer.text, how, dice)
        answer = await client.chat(messages, dice.choice(names), tokens=tokens, stream=dice.random() < 0.5)
        answer.assert_same(await client.chat(messages, reuse=False, tokens=tokens))
        reused += answer.reuse.tokens
        if how == "grow" and not is_cached and len(names) == 1:
            assert answer.reuse.outcome == "hit"
    return reused


@settings(
    max_examples=int(os.environ.get("CARRYBACK_TEST_HISTORIES", "20")),
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(edits=st.lists(st.sampled_from(EDITS), min_size=2, max_size=3), seed=st.integers(0, 10_000))
async def test_random_histories(client: Client, edits: list[str], seed: int) -> None:
    await check_history(client, edits, seed)


@settings(
    max_examples=int(os.environ.get("CARRYBACK_TEST_HISTORIES", "10")),
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(edits=st.lists(st.sampled_from(EDITS), min_size=2, max_size=3), seed=st.integers(0, 10_000))
async def test_random_histories_that_share_names_wrongly(client: Client, edits: list[str], seed: int) -> None:
    """Every request has one of three names, whatever it belongs to; two conversations at a time."""
    await asyncio.gather(*(check_history(client, edits, seed + at, names=["a", "b", "c"]) for at in range(2)))


@pytest_asyncio.fixture(loop_scope="session")
async def mutants(pair: Pair, tmp_path: Path) -> AsyncIterator[tuple[Client, Client]]:
    """Clients of two routers whose decode engine goes by name: before a prefill engine that verifies, and before one
    that does not."""
    decode = pair.another("decode", "by-name", connector=("unverified", "ByNameConnector"))
    trusting = pair.another("prefill", "trusting", connector=("unverified", "TrustingConnector"))
    with pair.paused("decode"):
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(Engines([decode, trusting], log_dir=tmp_path))
            await engines.wait_ready()
            verified, wrong = (
                await stack.enter_async_context(pair.router([prefill.engine(), decode.engine()]))
                for prefill in (pair.commands[0], trusting)
            )
            yield verified, wrong


async def test_the_check_fails_without_verification(mutants: tuple[Client, Client]) -> None:
    verified, trusting = mutants
    for how in ("change", "system", "stranger"):
        wrong = 0
        for seed in range(3):
            await check_history(verified, [how], seed)
            try:
                await check_history(trusting, [how], seed)
            except AssertionError:
                wrong += 1
        assert wrong, f"wrong KV behind {how!r} went unnoticed"
