"""Simulations: what is known to be true of them, and that the router's own code decides in them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from carryback_server import pins
from carryback_server.bench import workloads
from carryback_server.bench.result import Request, Result
from carryback_server.config import RouterConfig
from carryback_server.pipeline import decode, hold, prefill
from carryback_server.simulate import run as run_module
from carryback_server.simulate.agents import Agent, Population, Step, planned, recorded
from carryback_server.simulate.engine import DecodeEngine, TooLong
from carryback_server.simulate.kv import Blocks, KvCache, Text
from carryback_server.simulate.loop import Stalled, VirtualLoop
from carryback_server.simulate.profile import Profile, built_in, load_profile
from carryback_server.simulate.run import Report, Scenario, Simulation
from carryback_server.simulate.setup import Setup
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 16
PROFILE = Profile(
    kv_bytes_per_token=1000.0,
    prefill_blocks=2000,
    decode_blocks=2000,
    prefill_request_s=0.02,
    prefill_request_s_per_token=1e-5,
    prefill_step_s=0.01,
    prefill_token_s=1e-4,
    prefill_attention_s=1e-8,
    max_num_batched_tokens=512,
    transfer_s=0.005,
    transfer_bytes_per_s=1e8,
    parallel_reads=2,
    decode_request_s=0.003,
    decode_go_s=0.002,
    decode_step_s=0.01,
    decode_sequence_s=0.001,
    decode_context_s=1e-7,
)
WORLD = Scenario(prefill=1, decode=1, duration_s=10_000.0, warmup_share=0.0)


def router(**settings: Any) -> RouterConfig:
    return RouterConfig(**settings)


def conversation(
    prompts: Sequence[int], *, gap_s: float = 1.0, output: int = 20, name: str = "a", **more: Any
) -> list[Step]:
    """One that only grows."""
    steps: list[Step] = []
    for prompt in prompts:
        common = steps[-1].prompt_tokens + output if steps else 0
        steps.append(Step(gap_s if steps else 0.0, name, prompt, common, output, is_first=not steps, **more))
    return steps


def simulated(
    agents: Sequence[Agent],
    config: RouterConfig | None = None,
    *,
    profile: Profile = PROFILE,
    scenario: Scenario = WORLD,
    reuse: bool = True,
) -> Report:
    """A simulation, at whose end nothing is left anywhere."""
    simulation = Simulation(scenario, profile, config or router(), agents, reuse=reuse, keep=True)
    report = simulation.run()
    for engine in [*simulation.prefill, *simulation.decode]:
        assert engine.kv.used == 0
        assert engine.load == engine.in_flight == 0
    for engine in simulation.decode:
        assert engine.held == engine.pinned == 0
        assert not engine._leases
    assert len(simulation.holding.pins) == 0
    return report


# -- the loop


def test_time_passes_from_timer_to_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(loop.time())

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5e6):
                await asyncio.Event().wait()
        seen.append(loop.time())
        await asyncio.gather(sleeper(3e6), sleeper(1e6))
        return seen

    assert VirtualLoop().run(main()) == [5e6, 6e6, 8e6]


def test_what_was_cancelled_does_not_happen() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        happened: list[int] = []
        handles = [loop.call_later(1.0, happened.append, number) for number in range(50_000)]
        for handle in handles[1:]:
            handle.cancel()
        await asyncio.sleep(2.0)
        for handle in handles:
            handle.cancel()  # too late, or twice
        return len(happened)

    assert VirtualLoop().run(main()) == 1


def test_nothing_goes_wrong_unseen() -> None:
    async def stalled() -> None:
        await asyncio.Event().wait()

    async def failing() -> None:
        raise ZeroDivisionError

    async def forgets() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(Stalled):
        VirtualLoop().run(stalled())
    with pytest.raises(ZeroDivisionError):
        VirtualLoop().run(failing())
    with pytest.raises(ZeroDivisionError):
        VirtualLoop().run(forgets())


# -- what can be worked out by hand


def first_token_s(
    prompt: int, *, read: int = 0, there: int = 0, is_early: bool = True, asks: bool = True
) -> float:
    """Until the first token, with nobody else there.

    Args:
        there: tokens that the decode engine has itself.
    """
    p = PROFILE
    computed = prompt - read
    seconds = p.prefill_request_s + p.prefill_request_s_per_token * prompt
    seconds += 2 * p.control_s if asks else 0.0
    seconds += p.transfer_s + p.read_s(read) if read else 0.0
    seconds += p.prefill_s(computed, after=read)
    # It waits at the decode engine already, or comes there only now.
    seconds += p.decode_go_s if is_early else p.decode_request_s
    seconds += p.transfer_s + p.read_s(prompt - there)
    return seconds + p.decode_step_s + p.decode_sequence_s + p.decode_context_s * prompt


def test_one_agent_alone_waits_for_what_its_own_requests_take() -> None:
    prompts = [300, 900, 1000, 3000]
    report = simulated([Agent(5.0, conversation(prompts))])
    reused = [0, *((prompt + 20 - 1) // SIZE * SIZE for prompt in prompts[:-1])]
    assert [seen.reused_tokens for seen in report.seen] == reused
    for seen, read in zip(report.seen, reused, strict=True):
        assert seen.ttft_s == pytest.approx(first_token_s(seen.prompt_tokens, read=read, there=read))
        # 19 more steps, in which the context grows by a token each.
        p, context = PROFILE, seen.prompt_tokens
        steps_s = 19 * (p.decode_step_s + p.decode_sequence_s)
        steps_s += p.decode_context_s * sum(context + each for each in range(1, 20))
        assert seen.duration_s - seen.ttft_s == pytest.approx(steps_s)
    assert report.seen[0].started_s == 5.0
    assert report.seen[1].started_s == pytest.approx(5.0 + report.seen[0].duration_s + 1.0)
    assert report.hits == report.returning == 3
    assert report.hit_rate == 1.0
    new = sum(after - before - 20 for before, after in pairwise(prompts))
    computed = sum(prompts[1:]) - sum(reused)
    assert report.recomputed_per_new == pytest.approx(computed / new)


def test_a_request_that_is_sent_to_its_decode_engine_late_comes_later() -> None:
    report = simulated([Agent(0.0, conversation([300]))], router(admit_early=False))
    assert report.seen[0].ttft_s == pytest.approx(first_token_s(300, is_early=False))


def test_chunks_are_as_long_as_an_engine_takes_tokens_at_once() -> None:
    one, two = PROFILE.prefill_s(512), PROFILE.prefill_s(513)
    assert two - one == pytest.approx(PROFILE.prefill_step_s + PROFILE.chunk_s(1, 512))
    assert PROFILE.prefill_s(100, after=50) - PROFILE.prefill_s(100) == pytest.approx(1e-8 * 50 * 100)


def test_without_reuse_nothing_is_reused_or_held() -> None:
    report = simulated([Agent(0.0, conversation([300, 900, 1000]))], reuse=False)
    assert report.hits == report.partial == 0
    assert report.reasons == {"miss off": 2}
    assert max(report.curve.held) == 0
    assert [seen.ttft_s for seen in report.seen] == pytest.approx(
        [
            first_token_s(n, there=there // SIZE * SIZE, asks=False)
            for n, there in ((300, 0), (900, 319), (1000, 919))
        ]
    )


def test_a_budget_of_nothing_pins_nothing_and_what_is_there_is_reused() -> None:
    report = simulated([Agent(0.0, conversation([300, 900, 1000]))], router(pin_budget=0))
    assert report.reasons == {"hit verified": 2}
    assert report.given_up == {}
    assert max(report.curve.held) == 0


def test_what_is_held_for_ever_is_always_there() -> None:
    agents = [
        Agent(3.0 * number, conversation([300, 350, 400, 450], gap_s=500.0, name=f"{number}"))
        for number in range(10)
    ]
    report = simulated(agents, router(hold_s=1e6, hold_mid_turn_s=1e6, pin_budget=1.0))
    assert report.hit_rate == 1.0
    assert report.reasons == {"hit verified": 30}


def flood(start_s: float) -> Agent:
    """Two new conversations that overwrite all that a decode engine does not pin."""
    steps = [conversation([1000 * SIZE], name=name, is_named=False, ends_turn=True)[0] for name in ("x", "y")]
    return Agent(start_s, steps)


@pytest.mark.parametrize(
    ("ends_turn", "gap_s", "reason"),
    [
        (False, 95.0, "hit verified"),
        (False, 115.0, "miss overwritten"),
        (True, 115.0, "hit verified"),
        (True, 195.0, "hit verified"),
        (True, 215.0, "miss overwritten"),
    ],
)
def test_conversations_are_waited_for_as_the_router_is_set(
    ends_turn: bool, gap_s: float, reason: str
) -> None:
    config = router(hold_s=200.0, hold_mid_turn_s=100.0, hold_first_s=0.0)
    agent = Agent(0.0, conversation([300, 900], gap_s=gap_s, ends_turn=ends_turn))
    assert simulated([agent, flood(gap_s - 10)], config).reasons == {reason: 1}
    # What nobody overwrites is there for ever.
    assert simulated([agent], config).reasons == {"hit verified": 1}


def test_a_first_request_without_a_name_is_held_briefly() -> None:
    config = router(hold_first_s=10.0)
    for is_named, reason in ((False, "miss overwritten"), (True, "hit verified")):
        agent = Agent(0.0, conversation([300, 900], gap_s=50.0, is_named=is_named))
        assert simulated([agent, flood(20.0)], config).reasons == {reason: 1}


def test_what_everybody_begins_with_is_computed_once() -> None:
    steps = [conversation([1000], name=name)[0]._replace(common_tokens=700) for name in "abc"]
    report = simulated([Agent(5.0 * number, [step]) for number, step in enumerate(steps)])
    assert [(seen.reused_tokens, seen.reason) for seen in report.seen] == [
        (0, "new"),
        (700 // SIZE * SIZE, "verified"),
        (700 // SIZE * SIZE, "verified"),
    ]


def test_who_has_the_same_name_has_what_is_its_own() -> None:
    # Two agents take turns under one name: each goes on from its own history.
    agents = [Agent(start_s, conversation([300, 900, 1000], gap_s=10.0)) for start_s in (0.0, 5.0)]
    report = simulated(agents)
    assert [seen.reused_tokens for seen in report.seen[2:]] == [304, 304, 912, 912]


def test_a_history_that_changed_is_read_as_far_as_it_is_the_same() -> None:
    first, second = conversation([1000, 1200])
    report = simulated([Agent(0.0, [first, second._replace(common_tokens=500)])])
    assert report.reasons == {"partial history_changed": 1}
    assert report.seen[1].reused_tokens == 500 // SIZE * SIZE
    report = simulated([Agent(0.0, [first, second._replace(common_tokens=10)])])
    assert report.reasons == {"miss history_changed": 1}
    report = simulated([Agent(0.0, [first, second._replace(common_tokens=60)])])
    assert report.reasons == {"miss below_threshold": 1}


def test_prefix_caches_save_computing_and_reading() -> None:
    cached = msgspec.structs.replace(PROFILE, prefill_prefix_caching=True)
    agents = [Agent(0.0, conversation([1000, 1200]))]
    plain, quick = simulated(agents), simulated(agents, profile=cached)
    # One more block could be read, which is less than pays.
    assert quick.reasons == {"partial below_threshold": 1}
    assert quick.seen[1].ttft_s < plain.seen[1].ttft_s
    assert quick.recomputed_per_new == pytest.approx((1200 - 1000 // SIZE * SIZE) / 180)


def test_a_threshold_that_is_learned_stops_reads_that_do_not_pay() -> None:
    slow = msgspec.structs.replace(PROFILE, transfer_bytes_per_s=1e6)  # ten times as long as to compute
    steps = conversation([400 + 40 * number for number in range(60)])
    always = simulated([Agent(0.0, steps)], profile=slow)
    learned = simulated([Agent(0.0, steps)], router(kv_recompute_threshold="auto"), profile=slow)
    assert always.reasons == {"hit verified": 59}
    assert learned.reasons["miss below_threshold"] > 40


def test_a_request_that_never_fits_is_said() -> None:
    with pytest.raises(TooLong, match="needs 2002 KV blocks, and prefill engines have 2000"):
        simulated([Agent(0.0, conversation([2001 * SIZE + 1]))])


# -- engines that are full


def crowd(count: int, *, prompt: int = 4000, steps: int = 4, gap_s: float = 0.5) -> list[Agent]:
    return [
        Agent(
            0.01 * number,
            conversation(
                [prompt + 200 * step for step in range(steps)],
                gap_s=gap_s * (1 + number % 5),
                name=f"{number}",
            ),
        )
        for number in range(count)
    ]


def test_engines_never_use_more_blocks_than_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    most: dict[int, int] = {}
    take = KvCache.take

    def watched(self: KvCache, text: Text, found: int, blocks: int) -> bool:
        done = take(self, text, found, blocks)
        most[id(self)] = max(most.get(id(self), 0), self.used)
        assert self.used + self._free_count <= self.capacity
        return done

    monkeypatch.setattr(KvCache, "take", watched)
    cached = msgspec.structs.replace(PROFILE, prefill_prefix_caching=True)
    report = simulated(crowd(30, prompt=8000), profile=cached)
    assert report.requests == 120
    assert max(most.values()) > PROFILE.decode_blocks - 550  # so that no further one fits
    assert max(report.curve.held_most) <= report.budget_blocks + 300


def test_a_full_decode_engine_holds_no_more_than_it_may() -> None:
    half = msgspec.structs.replace(PROFILE, max_pinned=0.2)
    report = simulated(crowd(30, gap_s=100.0), router(pin_budget=1.0), profile=half)
    assert max(report.curve.held_most) <= 0.2 * PROFILE.decode_blocks
    assert any(reason.startswith("miss") for reason in report.reasons)


def test_who_shares_a_processor_is_slower() -> None:
    shared = msgspec.structs.replace(PROFILE, prefill_slowdown=2.0, decode_slowdown=3.0)
    alone = simulated([Agent(0.0, conversation([300], output=2))], profile=shared)
    assert alone.seen[0].ttft_s == pytest.approx(first_token_s(300))
    # One computes for a long time while another one generates for longer.
    both = [
        Agent(0.0, conversation([300], output=1000)),
        Agent(1.0, conversation([5000], name="b", output=2)),
    ]
    slow, quick = simulated(both, profile=shared).seen, simulated(both).seen
    prefill_s = PROFILE.prefill_s(5000)
    assert slow[0].ttft_s - quick[0].ttft_s == pytest.approx(prefill_s, rel=0.1)
    generated_s = quick[1].duration_s - quick[1].ttft_s
    assert slow[1].duration_s - slow[1].ttft_s == pytest.approx(
        generated_s + 2 * 2 * prefill_s * 2 / 3, rel=0.1
    )


# -- blocks by content


class Explicit:
    """The same as `KvCache`, block by block: each known by all tokens up to its last, the free ones in the order in which
    they are overwritten."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: Counter[tuple[int, ...]] = Counter()
        self.free: dict[tuple[int, ...], None] = {}
        self.unfilled = 0

    def find(self, blocks: list[tuple[int, ...]]) -> int:
        there = [block in self.free or self.users[block] > 0 for block in blocks]
        return there.index(False) if False in there else len(there)

    def hold(self, blocks: list[tuple[int, ...]]) -> None:
        self.users.update(blocks)
        for block in blocks:
            self.free.pop(block, None)

    def release(self, blocks: list[tuple[int, ...]]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None

    @property
    def used(self) -> int:
        return sum(count > 0 for count in self.users.values()) + self.unfilled

    def take(self, blocks: list[tuple[int, ...]], found: int) -> None:
        self.hold(blocks[:found])
        self.unfilled += len(blocks) - found
        while self.used + len(self.free) > self.capacity:
            del self.free[next(iter(self.free))]


@pytest.mark.parametrize("seed", range(100))
def test_a_cache_finds_what_one_of_explicit_blocks_finds(seed: int) -> None:
    size, random = 4, Random(seed)
    cache, explicit = KvCache(40), Explicit(40)
    tokens = itertools.count()
    texts = [(Text.of(20, size), [next(tokens) for _ in range(20)])]
    held: list[tuple[str, Text, list[tuple[int, ...]], int]] = []
    for _ in range(100):
        which, common, new = random.randrange(8), random.randrange(60), random.randrange(1, 30)
        move = random.choice(["take", "take", "pin", "end", "end", "end"])
        if move == "end":
            if held:
                kind, text, blocks, found = held.pop(which % len(held))
                if kind == "take":
                    explicit.unfilled -= len(blocks) - found
                    explicit.hold(blocks[found:])
                    found = cache.fill(text, found, len(blocks))
                    cache.give_back(text, found, len(blocks))
                    explicit.release(blocks)
                else:
                    cache.release(text, len(blocks))
                    explicit.release(blocks)
        else:
            before, words = texts[-1 - which % len(texts)]
            common = min(common, len(words))
            # A branch, an edit, or what goes on from there.
            text, words = (
                before.then(common, common + new),
                words[:common] + [next(tokens) for _ in range(new)],
            )
            texts.append((text, words))
            blocks = [tuple(words[:end]) for end in range(size, len(words) + 1, size)]
            found = cache.find(text, len(blocks))
            assert found == explicit.find(blocks)
            if move == "pin" and found:
                cache.hold(text, found)
                explicit.hold(blocks[:found])
                held.append(("pin", text, blocks[:found], 0))
            elif move == "take" and cache.take(text, found, len(blocks)):
                explicit.take(blocks, found)
                held.append(("take", text, blocks, found))
        assert cache.used == explicit.used
        assert cache._free_count == len(explicit.free)


def test_blocks_that_several_hold_count_once() -> None:
    first = Text.of(10 * SIZE, SIZE)
    branches = [first.then(8 * SIZE, 12 * SIZE) for _ in range(2)]
    held = Blocks()
    held.hold(first, 10)
    assert [held.more(branch, 12) for branch in branches] == [4, 4]
    for branch in branches:
        held.hold(branch, 12)
    assert held.count == 10 + 4 + 4
    assert len({text.digest(10) for text in (first, *branches)}) == 3
    assert len({text.digest(8) for text in (first, *branches)}) == 1
    held.release(first, 10)
    assert held.count == 8 + 4 + 4


# -- the router is the real one


def test_the_same_seed_gives_the_same_simulation() -> None:
    population = Population(agents=40, first_tokens=500.0, max_context_tokens=6000, summary_tokens=100)
    scenario = Scenario(prefill=3, decode=3, duration_s=300.0, seed=7)

    def once(seed: int) -> bytes:
        each = msgspec.structs.replace(scenario, seed=seed)
        return msgspec.json.encode(simulated(list(population.draw(seed, 100.0)), scenario=each))

    assert once(7) == once(7)
    assert once(7) != once(8)


def cluster_report() -> Report:
    """Agents on several engines with little room."""
    scenario = Scenario(prefill=3, decode=3, duration_s=300.0, warmup_share=0.0)
    return simulated(
        crowd(40, prompt=1500, steps=6, gap_s=3.0),
        router(pin_budget=0.4, hold_s=30.0, hold_mid_turn_s=28.0),
        scenario=scenario,
    )


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (prefill, "less_loaded", lambda engines, but=(): engines[0]),
        (prefill, "question", lambda shared, context, engine, beside: {"carryback_ask": []}),
        (decode, "decode_engine", lambda engines, holder, **settings: engines[0]),
        (pins.Pins, "enforce", lambda self, engine: None),
        (pins.Pins, "_give_up", lambda self, held, tenants, why: 0),
        (hold.Holding, "_retention", lambda self, decode: (pins.Rank.FIRST, 1.0)),
    ],
)
def test_what_is_broken_in_the_router_shows(
    module: Any, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = cluster_report()
    monkeypatch.setattr(module, name, broken)
    assert msgspec.json.encode(cluster_report()) != msgspec.json.encode(sound)


def test_an_engine_that_hears_no_release_unpins_by_itself_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [Agent(0.0, conversation([300], gap_s=20.0)), flood(25.0), Agent(500.0, conversation([300]))]
    heard = simulated(agents, router(hold_s=300.0, hold_mid_turn_s=10.0))
    monkeypatch.setattr(DecodeEngine, "release", lambda self, *keys: None)
    lost = simulated(agents, router(hold_s=300.0, hold_mid_turn_s=10.0))
    assert lost.curve.held_most != heard.curve.held_most


# -- what is true of all


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(100, 1500), st.floats(0.0, 60.0), st.integers(1, 5)), min_size=1, max_size=12
    ),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_while_there_is_room_everything_is_reused_whatever_is_held(
    crowd: list[tuple[int, float, int]], budget: float
) -> None:
    agents = [
        Agent(
            float(number),
            conversation([prompt + 100 * step for step in range(steps)], gap_s=gap_s, name=f"{number}"),
        )
        for number, (prompt, gap_s, steps) in enumerate(crowd)
    ]
    roomy = msgspec.structs.replace(PROFILE, prefill_blocks=100_000, decode_blocks=100_000)
    report = simulated(agents, router(hold_mid_turn_s=1.0, pin_budget=budget), profile=roomy)
    assert report.hits == report.returning


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(1, 6000), st.floats(0.0, 30.0), st.integers(1, 5), st.integers(1, 200)),
        min_size=1,
        max_size=15,
    ),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([1.0, 20.0, 480.0]),
    st.integers(1, 3),
    st.booleans(),
)
def test_whatever_agents_do_nothing_leaks(
    crowd: list[tuple[int, float, int, int]], budget: float, hold_s: float, engines: int, shared: bool
) -> None:
    agents = [
        Agent(
            0.1 * number,
            conversation(
                [prompt + (output + 50) * step for step in range(steps)],
                gap_s=gap_s,
                output=output,
                name=f"{number % 5}",  # some share a conversation
            ),
        )
        for number, (prompt, gap_s, steps, output) in enumerate(crowd)
    ]
    profile = PROFILE
    if shared:
        profile = msgspec.structs.replace(
            PROFILE, prefill_slowdown=1.7, decode_slowdown=1.3, prefill_prefix_caching=True
        )
    scenario = Scenario(prefill=engines, decode=engines, duration_s=100.0, warmup_share=0.0)
    report = simulated(agents, router(pin_budget=budget, hold_s=hold_s), profile=profile, scenario=scenario)
    assert report.requests == sum(steps for _, _, steps, _ in crowd)
    assert all(0 < seen.ttft_s <= seen.duration_s + 1e-6 for seen in report.seen)


