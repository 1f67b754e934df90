"""Locks in a process that was forked."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class Lock:
    """A `threading.Lock` that is free in a forked child.

    A fork copies one thread, and the locks that the others hold: nobody would let go of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_whole = True
        _locks.add(self)

    def __enter__(self) -> bool:
        """Take the lock; False, once, if a fork cut off who held it, so that what it guards may be half written."""
        self._lock.acquire()
        is_whole, self._is_whole = self._is_whole, True
        return is_whole

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Forget who holds it; for a child that has one thread."""
        self._is_whole = self._is_whole and not self._lock.locked()
        self._lock = threading.Lock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_renew_all)
