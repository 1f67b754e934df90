"""The order of prompts that wait at a prefill engine."""

from __future__ import annotations

import pytest
from carryback_vllm.line import Line


def order(line: Line[str]) -> list[str]:
    """Who goes, one after the other."""
    gone = []
    while (key := line.first()) is not None:
        gone.append(key)
        line.leave(key)
    return gone


def waiting(patience_s: float = 120, *, token_s: float = 0.001, **tokens: int) -> Line[str]:
    """Prompts that came a second apart, with so many tokens to compute."""
    line: Line[str] = Line(patience_s)
    if token_s:
        line.learn(token_s * 1000, 1000)
    for at, (key, count) in enumerate(tokens.items()):
        line.join(key, key, count, now=float(at))
    return line


def test_little_to_compute_goes_before_much() -> None:
    assert order(waiting(a=300, b=50, c=200, d=40)) == ["d", "b", "c", "a"]
    assert order(waiting(a=50, b=50, c=50)) == ["a", "b", "c"]


def test_before_anything_is_learned_who_comes_first_goes_first() -> None:
    assert order(waiting(a=30_000, b=50, token_s=0)) == ["a", "b"]


def test_without_patience_who_comes_first_goes_first() -> None:
    assert order(waiting(0, a=30_000, b=50)) == ["a", "b"]


def test_nobody_waits_for_ever() -> None:
    line = waiting(a=1_000_000)
    # It is passed by who comes less than 120 s later, whatever it takes.
    line.join("soon", "soon", 10, now=115)
    line.join("late", "late", 10, now=121)
    assert order(line) == ["soon", "a", "late"]


def test_of_those_that_take_long_who_comes_first_goes_first() -> None:
    assert order(waiting(a=60_000, b=30_000, c=90_000, d=1)) == ["d", "a", "b", "c"]


def test_a_short_prompt_lets_few_pass() -> None:
    # 100 tokens take 0.1 s: who has less to do passes only if he comes within 30 s.
    line = waiting(a=100)
    line.join("soon", "soon", 1, now=29)
    line.join("late", "late", 1, now=31)
    assert order(line) == ["soon", "a", "late"]


def test_it_turns_out_that_less_has_to_be_computed() -> None:
    line = waiting(a=300, b=200)
    assert line.first() == "b"
    line.shorten("a", 100)
    assert line.first() == "a"
    line.shorten("a", 250)
    assert line.first() == "a", "it does not grow again"
    line.shorten("gone", 1)


def test_priorities_of_vllm_come_first() -> None:
    line = waiting(a=50)
    line.join("urgent", "urgent", 30_000, now=9, priority=-1)
    line.join("idle", "idle", 1, now=0, priority=5)
    assert order(line) == ["urgent", "a", "idle"]


def test_nobody_waits_for_who_cannot_go() -> None:
    line = waiting(a=30_000, b=50)
    held_up = {"b"}
    assert line.first(lambda item: item not in held_up) == "a"
    held_up.clear()
    line.look_again()
    assert line.first(lambda item: item not in held_up) == "b"
    held_up |= {"a", "b"}
    line.look_again()
    assert line.first(lambda item: item not in held_up) is None


def test_what_is_learned_lately_counts_more() -> None:
    line = waiting(a=300, b=100)
    assert line.first() == "b"
    for _ in range(50):
        line.learn(0.000_001, 1000)
    # Now a thousand tokens take no time, and who came first goes first.
    assert line.first() == "a"


@pytest.mark.parametrize("count", [0, 1])
def test_who_is_there(count: int) -> None:
    line = waiting(**{"a": 1} if count else {})
    assert len(line) == count
    assert ("a" in line) == bool(count)
    line.leave("a")
    line.leave("a")
    assert "a" not in line
    assert line.first() is None
