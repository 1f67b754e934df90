"""What is counted as held, and what is given up when it is too much: random histories against a plain model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from carryback_server.metrics import Metrics
from carryback_server.pins import Pin, Pins, Rank
from hypothesis import given, settings
from hypothesis import strategies as st

TENANTS = ["acme", "guests"]
FOREVER_S = 1000.0


@dataclass(eq=False)
class Holder:
    """An engine, as far as pins know one."""

    name: str
    capacity: int = 100
    pinned: int = 0
    released: list[str] = field(default_factory=list)

    def release(self, *keys: str) -> None:
        self.released += keys


class World:
    """Pins of two engines, and all that they gave up."""

    def __init__(self, budget: float, **shares: float) -> None:
        self.metrics = Metrics()
        self.pins = Pins(budget, self.metrics)
        self.pins.shares = shares
        self.engines: Any = [Holder("one"), Holder("two")]
        self.count = 0

    def pin(
        self,
        blocks: int,
        rank: Rank = Rank.TURN_END,
        tenant: str = "acme",
        engine: int = 0,
        hold_s: float = FOREVER_S,
    ) -> Pin:
        """One more."""
        self.count += 1
        key = f"k{self.count}"
        pin = Pin(
            self.engines[engine], key, blocks * 16, blocks, tenant, key, rank, since=float(self.count)
        )  # fmt: skip
        self.engines[engine].pinned += blocks
        self.pins.add(pin, hold_s)
        return pin

    def gone(self, key: str, engine: int, blocks: int) -> Pin | None:
        """The engine has let go."""
        self.engines[engine].pinned -= blocks
        return self.pins.released(key, self.engines[engine])

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value."""
        value = self.metrics.registry.get_sample_value(f"carryback_{name}", labels)
        return value if value is not None else 0.0


def keys(world: World) -> list[str]:
    """Of the pins that were given up."""
    return [key for engine in world.engines for key in engine.released]


async def test_nothing_is_given_up_within_the_budget() -> None:
    world = World(0.5)
    for _ in range(5):
        world.pin(10)
        world.pins.enforce(world.engines[0])
    assert keys(world) == []
    assert world.sample("held_blocks", engine="one") == 50
    assert world.sample("pin_budget_blocks", engine="one") == 50


async def test_the_least_likely_to_return_goes_first_and_of_those_the_oldest() -> None:
    world = World(0.5)
    ranks = [Rank.MID_TURN, Rank.FIRST, Rank.TURN_END, Rank.FIRST, Rank.TURN_END, Rank.MID_TURN]
    held = [world.pin(8, rank) for rank in ranks]
    order = [held[1], held[3], held[2], held[4], held[0], held[5]]
    for count in range(1, 7):
        # One more, that is the last to go.
        world.pin(8, Rank.MID_TURN)
        world.pins.enforce(world.engines[0])
        assert keys(world) == [pin.key for pin in order[:count]]


async def test_what_its_conversation_has_in_use_goes_before_all_others() -> None:
    world = World(0.5)
    held = [world.pin(20, rank) for rank in (Rank.FIRST, Rank.MID_TURN)]
    world.pins.passed(held[1])
    world.pin(20, Rank.TURN_END)
    world.pins.enforce(world.engines[0])
    assert keys(world) == [held[1].key]
    assert world.sample("pins_given_up_total", rank="passed", reason="budget") == 1


async def test_what_is_leaving_is_not_counted_twice() -> None:
    world = World(0.5)
    first = world.pin(30)
    world.pin(30)
    for _ in range(3):  # the engine has not let go yet
        world.pins.enforce(world.engines[0])
    assert keys(world) == [first.key]
    assert world.gone(first.key, 0, 30) is None
    world.pins.enforce(world.engines[0])
    assert keys(world) == [first.key]


async def test_each_router_gives_up_its_part() -> None:
    # The engine holds 80 blocks, half of them for another router; 30 are too many.
    world = World(0.5)
    mine = [world.pin(5) for _ in range(8)]
    world.engines[0].pinned += 40
    world.pins.enforce(world.engines[0])
    assert keys(world) == [pin.key for pin in mine[:3]]


async def test_a_tenant_s_share_costs_that_tenant_alone() -> None:
    world = World(0.5, guests=0.2)
    acme = [world.pin(10) for _ in range(3)]
    guests = [world.pin(4, tenant="guests") for _ in range(4)]
    world.pins.enforce(world.engines[0])
    assert keys(world) == [guests[0].key, guests[1].key]
    assert all(world.pins.get(pin.key) is pin for pin in acme)
    assert world.sample("pins_given_up_total", rank="turn_end", reason="tenant_share") == 2


async def test_a_pin_s_time_is_what_was_said_last() -> None:
    world = World(1.0)
    tool, done = world.pin(5, hold_s=FOREVER_S), world.pin(5, hold_s=0.0)
    assert tool.time_left == pytest.approx(FOREVER_S, abs=1)
    world.pins.settle(done.key, Rank.TURN_END, FOREVER_S)
    world.pins.settle(tool.key, Rank.MID_TURN, 0.0)
    async with asyncio.timeout(10):
        while not keys(world):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert keys(world) == [tool.key]
    assert world.sample("pins_given_up_total", rank="mid_turn", reason="retention") == 1
    assert world.pins.get(done.key) is done


async def test_an_engine_without_a_known_capacity_is_left_alone() -> None:
    world = World(0.0)
    world.engines[0].capacity = 0
    world.pin(10)
    world.pins.enforce(world.engines[0])
    assert keys(world) == []


