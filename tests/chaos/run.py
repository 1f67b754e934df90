"""One run: start all, let agents talk while things fail, wait until nothing is held, and judge."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from chaos.agents import HANG_S, Agent
from chaos.faults import Faults
from chaos.processes import GRACE_S, SETTINGS, Cluster, Program, running
from chaos.verdict import Report

# What an agent's turn takes without its pause, roughly.
TURN_S = 1.5
LOOK_EVERY_S = 2.0
# From the last answer until nothing is held: the longest hold, as engines keep it.
RELEASED_S = max(SETTINGS["hold_s"] + GRACE_S, SETTINGS["prefill_lease_s"]) + 5.0
# Of a router with nothing to do, but for its connections to Redis: listeners, event loop, events, log.
MAX_IDLE_DESCRIPTORS = 50
# Gauges of a router that are 0 once nothing goes on and nothing is held.
_QUIET = (
    "carryback_in_flight_requests",
    "carryback_active_streams",
    "carryback_held_pins",
    "carryback_held_blocks",
    "carryback_engine_in_flight_requests",
    "carryback_engine_load_tokens",
    "carryback_tenant_in_flight_requests",
)


@dataclass(frozen=True)
class Plan:
    """How much of what.

    Attributes:
        seconds: that conversations take together.
        every_s: mean time between two faults.
        faults: how many; None: as many as come in three quarters of the time.
    """

    seconds: float = 300.0
    conversations: int = 200
    turns: int = 10
    seed: int = 1
    every_s: float = 3.0
    faults: int | None = None


async def run(plan: Plan, folder: Path) -> Report:
    """Do it; what was wrong is in the report's `failures`.

    Args:
        folder: for logs and what else should be looked at afterwards.
    """
    rng = random.Random(plan.seed)
    async with running(folder) as cluster:
        report = Report(plan.seconds, plan.seed)
        looking = asyncio.create_task(_look(cluster))
        async with _session() as session:
            faults = asyncio.create_task(_fail(plan, cluster, rng, report))
            await _talk(plan, cluster, rng, session, report)
            await faults
            report.phase = "calm"
            await _talk(_calm(plan), cluster, rng, session, report)
            try:
                await _let_go(cluster, session, report)
            except (RuntimeError, aiohttp.ClientError) as error:
                report.failures.append(f"at the end: {error!r}")
        looking.cancel()
        await _judge_processes(cluster, report)
        report.judge()
    return report


async def _judge_processes(cluster: Cluster, report: Report) -> None:
    """What engines saw, what is in the logs, what the replicas used."""
    report.failures += [f"an engine saw: {each}" for each in cluster.journal()]
    for program in cluster.programs:
        report.failures += program.complaints()
    report.facts["seconds of the slowest start"] = round(
        max(max(program.starts) for program in cluster.programs), 1
    )
    await asyncio.sleep(1)  # the clients' connections are closed
    for router in cluster.routers:
        _judge_usage(router, cluster, report)


def _calm(plan: Plan) -> Plan:
    """A few conversations more, when nothing fails any more."""
    return replace(
        plan, seconds=plan.seconds * 0.1, conversations=max(plan.conversations // 8, 6), seed=-plan.seed
    )


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def _look(cluster: Cluster) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        for router in cluster.routers:
            router.look()


async def _fail(plan: Plan, cluster: Cluster, rng: random.Random, report: Report) -> None:
    """Faults from a tenth of the time on, until a tenth before its end."""
    await asyncio.sleep(plan.seconds * 0.1)
    report.phase = "during"
    await Faults(cluster, rng, report, plan.every_s).run(plan.seconds * 0.75, plan.faults)
    report.phase = "after"


async def _talk(
    plan: Plan, cluster: Cluster, rng: random.Random, session: aiohttp.ClientSession, report: Report
) -> None:
    """All conversations, one begun after the other, so that they end when the time is over."""
    life_s = min(plan.seconds / 3, 45.0)
    pace_s = max(life_s / plan.turns - TURN_S, 0.1)

    async def talk(number: int, start_s: float) -> None:
        await asyncio.sleep(start_s)
        await Agent(f"{plan.seed}.{number}", plan.turns, pace_s, cluster.routers, session, report).run()

    starts = sorted(rng.uniform(0, plan.seconds - life_s) for _ in range(plan.conversations))
    tasks = [asyncio.create_task(talk(number, start_s)) for number, start_s in enumerate(starts)]
    done, missing = await asyncio.wait(tasks, timeout=plan.seconds * 2 + 3 * HANG_S)
    for task in missing:
        task.cancel()
    if missing:
        report.failures.append(f"{len(missing)} conversations did not come to their end")
    for task in done:
        if (error := task.exception()) is not None:
            report.failures.append(f"an agent failed: {error!r}")


async def _let_go(cluster: Cluster, session: aiohttp.ClientSession, report: Report) -> None:
    """End the conversations that are left; nothing may be pinned or in use after the longest hold."""
    ended = time.monotonic()
    report.facts["pinned blocks after the last answer"] = await _pinned(cluster, session)
    url = f"{cluster.routers[0].url}/v1/conversations"
    deleted = 0
    while ids := [each["id"] for each in (await _get(session, f"{url}?limit=1000"))["data"]]:
        for id in ids:
            async with session.delete(f"{url}/{id}") as response:
                deleted += response.status == 200
    report.facts["conversations deleted"] = deleted
    await asyncio.sleep(1)
    report.facts["pinned blocks a second after that"] = await _pinned(cluster, session)
    left = ["?"]
    while left and time.monotonic() < ended + RELEASED_S:
        await asyncio.sleep(0.5)
        left = await _left(cluster, session)
    report.facts["seconds until nothing was held"] = round(time.monotonic() - ended, 1)
    report.failures += left


async def _pinned(cluster: Cluster, session: aiohttp.ClientSession) -> int:
    states = [await _get(session, f"{engine.url}/stub/state") for engine in cluster.engines]
    return sum(state["pinned"] for state in states)


async def _left(cluster: Cluster, session: aiohttp.ClientSession) -> list[str]:
    """What is still held, or still goes on."""
    left = []
    for engine in cluster.engines:
        state = await _get(session, f"{engine.url}/stub/state")
        left += [
            f"{engine.name}: {name} {state[name]}"
            for name in ("pinned", "leased", "in_use", "running")
            if state[name]
        ]
    for router in cluster.routers:
        host, _, port = router.url.rpartition(":")
        async with session.get(f"{host}:{int(port) + 1}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            samples = [sample for family in families for sample in family.samples if sample.name in _QUIET]
        left += [f"{router.name}: {each.name}{each.labels} {each.value}" for each in samples if each.value]
    return left


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    """What is there; asked for again while the router says that it cannot say now."""
    for _ in range(20):
        async with session.get(url) as response:
            if response.status == 200:
                return await response.json()
            last = f"{url}: {await response.text()}"
        await asyncio.sleep(1)
    raise RuntimeError(last)


def _judge_usage(router: Program, cluster: Cluster, report: Report) -> None:
    """Say what a replica used from its start to its end."""
    router.look()
    names = {int(each.url.rpartition(":")[2]): each.name for each in cluster.programs}
    names[cluster.redis.port] = "redis"
    peers = Counter[str]()
    for port, count in router.peers().items():
        peers[names.get(port, "others")] += count
    first, last = router.usage[-1][0], router.usage[-1][-1]
    longest = max(router.usage, key=lambda usages: usages[-1].age_s if usages else 0)
    report.facts[f"{router.name}, {len(router.usage)} lives, the last one"] = (
        f"{last.age_s:.0f} s, descriptors {first.descriptors} to {last.descriptors}, "
        f"RSS {first.rss_mib:.1f} to {last.rss_mib:.1f} MiB, connections at the end {dict(peers)}"
    )
    report.facts[f"{router.name}, the longest"] = (
        f"{longest[-1].age_s:.0f} s, descriptors {longest[0].descriptors} to {longest[-1].descriptors} "
        f"(at most {max(each.descriptors for each in longest)}), "
        f"RSS {longest[0].rss_mib:.1f} to {longest[-1].rss_mib:.1f} MiB"
    )
    # Redis's client keeps as many connections as it ever used at once.
    others = last.descriptors - peers["redis"]
    if others > MAX_IDLE_DESCRIPTORS:
        report.failures.append(f"{router.name} has {others} descriptors with nothing to do, {dict(peers)}")
