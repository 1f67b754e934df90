"""One simulation: agents, the router's own pipeline, and engines, for a while of virtual time.

The router is the real one (`carryback_server.pipeline.hops`), from the placement of a request to what is held after it.
What it does for clients is not there: HTTP, bodies, and telling which conversation a request is of.
"""

from __future__ import annotations

import asyncio
import gc
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import cast

import msgspec
from carryback.wire import Outcome
from carryback.wire.events import Held, Released

from carryback_server import live
from carryback_server.access_log import Entry
from carryback_server.answer import Answer
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.endpoints import ENDPOINTS
from carryback_server.engine_client import EngineClient, Role
from carryback_server.hints import RequestIdentity
from carryback_server.live import Live
from carryback_server.metrics import Metrics
from carryback_server.pipeline.context import Identified, RequestContext, Shared
from carryback_server.pipeline.decode import Decoding
from carryback_server.pipeline.hold import Holding, hold_s
from carryback_server.pipeline.hops import carry
from carryback_server.pipeline.prefill import Prefilled
from carryback_server.simulate.agents import Agent, Step
from carryback_server.simulate.engine import DecodeEngine, Generation, PrefillEngine, SimulatedPrompt
from carryback_server.simulate.kv import Text
from carryback_server.simulate.loop import VirtualLoop
from carryback_server.simulate.profile import Profile
from carryback_server.state import MemoryState
from carryback_server.tracing import Trace

# Points of the curves over time.
SAMPLES = 240
_TENANT = "default"
_ENDPOINT = ENDPOINTS["/v1/chat/completions"]
_OUTCOMES: tuple[Outcome, ...] = ("hit", "partial", "miss")


class Scenario(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is simulated, besides the engines' rates, the router's settings and the agents.

    Attributes:
        prefill, decode: engines.
        duration_s: for how long requests are sent.
        warmup_share: of that time, in which agents drawn at random start, and which is not in the figures.
        seed: of all that is random.
    """

    prefill: int = 32
    decode: int = 32
    duration_s: float = 3600.0
    warmup_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ValueError("there is at least 1 of prefill and decode")
        if not self.duration_s > 0 or not 0 <= self.warmup_share < 1:
            raise ValueError("duration_s is above 0, and warmup_share from 0 to below 1")

    @property
    def warmup_s(self) -> float:
        """The same in seconds."""
        return self.warmup_share * self.duration_s


class Quantiles(msgspec.Struct, frozen=True):
    """Of a number of times, in seconds; 0 if there are none."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Those of these values."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0)
        last = len(ordered) - 1
        return cls(len(ordered), *(ordered[round(share * last)] for share in (0.5, 0.9, 0.99)))


class Engines(msgspec.Struct, frozen=True):
    """How busy the engines of a role were after the warm-up, the mean of all.

    Attributes:
        busy: share of the time in which one computed.
        kv: share of its blocks in use, those held included.
        queue: requests that waited at one for blocks, or for room in its batch.
        batch: answers that a decode engine generated at once; 0 for prefill.
    """

    busy: float
    kv: float
    queue: float
    batch: float = 0.0


class Curve(msgspec.Struct):
    """Over the whole time.

    Attributes:
        time_s: of each point.
        held: KV blocks held at a decode engine, the mean of all;
        held_most: and at the one that holds most.
        used: in use by requests, the mean of all decode engines.
        waiting: requests that wait at any engine.
    """

    time_s: list[float] = []
    held: list[float] = []
    held_most: list[int] = []
    used: list[float] = []
    waiting: list[int] = []


class Seen(msgspec.Struct, frozen=True):
    """One request, as its client saw it."""

    conversation: str
    started_s: float
    ttft_s: float
    duration_s: float
    prompt_tokens: int
    reused_tokens: int
    outcome: Outcome
    reason: str


