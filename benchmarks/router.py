"""What a router costs: carryback beside no router, a FastAPI + httpx proxy, and vllm-router.

    python benchmarks/router.py --quick
    python benchmarks/router.py --json full.json

All of them serve the same traffic from the same stub engines on this machine, in turns, so that what
else the machine does hits all alike. See README.md for what is measured and how to read it.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
from load import Load, Seen

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        pace_ms: between two chunks of an answer; 0: as fast as they go.
    """

    streams: int
    prompt_kb: int
    chunks: int
    pace_ms: float

    def __str__(self) -> str:
        pace = f"paced {self.pace_ms:g} ms apart" if self.pace_ms else "unpaced"
        return f"{self.streams} streams, prompts of {self.prompt_kb} KB, {self.chunks} chunks {pace}"


@dataclass
class Engines:
    """The two stub engines, as routers reach them."""

    prefill: str
    prefill_events: str
    decode: str
    decode_events: str


@dataclass
class System:
    """One way from the client to the engines.

    Attributes:
        process: the router's first process; None without a router.
    """

    name: str
    url: str
    process: psutil.Process | None = None
    requests: int = 0
    seconds: float = 0.0
    cpu_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    chunks: int = 0
    reuse: dict[str, int] = field(default_factory=dict)
    load_cpu: float = 0.0
    rss_max: int = 0


@dataclass
class Result:
    """What one system did under one load.

    Attributes:
        added_p50_ms, added_p99_ms: time to first chunk, beyond that of `direct` at the same percentile.
        cpu_s: CPU seconds of the router, with all its threads and children, for 1,000 requests.
        cpu_s_range: the lowest and the highest of the rounds.
        rss_mib: the sum of its processes' peaks.
        load_cpu: the share of one core that the load generator needed; near 1, it is what was measured.
        reuse: answers by what they say of reuse.
    """

    system: str
    requests_s: float
    chunks_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    cpu_s: float | None
    cpu_s_range: tuple[float, float] | None
    rss_mib: float | None
    load_cpu: float
    reuse: dict[str, int]


# -- processes


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[psutil.Process]:
    """A process and its children, until the block ends."""
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


