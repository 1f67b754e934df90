"""The servers that `carryback bench` starts, and ends whatever happens. Stub engines take vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from carryback_server.bench import result as results
from live_router import wait_until

# Found before the real one. Takes its command line, and leaves its process id.
VLLM = """
import asyncio, json, os, signal, sys
from pathlib import Path
from urllib.parse import urlsplit
from stub_engine import StubEngine

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

async def main():
    role, events = "decode", 0
    if "--kv-transfer-config" in sys.argv:
        connector = json.loads(option("--kv-transfer-config"))
        role = {"kv_producer": "prefill", "kv_consumer": "decode"}[connector["kv_role"]]
        events = urlsplit(connector["kv_connector_extra_config"]["carryback_events"]).port
    engine = StubEngine(
        role, port=int(option("--port")), events_port=events, model=option("--served-model-name")
    )
    await engine.start()
    name = role if events else "aggregated"
    started = Path(os.environ["STARTED"])
    (started.parent / name).write_text(json.dumps([os.getpid(), sys.argv]))
    (started.parent / name).rename(started / name)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await engine.kill()

asyncio.run(main())
"""


class Bench:
    """`carryback bench` on this machine, with engines of its own.

    Args:
        folder: for all that it leaves.
    """

    def __init__(self, folder: Path, *args: str) -> None:
        package = folder / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for each in (package, package.parent, package.parent.parent):
            (each / "__init__.py").touch()
        (package / "api_server.py").write_text(VLLM)
        config = folder / "serve.yaml"
        config.write_text("insecure_dev: true\nserved_model_name: stub\n")
        self.started = folder / "started"
        self.started.mkdir()
        self.out = folder / "run"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "STARTED": str(self.started),
            "CARRYBACK_CACHE": str(folder / "cache"),
        }
        workload, *others = args
        command = [sys.executable, "-m", "carryback_server", "bench", workload, "--config", str(config)]
        command += ["--device", "cpu", "--model", str(folder), "--aggregated", "--out", str(self.out)]
        self.process = subprocess.Popen(
            [*command, *others], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    def engines(self) -> dict[str, tuple[int, list[str]]]:
        """Process id and arguments of each engine that has started."""
        return {each.name: json.loads(each.read_text()) for each in self.started.iterdir()}

    def left(self) -> list[str]:
        """Engines that still run."""
        return [name for name, (pid, _) in self.engines().items() if Path(f"/proc/{pid}").exists()]

    def said(self) -> str:
        """All that it says until it ends."""
        return self.process.communicate(timeout=120)[0]


Start = Callable[..., Bench]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a `Bench`, with its arguments."""
    with ExitStack() as stack:

        def start(*args: str) -> Bench:
            bench = Bench(tmp_path, *args)
            stack.callback(bench.process.kill)
            return bench

        yield start


def test_it_starts_three_engines_and_ends_them(start: Start) -> None:
    bench = start("agent", "--turns", "1", "--steps", "2", "--", "--max-model-len", "4096")
    said = bench.said()
    assert bench.process.returncode == 0, said
    result = results.load(bench.out.with_suffix(".json"))
    assert {each.arm for each in result.requests} == {"reuse", "no_reuse", "aggregated"}
    assert [each.outcome for each in result.requests if each.arm == "reuse" and each.is_measured] == [
        "miss",
        "hit",
    ]
    assert all(each.is_identical for each in result.requests if each.arm != "no_reuse")
    assert result.environment["device"] == "cpu"
    engines = bench.engines()
    assert set(engines) == {"prefill", "decode", "aggregated"}
    assert all(argv[-2:] == ["--max-model-len", "4096"] for _, argv in engines.values())
    # The same engine but for the connector.
    assert "--kv-transfer-config" not in engines["aggregated"][1]
    assert set(engines["aggregated"][1]) > {"--dtype", "float32", "--block-size", "32"}
    assert bench.left() == []


def test_only_the_paper_has_no_prefix_caching(start: Start) -> None:
    bench = start("paper", "--sizes", "200", "--repeats", "1")
    said = bench.said()
    assert bench.process.returncode == 0, said
    without = {name for name, (_, argv) in bench.engines().items() if "--no-enable-prefix-caching" in argv}
    assert without == {"prefill"}


def test_nothing_outlives_it_when_it_is_killed(start: Start) -> None:
    bench = start("chat", "--think-s", "1000")
    wait_until(lambda: len(bench.engines()) == 3, "the engines have started", 60)
    bench.process.send_signal(signal.SIGKILL)
    bench.said()
    wait_until(lambda: bench.left() == [], "the engines have ended", 60)


def test_an_interrupt_while_they_start(start: Start) -> None:
    bench = start("chat")
    wait_until(lambda: len(bench.engines()) >= 1, "an engine has started", 60)
    bench.process.send_signal(signal.SIGINT)
    said = bench.said()
    assert bench.process.returncode == 130, said
    assert "Traceback" not in said
    assert bench.left() == []


def test_an_engine_that_does_not_start(start: Start) -> None:
    bench = start("chat", "--prefill-args=--api-key x")
    said = bench.said()
    assert bench.process.returncode == 1
    assert "--api-key among the engine arguments" in said
    assert bench.left() == []
