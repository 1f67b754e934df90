"""Runs `carryback_vllm.probe` in a process of its own, which ends in time whatever it loads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class Probed:
    """What it said.

    Attributes:
        facts: as JSON.
        text: all else that it printed, NIXL's and UCX's logs among it.
        is_late: it was not done in time.
    """

    facts: Mapping[str, Any]
    text: str
    is_late: bool = False


async def probe(*args: str, env: Mapping[str, str] = {}, timeout_s: float) -> Probed:
    """Run it; `error` in the facts says what went wrong.

    Args:
        args: of its command line.
        env: variables besides ours.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carryback_vllm.probe", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **env}, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return Probed({"error": f"not done within {timeout_s:g} s"}, "", is_late=True)
    finally:
        with suppress(ProcessLookupError):  # it may have children
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    text = output.decode(errors="replace")
    for line in reversed(text.splitlines()):
        with suppress(msgspec.DecodeError):
            return Probed(msgspec.json.decode(line, type=dict[str, Any]), text)
    return Probed({"error": f"it ended with status {process.returncode}"}, text)
