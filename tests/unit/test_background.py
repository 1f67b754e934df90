"""What goes on in the background goes on after a fault, which is logged and counted."""

from __future__ import annotations

import asyncio
import logging

import pytest
from carryback_server import background
from prometheus_client import CollectorRegistry, Counter


@pytest.fixture
def faults() -> Counter:
    return Counter("faults", "", ["task"], registry=CollectorRegistry())


@pytest.mark.parametrize(
    "error", [RuntimeError("a"), RecursionError("b"), UnicodeError("c"), KeyError("d"), MemoryError("e")]
)
async def test_whatever_a_loop_raises_it_goes_on(
    faults: Counter, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.001)
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 4:
            raise error

    with caplog.at_level(logging.ERROR):
        await background.keep_on("probe", "probing", work, faults)
    assert rounds == 4
    assert faults.labels("probe")._value.get() == 3
    assert [each.exc_info is not None for each in caplog.records] == [True] * 3


async def test_pauses_grow_and_have_an_end(faults: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            raise asyncio.CancelledError

    async def work() -> None:
        raise RuntimeError

    monkeypatch.setattr(background.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await background.keep_on("events", "hearing", work, faults)
    assert pauses[:3] == [background.FIRST_PAUSE_S * each for each in (1, 2, 4)]
    assert pauses[-1] == background.MAX_PAUSE_S


async def test_it_can_be_ended(faults: Counter) -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(background.keep_on("events", "hearing", work, faults))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_what_nobody_waits_for_fails_aloud(faults: Counter, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("nobody waits for this")

    task = asyncio.create_task(work())
    background.watch("hold", task, faults)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert faults.labels("hold")._value.get() == 1
    assert "nobody waits for this" in caplog.text