# -- agents


def test_agents_return_as_published_traces_do() -> None:
    gaps = []
    for agent in Population(agents=400).draw(3, 0.0):
        steps = iter(agent.steps)
        next(steps)
        gaps += [next(steps).gap_s for _ in range(200)]
    assert sum(gap <= 1 for gap in gaps) / len(gaps) == pytest.approx(0.86, abs=0.01)
    assert sum(gap <= 10 for gap in gaps) / len(gaps) == pytest.approx(0.95, abs=0.01)


def test_conversations_begin_alike_as_far_as_they_are_told_to() -> None:
    population = Population(agents=20, shared_tokens=5_000)
    firsts = [next(iter(agent.steps)) for agent in population.draw(0, 0.0)]
    assert all(0 < step.common_tokens <= min(5_000, step.prompt_tokens) for step in firsts)
    assert {step.common_tokens for step in firsts} >= {5_000}
    assert {next(iter(agent.steps)).common_tokens for agent in Population(agents=20).draw(0, 0.0)} == {0}


def test_conversations_grow_and_are_summarised() -> None:
    population = Population(agents=1, turns=1000.0)
    (agent,) = population.draw(0, 0.0)
    steps = iter(agent.steps)
    last = next(steps)
    shrunk = 0
    for _ in range(2000):
        step = next(steps)
        assert step.prompt_tokens <= population.max_context_tokens
        if step.common_tokens == last.prompt_tokens + last.output_tokens:
            assert step.prompt_tokens > step.common_tokens
        else:
            shrunk += 1
            assert step.prompt_tokens == step.common_tokens + population.summary_tokens
        last = step
    assert shrunk > 5


