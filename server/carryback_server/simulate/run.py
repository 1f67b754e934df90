"""One simulation: agents, the router's own code, and engines, for a while of virtual time.

Of the router, what decides is the real thing: placement (`carryback_server.pipeline.place`), what is held and for
how long (`hold`, `pins`), the records (`state`), loads and events (`engines`), and what pays (`costs`). Only its
transport is not there: requests reach engines by a call, not over HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count

import msgspec
from carryback.wire import Outcome, Reuse, Work
from carryback.wire.events import Held, Hello, Released

from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.engines import Engine, Role, Site
from carryback_server.hold import Holding
from carryback_server.metrics import Metrics
from carryback_server.pipeline.place import decode_engine, less_loaded
from carryback_server.simulate.agents import Agent, Step
from carryback_server.simulate.engine import READ_GRACE_S, DecodeEngine, Job, Offer, PrefillEngine
from carryback_server.simulate.loop import VirtualLoop
from carryback_server.simulate.profile import Profile
from carryback_server.state import Conversation, Record, make_state
from carryback_server.tracing import Trace

# Points of the curves over time.
SAMPLES = 240
_TENANT = "default"
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


class _PrefillSite(Engine):
    """A simulated prefill engine, to the router."""

    model: PrefillEngine


class _DecodeSite(Engine):
    """A simulated decode engine, to the router."""

    model: DecodeEngine
    control_s: float

    async def release(self, request_ids: list[str]) -> bool:
        """See `Engine.release`."""
        await asyncio.sleep(self.control_s)
        for request_id in request_ids:
            self.model.let_go(request_id, "asked")
        return True


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
        self._loop = VirtualLoop()  # type: ignore[abstract]  # no I/O
        self._keys = count(1)
        self._metrics = metrics = Metrics()
        self._costs = Costs()
        self._state = make_state(
            config,
            on_evicted=lambda record: self.holding.drop(record),
            on_message=lambda message: None,
            observe=metrics.observe_state,
            on_junk=metrics.state_junk.inc,
            on_refused=metrics.messages_refused.inc,
        )
        self.holding = Holding(
            config, self._state, metrics, lambda name: self._by_name[name], clock=self._loop.time
        )
        self.prefill = [self._prefill_site(number) for number in range(scenario.prefill)]
        self.decode = [self._decode_site(number) for number in range(scenario.decode)]
        self._by_name = {each.name: each for each in self.decode}
        if profile.prefill_slowdown > 1 or profile.decode_slowdown > 1:
            for one, other in zip(self.prefill, self.decode, strict=False):
                one.model.processor.neighbour, other.model.processor.neighbour = other.model, one.model
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
        for engine in self.decode:
            engine.hear(Hello(engine.name, 0, 0, engine.model.kv.capacity))
        sampling = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as group:
            for agent in self._agents:
                group.create_task(self._work(agent))
        sampling.cancel()
        await self.holding.stop()
        # What was not let go of, engines let go of by themselves.
        await self._loop.sleep(self._config.hold_s + READ_GRACE_S + 1)

    async def _work(self, agent: Agent) -> None:
        loop, end_s = self._loop, self._scenario.duration_s
        await loop.sleep(agent.start_s)
        starts_turn = True
        for step in agent.steps:
            wait_s = max(step.gap_s, step.at_s - loop.time())
            if agent.is_endless and loop.time() + wait_s > end_s:
                return
            if wait_s > 0:
                await loop.sleep(wait_s)
            await self._serve(step, starts_turn)
            starts_turn = step.ends_turn

    # -- what the router does; see `carryback_server.pipeline`

    async def _serve(self, step: Step, starts_turn: bool) -> None:
        config, started = self._config, self._loop.time()
        conversation = await self._state.open(_TENANT, step.conversation)
        is_guess = step.is_first and not step.is_named
        hold_s = (config.hold_first_s if is_guess else config.hold_s) if self._reuse else 0.0
        job = Job(
            f"cb.{next(self._keys)}",
            step.conversation,
            step.prompt_tokens,
            step.common_tokens,
            step.output_tokens,
            hold_s,
        )
        record, holder = await self._recall(conversation, job)
        with ExitStack() as stack:
            early = None
            if config.admit_early:
                early = self._admit(job, conversation, holder, stack, is_guess=is_guess)
            await self._prefill(job, record, holder)
            engine = early or self._admit(job, conversation, holder, stack, is_guess=is_guess)
            await engine.model.generate(job, began=started if early else None)
        self.holding.land(job.key, "turn_end" if step.ends_turn or step.is_cut else "mid_turn")
        conversation.why_none = "no_record"
        await self._state.save(conversation)
        self._count(step, job, started, starts_turn)

    async def _recall(self, conversation: Conversation, job: Job) -> tuple[Record | None, _DecodeSite | None]:
        if not self._reuse:
            job.reason = "off"
            return None, None
        record = await self.holding.take(conversation)
        job.reason = conversation.why_none
        if record is None:
            return None, None
        holder = self._by_name[record.engine]
        if not self.holding.time_left(record):
            job.reason = "expired"
            self._metrics.records_lost.labels(job.reason).inc()
            self.holding.release(holder, record.request)
            return None, holder
        return record, holder

    async def _prefill(self, job: Job, record: Record | None, holder: _DecodeSite | None) -> None:
        engine = less_loaded(self.prefill)
        assert engine is not None
        offer = None
        expected = 0
        if record is not None and holder is not None:
            offer = Offer(holder.model, record.request, record.tokens, record.deadline)
            expected = record.tokens
            threshold = self._config.kv_recompute_threshold
            job.threshold = (
                self._costs.threshold(engine.name, holder.name) if threshold == "auto" else threshold
            )
        with engine.busy(max(job.prompt_tokens - expected, 1)):
            await engine.model.compute(job, offer)
        if self._config.kv_recompute_threshold == "auto":
            self._learn(engine, holder, job)
        if job.reason == "load_failed" and record is not None and holder is not None:
            self.holding.release(holder, record.request)

    def _learn(self, engine: Engine, holder: Engine | None, job: Job) -> None:
        work = Work(
            compute_s=job.compute_s,
            read_s=job.read_s if job.read_tokens else 0.0,
            computed=job.scheduled,
        )
        holder_name = holder.name if holder is not None and job.read_tokens else None
        self._costs.learn(engine.name, holder_name, self._reuse_of(job), work)

    def _admit(
        self,
        job: Job,
        conversation: Conversation,
        holder: _DecodeSite | None,
        stack: ExitStack,
        *,
        is_guess: bool,
    ) -> _DecodeSite:
        """Choose a decode engine, which has the request until the stack is closed."""
        engine = decode_engine(
            self.decode,
            holder,
            overload_factor=self._config.overload_factor,
            slack_tokens=self._config.overload_slack_tokens,
        )
        assert engine is not None
        if job.hold_s > 0:
            self.holding.expect(job.key, conversation, Trace({}), is_first=is_guess)
        stack.enter_context(engine.busy(job.prompt_tokens))
        return engine

    @staticmethod
    def _reuse_of(job: Job) -> Reuse:
        return Reuse(job.outcome, job.read_tokens, job.reason, job.recomputed_tokens, job.cached_tokens)

    # -- engines

    def _prefill_site(self, number: int) -> _PrefillSite:
        site = _PrefillSite(_site("prefill", number), self._config, self._metrics, lambda engine: False)
        site.is_up = True
        site.model = PrefillEngine(self._loop, self._profile)
        return site

    def _decode_site(self, number: int) -> _DecodeSite:
        site = _DecodeSite(_site("decode", number), self._config, self._metrics, lambda engine: False)

        def publish(event: Held | Released) -> None:
            site.hear(event)
            self.holding.on_event(site, event)

        site.is_up = True
        site.control_s = self._profile.control_s
        site.model = DecodeEngine(self._loop, self._profile, site.name, publish)
        return site

    # -- figures

    def _count(self, step: Step, job: Job, started: float, starts_turn: bool) -> None:
        if self._seen is not None:
            self._seen.append(
                Seen(
                    step.conversation, started, job.first_token - started, self._loop.time() - started,
                    step.prompt_tokens, job.read_tokens, job.outcome, job.reason,
                )
            )  # fmt: skip
        if started < self._scenario.warmup_s:
            return
        self._ttft[starts_turn].append(job.first_token - started)
        if step.is_first:
            return
        self._outcomes[starts_turn, job.outcome] += 1
        self._reasons[f"{job.outcome} {job.reason}"] += 1
        tokens = self._tokens
        tokens["common"] += step.common_tokens
        tokens["saved"] += min(job.read_tokens + job.cached_tokens, step.common_tokens)
        tokens["new"] += step.prompt_tokens - step.common_tokens
        tokens["recomputed"] += job.recomputed_tokens

    def _busy(self) -> tuple[float, float]:
        return (
            sum(engine.model.processor.busy_s for engine in self.prefill),
            sum(engine.model.processor.busy_s for engine in self.decode),
        )

    async def _sample(self) -> None:
        scenario, curve, sums = self._scenario, self._curve, self._sums
        prefill, decode = [each.model for each in self.prefill], [each.model for each in self.decode]
        is_measured = False
        for number in range(SAMPLES + 1):
            now = number * scenario.duration_s / SAMPLES
            await asyncio.sleep(now - self._loop.time())
            self._on_progress(now)
            held = [engine.pinned for engine in decode]
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


def _site(role: Role, number: int) -> Site:
    return Site(role, f"{role}-{number}", f"http://{role}-{number}.invalid:1", "")
