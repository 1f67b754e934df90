"""Step 4: a request at a decode engine, until its answer begins; at another one if it fails.

It may be sent before its prompt's KV is computed. The engine then takes it in meanwhile (HTTP, chat template,
tokens, grammar), and it waits there until `go` says where the KV is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from carryback_server.answer import Answer
from carryback_server.engine_client import Blame, EngineClient, EngineDown
from carryback_server.errors import ApiError
from carryback_server.pipeline.context import RequestContext, Shared
from carryback_server.pipeline.hold import Expected
from carryback_server.pipeline.place import decode_engine
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


@contextmanager
def early(shared: Shared, context: RequestContext) -> Iterator[Decoding | None]:
    """Send a request to its decode engine while its prompt is yet to be computed, if both can do that."""
    prefills, engine = shared.engines.of("prefill"), None
    if shared.config.admit_early and prefills and not context.asked.alone:
        engine = _place(shared, context.last)
    if engine is None or not (engine.takes_go and engine.is_heard):
        yield None
        return
    # Each prefill engine may be tried, one after the other.
    wait = {"carryback_await": shared.config.prefill_timeout_s * len(prefills)}
    tokens = shared.estimate.tokens(context.asked.prompt.size)
    decoding = _admit(shared, context, engine, wait, tokens, is_waiting=True)
    try:
        yield decoding
    finally:
        decoding.leave()


async def decode(
    shared: Shared,
    context: RequestContext,
    prefilled: Prefilled,
    waiting: Decoding | None,
    relay: Callable[[Decoding, Answer], Awaitable[AnsweredT]],
) -> AnsweredT:
    """Have a request answered, at another engine if one fails; what `relay` makes of the answer.

    Args:
        waiting: the request where it waits for this, if it does.

    Raises:
        ApiError: no engine answers.
    """
    asked, kv, decoding, last = context.asked, prefilled.kv, waiting, context.last
    tokens = prefilled.reuse.prompt_tokens or shared.estimate.tokens(asked.prompt.size)
    # Usage says what the header says, whichever engine ends up with the request and with or without the transfer.
    bill = {"carryback_cached": prefilled.reuse.tokens + prefilled.reuse.cached}
    tried: list[EngineClient] = []
    while True:
        if decoding is None:
            engine = _place(shared, last, tried, kv.engine)
            if engine is None and tried and tried[-1].is_up:
                engine = tried[-1]
            if engine is None:
                raise ApiError(503, "no decode engine is up", code="no_engine")
            decoding = _admit(shared, context, engine, {**kv.hand_over(), **bill}, tokens)
        elif not decoding.has_begun:
            decoding.visit.update(tokens)
            decoding.go({**kv.hand_over(), **bill})
        engine = decoding.engine
        tried.append(engine)
        context.entry.decode_engine = engine.name
        shared.live.decoding(context.step, decoding.key)
        if context.kept is not None:
            context.kept.key, context.kept.decode_engine = decoding.key, engine.name
        # One that ended while it waited has not seen the transfer: it is still there to be read.
        is_unseen = decoding.is_waiting
        try:
            with decoding:
                answer = await _answer(shared, context, decoding)
                # Nothing has been sent: once more, and without the transfer, which may be at fault.
                if answer.has_failed and len(tried) == 1:
                    message = f"failed before its first token (status {answer.status})"
                    raise EngineDown(engine, message, is_over=True, said=answer.excerpt)
                if answer.status >= 400:
                    kv.take_back()
                    decoding.visit.pass_over()
                elif not answer.has_failed:
                    context.blame.worked(engine)
                    context.entry.ttft_s = context.elapsed_s
                    shared.metrics.observe_first_byte(context.entry)
                    shared.live.changed(context.step)
                    asked.prompt.drop()
                    shared.holding.returned(context.had)
                return await relay(decoding, answer)
        except EngineDown as error:
            logger.warning("decode: %s", error)
            context.entry.retries += 1
            shared.metrics.retries.labels("decode", error.why).inc()
            if not is_unseen:
                if error.is_over:
                    kv.take_back()
                kv = PromptKv()
            if error.is_timeout:
                raise ApiError(504, error.reason, code="engine_timeout") from error
            if len(tried) > 1:
                raise ApiError(502, error.reason, code="engine_failed") from error
            last = decoding = None


async def _answer(shared: Shared, context: RequestContext, decoding: Decoding) -> Answer:
    sent_s, config = context.elapsed_s, shared.config
    try:
        if context.asked.prompt.is_streamed:
            return await decoding.answer(config.first_byte_timeout_s)
        # It has no first byte until all of it is generated.
        return await decoding.answer(config.answer_timeout_s)
    finally:
        context.entry.decode_wait_s += context.elapsed_s - sent_s


def _place(
    shared: Shared,
    last: EngineClient | None,
    but: Collection[EngineClient] = (),
    beside: EngineClient | None = None,
) -> EngineClient | None:
    return decode_engine(
        shared.engines.of("decode", beside),
        last,
        overload_factor=shared.config.overload_factor,
        slack_tokens=shared.config.overload_slack_tokens,
        but=but,
    )


def _admit(
    shared: Shared,
    context: RequestContext,
    engine: EngineClient,
    params: Mapping[str, Any],
    tokens: int,
    *,
    is_waiting: bool = False,
) -> Decoding:
    asked, key, hold_s = context.asked, shared.new_key(), 0.0
    if asked.leaves and engine.is_heard:
        hold_s = asked.hold_s
        expected = Expected(engine, asked.conversation, asked.came, context.trace, asked.identity.is_guess)
        shared.holding.expect(key, expected)
    step = context.trace.step("decode")
    step.engine(engine.name, engine.url)
    params = {**params, "carryback_key": key, "hold_s": hold_s}
    return Decoding(
        engine,
        key,
        step,
        engine.decode(asked.prompt, params, key=key, headers=step.headers()),
        tokens=tokens,
        blame=context.blame,
        is_waiting=is_waiting,
        over=lambda has_run: shared.holding.over(key, has_run),
    )
