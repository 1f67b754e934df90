"""Lets two engines live well on a small CPU. Does nothing on any other platform.

vLLM loads `register` in each of its processes, through the `vllm.general_plugins` entry point.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_WAIT_MS = 2
LOWEST_PRIORITY = 19


def register() -> None:
    """Make vLLM's shared-memory queue sleep instead of spin, on the CPU platform.

    A reader busy-waits for a second after each message, and then relies on a notification that can be
    lost when the cores are oversubscribed; it then sleeps for up to a minute. Here it never spins, and
    looks again every 2 ms.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if getattr(SpinCondition.wait, "calm", False):
        return
    stock_wait = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0
        self.last_read = 0.0
        stock_wait(self, MAX_WAIT_MS if timeout_ms is None else min(timeout_ms, MAX_WAIT_MS))

    wait.calm = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait


@contextmanager
def calm_new_threads() -> Iterator[None]:
    """Give native threads that start inside the lowest priority, on the CPU platform.

    Every NIXL agent runs a UCX progress thread that spins on a core, idle or not; without it transfers
    hang.
    """
    from vllm.platforms import current_platform

    before = _thread_ids()
    yield
    if current_platform.is_cpu():
        python_threads = {thread.native_id for thread in threading.enumerate()}
        for thread_id in _thread_ids() - before - python_threads:
            try:
                os.setpriority(os.PRIO_PROCESS, thread_id, LOWEST_PRIORITY)
            except ProcessLookupError:
                continue


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except FileNotFoundError:
        return set()
