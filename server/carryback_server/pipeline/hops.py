"""Both hops of a request. What is here knows no client, and engines by a protocol only: a test with scripted engines
and a simulation take the same road."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from carryback_server.answer import Answer
from carryback_server.pipeline.context import RequestContext, Shared
from carryback_server.pipeline.decode import AnsweredT, Decoding, decode, early
from carryback_server.pipeline.place import last_engine
from carryback_server.pipeline.prefill import Prefilled, prefill


async def carry(
    shared: Shared,
    context: RequestContext,
    report: Callable[[Prefilled], None],
    relay: Callable[[Decoding, Answer], Awaitable[AnsweredT]],
) -> AnsweredT:
    """Take an identified request through place, ask, prefill and decode; what `relay` makes of its answer.

    Args:
        report: called with what the prefill hop gave.
        relay: takes the answer, begun.

    Raises:
        ApiError: no engine answers.
        Refused: a prefill engine refused the request.
    """
    if context.asked.use:
        context.last = last_engine(shared.engines, context.asked.conversation.location)
    with early(shared, context) as waiting:
        beside = waiting.engine if waiting is not None else context.last
        async with prefill(shared, context, beside) as prefilled:
            report(prefilled)
            return await decode(shared, context, prefilled, waiting, relay)
