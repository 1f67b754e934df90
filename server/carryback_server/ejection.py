"""Whether an engine's requests work. One that answers probes but fails requests is put out for a while."""

from __future__ import annotations

import time
from collections.abc import Callable


class Ejection:
    """One engine's requests, by their outcome.

    After several failures in a row the engine is ejected, each time for twice as long. When the time is
    over, the router sends it a request of its own, so that no client pays for the trial. If that works the
    engine is back, and one more failure ejects it again; the first success clears it.

    A failure that may be the request's own fault is a doubt. After as many in a row there is such a trial as well,
    and the engine is ejected if that fails.

    Args:
        failures: in a row, until it is ejected.
        first_s: how long for, the first time, in seconds.
        max_s: at most. One that stays in for so long starts from `first_s` again.
        clock: seconds.

    Attributes:
        count: how often it was ejected.
    """

    def __init__(
        self, *, failures: int, first_s: float, max_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = failures
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock
        self.count = 0
        self.reset()

    def reset(self) -> None:
        """The engine was started anew: what was before says nothing."""
        self._failures = 0
        self._doubts = 0
        self.wait_s = 0.0
        self._until: float | None = None
        self._back = self._clock()

    @property
    def is_out(self) -> bool:
        """It is ejected, for now."""
        return self._until is not None

    @property
    def is_due(self) -> bool:
        """It is time for a trial."""
        if self._until is None:
            return self._doubts >= self._limit
        return self._clock() >= self._until

    def succeeded(self) -> None:
        """A request worked."""
        self._failures = 0
        self._doubts = 0

    def doubted(self) -> None:
        """A request failed, which may be its own fault."""
        self._doubts += 1

    def failed(self, may_eject: Callable[[], bool]) -> bool:
        """A request failed; whether that ejects the engine.

        Args:
            may_eject: asked when it is time to; if not, the next failure asks again.
        """
        self._failures += 1
        if self.is_out or self._failures < self._limit or not may_eject():
            return False
        self._begin()
        return True

    def tried(self, worked: bool, may_eject: Callable[[], bool] = lambda: True) -> bool:
        """The trial has ended; whether that ejects the engine, which was only in doubt.

        Args:
            may_eject: asked if it was; if not, as many doubts again make another trial.
        """
        self._doubts = 0
        if self._until is None:
            if worked or not may_eject():
                return False
            self._begin()
            return True
        if not worked:
            self._eject()
            return False
        self._until = None
        self._back = self._clock()
        self._failures = self._limit - 1
        return False

    def _begin(self) -> None:
        if self._clock() - self._back >= self._max_s:
            self.wait_s = 0.0
        self.count += 1
        self._eject()

    def _eject(self) -> None:
        self.wait_s = min(2 * self.wait_s or self._first_s, self._max_s)
        self._until = self._clock() + self.wait_s
