"""The supervisor on real, small processes that behave as engines do, well or badly."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from carryback_server.guard import alive
from carryback_server.launch import EngineCommand, free_ports
from carryback_server.profiles import Role
from carryback_server.supervisor import EngineFailed, Engines

# Serves /health after a child was started and shared memory made, as vLLM does. Flags change how it behaves.
ENGINE = """
import http.server, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
port, flags = int(sys.argv[1]), sys.argv[2:]
if "stubborn" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
memory = SharedMemory(create=True, size=16)
print("memory", memory.name)
print("worker", worker.pid, flush=True)
if "fail" in flags:
    sys.exit(flags[-1])
if "silent" in flags:
    time.sleep(600)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def command(name: Role, *flags: str) -> EngineCommand:
    (port,) = free_ports(1)
    argv = [sys.executable, "-c", ENGINE, str(port), *flags]
    return EngineCommand(
        role=name, name=name, argv=argv, env={}, url=f"http://127.0.0.1:{port}", events="tcp://127.0.0.1:1"
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (other processes set no event of ours)
        await asyncio.sleep(0.02)


def worker_pids(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("worker ")]


def memory_left(log: Path) -> list[str]:
    names = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("memory ")]
    assert names
    return [name for name in names if Path("/dev/shm", name).exists()]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_starts_serves_and_leaves_nothing(tmp_path: Path) -> None:
    async with Engines([command("prefill"), command("decode")], log_dir=tmp_path) as engines:
        await engines.wait_ready()
        assert engines.states() == {"prefill": "ready", "decode": "ready"}
        groups = [engines.pid("prefill"), engines.pid("decode")]
        workers = worker_pids(engines.log("prefill")) + worker_pids(engines.log("decode"))
        assert all(map(running, workers))
        assert all(os.getpgid(pid) == pid for pid in groups)  # Ctrl-C does not reach them
    assert not any(map(running, groups + workers))
    with pytest.raises(LookupError):
        engines.pid("prefill")


async def test_early_death_names_the_cause_and_stops_the_other(tmp_path: Path) -> None:
    engines = Engines(
        [command("prefill"), command("decode", "fail", "OSError: [Errno 98] Address already in use")],
        log_dir=tmp_path,
    )
    await engines.start()
    await until(lambda: "worker" in _text(tmp_path / "prefill.log"))
    with pytest.raises(EngineFailed) as failed:
        await engines.wait_ready()
    message = str(failed.value)
    assert "decode ended with exit status 1" in message
    assert "Likely cause: a port is in use" in message
    assert "[Errno 98] Address already in use" in message
    assert not any(map(running, worker_pids(tmp_path / "prefill.log") + worker_pids(tmp_path / "decode.log")))


# What vLLM says in each case, shortened.
@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.03 GiB).",
            "the KV cache is too small",
        ),
        (
            "api_server.py: error: unrecognized arguments: --no-such-flag",
            "vLLM does not know one of the engine arguments",
        ),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in "
            "the cached files.",
            "the model was not found",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "not enough GPU memory"),
        ("RuntimeError: No CUDA GPUs are available", "no usable GPU"),
        (
            "/usr/bin/python: Error while finding module specification: No module named 'vllm'",
            "vLLM is not installed",
        ),
        ("RuntimeError: NIXL is not available", "NIXL is not installed"),
        (
            "RuntimeError: carryback works with vLLM 0.32 or 0.33, and this is vLLM 0.9.",
            "this vLLM version is not supported",
        ),
        ("RuntimeError: carryback: CARRYBACK_KEY is not set.", "no key"),
    ],
)
async def test_likely_causes(tmp_path: Path, said: str, cause: str) -> None:
    # An exception comes first, and after it much that says only that there was one.
    lines = ["  File ..."] * 30
    lines = [said, *lines, "Engine core initialization failed."] if "Error: " in said else [*lines, said]
    engines = Engines([command("prefill", "fail", "\n".join(lines))], log_dir=tmp_path)
    await engines.start()
    with pytest.raises(EngineFailed) as failed:
        await engines.wait_ready()
    message = str(failed.value)
    assert f"Likely cause: {cause}" in message
    assert said in message
    assert lines[-1] in message


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_an_engine_that_never_serves_fails_the_start(tmp_path: Path) -> None:
    engines = Engines([command("prefill", "silent")], log_dir=tmp_path, start_timeout_s=1.0)
    await engines.start()
    with pytest.raises(EngineFailed, match="start_timeout_s"):
        await engines.wait_ready()
    assert not any(map(running, worker_pids(tmp_path / "prefill.log")))


async def test_restarts_an_engine_that_dies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commands = [command("prefill"), command("decode")]
    async with Engines(commands, log_dir=tmp_path, restart_wait_s=0.01) as engines:
        await engines.wait_ready()
        prefill, first = engines.pid("prefill"), engines.pid("decode")
        for _ in range(2):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                os.kill(engines.pid("decode"), signal.SIGKILL)
                await until(lambda: "decode serves again" in caplog.text)
            assert "decode was killed by SIGKILL" in caplog.text
        assert engines.pid("decode") != first
        assert engines.pid("prefill") == prefill
        old, *_, new = worker_pids(engines.log("decode"))
        assert not running(old)  # a dead engine's workers hold memory and ports
        assert running(new)
    assert not running(new)


async def test_kills_an_engine_that_does_not_stop(tmp_path: Path) -> None:
    async with Engines([command("prefill", "stubborn")], log_dir=tmp_path, stop_grace_s=0.3) as engines:
        await engines.wait_ready()
        group = engines.pid("prefill")
        assert memory_left(engines.log("prefill"))
    assert not alive(group)
    assert not memory_left(engines.log("prefill"))


async def test_hurry_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async with Engines([command("prefill", "stubborn")], log_dir=tmp_path, stop_grace_s=100_000) as engines:
        await engines.wait_ready()
        group = engines.pid("prefill")
        asyncio.get_running_loop().call_later(0.2, engines.hurry)
    assert not alive(group)


async def test_stop_while_starting(tmp_path: Path) -> None:
    engines = Engines([command("prefill", "silent"), command("decode")], log_dir=tmp_path)
    await engines.start()
    await until(lambda: "worker" in _text(tmp_path / "prefill.log"))
    assert memory_left(tmp_path / "prefill.log")
    await engines.stop()
    await engines.stop()
    assert not memory_left(tmp_path / "prefill.log")
    assert not any(map(running, worker_pids(tmp_path / "prefill.log")))


def test_engines_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_supervisor import Engines, command
async def main():
    async with Engines([command("prefill"), command("decode", "stubborn")], log_dir=Path({str(tmp_path)!r}), stop_grace_s=0.3) as engines:
        await engines.wait_ready()
        print(engines.pid("prefill"), engines.pid("decode"), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        groups = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(groups) == 2
        assert all(map(alive, groups))
        supervisor.kill()
    while any(map(alive, groups)):  # the test's timeout ends it if they stay
        time.sleep(0.05)
    assert not memory_left(tmp_path / "decode.log")
