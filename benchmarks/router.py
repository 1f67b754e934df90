"""What a router costs: carryback beside no router, a FastAPI + httpx proxy, and vllm-router.

    python benchmarks/router.py --quick
    python benchmarks/router.py --json full.json

All of them serve the same traffic from the same stub engines on this machine, in turns, so that what
else the machine does hits all alike. See README.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

import msgspec
from load import Load, Seen
from systems import BIN, HERE, SYSTEMS, Bench, System


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

    def load(self, system: System, events: int, args: argparse.Namespace) -> Load:
        """The load of one round on one system."""
        host, port = system.address
        answer_s = self.chunks * self.pace_ms / 1000
        requests: int = args.requests
        if answer_s:
            # Few streams would take hours for all of them.
            requests = min(requests, max(8 * self.streams, 16))
        return Load(
            host=host,
            port=port,
            streams=self.streams,
            requests=requests,
            chunks=self.chunks,
            events=events,
            prompt_bytes=1000 * self.prompt_kb,
            turns=args.turns,
            # Paced answers that start together would keep arriving together, which clients do not do.
            spread_s=answer_s,
        )


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a round: of the router, and of all else but the engines."""

    router_s: float
    others_s: float


@dataclass(frozen=True)
class Round:
    """What one system did in one round; the tables show the median over the rounds.

    Attributes:
        added_p50_ms, added_p99_ms: time to first chunk beyond that of `direct` at the same percentile, in
            the same round.
        cpu_s: CPU seconds of the router, with all its threads and children, for 1,000 requests.
        rss_mib: the peaks of its processes so far, added up.
        client_busy: the share of one core that the load generator needed; near 1, it is what was measured.
        others_busy: cores that were busy with anything else on this machine.
    """

    requests_s: float
    chunks_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    cpu_s: float | None
    rss_mib: float | None
    client_busy: float
    others_busy: float

    @classmethod
    def of(cls, system: System, seen: Seen, cost: Cost, direct: Seen | None) -> Round:
        """The figures of what the client saw, and what it cost."""
        p50, p99 = percentiles_ms(seen)
        floor = percentiles_ms(direct) if direct and system.name != "direct" else None
        return cls(
            requests_s=seen.requests / seen.seconds,
            chunks_s=seen.requests * (seen.events - 1) / seen.seconds,
            ttft_p50_ms=p50,
            ttft_p99_ms=p99,
            added_p50_ms=p50 - floor[0] if floor else None,
            added_p99_ms=p99 - floor[1] if floor else None,
            cpu_s=1000 * cost.router_s / seen.requests if system.process else None,
            rss_mib=system.peak_rss_mib() if system.process else None,
            client_busy=seen.cpu_s / seen.seconds,
            others_busy=max(0.0, cost.others_s - seen.cpu_s) / seen.seconds,
        )


@dataclass
class Result:
    """One system under one load.

    Attributes:
        reuse: its answers by what they say of reuse.
    """

    rounds: list[Round] = field(default_factory=list)
    reuse: Counter[str] = field(default_factory=Counter)

    def all(self, figure: str) -> list[float]:
        """One of `Round`'s figures, where there is one."""
        return [value for each in self.rounds if (value := getattr(each, figure)) is not None]

    def median(self, figure: str) -> float | None:
        """The same over all rounds."""
        values = self.all(figure)
        return statistics.median(values) if values else None


Results = dict[str, Result]


# -- measuring