class Report(msgspec.Struct, kw_only=True):
    """What a simulation showed, after its warm-up.

    Attributes:
        requests: answered.
        requests_per_s: those, by the time.
        returning: requests of a conversation that had one before.
        hits: of those, that reused all there was to reuse;
        partial: that reused some of it.
        hit_rate: the share of the returning ones that reused anything;
        hit_rate_turn_start, hit_rate_mid_turn: of those that begin a turn, and of those after a tool.
        token_hit_rate: the share of the tokens of their last prompts and answers that were not recomputed.
        recomputed_per_new: tokens computed for each token that was new, in returning requests. 1 is ideal.
        ttft, ttft_turn_start, ttft_mid_turn: times to the first token; of a turn's first request, and of
            those after a tool.
        reasons: what returning requests reused and why, e.g. `miss expired`, with their counts.
        given_up: pins given up unread, by rank and reason, with their counts (warm-up included).
        budget_blocks: that may be held at a decode engine.
        curve: over time.
        seen: each request, if asked for.
    """

    requests: int
    requests_per_s: float
    returning: int
    hits: int
    partial: int
    hit_rate: float
    hit_rate_turn_start: float
    hit_rate_mid_turn: float
    token_hit_rate: float
    recomputed_per_new: float
    ttft: Quantiles
    ttft_turn_start: Quantiles
    ttft_mid_turn: Quantiles
    reasons: dict[str, int]
    given_up: dict[str, int]
    prefill: Engines
    decode: Engines
    budget_blocks: int
    curve: Curve
    seen: list[Seen] = []


class _Cluster:
    """All engines, to the router's pipeline (`carryback_server.engine_client.Engines`)."""

    def __init__(self, prefills: Sequence[PrefillEngine], decodes: Sequence[DecodeEngine]) -> None:
        self._of: dict[Role, Sequence[EngineClient]] = {"prefill": prefills, "decode": decodes}
        self._decodes = {engine.name: engine for engine in decodes}

    def of(self, role: Role, beside: EngineClient | None = None) -> Sequence[EngineClient]:
        """See `Engines.of`."""
        return self._of[role]

    def askable(self, prefill: EngineClient) -> Sequence[EngineClient]:
        """See `Engines.askable`."""
        return self._of["decode"]

    def find(self, name: str) -> EngineClient | None:
        """See `Engines.find`."""
        return self._decodes.get(name)

    of_run = find  # it never starts anew


