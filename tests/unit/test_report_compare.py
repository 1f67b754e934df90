"""Two runs side by side."""

from __future__ import annotations

import io

import msgspec
import pytest
from bench_results import paper, request, result
from carryback_server.bench.compare import CannotCompare, Change, Comparison, compare, markdown, terminal
from carryback_server.bench.result import Result
from rich.console import Console


def change(comparison: Comparison, figure: str, arm: str = "reuse", group: str = "") -> Change:
    """One figure's."""
    (found,) = (
        each for each in comparison.changes if (each.figure, each.arm, each.group) == (figure, arm, group)
    )
    return found


def shown(comparison: Comparison) -> str:
    """On a terminal."""
    console = Console(file=io.StringIO(), width=200)
    terminal(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_and_itself() -> None:
    comparison = compare(paper(), paper())
    assert comparison.left_out == 0
    assert comparison.differences == []
    assert {each.group for each in comparison.changes} == {"", "512", "1024", "2048", "4096"}
    assert {each.figure for each in comparison.changes} == {"ttft", "itl", "recomputed_per_new"}
    for each in comparison.changes:
        assert each.is_change is False
        assert each.change.value == (0 if each.figure == "recomputed_per_new" else 1)
    assert "yes" not in shown(comparison)


def test_a_run_that_is_slower_in_one_figure() -> None:
    slower = paper(speed=1.3)
    comparison = compare(paper(), slower)
    for arm in ("reuse", "no_reuse", "aggregated"):
        found = change(comparison, "ttft", arm)
        assert found.change.value == pytest.approx(1.3)
        assert found.is_change
        assert found.after == pytest.approx(1.3 * found.before)
    assert change(comparison, "itl").is_change is False
    text = shown(comparison)
    assert "+30.0% (+30.0% to +30.0%)" in text
    assert "yes" in text


def test_noise_alone_is_no_change() -> None:
    comparison = compare(paper(rounds=20), paper(rounds=20, seed=7))
    found = [each for each in comparison.changes if each.figure == "ttft" and not each.group]
    assert [each.is_change for each in found] == [False, False, False]


def test_more_recomputed() -> None:
    before = [request(conversation=f"c{place}", new_tokens=20, recomputed_tokens=40) for place in range(8)]
    after = [
        msgspec.structs.replace(each, recomputed_tokens=60 + place % 2) for place, each in enumerate(before)
    ]
    found = change(compare(result(before), result(after)), "recomputed_per_new")
    assert (found.before, found.pairs) == (2, 8)
    assert found.change.value == pytest.approx(1.025)
    assert found.change.low
    assert 1 <= found.change.low <= 1.025
    assert found.is_change


def test_few_pairs_do_not_tell() -> None:
    comparison = compare(result([request(ttft_s=1.0)]), result([request(ttft_s=5.0)]))
    assert change(comparison, "ttft").is_change is None
    assert "+400.0%" in shown(comparison)


def test_what_is_in_one_run_only_is_left_out() -> None:
    before = [request(turn=turn) for turn in range(1, 5)]
    after = [
        request(turn=1, ttft_s=0.2),
        request(turn=2, error="503"),
        request(turn=3, prompt_tokens=2000),
        request(turn=9),
        request("aggregated", turn=1),
    ]
    comparison = compare(result(before), result(after))
    assert change(comparison, "ttft").pairs == 1
    assert change(comparison, "ttft").change.value == 2
    # Turns 2, 3 of both, turn 4 of the first, turn 9 of the second.
    assert comparison.left_out == 6
    assert "6 requests are left out" in markdown(comparison)


def test_settings_that_differ_are_told() -> None:
    first = paper()
    second = msgspec.structs.replace(first, carryback="0.2.0", settings=first.settings | {"repeats": 9})
    comparison = compare(first, second)
    assert comparison.differences == [("carryback", "0.1.0", "0.2.0"), ("repeats", "-", "9")]
    assert "| repeats | - | 9 |" in markdown(comparison)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (msgspec.structs.replace(paper(), workload="chat"), "different workloads: 'paper' and 'chat'"),
        (
            msgspec.structs.replace(paper(), environment={"model": "Qwen/Qwen3-32B"}),
            "different models: 'SmolLM2-135M-Instruct' and 'Qwen/Qwen3-32B'",
        ),
        (
            result([request("other")], workload="paper"),
            "no arm in common: reuse, no_reuse, aggregated; and other",
        ),
        (result([request("reuse", "somebody")], workload="paper"), "no request is in both runs"),
        (result([], workload="paper"), "no arm in common"),
    ],
    ids=["workload", "model", "arms", "requests", "empty"],
)
def test_runs_that_cannot_be_compared(second: Result, message: str) -> None:
    with pytest.raises(CannotCompare, match=message):
        compare(paper(), second)