def measure(case: Case, args: argparse.Namespace, profile: Path | None) -> Results:
    """All systems under one load, in rounds."""
    with tempfile.TemporaryDirectory() as logs, Bench(Path(logs), args.carryback_args) as bench:
        bench.start_engines(case.chunks, case.pace_ms)
        systems = [bench.start(name) for name in args.systems]
        results = {system.name: Result() for system in systems}
        events = 0
        for number in range(args.rounds):
            # Nobody follows the same one in every round.
            first = number % len(systems)
            seen: dict[str, tuple[Seen, Cost]] = {}
            for system in systems[first:] + systems[:first]:
                seen[system.name] = drive(case.load(system, events, args), system, bench)
                events = events or seen[system.name][0].events
            direct = seen["direct"][0] if "direct" in seen else None
            for system in systems:
                result = results[system.name]
                result.rounds.append(Round.of(system, *seen[system.name], direct))
                result.reuse.update(seen[system.name][0].reuse)
        # After the rounds: sampling costs something itself.
        for system in systems:
            if profile and system.name == "carryback":
                record_profile(profile, case.load(system, events, args), system, bench)
    return results


def drive(load: Load, system: System, bench: Bench) -> tuple[Seen, Cost]:
    """Send a load; what the client saw, and what it cost.

    Raises:
        SystemExit: an answer was not complete; the client has printed why.
    """
    command = [sys.executable, str(HERE / "load.py")]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        with suppress(BrokenPipeError):
            client.stdin.write(msgspec.json.encode(load) + b"\n")
            client.stdin.flush()
            client.stdout.readline()
            router_s, others_s = system.cpu_s(), bench.others_cpu_s(system)
            client.stdin.write(b"go\n")
            client.stdin.flush()
            if answer := client.stdout.readline():
                cost = Cost(system.cpu_s() - router_s, bench.others_cpu_s(system) - others_s)
                return msgspec.json.decode(answer, type=Seen), cost
        raise SystemExit(f"{system.name} failed under load\n{system.last_words()}")
    finally:
        client.kill()
        client.wait()


