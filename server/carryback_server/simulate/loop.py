"""An event loop in which no time passes but from one timer to the next: seconds are jumped over."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

# Timers that were cancelled are swept out once they are more than so many, and than half of all.
_SWEEP = 10_000


class Stalled(Exception):
    """All wait for each other: nothing will ever happen again."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs coroutines, callbacks and timers of `asyncio` in virtual time. No I/O, no threads.

    Things happen in the order of their times, those of the same time in the order in which they were asked
    for. So a run depends on nothing but what runs.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        # When, in which order, and what: a handle, or a callback and its arguments.
        self._timers: list[tuple[float, int, Any, tuple[Any, ...] | None]] = []
        self._counter = count()
        self._cancelled = 0
        self._problem: BaseException | None = None

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until this coroutine is done; what it returns.

        Raises:
            Stalled: it waits for something that cannot happen.
            Exception: what it, any callback or a task that nobody waits for raised.
        """
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            self._run_until(task)
            return task.result()
        finally:
            self._end()
            asyncio._set_running_loop(None)

    def _end(self) -> None:
        """End all tasks that have not ended, in order, while there is a loop for what they do then."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._ready:
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _run_until(self, task: asyncio.Task[Any]) -> None:
        ready, timers, heappop = self._ready, self._timers, heapq.heappop
        while not task.done():
            if ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            elif timers:
                when, _, what, args = heappop(timers)
                if args is not None:
                    if when > self._now:
                        self._now = when
                    what(*args)
                elif what._cancelled:
                    self._cancelled -= 1
                else:
                    if when > self._now:
                        self._now = when
                    what._scheduled = False
                    what._run()
            else:
                raise Stalled("nothing is left to happen, and the simulation is not over")
            if self._problem is not None:
                raise self._problem

    # -- quicker than what asyncio has, where there are millions

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        """As `call_later`, and cannot be cancelled."""
        heapq.heappush(self._timers, (self._now + delay, next(self._counter), callback, args))

    def sleep(self, delay: float) -> asyncio.Future[None]:
        """A future that is done after so many seconds; to be awaited to its end."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.after(delay, future.set_result, None)
        return future

    # -- what asyncio asks of a loop

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """See `asyncio`."""
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See `asyncio`."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See `asyncio`."""
        handle = TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._counter), handle, None))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio`."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """See `asyncio`."""
        return asyncio.Task(coroutine, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        """See `asyncio`."""
        return False

    def is_running(self) -> bool:
        """See `asyncio`."""
        return True

    def is_closed(self) -> bool:
        """See `asyncio`."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing goes wrong unseen: the first exception ends the run."""
        problem = context.get("exception") or RuntimeError(context["message"])
        self._problem = self._problem or problem

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        # One that has run is cancelled too, for good measure.
        self._cancelled += handle._scheduled  # type: ignore[attr-defined]
        if self._cancelled > max(_SWEEP, len(self._timers) // 2):
            # In place: the list is being run.
            self._timers[:] = [
                timer for timer in self._timers if timer[3] is not None or not timer[2]._cancelled
            ]
            heapq.heapify(self._timers)
            self._cancelled = 0
