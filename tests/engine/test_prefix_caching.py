"""With vLLM's prefix caching on in both engines, as it is by default: local caches and reads together.

KV that was read wrongly would stay in a cache here, and show in a later request.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pair import BLOCK, Pair, document
from test_random import EDITS, TOKENS, check_history


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def caching(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A second pair of engines, with prefix caching."""
    async with pair.beside(tmp_path_factory.mktemp("caching"), "--enable-prefix-caching") as caching:
        yield caching


async def test_random_histories_with_caches(caching: Pair) -> None:
    dice = random.Random(7)
    reused = 0
    async with caching.router() as cached:
        for seed in range(3):
            # Few seeds: what one conversation left in the caches is met by the next.
            edits = dice.choices(EDITS, k=4)
            reused += await check_history(cached, edits, seed % 3, tokens=100, is_cached=True)
    assert reused > 0


async def test_only_what_is_not_cached_is_read(caching: Pair) -> None:
    async with caching.router() as cached:
        conversation = uuid.uuid4().hex
        messages = [{"role": "user", "content": document(500, 20)}]
        first = await cached.chat(messages, conversation, tokens=100)
        prompt_tokens = first.reuse.prompt_tokens
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": document(501, 2)},
        ]
        second = await cached.chat(messages, conversation, tokens=TOKENS)
        # The prefill engine has the first prompt itself, and reads the answer.
        assert second.reuse.outcome == "hit"
        assert second.reuse.cached == prompt_tokens // BLOCK * BLOCK
        assert second.reuse.cached + second.reuse.tokens == (prompt_tokens + 99) // BLOCK * BLOCK
        second.assert_same(await cached.chat(messages, reuse=False, tokens=TOKENS))
        # The same prompt once more is all in its cache, and nothing is read.
        third = await cached.chat(messages, conversation, tokens=TOKENS)
        assert (third.reuse.outcome, third.reuse.tokens, third.reuse.reason) == ("hit", 0, "local_cache")
        third.assert_same(second)
    await caching.assert_unpinned()
