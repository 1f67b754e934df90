"""The figures of a run, and how sure they are.

Intervals are 95% percentile bootstrap intervals (Efron, 1979) with a fixed seed, so that a result always gives
the same figures. What is drawn anew is a whole conversation, since its requests depend on each other; a run
with few conversations draws requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from carryback_server.bench.result import Request, Result

SEED = 20_240_501
RESAMPLES = 1000
LEVEL = 0.95
# Of conversations or requests that an interval needs. The range of five values holds their median with less
# than 95%, and no bootstrap interval is wider than that range.
MIN_UNITS = 6
# Of one chunk of resamples, in numbers.
_CHUNK = 2_000_000
_ORDER = ("reuse", "no_reuse", "aggregated")
# What the groups of a workload's requests are.
_GROUPED_BY = {"paper": "prompt size", "agent": "turn", "chat": "turn"}

Unit = Literal["conversation", "request"]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; without one where there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Percentiles:
    """Of times in seconds.

    Attributes:
        count: of values.
        p50, p90, p99: None if so few values say nothing about it: p90 needs 10 of them, p99 needs 100.
    """

    count: int
    p50: Estimate | None
    p90: Estimate | None
    p99: Estimate | None


@dataclass(frozen=True)
class Figures:
    """Of an arm's measured requests, or those of one group of them.

    Attributes:
        group: empty: all.
        requests, errors: how many there were, and how many of them failed; those are in no other figure.
        prompt_tokens: median.
        ttft, itl: time to first token, of each request; inter-token latency, of each chunk.
        unit, units: what intervals draw anew, and how many of them there are.
        outcomes: of the requests that follow another of their conversation, by what the router says of
            their reuse.
        recomputed_per_new: tokens computed over tokens that are new, of those requests; 1.0 is ideal.
        beyond_new: tokens computed less tokens that are new, mean of those requests.
        identical, compared: outputs that are those of the run's reference arm, and how many were compared.
        logprob_gap: the most by which the log-probability of a token of one of those differs from the reference's.
    """

    arm: str
    group: str
    requests: int
    errors: int
    prompt_tokens: float | None
    ttft: Percentiles
    itl: Percentiles
    unit: Unit
    units: int
    outcomes: dict[str, int]
    recomputed_per_new: Estimate | None
    beyond_new: Estimate | None
    identical: int
    compared: int
    logprob_gap: float | None


@dataclass(frozen=True)
class Ratio:
    """How many times as long an arm's first token takes as the reference's, for the same request.

    Attributes:
        pairs: requests that both arms answered.
        ttft: median of the ratios of pairs; None without pairs.
    """

    arm: str
    reference: str
    group: str
    pairs: int
    unit: Unit
    ttft: Estimate | None


@dataclass(frozen=True)
class Reads:
    """KV that one engine read from another.

    Attributes:
        seconds, bytes: of one read, mean.
        bytes_per_s: while reading; None if the engines counted no time.
    """

    arm: str
    direction: str
    count: int
    seconds: float
    bytes: float
    bytes_per_s: float | None


@dataclass(frozen=True)
class Summary:
    """All figures of a run.

    Attributes:
        arms: those with measured requests; the reference first.
        groups: of requests, in order; empty if there are not several.
        grouped_by: what they are: `prompt size`, `turn` or `group`.
        figures: of each arm, then of each arm and group.
        ratios: of each other arm to the reference; all, then by group.
    """

    arms: list[str]
    groups: list[str]
    grouped_by: str
    figures: list[Figures] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)

    def of(self, arm: str, group: str = "") -> Figures | None:
        """The figures of an arm, or of a group of its requests."""
        return next((each for each in self.figures if (each.arm, each.group) == (arm, group)), None)

    def ratio(self, arm: str, group: str = "") -> Ratio | None:
        """An arm's ratio to the reference."""
        return next((each for each in self.ratios if (each.arm, each.group) == (arm, group)), None)


def summarize(result: Result) -> Summary:
    """The figures of a run."""
    measured = [each for each in result.requests if each.is_measured]
    arms = arms_of(measured)
    groups = groups_of(measured)
    summary = Summary(arms, groups, _GROUPED_BY.get(result.workload, "group"))
    for group in ["", *groups]:
        chosen = {arm: select(measured, arm, group) for arm in arms}
        for arm in arms:
            if chosen[arm] or not group:
                summary.figures.append(_figures(chosen[arm], arm, group))
        for arm in arms[1:]:
            pairs = paired(chosen[arms[0]], chosen[arm])
            estimate, unit = median_of(pairs, lambda pair: pair[1].ttft_s / pair[0].ttft_s)
            summary.ratios.append(Ratio(arm, arms[0], group, len(pairs), unit, estimate))
    for each in result.transfers:
        if each.count:
            speed = each.bytes / each.seconds if each.seconds else None
            size = each.bytes / each.count
            summary.reads.append(
                Reads(each.arm, each.direction, each.count, each.seconds / each.count, size, speed)
            )
    return summary


