"""Step 5, first half: a request at a decode engine, until its answer begins.

It may be sent before its prompt's KV is computed. The engine then takes it in meanwhile (HTTP, chat template,
tokens, grammar), and it waits there until `go` says where the KV is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from carryback_server.engines import Blame, Engine
from carryback_server.relay import Answer
from carryback_server.tracing import Step
from carryback_server.upstream import BrokeOff

# After how long an engine that has not answered is told again, if its connection broke meanwhile; doubled each
# time.
_AGAIN_S = 1.0
_MAX_AGAIN_S = 30.0


class Decoding:
    """One request at one decode engine, as a context: at its end nothing is left there.

    Args:
        key: of the request.
        beginning: sends it; gives its answer, begun.
        tokens: of its prompt, for the engine's load.
        blame: of the request.
        over: called at the end, with whether the engine may have begun with it: it was told to, or its wait was over.

    Attributes:
        visit: the request among those at the engine.
        is_waiting: it has not been told how to go on.
    """

    def __init__(
        self,
        engine: Engine,
        key: str,
        step: Step,
        beginning: Coroutine[Any, Any, Answer],
        *,
        tokens: int,
        blame: Blame,
        is_waiting: bool,
        over: Callable[[bool], None],
    ) -> None:
        self.engine = engine
        self.key = key
        self.step = step
        self.is_waiting = is_waiting
        self._is_unheard = False
        self._timer: asyncio.TimerHandle | None = None
        self._end = ExitStack()
        self._end.callback(lambda: over(self._has_run))
        self.visit = self._end.enter_context(engine.busy(tokens, blame))
        self._end.enter_context(step)
        self._beginning = asyncio.create_task(beginning)
        self._end.callback(self._break_off)

    @property
    def has_begun(self) -> bool:
        """Its answer has begun, or it has failed."""
        return self._beginning.done()

    @property
    def _has_run(self) -> bool:
        if not self.is_waiting:
            return True
        begun = self._beginning
        if not begun.done() or begun.cancelled() or begun.exception() is not None:
            return False
        answer = begun.result()
        return answer.status < 400 and not answer.has_failed

    def go(self, params: Mapping[str, Any]) -> None:
        """Let it go on, with these `kv_transfer_params`."""
        self.is_waiting = False
        self._say(msgspec.json.encode(params), _AGAIN_S)

    async def answer(self, timeout_s: float) -> Answer:
        """Its answer, begun.

        Args:
            timeout_s: from now, in seconds.

        Raises:
            EngineDown: there is none.
        """
        try:
            async with self.engine.within(timeout_s):
                return await self._begun()
        finally:
            self._say_no_more()

    async def _begun(self) -> Answer:
        try:
            return await self._beginning
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_unheard and task is not None and not task.cancelling():
                raise BrokeOff("it could not be told how to go on: its events have stopped") from None
            raise

    def leave(self) -> None:
        """Break it off, if it is not over; that says nothing about the engine."""
        self._end.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.__exit__(kind, error, traceback)

    def _say(self, params: bytes, again_s: float) -> None:
        if not self.engine.is_heard:  # then it hears nothing either
            self._is_unheard = True
            self._beginning.cancel()
            return
        self.engine.go(self.key, params)
        if again_s <= _MAX_AGAIN_S:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(again_s, self._say, params, 2 * again_s)

    def _say_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _break_off(self) -> None:
        self._say_no_more()
        self._beginning.cancel()
        self._beginning.add_done_callback(_close)


def _close(beginning: asyncio.Task[Answer]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().reply.close()
