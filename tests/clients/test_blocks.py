"""Blocks of conversations that do not end in the order in which they began: `yield` inside of them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator

import carryback
from carryback._conversation import current


def name() -> str | None:
    """The conversation that a request made here belongs to."""
    conversation = current()
    return conversation and conversation.id


def words(id: str) -> Iterator[str | None]:
    """A generator that pauses inside a block."""
    with carryback.conversation(id):
        yield name()
        yield name()


async def awords(id: str) -> AsyncIterator[str | None]:
    async with carryback.conversation(id):
        yield name()
        yield name()


def test_a_generator_closed_after_its_consumers_block_leaves_nothing() -> None:
    inner = words("inner")
    with carryback.conversation("outer"):
        assert next(inner) == "inner"
        assert name() == "inner", "a paused generator's block is open for who iterates"
    assert name() == "inner"
    inner.close()
    assert name() is None


def test_a_generator_closed_inside_of_a_later_block_takes_only_its_own() -> None:
    inner = words("inner")
    next(inner)
    with carryback.conversation("outer"):
        inner.close()
        assert name() == "outer"
    assert name() is None


def test_generators_side_by_side() -> None:
    both = [words("a"), words("b")]
    assert [next(each) for each in both] == ["a", "b"]
    assert next(both[0]) == "b", "the block entered last is the innermost"
    both[0].close()
    assert name() == "b"
    both[1].close()
    assert name() is None


def test_one_conversation_entered_twice() -> None:
    with carryback.conversation("a") as a:
        with a, carryback.conversation("b"), a:
            assert name() == "a"
        assert name() == "a"
    assert name() is None


async def test_an_async_generator_that_another_task_closes() -> None:
    inner = awords("inner")
    async with carryback.conversation("outer"):
        assert await anext(inner) == "inner"
        await asyncio.create_task(inner.aclose())  # type: ignore[attr-defined]
        assert name() == "outer"
    assert name() is None


async def test_an_async_generator_that_nobody_closes() -> None:
    async with carryback.conversation("outer"):
        async for _ in awords("inner"):
            break
        gc.collect()
        await asyncio.sleep(0)  # asyncio closes it, in a task of its own
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert name() == "outer"
    assert name() is None


def test_a_generator_that_another_thread_closes() -> None:
    inner = words("inner")
    next(inner)
    thread = threading.Thread(target=inner.close)
    thread.start()
    thread.join()
    assert name() is None


def test_a_block_that_is_left_elsewhere_is_no_parent() -> None:
    inner = words("inner")
    next(inner)
    contextvars.Context().run(inner.close)
    with carryback.conversation("next") as conversation:
        assert conversation.parent is None


def test_abandoned_blocks_are_not_kept() -> None:
    def run() -> int:
        from carryback import _conversation

        for number in range(100):
            inner = words(f"inner-{number}")
            next(inner)
            contextvars.Context().run(inner.close)
        with carryback.conversation("last"):
            return len(_conversation._entered.get())

    assert contextvars.Context().run(run) == 1


async def test_a_task_keeps_the_block_that_it_began_in() -> None:
    left = asyncio.Event()

    async def late() -> str | None:
        await left.wait()
        return name()

    async with carryback.conversation("outer"):
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
    left.set()
    assert await task == "outer"
    assert name() is None
