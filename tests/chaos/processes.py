"""The processes: how each is started, killed, paused and started again at the same address."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from redis_server import RedisServer

TESTS = Path(__file__).parents[1]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
# What a process's end may still break after it is up again: kept connections that nobody has looked at.
OUTAGE_SLACK_S = 1.0
# Of engines: tokens of an answer, seconds between two of them, KV blocks, and how long a hold may outlast its time.
ANSWER_TOKENS = 32
CHUNK_INTERVAL_S = 0.03
CAPACITY = 4000
GRACE_S = 10.0
# Short, so that the end need not be waited for long; but nothing else may take a slow machine for a dead one.
SETTINGS: dict[str, Any] = {
    "hold_s": 20.0,
    "hold_mid_turn_s": 15.0,
    "hold_first_s": 12.0,
    "prefill_lease_s": 25.0,
    "connect_timeout_s": 5.0,
    "prefill_timeout_s": 8.0,
    "first_byte_timeout_s": 8.0,
    "idle_timeout_s": 6.0,
    "probe_interval_s": 0.5,
    "probe_timeout_s": 3.0,
    "trial_timeout_s": 5.0,
    "ejection_s": 1.0,
    "ejection_max_s": 4.0,
    "shutdown_timeout_s": 4.0,
    "state_timeout_s": 2.0,
    "log_format": "json",
}
# What no log may have in it.
_COMPLAINTS = re.compile(
    r"Traceback|never retrieved|never awaited|was destroyed but it is pending|Unclosed|exception was not handled"
)


@dataclass(frozen=True)
class Usage:
    """What a process has open and in memory, so many seconds after its start."""

    age_s: float
    descriptors: int
    rss_mib: float


@dataclass
class Program:
    """One process, which may have been started several times.

    Attributes:
        url: where it answers.
        path: answers 200 once it works.
        outages: from when to when it did not work, on the monotonic clock; the last one may go on.
        usage: each time it was looked at, by start.
        starts: how long each took, in seconds.
    """

    name: str
    command: list[str]
    url: str
    path: str
    log: Path
    outages: list[tuple[float, float]] = field(default_factory=list)
    usage: list[list[Usage]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    is_up: bool = False
    _started: float = 0.0

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended, or does not answer.
        """
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220
                self.command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
            )
        self._started = time.monotonic()
        while not await _answers(self.url + self.path):
            if self.process.poll() is not None or time.monotonic() > self._started + START_TIMEOUT_S:
                raise RuntimeError(f"{self.name} does not come up: {self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.05)
        if self.outages:
            self.outages[-1] = self.outages[-1][0], time.monotonic() + OUTAGE_SLACK_S
        self.is_up = True
        self.starts.append(time.monotonic() - self._started)
        self.usage.append([])
        self.look()

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal that ends it."""
        assert self.process is not None
        self.is_up = False
        self.outages.append((time.monotonic(), float("inf")))
        self.process.send_signal(number)

    async def ended(self) -> None:
        """Wait for its end.

        Raises:
            TimeoutError: it does not end.
        """
        assert self.process is not None
        async with asyncio.timeout(STOP_TIMEOUT_S):
            while self.process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def pause(self) -> None:
        """Let it hang."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def was_out(self, since: float) -> bool:
        """Whether it was down at some time from then until now."""
        return any(end >= since for _, end in self.outages)

    def look(self) -> None:
        """Note what it uses now, if it is up."""
        if self.is_up and self.process is not None:
            now = psutil.Process(self.process.pid)
            age_s = time.monotonic() - self._started
            self.usage[-1].append(Usage(age_s, now.num_fds(), now.memory_info().rss / 2**20))

    def peers(self) -> Counter[int]:
        """Its connections, by the port at the other end."""
        assert self.process is not None
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return Counter(each.raddr.port for each in connections if each.raddr)

    def complaints(self) -> list[str]:
        """Lines of its log that should not be there, each with those that follow it."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [index for index, line in enumerate(lines) if _COMPLAINTS.search(line)]
        return [f"log of {self.name}: " + "\n".join(lines[index : index + 30])[:3000] for index in found]

    def close(self) -> None:
        """End it for good."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass
class Cluster:
    """All of it."""

    engines: list[Program]
    routers: list[Program]
    redis: RedisServer
    folder: Path

    @property
    def programs(self) -> list[Program]:
        """All but Redis."""
        return [*self.engines, *self.routers]

    def journal(self) -> list[str]:
        """What the engines saw, in all of their lives, that a correct router never causes."""
        journals = [self.folder / f"{engine.name}.journal" for engine in self.engines]
        return [
            line.removeprefix("violation ")
            for journal in journals
            if journal.exists()
            for line in journal.read_text().splitlines()
        ]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Cluster]:
    """Start all of it; end all of it at the end.

    Args:
        folder: for logs, journals and configuration files.
    """
    ports = _ports()
    async with AsyncExitStack() as stack:
        redis = RedisServer("--bind", "127.0.0.1", port=next(ports))
        stack.callback(redis.close)
        await asyncio.to_thread(redis.start)
        engines, sites = [], []
        for role, number in (("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)):
            name, port, events = f"{role}{number}", next(ports), next(ports)
            command = [
                sys.executable, "-m", "stub_engine", "--role", role, "--port", str(port),
                "--events", str(events), "--chunks", str(ANSWER_TOKENS),
                "--chunk-interval-s", str(CHUNK_INTERVAL_S), "--capacity", str(CAPACITY),
                "--journal", str(folder / f"{name}.journal"),
            ]  # fmt: skip
            url = f"http://127.0.0.1:{port}"
            engines.append(Program(name, command, url, "/health", folder / f"{name}.log"))
            sites.append({"role": role, "url": url, "events": f"tcp://127.0.0.1:{events}", "name": name})
        routers = []
        for number in range(2):
            name, port = f"router{number}", next(ports)
            settings = {**SETTINGS, "port": port, "admin_port": port + 1, "engines": sites}
            settings["state"] = f"redis://127.0.0.1:{redis.port}/0"
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(settings))
            command = [sys.executable, "-m", "carryback_server", "router", "--config", str(file)]
            url = f"http://127.0.0.1:{port}"
            routers.append(Program(name, command, url, "/health", folder / f"{name}.log"))
        cluster = Cluster(engines, routers, redis, folder)
        for program in cluster.programs:
            stack.callback(program.close)
        await asyncio.gather(*(engine.start() for engine in engines))
        await asyncio.gather(*(router.start() for router in routers))
        yield cluster


async def _answers(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(url) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _ports() -> Iterator[int]:
    """Free ports with a free successor, out of the range from which the system takes those of clients: they
    have to be free again whenever a process comes back."""
    for port in random.sample(range(12_000, 30_000, 2), 9_000):
        is_free = False
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            is_free = True
        if is_free:
            yield port
