"""Lets two engines live well on a small CPU. Does nothing on any other platform.

vLLM loads `register` in each of its processes, through the `vllm.general_plugins` entry point.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from carryback_vllm.version import check_version

logger = logging.getLogger("vllm.carryback")

MAX_WAIT_MS = 2
LOWEST_PRIORITY = 19


def register() -> None:
    """Make vLLM's shared-memory queue sleep instead of spin, on the CPU platform.

    This runs in every vLLM that has carryback in its environment, be it for the client's sake, and vLLM ends
    with what it raises. So it raises nothing: a vLLM of another version, or one that lacks what is needed here, stays
    as it is, and its log says so.
    """
    try:
        _sleep_instead_of_spinning()
    except Exception as error:  # noqa: BLE001  (whatever it is)
        # The log's level is vLLM's; whoever installed the client alone need not care.
        logger.info("carryback leaves this vLLM as it is: %s: %s", type(error).__name__, error)


def _sleep_instead_of_spinning() -> None:
    """Do what `register` says.

    A reader busy-waits for a second after each message, and then relies on a notification that can be
    lost when the cores are oversubscribed; it then sleeps for up to a minute. Here it never spins, and
    looks again every 2 ms.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    check_version(vllm.__version__)
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    stock_wait = SpinCondition.wait
    if getattr(stock_wait, "calm", False):
        return
    if [*inspect.signature(stock_wait).parameters] != ["self", "timeout_ms"]:
        raise TypeError(f"SpinCondition.wait takes {inspect.signature(stock_wait)}")

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
            with suppress(OSError):  # it has ended, or the container forbids it
                os.setpriority(os.PRIO_PROCESS, thread_id, LOWEST_PRIORITY)


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except FileNotFoundError:
        return set()
