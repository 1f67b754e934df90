"""Our own code inside vLLM's hooks: what it raises ends no engine. No vLLM in here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

logger = logging.getLogger("vllm.carryback")


class Guard:
    """Runs our code in vLLM's hooks; after a failure, what was asked for instead.

    Each failure counts. The log has one traceback for each place that fails, so that a hook which fails in every
    step does not fill a disk. What vLLM's own code raises stays as it is: keep `super()` calls outside.

    Attributes:
        failures: so many, since the engine's start.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._logged: set[tuple[str, int]] = set()

    @contextmanager
    def __call__(self, otherwise: Callable[[], object] | None = None) -> Iterator[None]:
        """A context that no `Exception` leaves.

        Args:
            otherwise: called after one; what it raises is counted, too.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is logged)
            self._failed(error)
            if otherwise is not None:
                with self():
                    otherwise()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        place = _innermost(error.__traceback__)
        if place not in self._logged:
            self._logged.add(place)
            logger.error(
                "carryback: a fault of the plug-in (%s). The engine goes on: what would have been read is computed, "
                "and what would have been held is not. Further faults at this place are only counted",
                type(error).__name__,
                exc_info=error,
            )


def _innermost(traceback: TracebackType | None) -> tuple[str, int]:
    """File and line where an exception was raised."""
    place = ("", 0)
    while traceback is not None:
        place = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return place