def arms_of(requests: Sequence[Request]) -> list[str]:
    """Their arms; the reference, reuse where it is there, first."""
    found = list(dict.fromkeys(each.arm for each in requests))
    return sorted(found, key=lambda arm: _ORDER.index(arm) if arm in _ORDER else len(_ORDER))


def groups_of(requests: Sequence[Request]) -> list[str]:
    """Their groups if there are several: numbers in their order, names as they first come."""
    found = list(dict.fromkeys(each.group for each in requests if each.group))
    if all(group.isdecimal() for group in found):
        found.sort(key=int)
    return found if len(found) > 1 else []


def select(requests: Sequence[Request], arm: str, group: str = "") -> list[Request]:
    """Those of an arm, and of a group if one is named."""
    return [each for each in requests if each.arm == arm and (not group or each.group == group)]


def answered(requests: Sequence[Request]) -> list[Request]:
    """Those that brought a token."""
    return [each for each in requests if not each.error and each.ttft_s > 0]


def follows(request: Request) -> bool:
    """Whether an earlier request left something that this one could reuse."""
    if request.new_tokens is not None:
        return request.new_tokens < request.prompt_tokens
    return (request.turn, request.step) != (1, 1)


def paired(first: Sequence[Request], second: Sequence[Request]) -> list[tuple[Request, Request]]:
    """The requests that both answered."""
    of_first = {(each.conversation, each.turn, each.step): each for each in answered(first)}
    pairs = []
    for each in answered(second):
        if other := of_first.get((each.conversation, each.turn, each.step)):
            pairs.append((other, each))
    return pairs


def median_of(
    pairs: Sequence[tuple[Request, Request]], value: Callable[[tuple[Request, Request]], float]
) -> tuple[Estimate | None, Unit]:
    """The median of a value of each pair, and what its interval draws anew."""
    unit, owners, _ = units_of([first for first, _ in pairs])
    found = quantiles([[value(pair)] for pair in pairs], owners, (0.5,))
    return found[0], unit


def quantiles(
    values: Sequence[Sequence[float]], owners: Sequence[int], which: Sequence[float]
) -> list[Estimate | None]:
    """Quantiles of the values of all requests, as numpy's "linear" method has them.

    Args:
        values: of each request.
        owners: of each request: the number of what is drawn anew with it.
        which: in [0.5, 1).

    Returns:
        None for a quantile beyond which less than one value is to be expected. No interval if the range of the
        values holds the quantile with less than 95%: no bootstrap interval is wider. p50 needs 6 values
        for one, p90 29, p99 299.
    """
    flat = np.array([each for some in values for each in some], dtype=np.float64)
    if not len(flat):
        return [None] * len(which)
    owner = np.repeat(np.array(owners), [len(some) for some in values])
    order = np.argsort(flat, kind="stable")
    flat, owner = flat[order], owner[order]
    units = len(set(owner.tolist()))
    owner = np.unique(owner, return_inverse=True)[1]
    drawn: list[list[float]] = [[] for _ in which]
    if units >= MIN_UNITS:
        for weights in _resamples(units, max(units, len(flat))):
            # How many values there are up to each one, in each resample.
            counts = np.cumsum(weights[:, owner], axis=1)
            for found, quantile in zip(drawn, which, strict=True):
                found += _linear(flat, counts, quantile).tolist()
    estimates: list[Estimate | None] = []
    for found, quantile in zip(drawn, which, strict=True):
        count = len(flat)
        if quantile > 0.5 and count * (1 - quantile) < 1 - 1e-9:
            estimates.append(None)
        elif not found or 1 - quantile**count - (1 - quantile) ** count < LEVEL:
            estimates.append(Estimate(float(np.quantile(flat, quantile))))
        else:
            estimates.append(interval(float(np.quantile(flat, quantile)), np.array(found)))
    return estimates