def test_a_run_is_replayed_with_its_pauses() -> None:
    def request(conversation: str, turn: int, step: int, started_s: float, **more: Any) -> Request:
        defaults = {
            "prompt_tokens": 100,
            "output_tokens": 10,
            "ttft_s": 1.0,
            "duration_s": 2.0,
            "arm": "reuse",
        }
        return Request(
            conversation=conversation, turn=turn, step=step, started_s=started_s, **(defaults | more)
        )

    requests = [
        request("b", 1, 1, 50.0),
        request("a", 1, 1, 40.0),
        request("a", 1, 2, 45.0, prompt_tokens=150, new_tokens=40),
        request("a", 2, 1, 60.0, prompt_tokens=170),
        request("a", 2, 1, 61.0, arm="no_reuse"),
        request("b", 1, 2, 70.0, error="no"),
    ]
    result = Result(
        carryback="", workload="agent", settings={}, environment={}, started="", duration_s=0.0, block_size=16,
        requests=requests, transfers=[],
    )  # fmt: skip
    b, a = recorded(result)
    assert (a.start_s, b.start_s) == (0.0, 10.0)
    first, second, third = a.steps
    assert (first.gap_s, second.gap_s, third.gap_s) == (0.0, 3.0, 13.0)
    assert (first.common_tokens, second.common_tokens, third.common_tokens) == (0, 110, 160)
    assert [step.ends_turn for step in a.steps] == [False, True, True]
    with pytest.raises(ValueError, match="no request of arm 'aggregated'"):
        recorded(result, "aggregated")


