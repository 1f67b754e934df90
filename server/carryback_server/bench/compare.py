"""Two runs of one workload side by side: what changed, and whether chance explains it.

Requests are compared with themselves: the same place in the same conversation, with a prompt as long. An interval
covers what differs from request to request within the two runs. That the machine was slower on one of the two
days it does not know.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from carryback_server.bench import report, stats
from carryback_server.bench.report import NONE, Table, arm_name, number
from carryback_server.bench.result import Request, Result
from carryback_server.bench.stats import Estimate

# How far the lengths of one prompt may differ between the runs; answers, which later prompts repeat, do.
MAX_DRIFT = 0.05

_Pair = tuple[Request, Request]


class CannotCompare(ValueError):
    """The two runs did not do the same; the message says what differs."""


@dataclass(frozen=True)
class Change:
    """One figure of an arm, or of a group of its requests, in both runs.

    Attributes:
        figure: `ttft`, `itl` (seconds; medians) or `recomputed_per_new`.
        before, after: in the first run and in the second, of the requests that are in both.
        pairs: how many requests those are.
        change: median of the ratios, second to first, of each request's times; for `recomputed_per_new` the
            difference of the two.
    """

    arm: str
    group: str
    figure: str
    pairs: int
    before: float
    after: float
    change: Estimate

    @property
    def is_change(self) -> bool | None:
        """Whether the interval excludes that nothing changed; None without an interval."""
        if self.change.low is None or self.change.high is None:
            return None
        nothing = 0.0 if self.figure == "recomputed_per_new" else 1.0
        return not self.change.low <= nothing <= self.change.high


@dataclass(frozen=True)
class Comparison:
    """What changed from one run to the other.

    Attributes:
        left_out: requests of arms that both have which are not in both, failed, or have prompts of another length.
        differences: settings and environment that are not equal: name, first, second.
    """

    workload: str
    grouped_by: str
    groups: list[str]
    changes: list[Change]
    left_out: int
    differences: list[tuple[str, str, str]]


def compare(a: Result, b: Result) -> Comparison:
    """What changed from `a` to `b`.

    Raises:
        CannotCompare: they are of different workloads or models, or have no request in common.
    """
    for name, one, other in (
        ("workloads", a.workload, b.workload),
        ("models", _model(a), _model(b)),
    ):
        if one != other:
            raise CannotCompare(f"the runs are of different {name}: {one!r} and {other!r}")
    of_a, of_b = ([each for each in run.requests if each.is_measured] for run in (a, b))
    arms = [arm for arm in stats.arms_of(of_a) if stats.select(of_b, arm)]
    if not arms:
        raise CannotCompare(
            f"the runs have no arm in common: {', '.join(stats.arms_of(of_a)) or 'none'}; "
            f"and {', '.join(stats.arms_of(of_b)) or 'none'}"
        )
    groups = stats.groups_of([*of_a, *of_b])
    changes: list[Change] = []
    left_out = 0
    for arm in arms:
        first, second = stats.select(of_a, arm), stats.select(of_b, arm)
        pairs = [pair for pair in stats.paired(first, second) if _is_same(*pair)]
        left_out += len(first) + len(second) - 2 * len(pairs)
        for group in [*groups, ""]:
            changes += _changes(arm, group, [pair for pair in pairs if not group or pair[0].group == group])
    if not changes:
        raise CannotCompare(
            "no request is in both runs with a prompt of the same length; were they made with one seed and one size?"
        )
    return Comparison(
        workload=a.workload,
        grouped_by=stats.summarize(a).grouped_by,
        groups=groups,
        changes=changes,
        left_out=left_out,
        differences=_differences(a, b),
    )


def terminal(comparison: Comparison, console: Console) -> None:
    """Print what changed."""
    for table in _tables(comparison):
        report.print_table(table, console)
    console.print(Text(_about(comparison), "dim"))


def markdown(comparison: Comparison) -> str:
    """What changed, as Markdown."""
    parts = [f"## carryback bench: {comparison.workload}, two runs"]
    parts += map(report.table_markdown, _tables(comparison))
    return "\n\n".join([*parts, _about(comparison)]) + "\n"


def _model(result: Result) -> str:
    return str(result.environment.get("model") or result.settings.get("model") or "")


def _is_same(one: Request, other: Request) -> bool:
    return abs(one.prompt_tokens - other.prompt_tokens) <= MAX_DRIFT * one.prompt_tokens


def _changes(arm: str, group: str, pairs: Sequence[_Pair]) -> list[Change]:
    found = []
    timed: list[tuple[str, Callable[[Request], float], Sequence[_Pair]]] = [
        ("ttft", lambda request: request.ttft_s, pairs),
        ("itl", _itl, [pair for pair in pairs if _itl(pair[0]) and _itl(pair[1])]),
    ]
    for figure, of, chosen in timed:
        change, _ = stats.median_of(chosen, lambda pair, of=of: of(pair[1]) / of(pair[0]))  # type: ignore[misc]
        if change:
            before, after = (statistics.median(of(pair[place]) for pair in chosen) for place in (0, 1))
            found.append(Change(arm, group, figure, len(chosen), before, after, change))
    counted = [pair for pair in pairs if all(_is_counted(each) for each in pair)]
    if recomputed := _recomputed(arm, group, counted):
        found.append(recomputed)
    return found


def _itl(request: Request) -> float:
    return statistics.median(request.itl_s) if request.itl_s else 0.0


def _is_counted(request: Request) -> bool:
    return stats.follows(request) and request.recomputed_tokens is not None and bool(request.new_tokens)


def _recomputed(arm: str, group: str, pairs: Sequence[_Pair]) -> Change | None:
    if not pairs:
        return None
    _, owners, _ = stats.units_of([first for first, _ in pairs])
    columns = [
        [float(getattr(pair[place], name)) for pair in pairs]
        for place in (0, 1)
        for name in ("recomputed_tokens", "new_tokens")
    ]
    before, after = (sum(columns[place]) / sum(columns[place + 1]) for place in (0, 2))
    sums = stats.resampled_sums(columns, owners)
    drawn = None if sums is None else sums[2] / sums[3] - sums[0] / sums[1]
    change = stats.interval(after - before, drawn)
    return Change(arm, group, "recomputed_per_new", len(pairs), before, after, change)


def _differences(a: Result, b: Result) -> list[tuple[str, str, str]]:
    one, other = ({"carryback": run.carryback, **run.settings, **run.environment} for run in (a, b))
    return [
        (name, report.shown(one.get(name)), report.shown(other.get(name)))
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]


def _tables(comparison: Comparison) -> list[Table]:
    grouped = bool(comparison.groups)
    names = [comparison.grouped_by, "arm"] if grouped else ["arm"]
    tables = []
    for figure, title, scale in (
        ("ttft", "Time to first token, p50, ms", 1000.0),
        ("itl", "Inter-token latency, p50, ms", 1000.0),
        ("recomputed_per_new", "Tokens computed for each new token", 1.0),
    ):
        is_ratio = figure != "recomputed_per_new"
        rows = [
            [
                *([report.group_name(each.group)] if grouped else []),
                arm_name(each.arm),
                f"{each.pairs:,}",
                number(each.before * scale),
                number(each.after * scale),
                _signed(each.change, is_ratio),
                {None: NONE, True: "yes", False: "no"}[each.is_change],
            ]
            for each in comparison.changes
            if each.figure == figure
        ]
        columns = [*names, "pairs", "first", "second", "change", "beyond chance"]
        tables.append(Table(title, columns, rows, len(names)))
    rows = [list(each) for each in comparison.differences]
    tables.append(Table("What differs between the runs", ["", "first", "second"], rows, text_columns=3))
    return [each for each in tables if each.rows]


def _signed(change: Estimate, is_ratio: bool) -> str:
    def shown(value: float) -> str:
        return f"{(value - 1) * 100:+.1f}%" if is_ratio else f"{value:+.2f}"

    if change.low is None or change.high is None:
        return shown(change.value)
    return f"{shown(change.value)} ({shown(change.low)} to {shown(change.high)})"


def _about(comparison: Comparison) -> str:
    left_out = (
        f" {comparison.left_out:,} requests are left out: not in both runs, failed, or with a prompt of another length."
        if comparison.left_out
        else ""
    )
    return (
        "Each request is compared with itself in the other run; the change is the median of the ratios (of tokens: the "
        "difference), in brackets its 95% bootstrap interval. Beyond chance: the interval excludes no change. With many "
        "figures some are beyond chance by chance, and that the machine was slower in one run no interval shows."
        + left_out
    )