def ratio_of_sums(above: Sequence[float], below: Sequence[float], owners: Sequence[int]) -> Estimate | None:
    """The sum of what is above over the sum of what is below; with ones below, a mean.

    Args:
        owners: see `quantiles`.
    """
    if not sum(below):
        return None
    sums = resampled_sums([above, below], owners)
    drawn = None if sums is None else sums[0] / sums[1]
    return interval(sum(above) / sum(below), drawn)


def resampled_sums(columns: Sequence[Sequence[float]], owners: Sequence[int]) -> Numbers | None:
    """The sum of each column in each resample, a row a column; None if there are too few owners to draw from."""
    number = np.unique(np.array(owners), return_inverse=True)[1]
    units = int(number.max(initial=-1)) + 1
    if units < MIN_UNITS:
        return None
    sums = np.stack([np.bincount(number, np.array(column), units) for column in columns], axis=1)
    drawn: Numbers = np.concatenate([weights @ sums for weights in _resamples(units, units)]).T
    return drawn


def interval(value: float, drawn: Numbers | None) -> Estimate:
    """A figure with the interval that its resamples give; those that have no value (NaN) do not count."""
    if drawn is None:
        return Estimate(value)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn[np.isfinite(drawn)], (tail, 1 - tail))
    return Estimate(value, float(low), float(high))


def _figures(requests: Sequence[Request], arm: str, group: str) -> Figures:
    good = answered(requests)
    unit, owners, units = units_of(good)
    later = [each for each in good if follows(each)]
    counted = [
        (each.recomputed_tokens, each.new_tokens, owner)
        for each, owner in zip(good, owners, strict=True)
        if follows(each) and each.recomputed_tokens is not None and each.new_tokens is not None
    ]
    computed, new, of = (
        [each[0] for each in counted],
        [each[1] for each in counted],
        [each[2] for each in counted],
    )
    beyond = [has - needs for has, needs in zip(computed, new, strict=True)]
    outcomes: dict[str, int] = {}
    for each in later:
        if each.outcome:
            outcomes[each.outcome] = outcomes.get(each.outcome, 0) + 1
    return Figures(
        arm=arm,
        group=group,
        requests=len(requests),
        errors=sum(bool(each.error) for each in requests),
        prompt_tokens=float(np.median([each.prompt_tokens for each in good])) if good else None,
        ttft=_percentiles([[each.ttft_s] for each in good], owners),
        itl=_percentiles([each.itl_s for each in good], owners),
        unit=unit,
        units=units,
        outcomes=outcomes,
        recomputed_per_new=ratio_of_sums(computed, new, of),
        beyond_new=ratio_of_sums(beyond, [1.0] * len(beyond), of),
        identical=sum(each.is_identical is True for each in good),
        compared=sum(each.is_identical is not None for each in good),
        logprob_gap=max((each.logprob_gap for each in good if each.logprob_gap is not None), default=None),
    )


def _percentiles(values: Sequence[Sequence[float]], owners: Sequence[int]) -> Percentiles:
    p50, p90, p99 = quantiles(values, owners, (0.5, 0.9, 0.99))
    return Percentiles(sum(map(len, values)), p50, p90, p99)


def units_of(requests: Sequence[Request]) -> tuple[Unit, list[int], int]:
    """What is drawn anew, the number of each request's one, and how many there are."""
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(each.conversation for each in requests))
    }
    if len(numbers) >= MIN_UNITS:
        return "conversation", [numbers[each.conversation] for each in requests], len(numbers)
    return "request", list(range(len(requests))), len(requests)


def _resamples(units: int, width: int) -> Iterator[npt.NDArray[np.int64]]:
    """How often each unit was drawn, a row a resample, in chunks that hold in memory.

    Args:
        width: numbers that the caller needs for a resample.
    """
    random = np.random.default_rng(SEED)
    rows = max(1, _CHUNK // width)
    for done in range(0, RESAMPLES, rows):
        yield random.multinomial(units, np.full(units, 1 / units), min(rows, RESAMPLES - done))


def _linear(values: Numbers, counts: npt.NDArray[np.int64], quantile: float) -> Numbers:
    """A quantile of each resample.

    Args:
        values: in order.
        counts: of each resample (row), how many values there are up to each of `values`.
    """
    place = (counts[:, -1] - 1) * quantile
    below = np.floor(place).astype(np.int64)
    low, high = (
        values[np.minimum((counts <= rank[:, None]).sum(axis=1), len(values) - 1)]
        for rank in (below, below + 1)
    )
    found: Numbers = low + (high - low) * (place - below)
    return found