@dataclass
class Model:
    """What should be there, in the plainest way."""

    budget: float
    shares: dict[str, float]
    pins: list[Pin] = field(default_factory=list)
    leaving: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Engine and blocks of what was given up and is not yet let go of."""

    def expect(self, engine: Any) -> list[str]:
        """The keys that are to be given up, in order."""
        out = []
        here = [pin for pin in self.pins if pin.engine is engine]
        budget = self.budget * engine.capacity

        def give_up(mine: list[Pin]) -> int:
            pin = min(mine, key=lambda pin: (pin.rank, pin.since))
            out.append(pin.key)
            here.remove(pin)
            return pin.blocks

        gone = sum(blocks for holder, blocks in self.leaving.values() if holder is engine)
        for tenant, share in self.shares.items():
            while mine := [pin for pin in here if pin.tenant == tenant]:
                if sum(pin.blocks for pin in mine) <= share * budget:
                    break
                gone += give_up(mine)
        own = sum(pin.blocks for pin in here)
        total = max(engine.pinned - gone, own)
        excess = math.ceil((total - budget) * own / total) if total > budget else 0
        while excess > 0 and here:
            excess -= give_up(here)
        return out


STEP = st.one_of(
    st.tuples(
        st.just("add"), st.integers(0, 40), st.sampled_from(Rank), st.sampled_from(TENANTS), st.integers(0, 1)
    ),
    st.tuples(st.just("others"), st.integers(0, 60), st.integers(0, 1)),
    st.tuples(st.just("remove"), st.integers(0, 50)),
    st.tuples(st.just("settle"), st.integers(0, 50), st.sampled_from(Rank)),
    st.tuples(st.just("let go"), st.integers(0, 50)),
    st.tuples(st.just("confirm"), st.integers(0, 50)),
    st.tuples(st.just("void"), st.integers(0, 1)),
    st.tuples(st.just("enforce"), st.integers(0, 1)),
)


@settings(max_examples=40)
@given(
    steps=st.lists(STEP, max_size=40),
    budget=st.floats(0, 1),
    shares=st.dictionaries(st.sampled_from(TENANTS), st.floats(0, 0.9)),
)
def test_any_history(steps: list[Any], budget: float, shares: dict[str, float]) -> None:
    asyncio.run(_live(steps, budget, shares))


async def _live(steps: list[Any], budget: float, shares: dict[str, float]) -> None:
    world = World(budget, **shares)
    model = Model(budget, shares)
    others = {engine.name: 0 for engine in world.engines}
    for kind, *args in steps:
        engine = world.engines[args[-1]] if kind in ("add", "others", "void", "enforce") else None
        pin = (
            model.pins[args[0] % len(model.pins)]
            if kind in ("remove", "settle", "let go") and model.pins
            else None
        )
        if kind == "add":
            model.pins.append(world.pin(*args))
        elif kind == "others":
            engine.pinned += args[0] - others[engine.name]
            others[engine.name] = args[0]
        elif kind == "void":
            gone = world.pins.void(engine)
            assert {each.key for each in gone} == {each.key for each in model.pins if each.engine is engine}
            model.pins = [each for each in model.pins if each.engine is not engine]
            model.leaving = {key: each for key, each in model.leaving.items() if each[0] is not engine}
            engine.pinned = others[engine.name]
        elif kind == "enforce":
            wanted, before = model.expect(engine), len(engine.released)
            world.pins.enforce(engine)
            assert engine.released[before:] == wanted
            for each in [each for each in model.pins if each.key in wanted]:
                model.pins.remove(each)
                model.leaving[each.key] = (each.engine, each.blocks)
        elif kind == "confirm" and model.leaving:
            key = list(model.leaving)[args[0] % len(model.leaving)]
            holder, blocks = model.leaving.pop(key)
            holder.pinned -= blocks
            assert world.pins.released(key, holder) is None
        elif pin is not None and kind == "remove":
            assert world.pins.remove(pin.key) is pin
            assert world.pins.remove(pin.key) is None
            model.pins.remove(pin)
        elif pin is not None and kind == "settle":
            assert world.pins.settle(pin.key, args[1], FOREVER_S) is pin
        elif pin is not None and kind == "let go":
            pin.engine.pinned -= pin.blocks
            assert world.pins.released(pin.key, pin.engine) is pin
            model.pins.remove(pin)
        check(world, model)
    assert world.pins.are_leaving == bool(model.leaving)
    world.pins.give_up_all()
    model.pins.clear()
    check(world, model)


def check(world: World, model: Model) -> None:
    """All counts are what is there."""
    assert len(world.pins) == len(model.pins)
    assert all(world.pins.get(pin.key) is pin for pin in model.pins)
    assert all(world.pins.of(pin.tenant, pin.conversation) == [pin] for pin in model.pins)
    for engine in world.engines:
        here = [pin for pin in model.pins if pin.engine is engine]
        assert world.sample("held_pins", engine=engine.name) == len(here)
        assert world.sample("held_blocks", engine=engine.name) == sum(pin.blocks for pin in here)
        assert world.sample("held_tokens", engine=engine.name) == sum(pin.tokens for pin in here)
    for tenant in TENANTS:
        mine = sum(pin.blocks for pin in model.pins if pin.tenant == tenant)
        assert world.sample("tenant_held_blocks", tenant=tenant) == mine
