"""What a forked child can do while the thread that held a lock is not there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import carryback
import pytest
from carryback import _headers
from carryback._fork import Lock
from carryback.identity import Identifier

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

HI = [{"role": "user", "content": "hi"}]
ANSWERED = [*HI, {"role": "assistant", "content": "Hello."}]


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread holds the lock."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_child(work: Callable[[], bool], timeout_s: float = 20.0) -> str:
    """What comes of it in a forked child: `yes`, `no`, `failed`, or `hangs`."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    for _ in range(int(timeout_s / 0.01)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {0: "yes", 1: "no"}.get(os.waitstatus_to_exitcode(status), "failed")
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def test_a_child_takes_a_lock_that_another_thread_of_its_parent_held() -> None:
    lock = Lock()

    def work() -> bool:
        with lock as first:
            pass
        with lock as second:
            pass
        return not first and second

    with held(lock):
        assert in_child(work) == "yes"
    with lock as is_whole:
        assert is_whole, "nothing was cut off in the parent"


def test_a_lock_that_was_free_guards_what_is_whole() -> None:
    lock = Lock()

    def work() -> bool:
        with lock as is_whole:
            return is_whole

    assert in_child(work) == "yes"


def test_a_child_tells_conversations_though_another_thread_was_at_it() -> None:
    identifier = Identifier()
    known = identifier.identify(HI).conversation

    def goes_on() -> bool:
        return identifier.identify([*ANSWERED, *HI]).conversation == known

    assert in_child(goes_on) == "yes"
    with held(identifier._lock):
        # What the other thread was writing may be half there, so all of it is forgotten.
        assert in_child(lambda: identifier.identify([*ANSWERED, *HI]).is_new) == "yes"
        assert in_child(goes_on) == "no"


def test_a_child_has_headers_though_another_thread_was_at_it() -> None:
    with held(_headers._shared._lock):
        assert in_child(lambda: bool(carryback.headers(HI))) == "yes"
    with carryback.conversation("thread-7"), held(_headers._shared._lock):
        assert in_child(lambda: carryback.headers(HI)["X-Conversation-ID"] == "thread-7") == "yes"


def test_no_lock_of_the_client_or_of_an_integration_outlives_a_fork() -> None:
    from carryback_agents import _calls
    from carryback_langgraph._lineage import lineage

    client = carryback.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")
    for lock in (_calls._lock, lineage._lock, client._identifier._lock):
        with held(lock):

            def work(lock: Lock = lock) -> bool:
                with lock:
                    return True

            assert in_child(work) == "yes"