def test_a_workload_is_planned_with_a_token_a_word() -> None:
    def said(text: str) -> tuple[workloads.Message, ...]:
        return ({"role": "user", "content": text},)

    conversation = workloads.Conversation(
        name="c",
        turns=(
            (workloads.Step(messages=said("one two three"), max_tokens=4, at_s=2.0),),
            (workloads.Step(messages=said("four five"), max_tokens=4, wait_s=7.0),),
            (workloads.Step(messages=said("one two six"), max_tokens=4, keep=0),),
        ),
    )
    (agent,) = planned([conversation])
    assert [(step.prompt_tokens, step.common_tokens) for step in agent.steps] == [(3, 0), (9, 7), (3, 2)]
    assert [(step.gap_s, step.at_s) for step in agent.steps] == [(0.0, 2.0), (7.0, 0.0), (0.0, 0.0)]


# -- what it is told


@pytest.mark.parametrize("name", built_in())
def test_profiles_are_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.description
    # Plausible: tokens come at readable speed, and a read is quicker than computing again.
    assert 0.001 < profile.decode_step_s + profile.decode_sequence_s < 1
    assert profile.transfer_s + profile.read_s(4096) < profile.prefill_s(4096)


def test_anything_is_set_by_its_name() -> None:
    setup = Setup(PROFILE).but(
        hold_s="30",
        pin_budget="0.25",
        agents="50",
        prefill=4,
        transfer_bytes_per_s="5e9",
        prefill_prefix_caching="true",
    )
    assert (setup.router.hold_s, setup.router.pin_budget) == (30.0, 0.25)
    assert (setup.population.agents, setup.scenario.prefill) == (50, 4)
    assert (setup.profile.transfer_bytes_per_s, setup.profile.prefill_prefix_caching) == (5e9, True)
    assert setup.but(kv_recompute_threshold="auto").router.kv_recompute_threshold == "auto"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hold", "3", "hold is no setting"),
        ("hold_s", "-3", "hold_s: "),
        ("pin_budget", "much", "pin_budget: "),
        ("agents", "0", "at least 1 of agents"),
        ("decode_blocks", "x", "decode_blocks: "),
        ("decode_step_s", "0", "decode_step_s must be above 0"),
        ("prefill_slowdown", "0.5", "a slowdown is at least 1"),
        ("duration_s", "0", "duration_s is above 0"),
        ("transfer_s", ".inf", "transfer_s must not be negative, or infinite"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(PROFILE).but(**{name: value})


def test_quantiles_of_nothing_are_zero() -> None:
    assert run_module.Quantiles.of([]) == run_module.Quantiles(0, 0.0, 0.0, 0.0)
    assert run_module.Quantiles.of(range(101)) == run_module.Quantiles(101, 50, 90, 99)
    assert not math.isnan(simulated([Agent(0.0, conversation([100]))]).hit_rate)