def wait_until_up(url: str, path: str, process: psutil.Process, log: Path) -> None:
    """Until GET answers 200.

    Raises:
        SystemExit: it died, or took too long.
    """
    host, port = address(url)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            break
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-2000:]
    raise SystemExit(f"{url} did not come up:\n{tail}")


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def free_port() -> int:
    """A port that is free, and its successor as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def family(process: psutil.Process) -> list[psutil.Process]:
    """It and all its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all threads and children, those that have ended as well."""
    return sum(sum(each.cpu_times()[:2]) for each in family(process)) + sum(process.cpu_times()[2:4])


def peak_rss(process: psutil.Process) -> int:
    """Bytes."""
    total = 0
    for each in family(process):
        status = Path(f"/proc/{each.pid}/status").read_text()
        total += int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return total


# -- the systems

Start = Callable[[Engines, ExitStack, Path, argparse.Namespace], System]


def direct(engines: Engines, stack: ExitStack, logs: Path, args: argparse.Namespace) -> System:
    """No router: the client talks to the decode engine."""
    return System("direct", engines.decode)


def baseline(engines: Engines, stack: ExitStack, logs: Path, args: argparse.Namespace) -> System:
    """`baseline.py`."""
    port = free_port()
    command = [sys.executable, str(HERE / "baseline.py"), "--port", str(port)]
    command += ["--prefill", engines.prefill, "--decode", engines.decode]
    return start("baseline", command, port, "/health", stack, logs)


def carryback(engines: Engines, stack: ExitStack, logs: Path, args: argparse.Namespace) -> System:
    """`carryback router`."""
    port = free_port()
    command = [str(BIN / "carryback"), "router", "--port", str(port)]
    command += ["--prefill", f"{engines.prefill},{engines.prefill_events}"]
    command += ["--decode", f"{engines.decode},{engines.decode_events}"]
    if args.workers > 1:
        command += ["--workers", str(args.workers)]
    return start("carryback", command, port, "/ready", stack, logs)


def vllm_router(engines: Engines, stack: ExitStack, logs: Path, args: argparse.Namespace) -> System:
    """`vllm-router`, prefill and decode: both hops, like carryback and the baseline."""
    port = free_port()
    command = [*_vllm_router(port), "--vllm-pd-disaggregation"]
    command += ["--prefill", engines.prefill, "--decode", engines.decode]
    return start("vllm-router", command, port, "/health", stack, logs)


def vllm_router_one_hop(engines: Engines, stack: ExitStack, logs: Path, args: argparse.Namespace) -> System:
    """`vllm-router` as a plain load balancer over the decode engine: half of the work."""
    port = free_port()
    command = [*_vllm_router(port), "--worker-urls", engines.decode]
    return start("vllm-router-one-hop", command, port, "/health", stack, logs)


def _vllm_router(port: int) -> list[str]:
    # At its default level it logs several lines a request; and it turns away what exceeds its queue.
    return [
        str(BIN / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(port + 1), "--policy", "consistent_hash",
        "--worker-startup-check-interval", "1", "--log-level", "warning",
    ]  # fmt: skip


def start(name: str, command: list[str], port: int, path: str, stack: ExitStack, logs: Path) -> System:
    """A system with a router, once it answers."""
    url, log = f"http://127.0.0.1:{port}", logs / f"{name}.log"
    process = stack.enter_context(running(command, log))
    wait_until_up(url, path, process, log)
    return System(name, url, process)


SYSTEMS: dict[str, Start] = {
    "direct": direct,
    "baseline": baseline,
    "carryback": carryback,
    "vllm-router": vllm_router,
    "vllm-router-one-hop": vllm_router_one_hop,
}


def start_engines(case: Case, stack: ExitStack, logs: Path) -> Engines:
    """The two stub engines."""
    where = []
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent / 'tests'}{os.pathsep}{HERE.parent / 'sdk'}"}
    for role in ("prefill", "decode"):
        port, events = free_port(), free_port()
        command = [
            sys.executable, "-m", "stub_engine", "--fast", "--role", role, "--port", str(port),
            "--events", str(events), "--chunks", str(case.chunks),
            "--chunk-interval-s", str(case.pace_ms / 1000),
        ]  # fmt: skip
        log = logs / f"{role}.log"
        process = stack.enter_context(running(command, log, env))
        url = f"http://127.0.0.1:{port}"
        wait_until_up(url, "/health", process, log)
        where += [url, f"tcp://127.0.0.1:{events}"]
    return Engines(*where)


# -- measuring


def load_of(case: Case, system: System, requests: int, turns: int, events: int) -> Load:
    """The load of one round on one system."""
    host, port = address(system.url)
    # Paced answers that start together would keep arriving together, which clients do not do.
    spread_s = case.chunks * case.pace_ms / 1000
    return Load(
        host, port, case.streams, requests, case.chunks, events, case.prompt_kb * 1000, turns, spread_s
    )


def drive(load: Load, process: psutil.Process | None) -> tuple[Seen, float]:
    """Send a load; what the client saw, and the router's CPU seconds.

    Raises:
        SystemExit: an answer was not complete.
    """
    client = subprocess.Popen(
        [sys.executable, str(HERE / "load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        client.stdin.write(msgspec.json.encode(load).decode() + "\n")
        client.stdin.flush()
        client.stdout.readline()
        before = cpu_seconds(process) if process else 0.0
        client.stdin.write("go\n")
        client.stdin.flush()
        answer = client.stdout.readline()
        after = cpu_seconds(process) if process else 0.0
        if not answer:
            raise SystemExit("the load failed")
        return msgspec.json.decode(answer, type=Seen), after - before
    except BrokenPipeError:
        raise SystemExit("the load failed") from None
    finally:
        client.kill()
        client.communicate()


def measure(case: Case, args: argparse.Namespace, profile: Path | None) -> list[Result]:
    """All systems under one load, in rounds."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = start_engines(case, stack, logs)
        systems = [SYSTEMS[name](engines, stack, logs, args) for name in args.systems]
        events = 0
        for number in range(args.rounds):
            # Nobody follows the same one in every round.
            first = number % len(systems)
            for system in systems[first:] + systems[:first]:
                seen, cpu_s = drive(load_of(case, system, args.requests, args.turns, events), system.process)
                events = events or seen.events
                system.requests += seen.requests
                system.chunks += seen.requests * (seen.events - 1)
                system.seconds += seen.seconds
                system.ttft_s += seen.ttft_s
                system.load_cpu += seen.cpu_s
                system.cpu_s.append(1000 * cpu_s / seen.requests)
                for outcome, times in seen.reuse.items():
                    system.reuse[outcome] = system.reuse.get(outcome, 0) + times
        for system in systems:
            if system.process:
                system.rss_max = peak_rss(system.process)
        if profile:
            # After the rounds: sampling costs something itself.
            for system in systems:
                if system.name == "carryback" and system.process:
                    record_profile(profile, system, load_of(case, system, args.requests, args.turns, events))
    floor = next((system for system in systems if system.name == "direct"), None)
    return [summary(system, floor) for system in systems]


