"""One request on its way, and what all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from carryback_server.access_log import Entry
from carryback_server.chains import Chain
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.endpoints import Endpoint
from carryback_server.engine_client import Blame, EngineClient, Engines, Prompt
from carryback_server.explain import Kept
from carryback_server.hints import RequestIdentity
from carryback_server.live import Live, Step
from carryback_server.metrics import Metrics
from carryback_server.pipeline.hold import Holding
from carryback_server.pipeline.place import TokenEstimate
from carryback_server.state import Conversation, Location
from carryback_server.tracing import Trace


@dataclass(frozen=True)
class Shared:
    """What both hops of all requests work with.

    Attributes:
        new_key: makes a request's name at an engine, one that nobody can guess.
    """

    config: RouterConfig
    engines: Engines
    holding: Holding
    metrics: Metrics
    costs: Costs
    live: Live
    new_key: Callable[[], str]
    estimate: TokenEstimate = field(default_factory=TokenEstimate)


@dataclass(frozen=True)
class Identified:
    """What a request asks, and where it belongs.

    Attributes:
        conversation: as it was before; without an id, one that nothing is kept of.
        chain: of a request for a response, what its `previous_response_id` stands for.
        came: when it came, in seconds since the epoch.
        use: whether it may reuse anything.
        alone: why a decode engine does all of it; empty if it goes through both hops.
        leaves: whether a later request may reuse what it leaves.
        hold_s: how long its decode engine is to pin that, in seconds.
    """

    prompt: Prompt
    identity: RequestIdentity
    conversation: Conversation
    came: float
    chain: Chain | None = None
    use: bool = True
    alone: str = ""
    leaves: bool = False
    hold_s: float = 0.0


@dataclass(eq=False)
class RequestContext:
    """One request, and what is said of it to its client and to operators.

    Attributes:
        asked: once it is identified.
        last: the decode engine where its conversation was last, if it can still have what it had.
        entry: for the log, the metrics and the trace.
        step: what operators see of it.
        headers: what the answer says about it.
        clock, started: the event loop's time, and when it came.
        blame: whose fault it is where it fails.
        kept: what is kept of it to explain its reuse, if anything is.
    """

    endpoint: Endpoint
    trace: Trace
    entry: Entry
    step: Step
    headers: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    started: float = field(init=False)
    blame: Blame = field(default_factory=Blame)
    kept: Kept | None = None
    asked: Identified = field(init=False)
    last: EngineClient | None = None

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it came."""
        return self.clock() - self.started

    @property
    def had(self) -> Location | None:
        """Where the conversation was before, if the request has had all of that."""
        location, reuse = self.asked.conversation.location, self.entry.reuse
        is_whole = location is not None and location.tip and reuse is not None and reuse.outcome == "hit"
        return location if is_whole else None
