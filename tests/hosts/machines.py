"""carryback on several hosts, started there with the commands that users give."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from asyncio.subprocess import STDOUT, Process
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from carryback_server import guard
from carryback_server.address import in_url
from carryback_server.launch import EngineCommand
from hosts.network import Network
from pair import ENGINE_ARGS, NAME, Client, Pair, eventually

HOSTS = ("prefill", "decode", "router-1", "router-2", "redis", "client")
EVENTS_PORT = {"prefill": 8101, "decode": 8201}
# Less than by default, so that a test sees what comes then.
TIMEOUTS = {"CARRYBACK_PREFILL_TIMEOUT_S": "60", "CARRYBACK_FIRST_BYTE_TIMEOUT_S": "60"}
_KEYS = {"CARRYBACK_KEY": "the key of this test", "CARRYBACK_EVENTS_KEY": "the events' key of this test"}
# UCX would see that all is one machine, and take shared memory.
_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_TCP_USER_TIMEOUT": "8s"}
_PASSWORD = "secret"


@dataclass
class Machines:
    """Two engines, two routers and Redis, each on a host of its own, and clients on one more, as a context.

    Attributes:
        model: the folder of the model.
        folder: for logs.
        pair: the engines, as other tests know them.
        routers: a client of each.
    """

    network: Network
    model: Path
    folder: Path
    address: dict[str, str]
    "Of each host, the one that the others are to use."
    pair: Pair = field(init=False)
    routers: list[Client] = field(default_factory=list)
    _processes: dict[str, Process] = field(default_factory=dict)
    _logs: dict[str, Path] = field(default_factory=dict)
    _words: dict[str, list[str]] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Machines:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            connector = aiohttp.TCPConnector(socket_factory=self.network.socket_of("client"), limit=0)
            timeout = aiohttp.ClientTimeout(total=120)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout)
            )
            await asyncio.gather(self.start_engine("prefill"), self.start_engine("decode"), self._redis())
            self.pair = Pair(None, [self._command("prefill"), self._command("decode")], session)
            await asyncio.gather(self.serves("prefill"), self.serves("decode"))
            self.routers = [await self._router("router-1"), await self._router("router-2")]
            for client in self.routers:
                await eventually(client.hears, 60, "a router does not hear the engines")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- engines

    async def start_engine(self, role: str) -> None:
        """Start an engine; it does not serve yet."""
        await self._run(
            role, "engine", role, "--device", "cpu", "--model", str(self.model), "--served-model-name", NAME,
            *self._advertise(role), "--", *ENGINE_ARGS, env=_KEYS | _TCP,
        )  # fmt: skip
        said = await self._said(role, "for the router: ")
        self._words[role] = shlex.split(said.removeprefix("for the router: "))

    def _advertise(self, role: str) -> list[str]:
        # An IPv4 address is found by itself.
        address = self.address[role]
        return ["--advertise-host", address] if ":" in address else []

    def _command(self, role: str) -> EngineCommand:
        name, url = self._words[role]
        assert name == f"--{role}"
        assert urlsplit(url).hostname == self.address[role]
        events = f"tcp://{in_url(self.address[role])}:{EVENTS_PORT[role]}"
        return EngineCommand("prefill" if role == "prefill" else "decode", role, [], {}, url, events)

    async def kill(self, host: str) -> None:
        """End what runs on a host at once, without a chance to say so."""
        process = self._processes.pop(host)
        guard.kill(process.pid, trackers=True)
        await process.wait()

    async def serves(self, role: str) -> None:
        """Wait until an engine serves."""

        async def is_up() -> bool:
            assert self._processes[role].returncode is None, self.log(role)[-5000:]
            with suppress(aiohttp.ClientError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=5)
                async with self.pair.session.get(
                    self.pair.url(role) + "/health", timeout=timeout
                ) as response:
                    return response.status == 200
            return False

        await eventually(is_up, 240, f"{role} does not serve")

    # -- the others

    async def _router(self, host: str) -> Client:
        bind = "::" if ":" in self.address[host] else "0.0.0.0"
        await self._run(
            host, "router", "--host", bind, *self._words["prefill"], *self._words["decode"],
            "--state", f"redis://:{_PASSWORD}@{in_url(self.address['redis'])}:6379/0",
            env={"CARRYBACK_EVENTS_KEY": _KEYS["CARRYBACK_EVENTS_KEY"], "CARRYBACK_ADMIN_HOST": bind} | TIMEOUTS,
        )  # fmt: skip
        await self._said(host, "is ready at")
        url = f"http://{in_url(self.address[host])}"
        return Client(self.pair.session, f"{url}:8000", f"{url}:8001")

    async def _redis(self) -> None:
        words = ("--bind", self.address["redis"], "--requirepass", _PASSWORD, "--save", "")
        await self._start("redis", "redis-server", *words)
        await self._said("redis", "Ready to accept connections")

    # -- processes

    async def _run(self, host: str, *args: str, env: dict[str, str]) -> Process:
        return await self._start(host, sys.executable, "-m", "carryback_server", *args, env=env)

    async def _start(self, host: str, *words: str, env: dict[str, str] | None = None) -> Process:
        self._logs[host] = log = self.folder / f"{host}-{len(list(self.folder.glob(f'{host}-*')))}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *self.network.command(host, *words),
                env=os.environ | (env or {}), stdout=out, stderr=STDOUT, process_group=0,
            )  # fmt: skip
        self._processes[host] = process
        return process

    async def _said(self, host: str, words: str) -> str:
        """The line with these words, once what runs on the host has said it."""

        async def is_there() -> bool:
            assert self._processes[host].returncode is None, self.log(host)[-5000:]
            return words in self.log(host)

        await eventually(is_there, 120, f"{host} does not say {words!r}")
        return next(line for line in self.log(host).splitlines() if words in line)

    def log(self, host: str) -> str:
        """All that was said by what runs on a host."""
        return self._logs[host].read_text(errors="replace")

    async def _stop(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(15):
                await asyncio.gather(*(process.wait() for process in self._processes.values()))
        for host in list(self._processes):
            await self.kill(host)
