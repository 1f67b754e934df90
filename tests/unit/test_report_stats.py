"""The figures of a run: right where the answer is known, absent where there is too little to tell."""

from __future__ import annotations

import random

import numpy as np
import pytest
from bench_results import paper, request, result
from carryback_server.bench import stats
from carryback_server.bench.result import Request, Transfers
from carryback_server.bench.stats import Estimate, summarize


def times(seconds: list[float], arm: str = "reuse", **fields: object) -> list[Request]:
    """A conversation of one request for each."""
    return [
        request(arm, f"c{place}", ttft_s=each, **fields)  # type: ignore[arg-type]
        for place, each in enumerate(seconds)
    ]


def ttft(requests: list[Request]) -> stats.Percentiles:
    """Of their one arm."""
    figures = summarize(result(requests)).of("reuse")
    assert figures
    return figures.ttft


def test_percentiles_are_those_of_the_values() -> None:
    rng = random.Random(1)
    seconds = [rng.lognormvariate(0, 1) for _ in range(400)]
    found = ttft(times(seconds))
    for estimate, quantile in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert estimate
        assert estimate.value == pytest.approx(np.quantile(seconds, quantile))
        assert estimate.low
        assert estimate.high
        assert estimate.low < estimate.value < estimate.high


def test_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    rng = random.Random(4)
    beyond = [round(rng.gauss(500, 100)) for _ in range(1000)]
    requests = [
        request(conversation=f"c{place}", new_tokens=10, recomputed_tokens=10 + each)
        for place, each in enumerate(beyond)
    ]
    figures = summarize(result(requests)).of("reuse")
    assert figures
    estimate = figures.beyond_new
    assert estimate
    assert estimate.value == pytest.approx(np.mean(beyond))
    assert estimate.low
    assert estimate.high
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 100 / 1000**0.5, rel=0.1)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(100):
        estimate = ttft(times([rng.gauss(10, 1) for _ in range(40)])).p50
        assert estimate
        assert estimate.low
        assert estimate.high
        held += estimate.low <= 10 <= estimate.high
    assert 86 <= held <= 100


@pytest.mark.parametrize(
    ("count", "has", "has_interval"),
    [
        (1, "p50", ""),
        (5, "p50", ""),
        (6, "p50", "p50"),
        (9, "p50", "p50"),
        (10, "p50 p90", "p50"),
        (29, "p50 p90", "p50 p90"),
        (99, "p50 p90", "p50 p90"),
        (100, "p50 p90 p99", "p50 p90"),
        (299, "p50 p90 p99", "p50 p90 p99"),
    ],
)
def test_few_values_do_not_tell_much(count: int, has: str, has_interval: str) -> None:
    found = ttft(times([1 + place / 1000 for place in range(count)]))
    assert found.count == count
    estimates = {name: getattr(found, name) for name in ("p50", "p90", "p99")}
    assert [name for name, each in estimates.items() if each] == has.split()
    assert [name for name, each in estimates.items() if each and each.low] == has_interval.split()


def test_the_same_run_gives_the_same_figures() -> None:
    assert summarize(paper()) == summarize(paper())


def test_conversations_are_drawn_whole() -> None:
    # What differs is only from conversation to conversation: twenty requests in each tell no more than one.
    rng = random.Random(3)
    means = [rng.gauss(10, 1) for _ in range(20)]
    one = [request(conversation=f"c{place}", ttft_s=mean) for place, mean in enumerate(means)]
    many = [
        request(conversation=f"c{place}", turn=turn, ttft_s=mean)
        for place, mean in enumerate(means)
        for turn in range(1, 21)
    ]
    alone = [request(conversation="one", turn=turn, ttft_s=each.ttft_s) for turn, each in enumerate(many)]
    figures = [summarize(result(requests)).of("reuse") for requests in (one, many, alone)]
    widths = []
    for each in figures:
        assert each
        assert each.ttft.p50
        assert each.ttft.p50.low
        assert each.ttft.p50.high
        widths.append(each.ttft.p50.high - each.ttft.p50.low)
    assert [each.unit for each in figures if each] == ["conversation", "conversation", "request"]
    assert [each.units for each in figures if each] == [20, 20, 400]
    assert widths[1] == pytest.approx(widths[0], rel=0.2)
    assert widths[2] < widths[1] / 2


def test_ratio_pairs_requests() -> None:
    # Prompts differ far more than arms do; each takes three times as long without reuse.
    fast = times([float(place + 1) for place in range(12)])
    slow = times([3.0 * (place + 1) for place in range(12)], "no_reuse")
    summary = summarize(result([*slow, *fast]))
    assert summary.arms == ["reuse", "no_reuse"]
    ratio = summary.ratio("no_reuse")
    assert ratio
    assert (ratio.reference, ratio.pairs, ratio.unit) == ("reuse", 12, "conversation")
    assert ratio.ttft == Estimate(3, 3, 3)


