"""What is compared, and the stub engines behind it: how each is started, and what it costs the machine."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Engines:
    """The two stub engines, as routers reach them."""

    prefill: str
    prefill_events: str
    decode: str
    decode_events: str


@dataclass(frozen=True)
class System:
    """One way from the client to the engines.

    Attributes:
        process: the router's first process; None without a router.
        log: what it prints.
    """

    name: str
    url: str
    process: psutil.Process | None = None
    log: Path | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return _address(self.url)

    def cpu_s(self) -> float:
        """User and system time of all threads and children so far, those that have ended as well."""
        if self.process is None:
            return 0.0
        ended: float = sum(self.process.cpu_times()[2:4])
        return ended + sum(sum(each.cpu_times()[:2]) for each in self._family(self.process))

    def peak_rss_mib(self) -> float:
        """The highest resident size of each process, added up."""
        if self.process is None:
            return 0.0
        status = [Path(f"/proc/{each.pid}/status").read_text() for each in self._family(self.process)]
        return sum(int(each.partition("VmHWM:")[2].split()[0]) for each in status) / 1024

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:] if self.log else ""

    @staticmethod
    def _family(process: psutil.Process) -> list[psutil.Process]:
        return [process, *process.children(recursive=True)]


class Bench:
    """Starts processes, and ends them all when the block ends.

    Args:
        logs: a folder for what they print.
        carryback_args: more words for carryback's command line.
    """

    def __init__(self, logs: Path, carryback_args: list[str]) -> None:
        self._logs = logs
        self._carryback_args = carryback_args
        self._stack = ExitStack()
        self._stubs: list[System] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_engines(self, chunks: int, pace_ms: float) -> None:
        """The two stub engines."""
        where = []
        paths = [str(ROOT / each) for each in ("tests", "sdk", "server")]
        for role in ("prefill", "decode"):
            port, events = free_port(), free_port()
            command = [
                sys.executable, "-m", "stub_engine", "--fast", "--role", role, "--port", str(port),
                "--events", str(events), "--chunks", str(chunks), "--chunk-interval-s", str(pace_ms / 1000),
            ]  # fmt: skip
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            stub = self._start(role, command, port, "/health", env)
            self._stubs.append(stub)
            where += [stub.url, f"tcp://127.0.0.1:{events}"]
        self._engines = Engines(*where)

    def start(self, name: str) -> System:
        """One of `SYSTEMS`, once it answers.

        Raises:
            SystemExit: it does not.
        """
        if name == "direct":
            return System("direct", self._engines.decode)
        port = free_port()
        command, path = SYSTEMS[name](self._engines, port)
        if name == "carryback":
            command += self._carryback_args
        return self._start(name, command, port, path)

    def others_cpu_s(self, system: System) -> float:
        """CPU seconds of everything on this machine but this system and the engines."""
        all_of_it = psutil.cpu_times()
        busy: float = (
            sum(all_of_it) - all_of_it.idle - all_of_it.iowait - all_of_it.guest - all_of_it.guest_nice
        )
        return busy - system.cpu_s() - sum(stub.cpu_s() for stub in self._stubs)

    def _start(
        self, name: str, command: list[str], port: int, path: str, env: dict[str, str] | None = None
    ) -> System:
        log = self._logs / f"{name}.log"
        process = self._stack.enter_context(running(command, log, env))
        system = System(name, f"http://127.0.0.1:{port}", process, log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(system, path):
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            if is_dead or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not come up:\n{system.last_words()}")
            time.sleep(0.05)
        return system


# -- the command of each system, and the path that answers 200 when it is up

Command = tuple[list[str], str]


def baseline(engines: Engines, port: int) -> Command:
    """`baseline.py`: one process of FastAPI, uvicorn and httpx."""
    command = [sys.executable, str(HERE / "baseline.py"), "--port", str(port)]
    return [*command, "--prefill", engines.prefill, "--decode", engines.decode], "/health"


def carryback(engines: Engines, port: int) -> Command:
    """`carryback router`, with its defaults."""
    command = [str(BIN / "carryback"), "router", "--port", str(port)]
    command += ["--prefill", f"{engines.prefill},{engines.prefill_events}"]
    return [*command, "--decode", f"{engines.decode},{engines.decode_events}"], "/ready"


def vllm_router(engines: Engines, port: int) -> Command:
    """`vllm-router` for prefill and decode: both hops, as carryback and the baseline."""
    command = [*_vllm_router(port), "--vllm-pd-disaggregation"]
    return [*command, "--prefill", engines.prefill, "--decode", engines.decode], "/health"


def vllm_router_one_hop(engines: Engines, port: int) -> Command:
    """`vllm-router` as a load balancer over the decode engine alone: half of the work."""
    return [*_vllm_router(port), "--worker-urls", engines.decode], "/health"


def _vllm_router(port: int) -> list[str]:
    # By default it logs several lines a request.
    return [
        str(BIN / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(port + 1), "--policy", "consistent_hash",
        "--worker-startup-check-interval", "1", "--log-level", "warning",
    ]  # fmt: skip


SYSTEMS: dict[str, Callable[[Engines, int], Command]] = {
    "baseline": baseline,
    "carryback": carryback,
    "vllm-router": vllm_router,
    "vllm-router-one-hop": vllm_router_one_hop,
}


# -- processes and ports


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str] | None) -> Iterator[psutil.Process]:
    """A process, which ends with the block, and all that it has started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        process.wait()


def _answers(system: System, path: str) -> bool:
    connection = http.client.HTTPConnection(*system.address, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def free_port() -> int:
    """A port that is free, with a free successor, which carryback and vllm-router use for their metrics."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port
