"""A redis-server of the tests' own."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import redis
from carryback_server.launch import is_free


class RedisServer:
    """One redis-server process, on a Unix socket and, if asked, a TCP port.

    Args:
        options: more of its options, e.g. `"--appendonly", "yes"`.
        port: 0 for none.
    """

    def __init__(self, *options: str, port: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis")
        self._options = options
        self.port = port
        self.url = f"unix://{self._folder.name}/socket"
        self.client = redis.Redis.from_url(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, from the last snapshot if there is one, and wait until it answers."""
        folder = Path(self._folder.name)
        command = ["redis-server", "--port", str(self.port), "--unixsocket", str(folder / "socket")]
        command += ["--dir", str(folder), "--save", "", "--repl-diskless-sync-delay", "0", *self._options]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(redis.RedisError):
                self.client.ping()
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once; nothing more is saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its files."""
        self.client.close()
        self.kill()
        self._folder.cleanup()


@contextlib.contextmanager
def redis_server(*options: str, port: int = 0) -> Iterator[RedisServer]:
    """A server that is running."""
    server = RedisServer(*options, port=port)
    try:
        yield server.start()
    finally:
        server.close()


def free_port() -> int:
    """A TCP port that nobody uses now, nor, as is a cluster's second port, gives to an outgoing connection."""
    while True:
        port = random.randrange(20_000, 22_000)
        if is_free("127.0.0.1", port) and is_free("127.0.0.1", port + 10_000):
            return port