def test_ratio_is_of_the_requests_that_both_answered() -> None:
    fast = times([1.0, 1.0, 1.0])
    slow = [*times([2.0, 100.0], "no_reuse")]
    slow[1].error = "503"
    ratio = summarize(result([*fast, *slow])).ratio("no_reuse")
    assert ratio
    assert (ratio.pairs, ratio.ttft) == (1, Estimate(2))


def test_what_is_not_measured_does_not_count() -> None:
    growth = request(turn=1, ttft_s=50.0, is_measured=False, group="4096")
    summary = summarize(result([growth, request(ttft_s=0.5, group="512")]))
    figures = summary.of("reuse")
    assert figures
    assert figures.requests == 1
    assert figures.ttft.p50 == Estimate(0.5)
    assert summary.groups == []


def test_groups_of_numbers_are_in_their_order() -> None:
    summary = summarize(paper(sizes=(4096, 512, 1024)))
    assert summary.groups == ["512", "1024", "4096"]
    medians = [
        each.ttft.p50.value
        for each in summary.figures
        if each.arm == "no_reuse" and each.group and each.ttft.p50
    ]
    assert medians == sorted(medians)
    assert len(medians) == 3


def test_tokens_computed_for_each_new_one() -> None:
    tokens = [(10, 40), (30, 40), (20, 40), (40, 80)]
    requests = [
        request(turn=turn, new_tokens=new, recomputed_tokens=computed, outcome="hit")
        for turn, (new, computed) in enumerate(tokens, start=2)
    ]
    # A conversation's first request has nothing to reuse: all of it is new.
    first = request(turn=1, new_tokens=1000, recomputed_tokens=1000, outcome="miss", reason="first")
    failed = request(turn=9, new_tokens=1, recomputed_tokens=900, outcome="miss", error="503")
    figures = summarize(result([first, *requests, failed])).of("reuse")
    assert figures
    assert figures.recomputed_per_new == Estimate(2.0)
    assert figures.beyond_new == Estimate(25.0)
    assert figures.outcomes == {"hit": 4}
    assert (figures.requests, figures.errors) == (6, 1)


def test_token_counts_that_are_not_told() -> None:
    figures = summarize(result([request(turn=1), request(turn=2)])).of("reuse")
    assert figures
    assert figures.recomputed_per_new is None
    assert figures.beyond_new is None
    assert figures.outcomes == {}
    assert figures.compared == 0


def test_outputs_that_are_identical() -> None:
    requests = [
        request(turn=turn, is_identical=same) for turn, same in enumerate((True, True, False, None), 1)
    ]
    figures = summarize(result(requests)).of("reuse")
    assert figures
    assert (figures.identical, figures.compared) == (2, 3)


def test_inter_token_latencies_are_of_chunks() -> None:
    requests = [request(conversation=f"c{place}", itl_s=[0.1] * 9 + [0.9]) for place in range(10)]
    figures = summarize(result([*requests, request(conversation="silent")])).of("reuse")
    assert figures
    assert figures.itl.count == 100
    assert figures.itl.p50 == Estimate(0.1, 0.1, 0.1)
    assert figures.itl.p99
    assert figures.itl.p99.value == pytest.approx(0.9)


def test_reads_of_kv() -> None:
    transfers = [
        Transfers(arm="reuse", direction="decode_to_prefill", count=4, seconds=0.2, bytes=4e6),
        Transfers(arm="reuse", direction="prefill_to_decode", count=2, seconds=0.0, bytes=0.0),
        Transfers(arm="no_reuse", direction="decode_to_prefill", count=0, seconds=0.0, bytes=0.0),
    ]
    reads = summarize(result([request()], transfers=transfers)).reads
    assert [(each.arm, each.direction, each.count) for each in reads] == [
        ("reuse", "decode_to_prefill", 4),
        ("reuse", "prefill_to_decode", 2),
    ]
    assert reads[0].seconds == pytest.approx(0.05)
    assert reads[0].bytes_per_s == pytest.approx(2e7)
    assert reads[1].bytes_per_s is None


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [request()],
        [request(error="503", ttft_s=0.0)],
        [request(arm, error="503", ttft_s=0.0) for arm in ("reuse", "no_reuse")],
        [request(is_measured=False)],
        [request(ttft_s=0.0)],
        [request(new_tokens=0, recomputed_tokens=0, prompt_tokens=0)],
    ],
    ids=["none", "one", "failed", "all-failed", "unmeasured", "no-token", "empty"],
)
def test_a_run_of_almost_nothing_has_figures(requests: list[Request]) -> None:
    summary = summarize(result(requests))
    for each in summary.figures:
        assert each.ttft.p90 is None
        assert each.itl.count == 0
    assert all(each.ttft is None for each in summary.ratios)


def test_arms_with_other_names_come_last() -> None:
    summary = summarize(
        result([request("http://b"), request("aggregated"), request("reuse"), request("http://a")])
    )
    assert summary.arms == ["reuse", "aggregated", "http://b", "http://a"]