class Simulation:
    """Runs once.

    Args:
        config: the router's settings.
        reuse: conversations reuse their KV; else nothing is held.
        keep: `Report.seen` has each request.
        on_progress: called now and then with the virtual seconds that have passed.
    """

    def __init__(
        self,
        scenario: Scenario,
        profile: Profile,
        config: RouterConfig,
        agents: Iterable[Agent],
        *,
        reuse: bool = True,
        keep: bool = False,
        on_progress: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._on_progress = on_progress
        self._scenario = scenario
        self._profile = profile
        self._config = config
        self._agents = agents
        self._reuse = reuse
        self._seen: list[Seen] | None = [] if keep else None
        self._loop = loop = VirtualLoop()  # type: ignore[abstract]  # no I/O
        self._metrics = metrics = Metrics()
        self._state = MemoryState(
            max_conversations=config.max_conversations,
            responses_max_bytes=config.responses_max_bytes,
            on_message=lambda message: None,
        )
        prefills: dict[str, PrefillEngine] = {}
        decodes: dict[str, DecodeEngine] = {}
        for name in (f"prefill-{number}" for number in range(scenario.prefill)):
            prefills[name] = PrefillEngine(loop, profile, name, decodes)
        for name in (f"decode-{number}" for number in range(scenario.decode)):
            decodes[name] = DecodeEngine(loop, profile, name, prefills, self._on_event)
        self.prefill, self.decode = list(prefills.values()), list(decodes.values())
        if profile.prefill_slowdown > 1 or profile.decode_slowdown > 1:
            for one, other in zip(self.prefill, self.decode, strict=False):
                one.processor.neighbour, other.processor.neighbour = other, one
        cluster, costs, keys = _Cluster(self.prefill, self.decode), Costs(), count(1)
        self.holding = Holding(config, self._state, metrics, cluster, clock=loop.time)
        self._shared = Shared(
            config,
            cluster,
            self.holding,
            metrics,
            costs,
            Live(costs.saved_s),
            lambda: f"cb.{next(keys)}",
        )
        # What conversations' first prompts have in common.
        self._system = Text.of(2**40, profile.block_size)
        # Figures.
        self._ttft = {True: array("d"), False: array("d")}
        self._reasons: Counter[str] = Counter()
        self._outcomes: Counter[tuple[bool, Outcome]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._curve = Curve()
        self._sums: Counter[str] = Counter()
        self._busy_before = 0.0, 0.0

    def run(self) -> Report:
        """Simulate, and report.

        Raises:
            TooLong: a request does not fit into an engine.
        """
        # Placement draws from the random module itself.
        before = random.getstate()
        random.seed(self._scenario.seed)
        # To look for cycles among all conversations takes long, and there are none.
        gc.collect()
        gc.freeze()
        thresholds = gc.get_threshold()
        gc.set_threshold(100_000, 50, 1000)
        try:
            self._loop.run(self._run())
        finally:
            random.setstate(before)
            gc.set_threshold(*thresholds)
            gc.unfreeze()
        return self._report()

    async def _run(self) -> None:
        sampling = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as group:
            for agent in self._agents:
                group.create_task(self._work(agent))
        sampling.cancel()
        await self.holding.stop()
        # What was not let go of, engines let go of by themselves.
        await self._loop.sleep(self._config.hold_s + 1)

    async def _work(self, agent: Agent) -> None:
        loop, end_s = self._loop, self._scenario.duration_s
        await loop.sleep(agent.start_s)
        starts_turn, text = True, self._system
        for step in agent.steps:
            wait_s = max(step.gap_s, step.at_s - loop.time())
            if agent.is_endless and loop.time() + wait_s > end_s:
                return
            if wait_s > 0:
                await loop.sleep(wait_s)
            before = self._system if step.is_first else text
            text = before.then(step.common_tokens, step.prompt_tokens + step.output_tokens)
            await self._serve(step, text, starts_turn)
            starts_turn = step.ends_turn

    async def _serve(self, step: Step, text: Text, starts_turn: bool) -> None:
        """One request through the router's pipeline. An agent says which conversation it is of."""
        conversation = await self._state.open(_TENANT, step.conversation)
        identity = RequestIdentity(step.conversation, is_guess=step.is_first and not step.is_named)
        entry = Entry(_ENDPOINT.path)
        context = RequestContext(_ENDPOINT, Trace({}), entry, live.Step(entry))
        context.asked = Identified(
            SimulatedPrompt(text, step.prompt_tokens, step.output_tokens),
            identity,
            conversation,
            self._loop.time(),
            use=self._reuse,
            leaves=self._reuse,
            hold_s=hold_s(self._config, identity) if self._reuse else 0.0,
        )

        def report(prefilled: Prefilled) -> None:
            entry.reuse = prefilled.reuse

        async def relay(decoding: Decoding, answer: Answer) -> None:
            await cast(Generation, answer.reply).ended
            conversation.boundary = "turn_end" if step.ends_turn or step.is_cut else "mid_turn"
            self.holding.ended(decoding.key, conversation.boundary, context.had)

        await carry(self._shared, context, report, relay)
        await self._state.save(conversation)
        self._count(step, context, starts_turn)

    def _on_event(self, engine: DecodeEngine, event: Held | Released) -> None:
        engine.pinned = event.pinned
        self.holding.on_event(engine, event)

    # -- figures

    def _count(self, step: Step, context: RequestContext, starts_turn: bool) -> None:
        started, ttft_s, reuse = context.started, context.entry.ttft_s, context.entry.reuse
        assert reuse is not None
        if self._seen is not None:
            self._seen.append(
                Seen(
                    step.conversation, started, ttft_s, context.elapsed_s, step.prompt_tokens, reuse.tokens,
                    reuse.outcome, reuse.reason,
                )
            )  # fmt: skip
        if started < self._scenario.warmup_s:
            return
        self._ttft[starts_turn].append(ttft_s)
        if step.is_first:
            return
        self._outcomes[starts_turn, reuse.outcome] += 1
        self._reasons[f"{reuse.outcome} {reuse.reason}"] += 1
        tokens = self._tokens
        tokens["common"] += step.common_tokens
        tokens["saved"] += min(reuse.tokens + reuse.cached, step.common_tokens)
        tokens["new"] += step.prompt_tokens - step.common_tokens
        tokens["recomputed"] += reuse.recomputed

    def _busy(self) -> tuple[float, float]:
        return (
            sum(engine.processor.busy_s for engine in self.prefill),
            sum(engine.processor.busy_s for engine in self.decode),
        )

    async def _sample(self) -> None:
        scenario, curve, sums = self._scenario, self._curve, self._sums
        prefill, decode = self.prefill, self.decode
        is_measured = False
        for number in range(SAMPLES + 1):
            now = number * scenario.duration_s / SAMPLES
            await asyncio.sleep(now - self._loop.time())
            self._on_progress(now)
            held = [engine.held for engine in decode]
            used = sum(engine.kv.used for engine in decode) - sum(held)
            queues = sum(engine.queue for engine in prefill), sum(engine.queue for engine in decode)
            curve.time_s.append(now)
            curve.held.append(sum(held) / len(held))
            curve.held_most.append(max(held))
            curve.used.append(used / len(decode))
            curve.waiting.append(sum(queues))
            if now < scenario.warmup_s:
                continue
            if not is_measured:
                is_measured = True
                self._busy_before = self._busy()
                self._measured_from = now
            sums["samples"] += 1
            sums["prefill queue"] += queues[0]
            sums["decode queue"] += queues[1]
            sums["prefill used"] += sum(engine.kv.used for engine in prefill)
            sums["decode used"] += sum(engine.kv.used for engine in decode)
            sums["batch"] += sum(engine.running for engine in decode)
            self._busy_after = self._busy()

    def _report(self) -> Report:
        scenario, profile, tokens = self._scenario, self._profile, self._tokens
        turn_start, mid_turn = self._ttft[True], self._ttft[False]
        outcomes = self._outcomes
        measured_s = scenario.duration_s - self._measured_from
        sums, samples = self._sums, self._sums["samples"]
        busy = [after - before for before, after in zip(self._busy_before, self._busy_after, strict=True)]

        def engines(role: Role, count: int, busy_s: float, blocks: int, batch: int) -> Engines:
            each = samples * count
            return Engines(
                busy_s / (measured_s * count) if measured_s else 0.0,
                sums[f"{role} used"] / (each * blocks),
                sums[f"{role} queue"] / each,
                batch / each,
            )

        given_up = {
            f"{sample.labels['rank']} {sample.labels['reason']}": int(sample.value)
            for metric in self._metrics.pins_given_up.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["reason"] != "shutdown"
        }
        return Report(
            requests=len(turn_start) + len(mid_turn),
            requests_per_s=(len(turn_start) + len(mid_turn)) / (scenario.duration_s - scenario.warmup_s),
            returning=sum(outcomes.values()),
            hits=outcomes[True, "hit"] + outcomes[False, "hit"],
            partial=outcomes[True, "partial"] + outcomes[False, "partial"],
            hit_rate=_hit_rate(outcomes, True, False),
            hit_rate_turn_start=_hit_rate(outcomes, True),
            hit_rate_mid_turn=_hit_rate(outcomes, False),
            token_hit_rate=tokens["saved"] / tokens["common"] if tokens["common"] else 0.0,
            recomputed_per_new=tokens["recomputed"] / tokens["new"] if tokens["new"] else 0.0,
            ttft=Quantiles.of([*turn_start, *mid_turn]),
            ttft_turn_start=Quantiles.of(turn_start),
            ttft_mid_turn=Quantiles.of(mid_turn),
            reasons=dict(self._reasons.most_common()),
            given_up=given_up,
            prefill=engines("prefill", scenario.prefill, busy[0], profile.prefill_blocks, 0),
            decode=engines("decode", scenario.decode, busy[1], profile.decode_blocks, sums["batch"]),
            budget_blocks=int(self._config.pin_budget * profile.decode_blocks),
            curve=self._curve,
            seen=self._seen or [],
        )


def _hit_rate(outcomes: Counter[tuple[bool, Outcome]], *starts_turn: bool) -> float:
    """The share of the requests that reused anything."""
    counts = {kind: sum(outcomes[each, kind] for each in starts_turn) for kind in _OUTCOMES}
    return 1 - counts["miss"] / total if (total := sum(counts.values())) else 0.0
