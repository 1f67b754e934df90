"""What goes wrong, and when."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

from chaos.processes import Cluster, Program
from chaos.verdict import Report

# A process that is killed is away for so long at most, besides its start; one that hangs, for so long.
MAX_DOWN_S = 3.0
MAX_PAUSE_S = 7.0
# Between a snapshot of Redis and the end of the server, which then comes back with what was so then.
MAX_SNAPSHOT_AGE_S = 3.0

# Of the seven, out at the same time; a slow machine takes long to bring one back.
MAX_OUT = 3

Fault = tuple[str, Callable[[], Coroutine[None, None, None]], str]
"Of whom, what happens, and its name."


class Faults:
    """Kills and revives, until it is stopped.

    Args:
        every_s: mean time between two faults, in seconds.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, report: Report, every_s: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._report = report
        self._every_s = every_s
        self._out: dict[str, asyncio.Task[None]] = {}

    async def run(self, seconds: float, count: int | None) -> None:
        """Faults for so long, or, if it is given, so many; return when all that was out is back."""
        deck: list[Fault] = []
        deadline = time.monotonic() + seconds if count is None else math.inf
        done = 0
        while time.monotonic() < deadline and (count is None or done < count):
            await asyncio.sleep(min(self._rng.expovariate(1 / self._every_s), 4 * self._every_s))
            deck = deck or self._shuffled()
            at = next((index for index, fault in enumerate(deck) if fault[0] not in self._out), None)
            if at is None or len(self._out) >= MAX_OUT:
                continue
            victim, happens, name = deck.pop(at)
            self._report.event(f"{name} {victim}")
            self._out[victim] = asyncio.create_task(self._one(victim, happens))
            done += 1
        if self._out:
            await asyncio.wait(list(self._out.values()))

    async def _one(self, victim: str, happens: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await happens()
        except Exception as error:  # noqa: BLE001
            self._report.failures.append(f"{victim} did not come back: {error!r}")
        finally:
            del self._out[victim]

    def _shuffled(self) -> list[Fault]:
        """All faults, in rounds: one of a prefill engine, a decode engine, a router and Redis in each."""
        groups = defaultdict[str, list[Fault]](list)
        for program in self._cluster.programs:
            group = groups[program.name.rstrip("0123456789")]
            kill = (program.name, partial(self._end, program, signal.SIGKILL), "kill")
            group += [kill] * 3 + [(program.name, partial(self._pause, program), "pause")]
        for router in self._cluster.routers:
            groups["router"].append((router.name, partial(self._end, router, signal.SIGTERM), "stop"))
        groups["redis"] = [
            *[("redis", self._empty_redis, "empty"), ("redis", self._set_back_redis, "set back")] * 3,
            ("redis", self._pause_redis, "pause"),
        ]
        for group in groups.values():
            self._rng.shuffle(group)
        faults: list[Fault] = []
        while any(groups.values()):
            now = [group.pop() for group in groups.values() if group]
            self._rng.shuffle(now)
            faults += now
        return faults

    async def _end(self, program: Program, number: signal.Signals) -> None:
        program.end(number)
        await program.ended()
        await asyncio.sleep(self._rng.uniform(0, MAX_DOWN_S))
        await program.start()

    async def _pause(self, program: Program) -> None:
        program.pause()
        try:
            await asyncio.sleep(self._rng.uniform(0.5, MAX_PAUSE_S))
        finally:
            program.resume()

    async def _empty_redis(self) -> None:
        """It dies, and what it knew is lost."""
        folder = self._cluster.redis.client.config_get("dir")["dir"]
        await self._restart_redis(Path(str(folder)))

    async def _set_back_redis(self) -> None:
        """It dies, and comes back from a snapshot: conversations are where they were then."""
        await asyncio.to_thread(self._cluster.redis.client.save)
        await asyncio.sleep(self._rng.uniform(0.2, MAX_SNAPSHOT_AGE_S))
        await self._restart_redis(None)

    async def _restart_redis(self, wipe: Path | None) -> None:
        redis = self._cluster.redis
        await asyncio.to_thread(redis.kill)
        if wipe is not None:
            (wipe / "dump.rdb").unlink(missing_ok=True)
        await asyncio.sleep(self._rng.uniform(0, MAX_DOWN_S))
        await asyncio.to_thread(redis.start)

    async def _pause_redis(self) -> None:
        self._cluster.redis.pause()
        try:
            await asyncio.sleep(self._rng.uniform(0.5, MAX_PAUSE_S))
        finally:
            self._cluster.redis.resume()
