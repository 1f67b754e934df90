"""Step 4: a request at a decode engine, until its answer begins; at another one if it fails.

It may be sent before its prompt's KV is computed. The engine then takes it in meanwhile (HTTP, chat template,
tokens, grammar), and it waits there until `go` says where the KV is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from carryback_server.answer import Answer
from carryback_server.config import RouterConfig
from carryback_server.engine_client import Blame, EngineClient, EngineDown
from carryback_server.errors import ApiError
from carryback_server.live import Live
from carryback_server.metrics import Metrics
from carryback_server.pipeline.context import Identified, RequestContext
from carryback_server.pipeline.hold import Holding
from carryback_server.pipeline.place import Place, TokenEstimate
from carryback_server.pipeline.prefill import Prefilled, PromptKv
from carryback_server.tracing import Step
from carryback_server.upstream import BrokeOff

logger = logging.getLogger("carryback")

# After how long an engine that has not answered is told again, if its connection broke meanwhile; doubled each
# time.
_AGAIN_S = 1.0
_MAX_AGAIN_S = 30.0

AnsweredT = TypeVar("AnsweredT")


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
        engine: EngineClient,
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
        self._say(params, _AGAIN_S)

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
        if isinstance(error, EngineDown):
            self.step.event("retry", reason=error.why)
        self._end.__exit__(kind, error, traceback)

    def _say(self, params: Mapping[str, Any], again_s: float) -> None:
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


@dataclass(frozen=True)
class Decode:
    """Has decode engines answer requests."""

    config: RouterConfig
    place: Place
    holding: Holding
    estimate: TokenEstimate
    metrics: Metrics
    live: Live
    new_key: Callable[[], str]

    @contextmanager
    def early(
        self, context: RequestContext, asked: Identified, last: EngineClient | None
    ) -> Iterator[Decoding | None]:
        """Send a request to its decode engine while its prompt is yet to be computed, if both can do that."""
        decoding = None if asked.alone else self._admit_early(context, asked, last)
        try:
            yield decoding
        finally:
            if decoding is not None:
                decoding.leave()

    async def __call__(
        self,
        context: RequestContext,
        asked: Identified,
        prefilled: Prefilled,
        early: Decoding | None,
        last: EngineClient | None,
        relay: Callable[[Decoding, Answer], Awaitable[AnsweredT]],
    ) -> AnsweredT:
        """What becomes of a request's answer.

        Args:
            early: the request where it waits for this, if it does.
            last: where its conversation was last.
            relay: takes the answer, begun.

        Raises:
            ApiError: no engine answers.
        """
        kv, entry, decoding = prefilled.kv, context.entry, early
        tokens = prefilled.reuse.prompt_tokens or self.estimate.tokens(asked.prompt.size)
        # Usage says what the header says, whichever engine ends up with the request and with or without the transfer.
        bill = {"carryback_cached": prefilled.reuse.tokens + prefilled.reuse.cached}
        tried: list[EngineClient] = []
        while True:
            if decoding is None:
                engine = self.place.decode(last, tried, kv.engine)
                if engine is None and tried and tried[-1].is_up:
                    engine = tried[-1]
                if engine is None:
                    raise ApiError(503, "no decode engine is up", code="no_engine")
                decoding = self._admit(context, asked, engine, {**kv.hand_over(), **bill}, tokens)
            elif not decoding.has_begun:
                decoding.visit.update(tokens)
                decoding.go({**kv.hand_over(), **bill})
            engine = decoding.engine
            tried.append(engine)
            entry.decode_engine = engine.name
            self.live.decoding(context.step, decoding.key)
            if context.kept is not None:
                context.kept.key, context.kept.decode_engine = decoding.key, engine.name
            # One that ended while it waited has not seen the transfer: it is still there to be read.
            is_unseen = decoding.is_waiting
            try:
                with decoding:
                    answer = await self._answer(context, asked, decoding)
                    # Nothing has been sent: once more, and without the transfer, which may be at fault.
                    if answer.has_failed and len(tried) == 1:
                        message = f"failed before its first token (status {answer.status})"
                        raise EngineDown(engine, message, is_over=True, said=answer.excerpt)
                    if answer.status >= 400:
                        kv.take_back()
                        decoding.visit.pass_over()
                    elif not answer.has_failed:
                        context.blame.worked(engine)
                        entry.ttft_s = context.elapsed_s
                        self.metrics.observe_first_byte(entry)
                        self.live.changed(context.step)
                        asked.prompt.drop()
                    return await relay(decoding, answer)
            except EngineDown as error:
                self._failed(context, error, is_last=len(tried) > 1)
                if not is_unseen:
                    if error.is_over:
                        kv.take_back()
                    kv = PromptKv()
                last = decoding = None

    def _failed(self, context: RequestContext, error: EngineDown, *, is_last: bool) -> None:
        """A try has failed.

        Raises:
            ApiError: it was the last one.
        """
        logger.warning("decode: %s", error)
        context.entry.retries += 1
        self.metrics.retries.labels("decode", error.why).inc()
        if error.is_timeout:
            raise ApiError(504, error.reason, code="engine_timeout") from error
        if is_last:
            raise ApiError(502, error.reason, code="engine_failed") from error

    async def _answer(self, context: RequestContext, asked: Identified, decoding: Decoding) -> Answer:
        sent_s = context.elapsed_s
        try:
            # What is not streamed has no first byte until all of it is generated.
            config, is_streamed = self.config, asked.prompt.is_streamed
            return await decoding.answer(
                config.first_byte_timeout_s if is_streamed else config.answer_timeout_s
            )
        finally:
            context.entry.decode_wait_s += context.elapsed_s - sent_s

    def _admit_early(
        self, context: RequestContext, asked: Identified, last: EngineClient | None
    ) -> Decoding | None:
        prefills = self.place.engines.of("prefill")
        if not self.config.admit_early or not prefills:
            return None
        engine = self.place.decode(last)
        if engine is None or not (engine.takes_go and engine.is_heard):
            return None
        # Each prefill engine may be tried, one after the other.
        wait = {"carryback_await": self.config.prefill_timeout_s * len(prefills)}
        tokens = self.estimate.tokens(asked.prompt.size)
        return self._admit(context, asked, engine, wait, tokens, is_waiting=True)

    def _admit(
        self,
        context: RequestContext,
        asked: Identified,
        engine: EngineClient,
        params: Mapping[str, Any],
        tokens: int,
        *,
        is_waiting: bool = False,
    ) -> Decoding:
        key = self.new_key()
        if asked.leaves and engine.is_heard:
            self.holding.expect(
                engine, key, asked.conversation, context.trace, came=asked.came, is_first=asked.identity.is_guess
            )  # fmt: skip
        step = context.trace.step("decode")
        step.engine(engine.name, engine.url)
        hold_s = asked.hold_s if engine.is_heard else 0
        params = {**params, "carryback_key": key, "hold_s": hold_s}
        return Decoding(
            engine,
            key,
            step,
            engine.decode(asked.prompt, params, key=key, headers=step.headers()),
            tokens=tokens,
            blame=context.blame,
            is_waiting=is_waiting,
            over=lambda has_run: self.holding.over(key, has_run),
        )
