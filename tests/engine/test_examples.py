"""Every example as a user runs it, on real engines: what its model calls reuse, counted by tokens.

The model's tokens are bytes, so its contexts are as long as the examples' texts are.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pair import Client, Pair

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from examples import EXAMPLES, Call, measure

# Without it a grammar lets this model write spaces without end.
ENGINE_ARGS = (
    "--max-model-len", "16384",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a router before engines with a long context."""
    async with (
        pair.beside(tmp_path_factory.mktemp("examples"), *ENGINE_ARGS) as roomy,
        roomy.router() as client,
    ):
        yield client


def reused(calls: list[Call]) -> int:
    return sum(call.reuse.tokens + call.reuse.cached for call in calls)


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_computes_what_is_new(client: Client, example: str) -> None:
    meter, printed = await measure(example, f"{client.url}/v1")
    later = [call for call in meter.calls if call.new is not None]
    assert later
    assert [(call.reuse, call.new) for call in meter.calls if not call.is_bounded] == []
    assert reused(later) > 0
    assert "reuse" in printed
    if example not in ("openai_loop", "langgraph_graph", "agents_sdk"):
        return
    # The router alone, with nothing but the messages, finds what there is to find.
    inferred, _ = await measure(example, f"{client.url}/v1", anonymous=True)
    assert reused(inferred.calls) >= 0.95 * reused(meter.calls)
