"""Starts engines side by side, waits until they serve, restarts those that die, and ends them all.

Each engine is a process group of its own: Ctrl-C in a terminal does not reach it directly, and vLLM's
workers are ended with it. It is no session of its own: Linux shares the cores out between sessions first
(`sched_autogroup`), and between the threads of a session by their priorities only then. NIXL's threads,
which spin at the lowest priority, would take a core from the *other* engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import tenacity

from carryback_server import guard
from carryback_server.launch import EngineCommand

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024

# What vLLM's log says while it starts, in the order in which it does.
_STAGES = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "warming up"),
    ("Started server process", "almost ready"),
)

_KILLED = "killed by hand, or by the kernel for lack of memory (see dmesg)"

# What in a log's errors and last lines names the likely cause, and what to do. First match wins.
_CAUSES = (
    (r"CARRYBACK_KEY", "no key: set CARRYBACK_KEY to one secret for all engines, or pass --insecure-dev"),
    (
        r"carryback works with vLLM",
        "this vLLM version is not supported: see `carryback version` and the versions in the README",
    ),
    (r"(?i)no module named 'carryback_vllm|carryback_vllm.*ModuleNotFound", "carryback is not installed for this Python"),
    (r"(?i)no module named 'vllm", "vLLM is not installed: pip install 'carryback[gpu]', or requirements/cpu.txt"),
    (
        r"(?i)nixl is not available|no module named 'nixl|NIXL.*not installed",
        "NIXL is not installed: pip install 'carryback[gpu]', or requirements/cpu.txt",
    ),
    (r"(?i)address already in use|errno 98", "a port is in use: leave --prefill-port and --decode-port to be chosen"),
    (
        r"(?i)KV cache.*(needed|larger than the available|max_model_len)|max_model_len.*KV cache|No available memory for the cache",
        "the KV cache is too small for the context length: lower --max-model-len (after --), or raise "
        "cpu_kv_cache_gib on a CPU, --gpu-memory-utilization on a GPU",
    ),
    (
        r"(?i)CUDA out of memory|OutOfMemoryError|Free memory on device",
        "not enough GPU memory: other processes use it, or the model needs more GPUs (--prefill-devices, "
        "--decode-devices and --tensor-parallel-size after --)",
    ),
    (r"(?i)cannot allocate memory|std::bad_alloc|MemoryError", "out of memory: lower cpu_kv_cache_gib, or use a smaller model"),
    (
        r"(?i)no CUDA GPUs are available|Found no NVIDIA driver|invalid device ordinal|Failed to infer device type|CUDA_ERROR_NO_DEVICE",
        "no usable GPU: check --prefill-devices and --decode-devices, or pass --device cpu",
    ),
    (
        r"(?i)is not a local folder and is not a valid model identifier|RepositoryNotFound|Repo id must be|GatedRepo"
        r"|couldn't connect to|LocalEntryNotFound|Invalid repository ID or local directory",
        "the model was not found: check --model, the network, and access to the model (hf auth login)",
    ),
    (r"(?i)unrecognized arguments|invalid choice|api_server.py: error", "vLLM does not know one of the engine arguments"),
    (r"(?i)nixl_err_\w+|nixlbackenderror|UCX\s+ERROR", "NIXL could not set up its transport: check kv_backend"),
    (r"EngineDeadError", f"its engine process ended: {_KILLED}, or by an error further up in the log"),
)  # fmt: skip


_ERROR = re.compile(r"(?m)^(?!.*\bWARNING\b).*?(\b[\w.]*(?:Error|Exception): .{1,400})")


class EngineFailed(Exception):
    """An engine did not start; the message has the likely cause and the last lines of its log."""


class Engines:
    """A set of engines under supervision; an async context manager that starts and stops them.

    An engine that dies before it first serves fails the whole set. One that dies later is restarted, after
    a wait that doubles with each restart, and logged as an error.

    Args:
        commands: what to start; names are unique.
        log_dir: folder for `<name>.log`; appended to.
        start_timeout_s: from starting an engine until it must serve.
        stop_grace_s: from asking an engine to stop until it is killed.
        restart_wait_s: before the first restart; doubled for each further one, up to
            `restart_wait_max_s`, and back to the start once the engine has served for `restart_reset_s`.
    """

    def __init__(
        self,
        commands: Sequence[EngineCommand],
        *,
        log_dir: Path,
        start_timeout_s: float = 600.0,
        stop_grace_s: float = 20.0,
        restart_wait_s: float = 1.0,
        restart_wait_max_s: float = 60.0,
        restart_reset_s: float = 300.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._restart_wait_s = restart_wait_s
        self._restart_wait_max_s = restart_wait_max_s
        self._restart_reset_s = restart_reset_s
        self._engines = {command.name: _Engine(command, log_dir) for command in commands}
        self._tasks: list[asyncio.Task[None]] = []
        self._guard: subprocess.Popen[str] | None = None
        self._hurry = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all engines, without waiting until they serve."""
        self._guard = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            [sys.executable, "-I", "-S", guard.__file__, str(self._stop_grace_s)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._tasks = [asyncio.create_task(self._run(engine)) for engine in self._engines.values()]

    async def wait_ready(self) -> None:
        """Return once every engine serves.

        Raises:
            EngineFailed: one died or took too long; all have been stopped.
        """
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    await self.stop()
                    task.result()
        finally:
            ready.cancel()

    async def _all_ready(self) -> None:
        for engine in self._engines.values():
            await engine.ready.wait()

    def pid(self, name: str) -> int:
        """Process id of an engine's main process, which is its process group too.

        Raises:
            LookupError: no such engine, or it is not running now.
        """
        process = self._engines[name].process
        if process is None:
            raise LookupError(f"{name} is not running")
        return process.pid

    def states(self) -> Mapping[str, str]:
        """In a few words, what each engine is doing, e.g. `loading weights`."""
        return {name: engine.state() for name, engine in self._engines.items()}

    def log(self, name: str) -> Path:
        """An engine's log file."""
        return self._engines[name].log

    def hurry(self) -> None:
        """Kill what a running or later `stop` would wait for."""
        self._hurry.set()

    async def stop(self) -> None:
        """End all engines with their workers; returns when none is left. May be called again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(engine) for engine in self._engines.values()))
        if self._guard is not None:
            self._guard.communicate()  # closes its input; with no group left it ends at once
            self._guard = None

    async def _run(self, engine: _Engine) -> None:
        """One engine's life: start, serve, die, start again. Ends with an error or when cancelled."""
        restarts = 0
        while True:
            await self._spawn(engine)
            trouble = await self._until_ready(engine)
            if trouble is None:
                served_from = time.monotonic()
                engine.ready.set()
                if restarts:
                    logger.warning("%s serves again", engine.name)
                trouble = await engine.exit()
                engine.ready.clear()
                if time.monotonic() - served_from >= self._restart_reset_s:
                    restarts = 0
            elif not engine.has_served:
                await self._end(engine)
                raise EngineFailed(engine.report(trouble))
            engine.has_served = True
            wait_s = min(self._restart_wait_s * 2**restarts, self._restart_wait_max_s)
            restarts += 1
            logger.error("%s\nstarting it again in %g s", engine.report(trouble), wait_s)
            await self._end(engine)
            await asyncio.sleep(wait_s)

    async def _spawn(self, engine: _Engine) -> None:
        engine.log.parent.mkdir(parents=True, exist_ok=True)
        with engine.log.open("ab") as log:
            engine.log_start = log.tell()
            engine.process = await asyncio.create_subprocess_exec(
                *engine.command.argv,
                env=os.environ | engine.command.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=os.setpgrp,  # uvloop does not know process_group=0
            )
        self._tell_guard(f"+{engine.process.pid}")

    async def _until_ready(self, engine: _Engine) -> str | None:
        """None once the engine answers its health check, else what went wrong."""
        died = asyncio.create_task(engine.exit())
        healthy = asyncio.create_task(_healthy(engine.command.url))
        try:
            done, _ = await asyncio.wait(
                [died, healthy], timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if died in done:
                return died.result()
            if healthy in done:
                return None
            return f"did not serve within {self._start_timeout_s:g} s (setting start_timeout_s)"
        finally:
            died.cancel()
            healthy.cancel()

    async def _end(self, engine: _Engine) -> None:
        """Stop an engine, if it runs, and all that it started."""
        if engine.process is None:
            return
        group = engine.process.pid
        ended = asyncio.create_task(engine.process.wait())
        if engine.ready.is_set():
            # The main process alone is asked: it knows the order in which to stop its workers. One that
            # still starts has nothing to finish, and would go on with it.
            with suppress(ProcessLookupError):
                engine.process.terminate()
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait(
                [ended, hurry], timeout=self._stop_grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurry.cancel()
        deadline = time.monotonic() + guard.TRACKERS_S
        while guard.alive(group):
            guard.kill(group, trackers=time.monotonic() > deadline)
            await asyncio.sleep(0.02)
        await ended
        self._tell_guard(f"-{group}")
        engine.process = None
        engine.ready.clear()

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(BrokenPipeError):  # somebody killed it; we go on without
                self._guard.stdin.write(line + "\n")
                self._guard.stdin.flush()


class _Engine:
    """One engine and what is known of it."""

    def __init__(self, command: EngineCommand, log_dir: Path) -> None:
        self.command = command
        self.name = command.name
        self.log = log_dir / f"{command.name}.log"
        self.log_start = 0
        "Where in the log its present life begins, bytes."
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.has_served = False

    async def exit(self) -> str:
        """Wait until the main process ends; returns how it did, in words."""
        assert self.process is not None
        code = await self.process.wait()
        if code >= 0:
            return f"ended with exit status {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def state(self) -> str:
        if self.ready.is_set():
            return "ready"
        if self.process is None:
            return "down" if self.has_served else "starting"
        text = self.tail()
        return next((stage for mark, stage in reversed(_STAGES) if mark in text), "starting")

    def tail(self) -> str:
        """The end of the log of its present life."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_start, size - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def report(self, trouble: str) -> str:
        """What happened, the likely cause and the last lines of the log."""
        text = self.tail()
        # vLLM's root cause is far above its last lines, which say only that there was one.
        errors = list(dict.fromkeys(match[1] for match in _ERROR.finditer(text)))
        lines = text.rstrip().splitlines()[-_TAIL_LINES:]
        said = "\n".join([*errors, *lines])
        cause = next((cause for mark, cause in _CAUSES if re.search(mark, said)), "")
        if not cause and "SIGKILL" in trouble:
            cause = _KILLED
        return "\n".join(
            [
                f"{self.name} {trouble}",
                *([f"Likely cause: {cause}"] if cause else []),
                *(["Errors in its log:", *(f"  | {error}" for error in errors)] if errors else []),
                f"Last lines of {self.log}:",
                *(f"  | {line}" for line in lines or ["(nothing)"]),
            ]
        )


async def _healthy(url: str) -> None:
    """Return once the server at `url` answers its health check with 200."""
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async for attempt in tenacity.AsyncRetrying(
            wait=tenacity.wait_fixed(0.25),
            retry=tenacity.retry_if_exception_type((aiohttp.ClientError, TimeoutError, OSError)),
        ):
            with attempt:
                async with session.get(f"{url}/health") as response:
                    response.raise_for_status()
