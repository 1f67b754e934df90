"""Step 3: a prompt at a prefill engine, which reads what decode engines have of it and computes the rest."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import msgspec
from carryback.wire import Report, Reuse, Work

from carryback_server.engine_client import EngineClient, EngineDown, Refused
from carryback_server.pipeline.ask import question
from carryback_server.pipeline.context import RequestContext, Shared
from carryback_server.pipeline.place import less_loaded

logger = logging.getLogger("carryback")


class PromptKv:
    """A prompt's KV at a prefill engine, as a context: a decode engine has it to read, or it is released.

    Args:
        engine: the prefill engine; None: there is no KV.
        key: of the request there.

    Attributes:
        params: the `kv_transfer_params` for the decode hop, once they are known.
    """

    def __init__(self, engine: EngineClient | None = None, key: str = "") -> None:
        self.engine = engine
        self.key = key
        self.params: Mapping[str, Any] = {}
        self._is_handed_over = False

    def hand_over(self) -> Mapping[str, Any]:
        """A decode engine gets this, to read it."""
        self._is_handed_over = True
        return self.params

    def take_back(self) -> None:
        """That engine does not read it, for certain."""
        self._is_handed_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.engine is not None and not self._is_handed_over:
            self.engine.release(self.key)


@dataclass(frozen=True)
class Prefilled:
    """What the prefill hop gave.

    Attributes:
        kv: of the prompt; none, if a decode engine has to compute it itself.
        holder: the decode engine that had most of it.
    """

    reuse: Reuse
    kv: PromptKv = field(default_factory=PromptKv)
    holder: EngineClient | None = None


@asynccontextmanager
async def prefill(
    shared: Shared, context: RequestContext, beside: EngineClient | None
) -> AsyncIterator[Prefilled]:
    """Have a prompt prefilled, at another engine if one fails. At the end nothing is left at any.

    Args:
        beside: the decode engine that will read the prompt's KV, if that is known.

    Raises:
        Refused: an engine refused the request.
    """
    asked, tried = context.asked, list[EngineClient]()
    while not asked.alone:
        with context.trace.step("place") as step:
            engine = less_loaded(shared.engines.of("prefill", beside), but=tried)
            if engine is None:
                break
            step.engine(engine.name, engine.url)
        tried.append(engine)
        with PromptKv(engine, shared.new_key()) as kv:
            try:
                prefilled = await _prefill_at(engine, kv, shared, context, beside)
            except Refused:
                if not asked.prompt.changes_tools:
                    raise
                # Without a tool parser, an engine takes no free choice of tools. The decode engine knows.
                prefilled = Prefilled(Reuse("miss", 0, "prefill_refused"))
            except EngineDown as error:
                logger.warning("prefill: %s", error)
                shared.metrics.retries.labels("prefill", error.why).inc()
                context.entry.retries += 1
                continue
            yield prefilled
            return
    # A decode engine does the whole request.
    reason = asked.alone or ("prefill_failed" if tried else "prefill_unavailable")
    yield Prefilled(Reuse("miss", 0, reason))


async def _prefill_at(
    engine: EngineClient,
    kv: PromptKv,
    shared: Shared,
    context: RequestContext,
    beside: EngineClient | None,
) -> Prefilled:
    """Have a prompt prefilled at one engine.

    Raises:
        EngineDown: it failed.
        Refused: it refused the request.
    """
    asked, entry, config = context.asked, context.entry, shared.config
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "carryback_key": kv.key,
        "carryback_tell": engine.is_heard,
        "hold_s": config.prefill_lease_s,
        **question(shared, context, engine, beside),
    }
    location = asked.conversation.location
    expected = location.tokens if context.last is not None and location is not None else 0
    tokens = max(shared.estimate.tokens(asked.prompt.size) - expected, 1)
    entry.prefill_engine = engine.name
    sent_s = context.elapsed_s
    with context.trace.step("prefill") as step, engine.busy(tokens, context.blame):
        step.engine(engine.name, engine.url)
        try:
            given = await engine.prefill(
                asked.prompt, params, key=kv.key, headers=step.headers(), timeout_s=config.prefill_timeout_s
            )
        except EngineDown as error:
            step.event("retry", reason=error.why)
            raise
        finally:
            entry.prefill_s += context.elapsed_s - sent_s
    context.blame.worked(engine)
    report, work = _reported(given)
    if report is None:
        logger.error(
            "prefill engine %s runs without carryback's plug-in, or with one of a release that this router cannot "
            "read: nothing is transferred",
            engine.name,
        )
        return Prefilled(Reuse("miss", 0, "no_plugin"))
    if given.get("remote_block_ids"):
        kv.params = given
    reason = report.reason
    if asked.use:
        shared.metrics.observe_question(len(params["carryback_ask"]), report)
        reason = _reason(reason, is_lost=location is not None and context.last is None)
    reuse = report if reason == report.reason else replace(report, reason=reason)
    shared.estimate.learn(asked.prompt.size, reuse.prompt_tokens)
    holder = shared.engines.of_run(report.holder) if report.holder else None
    if work is not None:
        _learn(shared, context, engine, holder if reuse.tokens else None, reuse, work)
    return Prefilled(reuse, kv, holder)


def _learn(
    shared: Shared,
    context: RequestContext,
    engine: EngineClient,
    holder: EngineClient | None,
    reuse: Reuse,
    work: Work,
) -> None:
    """Learn from how long an engine took.

    Args:
        holder: from which it read, if it did.
    """
    context.entry.compute_s = work.compute_s
    context.entry.read_s = work.read_s if reuse.tokens else 0.0
    shared.costs.learn(engine.name, holder.name if holder is not None else None, reuse, work)
    if holder is not None:
        break_even = shared.costs.break_even(engine.name, holder.name)
        shared.metrics.break_even(engine.name, holder.name, break_even)


def _reported(given: dict[str, Any]) -> tuple[Report | None, Work | None]:
    """What a prefill engine says that it did. Taken out of its answer, which a decode engine gets."""
    with suppress(msgspec.ValidationError):
        report = msgspec.convert(given.pop("carryback_reuse", None), Report)
        work = msgspec.convert(given.pop("carryback_work", None), Work | None)
        if report.reason.isidentifier():
            return report, work
    return None, None


def _reason(reason: str, *, is_lost: bool) -> str:
    """Why no more was reused, of a request that may reuse: a prefill engine does not know whom it could not ask.

    Args:
        is_lost: the engine where the conversation was last is gone, or was started anew.
    """
    if is_lost and reason in ("overwritten", "new", "no_answer", "off"):
        return "engine_lost"
    return "no_answer" if reason == "off" else reason
