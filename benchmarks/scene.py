"""Where a hostile run takes place: a router with two tenants, Redis, stub engines, and the innocent tenant.

Router and engines are those of any checkout, so that two can be compared. They know nothing of each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import yaml
from innocent import Seen, Watch
from redis_server import RedisServer, free_port
from systems import HERE, running

INNOCENT_KEY = "sk-innocent-0123456789abcdef0123456789"
ATTACKER_KEY = "sk-attacker-0123456789abcdef0123456789"
ENGINE_KEY = "the key of the engines, which nobody else may have"
STATE_KEY = "the key of the routers, which nobody else may have"
DESCRIPTORS = 1024
START_TIMEOUT_S = 60.0
PACE_S = 0.01


@dataclass
class Reply:
    """What an attacker got. Status 0: the connection was broken off; -1: nothing in time."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __str__(self) -> str:
        return {0: "broken off", -1: "no answer"}.get(self.status, str(self.status))

    @property
    def json(self) -> Any:
        """Its body; None if that is none."""
        with suppress(ValueError):
            return json.loads(self.body)
        return None

    @property
    def is_error_object(self) -> bool:
        """It says what is wrong as the API does."""
        return isinstance(self.json, dict) and isinstance(self.json.get("error"), dict)


@dataclass
class Scene:
    """The place, as an attacker finds it.

    Attributes:
        root: the checkout that is attacked.
        pid: of the router.
        redis: of the run's own.
        engines: name, role, URL and address of the events of each.
        folder: with the router's files and all logs.
        stack: what an attack starts ends with it.
    """

    root: Path
    port: int
    admin_port: int
    pid: int
    redis: RedisServer
    engines: list[dict[str, str]]
    folder: Path
    stack: AsyncExitStack

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}, *,
        key: str = ATTACKER_KEY, port: int = 0, within_s: float = 60.0,
    ) -> Reply:  # fmt: skip
        """One request over a connection of its own; an empty `key`: without one."""
        own = {"Host": "127.0.0.1", "Connection": "close", "Content-Type": "application/json"}
        own |= {"Authorization": f"Bearer {key}"} if key else {}
        own |= {"Content-Length": str(len(body))} if body else {}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in (own | {**headers}).items()),
        ]
        data = bytearray()
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port)
                try:
                    writer.write("\r\n".join([*lines, "", ""]).encode())
                    writer.write(body)
                    while piece := await reader.read(2**18):
                        data += piece
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return Reply(-1)
        except OSError:
            pass  # it may have said why before
        return parsed(bytes(data))

    async def operate(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> Reply:
        """One request to the operators' port."""
        return await self.ask(method, path, body, headers, key="", port=self.admin_port)

    async def chat(self, text: str, **fields: Any) -> Reply:
        """The attacker asks something."""
        body = {"model": "stub", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        return await self.ask("POST", "/v1/chat/completions", json.dumps(body).encode())

    async def connect(
        self, data: bytes = b"", port: int = 0, *, limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has sent this, and stays until the attack is over.

        Raises:
            OSError: there is none.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port, limit=limit)
        self.stack.callback(writer.transport.abort)
        writer.write(data)
        return reader, writer

    async def states(self) -> dict[str, str]:
        """What the router thinks of the engines, by their names."""
        listed = (await self.operate("GET", "/admin/engines")).json or {"data": []}
        return {engine["name"]: engine["state"] for engine in listed["data"]}

    async def drain(self, *names: str, back: bool = False) -> None:
        """Let nothing new come to engines, or let it come again.

        Raises:
            RuntimeError: the router does not.
        """
        for name in names:
            reply = await self.operate("POST", f"/admin/engines/{name}/{'undrain' if back else 'drain'}")
            if reply.status != 200:
                raise RuntimeError(f"{name} cannot be drained: {reply} {reply.body!r}")

    async def fault(self, **fields: Any) -> None:
        """Let something go wrong at all engines but the stream's; see `stub_engine.Fault`."""
        async with aiohttp.ClientSession() as session:
            for engine in self.engines[1:]:
                async with session.post(f"{engine['url']}/stub/faults", json=fields) as response:
                    response.raise_for_status()

    def start(self, name: str, code: str, *args: str) -> psutil.Process:
        """A program of the checkout's own, until the attack is over."""
        command = [sys.executable, "-c", code, *args]
        return self.stack.enter_context(running(command, self.folder / f"{name}.log", environ(self.root)))

    def read(self, name: str) -> str:
        """One of the router's files, or a log."""
        return (self.folder / name).read_text(errors="replace")

    def write(self, name: str, text: str) -> None:
        """Change one."""
        (self.folder / name).write_text(text)


def parsed(data: bytes) -> Reply:
    """An answer, as its bytes came."""
    head, _, body = data.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    try:
        first, *rest = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
    except (IndexError, ValueError):
        return Reply(0)
    pairs = (line.partition(":") for line in rest)
    return Reply(status, {name.lower(): value.strip() for name, _, value in pairs}, body)


def environ(root: Path) -> dict[str, str]:
    """For a process that runs the packages of a checkout."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("CARRYBACK_")}
    paths = [root / folder for folder in ("sdk", "server", "integrations", "tests")]
    return {**mine, "PYTHONPATH": os.pathsep.join(map(str, paths))}


@asynccontextmanager
async def scene(
    root: Path, folder: Path, *, is_fast: bool, settings: Mapping[str, Any], limits: Mapping[str, Any],
    redis_options: tuple[str, ...],
) -> AsyncIterator[tuple[Scene, Innocent]]:  # fmt: skip
    """Everything that is attacked, running.

    Args:
        is_fast: the engines do next to no work; else they answer as a model would, and can be made to fail.
        settings: of the router; those that the checkout does not know are left out.
        limits: of the attacking tenant.
    """
    with ExitStack() as stack:
        ports = _ports()
        redis = RedisServer("--bind", "127.0.0.1", *redis_options, port=next(ports))
        stack.callback(redis.close)
        redis.start()
        engines = [
            stack.enter_context(_engine(root, folder, name, role, ports, is_fast=is_fast or name == "calm"))
            for name, role in (
                ("calm", "decode"), ("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")
            )
        ]  # fmt: skip
        tenants = [
            {"name": "innocent", "keys": [INNOCENT_KEY]},
            {"name": "attacker", "keys": [ATTACKER_KEY], **limits},
        ]
        (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
        port, admin_port = next(ports), next(ports)
        config = {
            "port": port, "admin_port": admin_port, "engines": engines, "engine_api_key": ENGINE_KEY,
            "tenants_file": str(folder / "tenants.yaml"), "state": f"redis://127.0.0.1:{redis.port}/0",
            "probe_interval_s": 0.5, "shutdown_timeout_s": 0, "state_key": STATE_KEY, **settings,
        }  # fmt: skip
        known = (root / "server/carryback_server/config.py").read_text()
        config = {name: value for name, value in config.items() if f"    {name}: " in known}
        (folder / "router.yaml").write_text(yaml.safe_dump(config))
        command = [
            sys.executable,
            "-m",
            "carryback_server",
            "router",
            "--config",
            str(folder / "router.yaml"),
        ]
        router = stack.enter_context(running(command, folder / "router.log", environ(root)))
        # As most services are started, whatever this machine allows.
        router.rlimit(psutil.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        async with AsyncExitStack() as attackers:
            place = Scene(root, port, admin_port, router.pid, redis, engines, folder, attackers)
            await _wait(place, router)
            innocent = Innocent(stack, folder)
            # The stream is alone on its engine: what slows it down is the router.
            await place.drain("d0", "d1")
            await innocent.next(msgspec.json.encode(Watch(port, admin_port, router.pid, INNOCENT_KEY)))
            await place.drain("calm")
            await place.drain("d0", "d1", back=True)
            await innocent.next()
            yield place, innocent


class Innocent:
    """The process of `innocent.py`."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        command = [sys.executable, str(HERE / "innocent.py")]
        log = stack.enter_context((folder / "innocent.log").open("wb"))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        stack.callback(self._close)
        self._log = folder / "innocent.log"

    async def next(self, line: bytes = b"") -> bytes:
        """Let it do the next thing; what it prints."""
        return await asyncio.to_thread(self._next, line)

    async def seen(self) -> Seen:
        """What it saw, at last."""
        return msgspec.json.decode(await self.next(), type=Seen)

    def _next(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            return answer
        raise RuntimeError(self._log.read_text()[-2000:])

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()


def _ports() -> Iterator[int]:
    """Free ports, each once: a process that was given one may not have it yet."""
    given: set[int] = set()
    while True:
        if (port := free_port()) not in given:
            given.add(port)
            yield port


@contextmanager
def _engine(
    root: Path, folder: Path, name: str, role: str, ports: Iterator[int], *, is_fast: bool
) -> Iterator[dict[str, str]]:
    port, events = next(ports), next(ports)
    command = [
        sys.executable, "-m", "stub_engine", "--role", role, "--port", str(port), "--events", str(events),
        "--chunk-interval-s", str(PACE_S if name == "calm" else 0), "--chunks", "100000000" if is_fast else "16",
        *(["--fast"] if is_fast else ["--capacity", "20000"]),
    ]  # fmt: skip
    with running(command, folder / f"{name}.log", environ(root)):
        url, address = f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}"
        yield {"name": name, "role": role, "url": url, "events": address}


async def _wait(place: Scene, router: psutil.Process) -> None:
    """Until the router and all engines are up, and heard.

    Raises:
        RuntimeError: they are not.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        reply = await place.operate("GET", "/admin/engines")
        engines = (reply.json or {}).get("data", [])
        if engines and all(each["state"] == "up" and each["events"] for each in engines):
            return
        if router.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
            raise RuntimeError(f"the router does not come up: {place.read('router.log')[-3000:]}")
        await asyncio.sleep(0.05)
