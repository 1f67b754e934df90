"""A model with sliding windows, and a decode engine of two ranks: what is read back, and that every answer is right.

Both at once, since a pair of engines takes long to start. `benchmarks/support.py` tries many more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from carryback_server.launch import free_ports
from layouts import Trial, Tried, by_name, running
from pair import BLOCK, KEY, Client, Pair
from test_cases import reads, seal_again
from test_random import check_history
from tiny_model import WINDOW

(LAYOUT,) = by_name(["gemma2-tp1-tp2"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def other(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Engines of that layout."""
    with pair.paused("prefill", "decode"):
        async with running(LAYOUT, tmp_path_factory.mktemp("models"), pair.session) as engines:
            yield engines


@pytest_asyncio.fixture(loop_scope="session")
async def client(other: Pair) -> AsyncIterator[Client]:
    """A client of a router before those engines."""
    async with other.router() as client:
        yield client


def right(trial: Trial) -> list[Tried]:
    """What was tried, every answer being a full recompute's."""
    for each in trial.tried:
        assert each.apart <= LAYOUT.tolerance, each
        assert each.is_same, each
    return trial.tried


async def test_a_history_that_grows_is_read_back(other: Pair, client: Client) -> None:
    trial = Trial(other, client, LAYOUT)
    await trial.growth()
    for each in right(trial):
        reuse = each.answer.reuse
        assert (reuse.outcome, reuse.reason) == ("hit", "verified")
        assert reuse.tokens > WINDOW + BLOCK


async def test_an_edit_behind_the_windows_reads_what_is_there(other: Pair, client: Client) -> None:
    """vLLM keeps the windows at the ends of what it has computed; of what is before, only what lies there by chance."""
    trial = Trial(other, client, LAYOUT)
    await trial.edit("middle")
    (edited,) = right(trial)
    assert edited.telling > 0.1
    assert edited.answer.reuse.reason == "history_changed"


async def test_an_edit_in_the_last_block_reuses_all_others(other: Pair, client: Client) -> None:
    trial = Trial(other, client, LAYOUT)
    await trial.edit("last")
    (edited,) = right(trial)
    assert edited.telling > 0.1
    reuse = edited.answer.reuse
    assert reuse.tokens > reuse.prompt_tokens - WINDOW


async def test_random_histories(client: Client) -> None:
    assert await check_history(client, ["grow", "change", "grow", "swap", "grow"], seed=1) > 0


async def test_a_read_that_fails_leaves_nothing_that_is_taken_for_kv(other: Pair, client: Client) -> None:
    def change(record: dict[str, Any], digests: bytes) -> bytes:
        seal_again(record, digests, KEY, remote_engine_id="nobody", remote_port=free_ports(1)[0])
        return digests

    report = await reads(other, client, 2, change)
    assert (report["outcome"], report["tokens"], report["reason"]) == ("miss", 0, "load_failed")