def record_profile(file: Path, system: System, load: Load) -> None:
    """A py-spy profile of one more round; its format follows from the file's name."""
    assert system.process is not None
    kind = {".svg": "flamegraph", ".json": "speedscope"}.get(file.suffix, "raw")
    spy = subprocess.Popen(
        [
            str(BIN / "py-spy"), "record", "--pid", str(system.process.pid), "--subprocesses",
            "--format", kind, "--rate", "500", "--duration", "600", "--output", str(file),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        drive(load, system.process)
    finally:
        spy.send_signal(signal.SIGINT)  # it writes the file
        spy.wait()
    print(f"profile: {file}", file=sys.stderr)


def percentile(values: list[float], percent: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def summary(system: System, floor: System | None) -> Result:
    """The figures of one system over all rounds."""
    p50, p99 = (1000 * percentile(system.ttft_s, each) for each in (50, 99))
    added50 = added99 = None
    if floor and floor is not system:
        added50, added99 = (p - 1000 * percentile(floor.ttft_s, each) for p, each in ((p50, 50), (p99, 99)))
    has_router = system.process is not None
    return Result(
        system=system.name,
        requests_s=system.requests / system.seconds,
        chunks_s=system.chunks / system.seconds,
        ttft_p50_ms=p50,
        ttft_p99_ms=p99,
        added_p50_ms=added50,
        added_p99_ms=added99,
        cpu_s=statistics.fmean(system.cpu_s) if has_router else None,
        cpu_s_range=(min(system.cpu_s), max(system.cpu_s)) if has_router else None,
        rss_mib=system.rss_max / 2**20 if has_router else None,
        load_cpu=system.load_cpu / system.seconds,
        reuse=system.reuse,
    )


# -- the report

RATIOS = ("requests_s", "chunks_s", "added_p50_ms", "added_p99_ms", "cpu_s", "rss_mib")
COLUMNS = (
    "requests/s", "chunks/s", "TTFT p50 ms", "p99", "added p50 ms", "p99", "CPU s / 1,000 requests", "RSS MiB",
)  # fmt: skip


def ratios(results: list[Result], other: str) -> dict[str, float | None]:
    """carryback's figures divided by another system's; None where either is missing or not above zero."""
    by_name = {result.system: result for result in results}
    mine, its = by_name.get("carryback"), by_name.get(other)
    if mine is None or its is None:
        return {}
    found: dict[str, float | None] = {}
    for name in RATIOS:
        above, below = getattr(mine, name), getattr(its, name)
        found[name] = above / below if above and below and above > 0 and below > 0 else None
    return found


def table(case: Case, results: list[Result]) -> str:
    """Markdown."""
    lines = [f"### {case}", "", "| | " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for each in results:
        cpu = cell(each.cpu_s, ".2f")
        if each.cpu_s_range:
            cpu += " ({:.2f}-{:.2f})".format(*each.cpu_s_range)
        row(
            each.system,
            [
                cell(each.requests_s, ",.0f"), cell(each.chunks_s, ",.0f"), cell(each.ttft_p50_ms, ",.1f"),
                cell(each.ttft_p99_ms, ",.1f"), cell(each.added_p50_ms, ",.1f"),
                cell(each.added_p99_ms, ",.1f"), cpu, cell(each.rss_mib, ",.0f"),
            ],
        )  # fmt: skip
    for other in ("baseline", "vllm-router"):
        if found := ratios(results, other):
            values = [cell(found[name], ".2f") for name in RATIOS]
            row(f"carryback / {other}", [*values[:2], "", "", *values[2:]])
    return "\n".join(lines) + "\n"


def about() -> dict[str, str | int]:
    """The machine and the versions."""
    model = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition(":")[2].partition("\n")[0]
    versions = {}
    for name in ("carryback", "vllm-router", "fastapi", "httpx", "uvicorn", "uvloop"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "cpu": model.strip(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        **versions,
    }


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    report = []
    cases = [
        Case(*each) for each in itertools.product(args.streams, args.prompt_kb, args.chunks, args.pace_ms)
    ]
    for case in cases:
        print(f"{case} ...", file=sys.stderr)
        profile: Path | None = args.py_spy
        if profile and len(cases) > 1:
            name = f"{case.streams}x{case.prompt_kb}kb-{case.chunks}-{case.pace_ms:g}ms"
            profile = profile.with_stem(f"{profile.stem}-{name}")
        results = measure(case, args, profile)
        print(table(case, results), flush=True)
        found = {other: ratios(results, other) for other in ("baseline", "vllm-router")}
        report.append(
            {
                "case": asdict(case),
                "results": [asdict(result) for result in results],
                "carryback_over": found,
            }
        )
        if args.json:
            whole = {
                "about": about(),
                "requests": args.requests,
                "rounds": args.rounds,
                "turns": args.turns,
                "workers": args.workers,
                "cases": report,
            }
            args.json.write_text(json.dumps(whole, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="64 streams, 4 KB, 64 chunks: about two minutes")
    add("--systems", nargs="+", choices=SYSTEMS, default=["direct", "baseline", "carryback", "vllm-router"])
    add("--streams", nargs="+", type=int, help="requests in flight (1 64 256)")
    add("--prompt-kb", nargs="+", type=int, help="size of a conversation's first request (1 100)")
    add("--chunks", nargs="+", type=int, help="tokens of an answer (128)")
    add("--pace-ms", nargs="+", type=float, help="between two chunks; 0: unpaced (0 10)")
    add("--requests", type=int, help="in one round, on each system (512)")
    add("--rounds", type=int, help="(5)")
    add("--turns", type=int, default=8, help="requests of one conversation (8)")
    add("--workers", type=int, default=1, help="of carryback (1)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--py-spy", type=Path, metavar="FILE", help="profile carryback in one more round: .svg, .json, .txt")
    args = parser.parse_args()
    full = {"streams": [1, 64, 256], "prompt_kb": [1, 100], "chunks": [128], "requests": 512, "rounds": 5}
    quick = {"streams": [64], "prompt_kb": [4], "chunks": [64], "requests": 384, "rounds": 3}
    for name, value in {**(quick if args.quick else full), "pace_ms": [0.0, 10.0]}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
