"""Leases and pins: how many blocks they keep, for whom, and that nothing is kept after their end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from carryback_vllm.holds import Holds
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


@dataclass(frozen=True)
class Block:
    block_id: int


BLOCKS = [Block(number) for number in range(12)]
NAMES = st.sampled_from("abcdef")


@dataclass
class Pool:
    """As vLLM counts who uses a block."""

    users: Counter[int] = field(default_factory=Counter)

    def touch(self, blocks: Any) -> None:
        self.users.update(each.block_id for each in blocks)

    def free(self, blocks: Any) -> None:
        self.users.subtract(each.block_id for each in blocks)
        assert min(self.users.values()) >= 0
        self.users = +self.users

    def holds(self, each: int = 99, all: int = 99) -> Holds:
        return Holds(self.touch, self.free, each=each, all=all)


def test_blocks_that_several_hold_count_once() -> None:
    pool = Pool()
    holds = pool.holds(each=6, all=8)
    assert holds.take("a", BLOCKS[:6], 1, "one")
    assert holds.take("b", BLOCKS[:6], 1, "one")
    assert holds.blocks == 6
    assert not holds.take("c", BLOCKS[:7], 1, "one")  # the owner's limit
    assert holds.take("c", BLOCKS[2:8], 1, "two")
    assert holds.blocks == 8
    assert not holds.take("d", BLOCKS[8:9], 1, "three")  # the limit of all
    assert "d" not in holds
    assert holds.end(["a", "unknown"]) == ["a"]
    assert holds.blocks == 8
    assert pool.users[3] == 2
    assert holds.end(["b"]) == ["b"]
    assert holds.blocks == 6
    assert holds.take("d", BLOCKS[8:10], 1, "one")
    assert sorted(holds.end_all()) == ["c", "d"]
    assert (holds.blocks, len(holds), pool.users) == (0, 0, Counter())


def test_an_owner_that_holds_nothing_leaves_nothing() -> None:
    holds = Pool().holds()
    for number in range(100):
        assert holds.take("a", BLOCKS[:2], 1, f"owner {number}")
        holds.end(["a"])
    assert not holds.take("a", [], 1, "owner")
    assert (len(holds._counts), len(holds._by_last), holds._counts[None]) == (1, 0, Counter())


def test_a_newer_hold_covers_those_that_have_no_more() -> None:
    holds = Pool().holds()
    holds.take("beginning", BLOCKS[:3], 10)
    holds.take("same", BLOCKS[:5], 20)
    holds.take("another branch", [*BLOCKS[:3], BLOCKS[8]], 10)
    holds.take("longer", BLOCKS[:6], 10)
    holds.take("later", BLOCKS[:2], 21)
    holds.take("new", BLOCKS[:5], 20)
    assert sorted(holds.covered("new")) == ["beginning", "same"]


def test_holds_end_when_their_time_is_over_unless_it_is_extended() -> None:
    holds = Pool().holds()
    for name in "abc":
        holds.take(name, BLOCKS[:2], 10)
    holds.extend(["b", "unknown"], 20)
    assert holds.end_late(9.9) == []
    assert sorted(holds.end_late(10)) == ["a", "c"]
    assert holds.end_late(19) == []
    assert holds.end_late(20) == ["b"]


@given(st.lists(st.tuples(st.sets(st.integers(0, 11)), st.integers(0, 3)), max_size=8))
def test_what_is_covered_is_what_sets_say(made: list[tuple[set[int], int]]) -> None:
    holds = Pool().holds()
    for name, (ids, until) in enumerate(made):
        holds.take(str(name), [BLOCKS[each] for each in sorted(ids)], until)
    for name, (ids, until) in enumerate(made):
        if ids:
            others = {
                str(other)
                for other, (theirs, end) in enumerate(made)
                if other != name and theirs and theirs <= ids and end <= until
            }
            assert sorted(holds.covered(str(name))) == sorted(others)


class _Machine(RuleBasedStateMachine):
    """Any order of calls, beside a dictionary that is kept by hand."""

    @initialize(each=st.integers(0, 12), all=st.integers(0, 12))
    def begin(self, each: int, all: int) -> None:
        self.each, self.all = each, all
        self.pool = Pool()
        self.holds = self.pool.holds(each, all)
        self.model: dict[str, tuple[str, set[int], float]] = {}

    def _union(self, owner: str | None, more: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
        held = (ids for who, ids, _ in self.model.values() if owner in (None, who))
        return set(more).union(*held)

    @rule(name=NAMES, owner=st.sampled_from("xy"), ids=st.sets(st.integers(0, 11)), until=st.integers(0, 9))
    def take(self, name: str, owner: str, ids: set[int], until: float) -> None:
        fits = len(self._union(owner, ids)) <= self.each and len(self._union(None, ids)) <= self.all
        expected = name in self.model or (bool(ids) and fits)
        assert self.holds.take(name, [BLOCKS[each] for each in sorted(ids)], until, owner) == expected
        if expected:
            self.model.setdefault(name, (owner, ids, until))

    @rule(names=st.lists(NAMES), until=st.integers(0, 9))
    def extend(self, names: list[str], until: float) -> None:
        self.holds.extend(names, until)
        for name in names:
            if name in self.model:
                self.model[name] = (*self.model[name][:2], until)

    @rule(names=st.lists(NAMES))
    def end(self, names: list[str]) -> None:
        gone = [name for name in dict.fromkeys(names) if self.model.pop(name, None) is not None]
        assert self.holds.end(names) == gone

    @rule(now=st.integers(0, 9))
    def end_late(self, now: float) -> None:
        gone = {name for name, (_, _, until) in self.model.items() if until <= now}
        assert set(self.holds.end_late(now)) == gone
        for name in gone:
            del self.model[name]

    @invariant()
    def agrees(self) -> None:
        assert len(self.holds) == len(self.model)
        assert self.holds.blocks == len(self._union(None))
        assert self.pool.users == Counter(each for _, ids, _ in self.model.values() for each in ids)


TestHoldsInAnyOrder = _Machine.TestCase


@pytest.mark.parametrize("limits", [(0, 9), (9, 0)])
def test_a_limit_of_nothing_holds_nothing(limits: tuple[int, int]) -> None:
    pool = Pool()
    assert not pool.holds(*limits).take("a", BLOCKS[:1], 1)
    assert not pool.users