def record_profile(file: Path, load: Load, system: System, bench: Bench) -> None:
    """A py-spy profile of one more round, without the frames of C code; the file's name says the format."""
    assert system.process is not None
    form = {".svg": "flamegraph", ".json": "speedscope"}.get(file.suffix, "raw")
    spy = subprocess.Popen(
        [
            str(BIN / "py-spy"), "record", "--pid", str(system.process.pid), "--subprocesses",
            "--format", form, "--rate", "500", "--duration", "600", "--output", str(file),
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        drive(load, system, bench)
    finally:
        spy.send_signal(signal.SIGINT)  # it writes the file
        spy.wait()
    print(f"profile: {file}", file=sys.stderr)


def percentiles_ms(seen: Seen) -> tuple[float, float]:
    """p50 and p99 of the time to first chunk."""
    cuts = statistics.quantiles(seen.ttft_s, n=100, method="inclusive")
    return 1000 * cuts[49], 1000 * cuts[98]


# -- the report

OTHERS = ("baseline", "vllm-router")
RATIOS = ("requests_s", "chunks_s", "added_p50_ms", "added_p99_ms", "cpu_s", "rss_mib")
HEAD = """
| | requests/s | chunks/s | TTFT p50 ms | p99 | added p50 ms | p99 | CPU s / 1,000 requests | lowest-highest | RSS MiB | client busy | others busy |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def ratios(results: Results, other: str) -> dict[str, float | None]:
    """carryback's medians divided by another system's; None where one of them is not above zero."""
    found: dict[str, float | None] = {}
    if "carryback" in results and other in results:
        for name in RATIOS:
            above, below = results["carryback"].median(name), results[other].median(name)
            found[name] = above / below if above and below and above > 0 and below > 0 else None
    return found


def table(case: Case, results: Results) -> str:
    """Markdown."""

    def row(name: str, *cells: str) -> str:
        return f"| {name} | " + " | ".join(cells) + " |\n"

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    text = f"### {case}\n{HEAD}"
    for name, each in results.items():
        cpu = each.all("cpu_s")
        text += row(
            name,
            cell(each.median("requests_s"), ",.0f"),
            cell(each.median("chunks_s"), ",.0f"),
            cell(each.median("ttft_p50_ms"), ",.1f"),
            cell(each.median("ttft_p99_ms"), ",.1f"),
            cell(each.median("added_p50_ms"), ",.1f"),
            cell(each.median("added_p99_ms"), ",.1f"),
            cell(each.median("cpu_s"), ".2f"),
            f"{min(cpu):.2f}-{max(cpu):.2f}" if cpu else "",
            cell(each.median("rss_mib"), ",.0f"),
            cell(each.median("client_busy"), ".0%"),
            cell(each.median("others_busy"), ".0%"),
        )
    for other in OTHERS:
        if found := ratios(results, other):
            values = [cell(found[name], ".2f") for name in RATIOS]
            text += row(f"carryback / {other}", *values[:2], "", "", *values[2:5], "", values[5], "", "")
    return text


def about() -> dict[str, str | int]:
    """The machine and the versions."""
    model = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition(":")[2].partition("\n")[0]
    found: dict[str, str | int] = {"cpu": model.strip(), "cores": os.cpu_count() or 0}
    found["python"] = platform.python_version()
    for name in ("carryback", "vllm-router", "fastapi", "httpx", "uvicorn", "uvloop"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def report(case: Case, results: Results) -> dict[str, object]:
    """The same as JSON, with every round."""
    return {
        "case": asdict(case),
        "systems": {
            name: {
                "median": {each.name: result.median(each.name) for each in fields(Round)},
                "rounds": [asdict(each) for each in result.rounds],
                "reuse": result.reuse,
            }
            for name, result in results.items()
        },
        "carryback_over": {other: found for other in OTHERS if (found := ratios(results, other))},
    }


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped"))  # the processes that were started end first
    chosen = itertools.product(args.streams, args.prompt_kb, args.chunks, args.pace_ms)
    cases = [Case(*each) for each in chosen]
    reports = []
    for case in cases:
        print(f"{case} ...", file=sys.stderr)
        profile: Path | None = args.py_spy
        if profile and len(cases) > 1:
            which = f"{case.streams}x{case.prompt_kb}kb-{case.chunks}x{case.pace_ms:g}ms"
            profile = profile.with_stem(f"{profile.stem}-{which}")
        results = measure(case, args, profile)
        print(table(case, results), flush=True)
        reports.append(report(case, results))
        if args.json:
            options = {
                name: getattr(args, name) for name in ("requests", "rounds", "turns", "carryback_args")
            }
            whole = {"about": about(), **options, "cases": reports}
            args.json.write_text(json.dumps(whole, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    names = ["direct", *SYSTEMS]
    add("--quick", action="store_true", help="64 streams, 4 KB, 64 chunks: two minutes")
    add("--systems", nargs="+", choices=names, default=["direct", "baseline", "carryback", "vllm-router"])
    add("--streams", nargs="+", type=int, help="requests in flight (1 64 256)")
    add("--prompt-kb", nargs="+", type=int, help="size of a conversation's first request (1 100)")
    add("--chunks", nargs="+", type=int, help="tokens of an answer (128)")
    add("--pace-ms", nargs="+", type=float, help="between two chunks; 0: unpaced (0 10)")
    add("--requests", type=int, help="of a round, to each system (512); paced: at most 8 a stream, or 16")
    add("--rounds", type=int, help="(3)")
    add("--turns", type=int, default=8, help="requests of one conversation (8)")
    add("--carryback-args", type=shlex.split, default=[], metavar="WORDS", help="for `carryback router`")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--py-spy", type=Path, metavar="FILE", help="profile carryback in one more round: .svg, .json, .txt")
    args = parser.parse_args()
    defaults: dict[str, object] = {"pace_ms": [0.0, 10.0], "rounds": 3}
    if args.quick:
        defaults |= {"streams": [64], "prompt_kb": [4], "chunks": [64], "requests": 384}
    else:
        defaults |= {"streams": [1, 64, 256], "prompt_kb": [1, 100], "chunks": [128], "requests": 512}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
