"""Several router processes behind one port, for more than one core.

The kernel spreads connections over the workers. What one learns another may need, so they share their
state in Redis; their metrics they share in a folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

from prometheus_client.multiprocess import mark_process_dead

logger = logging.getLogger("carryback")

# In a worker's environment: what it is.
WORKER = "CARRYBACK_WORKER"
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_RESTART_WAIT_S = 1.0


async def run(count: int, argv: Sequence[str], stop: asyncio.Event, on_ready: Callable[[], None]) -> bool:
    """Run workers until told to stop; restart those that die.

    SIGHUP to this process goes on to all of them.

    Args:
        count: how many.
        argv: the command line after `python -m carryback_server` that each of them runs.
        on_ready: called once all of them listen.

    Returns:
        False if a worker could not start: the others are stopped, and it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="carryback-metrics-") as folder:
        workers = [_Worker(number, argv, folder) for number in range(count)]

        def hang_up() -> None:
            for worker in workers:
                worker.hang_up()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        keeping = [asyncio.create_task(worker.keep()) for worker in workers]
        ready = asyncio.ensure_future(asyncio.gather(*(worker.ready.wait() for worker in workers)))
        ready.add_done_callback(lambda done: None if done.cancelled() else on_ready())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *keeping], return_when=asyncio.FIRST_COMPLETED)
            return stop.is_set()
        finally:
            ready.cancel()
            stopping.cancel()
            for worker in workers:
                worker.end()
            await asyncio.gather(*keeping)


class _Worker:
    """One worker process, and those that take its place."""

    def __init__(self, number: int, argv: Sequence[str], folder: str) -> None:
        self._number = number
        self._argv = argv
        self._environ = {**os.environ, WORKER: str(number), METRICS_FOLDER: folder}
        self._process: asyncio.subprocess.Process | None = None
        self._is_ending = False
        self._listens = False
        self._is_to_reload = False
        self.ready = asyncio.Event()

    async def keep(self) -> None:
        """Run it, and again when it dies; return when it is to end, or could not start."""
        while not self._is_ending:
            # It says a line once it listens, and ends if this process is gone: then its input ends.
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "carryback_server", *self._argv,
                env=self._environ, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            if await process.stdout.readline():
                self._listens = True
                self.ready.set()
                if self._is_to_reload:
                    self.hang_up()
            status = await process.wait()
            self._listens = False
            mark_process_dead(process.pid, self._environ[METRICS_FOLDER])  # type: ignore[no-untyped-call]
            if self._is_ending:
                return
            if not self.ready.is_set():
                return
            logger.error("router worker %d ended with status %d; starting it again", self._number, status)
            await asyncio.sleep(_RESTART_WAIT_S)

    def end(self) -> None:
        """Ask it to finish what it does, and to end."""
        self._is_ending = True
        self.signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Have it read its configuration again. While it starts, SIGHUP would end it: it is told later."""
        self._is_to_reload = not self._listens
        if self._listens:
            self.signal(signal.SIGHUP)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def is_worker() -> bool:
    """Whether this process is a worker of another."""
    return WORKER in os.environ


def number() -> int | None:
    """Which worker this process is; None if it is none."""
    return int(os.environ[WORKER]) if is_worker() else None


async def parent_gone() -> None:
    """In a worker: wait until the process that started it has ended."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
