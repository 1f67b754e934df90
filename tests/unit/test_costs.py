"""When a read pays, as learned from what prefill engines say."""

from __future__ import annotations

import random

import pytest
from carryback.wire import Reuse, Work
from carryback_server.costs import MAX_PAIRS, MIN_SAMPLES, NEVER, Costs, Line
from hypothesis import given
from hypothesis import strategies as st

RATE_S, READ_S, READ_RATE_S = 1e-3, 0.05, 1e-5
BREAK_EVEN = READ_S / (RATE_S - READ_RATE_S)


def learned(
    costs: Costs,
    turns: int = 200,
    *,
    rate_s: float = RATE_S,
    read_s: float = READ_S,
    read_rate_s: float = READ_RATE_S,
    noise: float = 0.1,
    sizes: tuple[int, int] = (100, 4000),
) -> Costs:
    """After so many turns of engines that take so long."""
    chance = random.Random(0)
    for _ in range(turns):
        reused, new = chance.randint(*sizes), chance.randint(10, 1000)
        scale = chance.uniform(1 - noise, 1 + noise)
        work = Work((read_s + read_rate_s * reused) * scale, (0.01 + rate_s * new) * scale, new)
        costs.learn("p", "d", Reuse("hit", reused, "verified", new), work)
    return costs


def test_nothing_is_known_before_there_were_samples_enough() -> None:
    costs = learned(Costs(), MIN_SAMPLES)  # the first read shakes hands, and does not count
    assert costs.break_even("p", "d") is None
    assert costs.threshold("p", "d") is None
    assert costs.saved_s("p", "d", 1000) is None
    learned(costs, 1)
    assert costs.break_even("p", "d") is not None
    assert costs.break_even("p", "other") is None


def test_the_break_even_is_where_the_two_lines_cross() -> None:
    costs = learned(Costs())
    assert costs.break_even("p", "d") == pytest.approx(BREAK_EVEN, rel=0.25)
    saved = costs.saved_s("p", "d", 2000)
    assert saved == pytest.approx(2000 * (RATE_S - READ_RATE_S) - READ_S, rel=0.1)
    below = costs.saved_s("p", "d", 10)
    assert below is not None
    assert below < 0


def test_a_read_that_is_dearer_than_to_compute_never_pays() -> None:
    costs = learned(Costs(), read_rate_s=5 * RATE_S)
    assert costs.break_even("p", "d") == NEVER
    thresholds = [costs.threshold("p", "d") for _ in range(200)]
    told = [each for each in thresholds if each is not None]
    assert min(told) > 10**6
    # What is not tried is not learned.
    assert 1 <= thresholds.count(None) <= 20


def test_engines_that_change_are_learned_anew() -> None:
    costs = learned(Costs(), 500, read_rate_s=5 * RATE_S)
    learned(costs, 500)
    assert costs.break_even("p", "d") == pytest.approx(BREAK_EVEN, rel=0.3)


def test_what_was_held_up_by_something_else_counts_little() -> None:
    line = Line()
    for number in range(100):
        line.learn(1000, 60.0 if number == 50 else 0.1)
    assert line.seconds(1000) < 0.2


def test_the_first_read_between_two_engines_does_not_count() -> None:
    costs = Costs()
    costs.learn("p", "d", Reuse("hit", 1000, "verified", 10), Work(30.0, 0.1, 10))
    learned(costs)
    assert costs.break_even("p", "d") == pytest.approx(BREAK_EVEN, rel=0.25)


def test_reads_of_one_size_are_taken_to_be_of_fixed_cost() -> None:
    """So that no read is done that may not pay."""
    costs = learned(Costs(), sizes=(2000, 2000), noise=0.0)
    assert costs.break_even("p", "d") == pytest.approx((READ_S + READ_RATE_S * 2000) / RATE_S, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), max_size=60))
def test_a_line_has_no_negative_part_and_no_nonsense(samples: list[tuple[int, float]]) -> None:
    line = Line()
    for tokens, seconds in samples:
        line.learn(tokens, seconds)
    assert line.slope_s >= 0
    assert line.fixed_s >= -1e-6
    assert line.seconds(1000) >= line.seconds(0) >= -1e-6


def test_what_is_no_work_teaches_nothing() -> None:
    costs = Costs()
    for _ in range(20):
        costs.learn("p", "d", Reuse("hit", 100, "verified"), Work(0.0, 0.0, 0))
        costs.learn("p", None, Reuse("miss", 0, "new", 10), Work(0.0, 0.1, 10))
    assert costs.view() == []


def test_engines_that_come_and_go_do_not_pile_up() -> None:
    costs = Costs()
    for number in range(MAX_PAIRS + 50):
        costs.learn(f"p{number}", "d", Reuse("hit", 64, "verified", 1), Work(0.1, 0.1, 1))
    assert len(costs.view()) == MAX_PAIRS
