"""`carryback router` as a process."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml
from service import until


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody uses now, and that no client's connection is given meanwhile."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


class RouterProcess:
    """A router with a configuration file: `async with RouterProcess(folder, settings) as router: ...`.

    Args:
        folder: for the file.
        settings: what is in it; ports are added.
        flags: of the command line.
        environ: further variables.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *flags: str, environ: Mapping[str, str] = {}
    ) -> None:
        self.file = folder / "router.yaml"
        port, admin_port = free_ports(2)
        self.settings = {"port": port, "admin_port": admin_port, "probe_interval_s": 0.1, **settings}
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._flags = flags
        self._environ = {
            name: value for name, value in os.environ.items() if not name.startswith("CARRYBACK_")
        }
        self._environ |= environ
        self._out = folder / "stdout"
        self._err = folder / "stderr"

    def write(self, **settings: Any) -> None:
        """Change the file."""
        self.settings |= settings
        self.file.write_text(yaml.safe_dump(self.settings))

    async def __aenter__(self) -> Self:
        await self.start()
        await until(lambda: "is ready" in self.out or self.process.returncode is not None, self.err)
        assert self.process.returncode is None, self.err
        return self

    async def start(self) -> None:
        """Start it; it may not be ready yet."""
        self.write()
        words: Sequence[str] = [
            sys.executable,
            "-m",
            "carryback_server",
            "router",
            "--config",
            str(self.file),
        ]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = await asyncio.create_subprocess_exec(
                *words, *self._flags, env=self._environ, stdout=out, stderr=err
            )

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.err)
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(60):
            await self.process.wait()

    @property
    def out(self) -> str:
        """What it printed."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it logged."""
        return self._err.read_text()
