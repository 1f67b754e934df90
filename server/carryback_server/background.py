"""Work that goes on in the background for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from prometheus_client import Counter

logger = logging.getLogger("carryback")

# After a fault it begins again so much later, doubled with each fault in a row.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0
# What has run for so long since its last fault begins with a short pause again.
SOUND_S = 60.0

Task = Literal["probe", "resolve", "events", "hold", "engines"]


def watch(task: Task, running: asyncio.Task[Any], faults: Counter) -> None:
    """Log and count an exception with which a task ends that nobody waits for."""

    def ended(over: asyncio.Task[Any]) -> None:
        if not over.cancelled() and (error := over.exception()) is not None:
            faults.labels(task).inc()
            logger.error("in the background: %s failed", task, exc_info=error)

    running.add_done_callback(ended)


async def keep_on(task: Task, what: str, work: Callable[[], Awaitable[None]], faults: Counter) -> None:
    """Run something until it ends; after an exception, again. Nothing in the background ends in silence.

    Args:
        task: one word, for the metric.
        what: for the log, e.g. `probes of engine 10.0.0.1:8000`.
        faults: counts exceptions, by `task`.
    """
    pause_s = 0.0
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await work()
            return
        except Exception:
            faults.labels(task).inc()
            if loop.time() - began >= SOUND_S:
                pause_s = 0.0
            pause_s = min(2 * pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
            logger.exception("%s failed; again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)
