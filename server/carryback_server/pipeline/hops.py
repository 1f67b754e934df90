"""Both hops of a request. What is here knows no client, and engines by a protocol only: a test with scripted engines
and a simulation take the same road."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from carryback_server.answer import Answer
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.engine_client import Engines
from carryback_server.live import Live
from carryback_server.metrics import Metrics
from carryback_server.pipeline.ask import Ask
from carryback_server.pipeline.context import Identified, RequestContext
from carryback_server.pipeline.decode import AnsweredT, Decode, Decoding
from carryback_server.pipeline.hold import Holding
from carryback_server.pipeline.place import Place, TokenEstimate
from carryback_server.pipeline.prefill import Prefill, Prefilled


@dataclass(frozen=True)
class Hops:
    """Takes identified requests through both hops: place, ask, prefill, decode."""

    place: Place
    prefill: Prefill
    decode: Decode

    async def __call__(
        self,
        context: RequestContext,
        asked: Identified,
        report: Callable[[Prefilled], None],
        relay: Callable[[Decoding, Answer], Awaitable[AnsweredT]],
    ) -> AnsweredT:
        """What `relay` makes of the answer.

        Args:
            report: called with what the prefill hop gave.
            relay: takes the answer, begun.

        Raises:
            ApiError: no engine answers.
            Refused: a prefill engine refused the request.
        """
        last = self.place.last(asked.conversation.location) if asked.use else None
        with self.decode.early(context, asked, last) as early:
            beside = early.engine if early is not None else last
            async with self.prefill(context, asked, last, beside) as prefilled:
                report(prefilled)
                return await self.decode(context, asked, prefilled, early, last, relay)


def make_hops(
    config: RouterConfig,
    engines: Engines,
    holding: Holding,
    metrics: Metrics,
    costs: Costs,
    live: Live,
    new_key: Callable[[], str],
) -> Hops:
    """The two hops of a router.

    Args:
        new_key: makes a request's name at an engine.
    """
    place, estimate = Place(engines, config), TokenEstimate()
    ask = Ask(engines, config, costs)
    return Hops(
        place,
        Prefill(config, engines, place, ask, estimate, costs, metrics, new_key),
        Decode(config, place, holding, estimate, metrics, live, new_key),
    )
