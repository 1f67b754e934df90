"""The figures of a run as tables: for a terminal, and in Markdown to paste."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from carryback_server.bench import stats
from carryback_server.bench.result import Result
from carryback_server.bench.stats import Estimate, Figures, Summary

NONE = "-"
ARMS = {"no_reuse": "no reuse", "aggregated": "one engine"}
DIRECTIONS = {"decode_to_prefill": "decode to prefill", "prefill_to_decode": "prefill to decode"}
_SIGNIFICANT = 3
_INTERVAL = re.compile(r" \([^)]* to [^)]*\)")
_ANY_WIDTH = 1000


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        text_columns: how many of the first columns are names rather than numbers.
        note: what a reader must know of it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    note: str = ""


def terminal(result: Result, console: Console) -> None:
    """Print a run's figures."""
    summary = stats.summarize(result)
    for line in headlines(summary):
        console.print(Text(line, "bold"))
    for table in tables(summary, result):
        print_table(table, console)
    console.print(Text(about(summary), "dim"))


def markdown(result: Result) -> str:
    """A run's figures, settings and environment, as Markdown."""
    summary = stats.summarize(result)
    parts = [f"## carryback bench: {_escaped(result.workload)}", *headlines(summary)]
    parts += [table_markdown(each) for each in [*tables(summary, result), *setting_tables(result)]]
    return "\n\n".join([*parts, about(summary)]) + "\n"


def headlines(summary: Summary) -> list[str]:
    """What came out, in sentences."""
    return [
        line
        for line in (
            *_sooner(summary),
            _recomputed(summary),
            _identical(summary),
            _failed(summary),
        )
        if line
    ]


def tables(summary: Summary, result: Result) -> list[Table]:
    """All tables of figures that have something to show."""
    found = [
        _ttft(summary),
        _itl(summary),
        _tokens(summary, result.block_size),
        _reads(summary),
        _costs(result),
    ]
    return [each for each in found if each.rows]


def setting_tables(result: Result) -> list[Table]:
    """What was run, and on what."""
    run = [
        ["carryback", result.carryback],
        ["started", result.started],
        ["took", f"{result.duration_s:,.0f} s"],
        ["tokens in a KV block", f"{result.block_size:,}" if result.block_size else "not known"],
    ]
    settings = [[name, shown(value)] for name, value in result.settings.items()]
    environment = [[name, shown(value)] for name, value in result.environment.items()]
    return [
        Table("Settings", ["setting", "value"], settings, text_columns=2),
        Table("Environment", ["", "value"], run + environment, text_columns=2),
    ]


def about(summary: Summary) -> str:
    """How to read the figures."""
    overall = [figures for arm in summary.arms if (figures := summary.of(arm))]
    drawn = " and ".join(sorted({f"{each.unit}s" for each in overall}))
    return (
        f"In brackets: 95% bootstrap intervals ({stats.RESAMPLES:,} resamples of {drawn}). Without one, or with a dash: "
        "there were too few values to tell (p90 needs 10, p99 needs 100; intervals of p50 need 6, of p90 29, of p99 299)."
    )


def table_markdown(table: Table) -> str:
    """One table, with its title and note."""
    names = "|".join("---" for _ in table.columns[: table.text_columns])
    numbers = "".join("|---:" for _ in table.columns[table.text_columns :])
    lines = [f"### {table.title}", ""]
    lines += [_row(table.columns), f"|{names}{numbers}|", *map(_row, table.rows)]
    return "\n".join([*lines, "", table.note] if table.note else lines)


def print_table(table: Table, console: Console) -> None:
    """One table, on a terminal; without intervals where there is no room for them."""
    grid = _grid(table, table.rows)
    note = table.note
    needed = console.measure(grid, options=console.options.update(width=_ANY_WIDTH)).maximum
    if needed > console.width:
        rows = [[_INTERVAL.sub("", cell) for cell in row] for row in table.rows]
        if rows != table.rows:
            grid = _grid(table, rows)
            note = f"{note} Intervals are shown where {needed} columns have room.".strip()
    console.print(grid, soft_wrap=False)
    if note:
        console.print(Text(note, "dim"), soft_wrap=False)


def arm_name(arm: str) -> str:
    """As people read it."""
    return ARMS.get(arm, arm)


def group_name(group: str) -> str:
    """As people read it."""
    return f"{int(group):,}" if group.isdecimal() else group or "all"


def spread(estimate: Estimate | None, scale: float = 1.0, unit: str = "") -> str:
    """A figure and its interval.

    Args:
        scale: what it is multiplied by: 1000 for milliseconds.
        unit: written behind the figure.
    """
    if estimate is None:
        return NONE
    value = f"{number(estimate.value * scale)}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({number(estimate.low * scale)} to {number(estimate.high * scale)})"


def number(value: float) -> str:
    """To three digits, or to the last before the point."""
    digits = len(str(int(abs(value))))
    places = max(0, _SIGNIFICANT - digits)
    return f"{value:,.{places}f}"


def count(some: int, of: int) -> str:
    """Some of them."""
    return f"{some:,} of {of:,}" if of else NONE


def shown(value: object) -> str:
    """A setting, as people read it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(each)}" for name, each in value.items())
    return NONE if value is None or value == "" else str(value)


def largest_size(summary: Summary) -> str:
    """The group of the largest prompts, if groups are sizes; else empty."""
    return summary.groups[-1] if summary.groups and summary.grouped_by == "prompt size" else ""


def at_size(group: str) -> str:
    """Where a figure holds."""
    return f" at {group_name(group)} prompt tokens" if group else ""


def _sooner(summary: Summary) -> Iterator[str]:
    group = largest_size(summary)
    for arm in summary.arms[1:]:
        ratio = summary.ratio(arm, group)
        if ratio and ratio.ttft:
            yield (
                f"With {arm_name(arm)} the first token takes {spread(ratio.ttft)} times as long as with "
                f"{arm_name(ratio.reference)}{at_size(group)}, median of {ratio.pairs:,} pairs."
            )


def _recomputed(summary: Summary) -> str:
    figures = summary.of(summary.arms[0]) if summary.arms else None
    if not figures or not figures.recomputed_per_new or not figures.beyond_new:
        return ""
    return (
        f"Tokens computed for each new token, {arm_name(figures.arm)}: {spread(figures.recomputed_per_new)}; "
        f"{number(figures.beyond_new.value)} tokens a request beyond the new."
    )


def _identical(summary: Summary) -> str:
    compared = [each for arm in summary.arms if (each := summary.of(arm)) and each.compared]
    some, of = sum(each.identical for each in compared), sum(each.compared for each in compared)
    return f"Identical outputs: {count(some, of)}." if of else ""


def _grid(table: Table, rows: list[list[str]]) -> Grid:
    grid = Grid(
        title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for place, column in enumerate(table.columns):
        grid.add_column(column, justify="left" if place < table.text_columns else "right", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _failed(summary: Summary) -> str:
    every = [each for arm in summary.arms if (each := summary.of(arm))]
    failed, of = sum(each.errors for each in every), sum(each.requests for each in every)
    return f"Requests that failed: {count(failed, of)}." if failed else ""


def _all_figures(summary: Summary) -> Iterator[Figures]:
    for group in [*summary.groups, ""]:
        for arm in summary.arms:
            if figures := summary.of(arm, group):
                yield figures


def _names(figures: Figures, summary: Summary) -> list[str]:
    return [*([group_name(figures.group)] if summary.groups else []), arm_name(figures.arm)]


def _columns(summary: Summary) -> list[str]:
    return [summary.grouped_by, "arm"] if summary.groups else ["arm"]


def _ttft(summary: Summary) -> Table:
    columns = [*_columns(summary), "requests", "failed", "prompt tokens", "p50", "p90", "p99"]
    if len(summary.arms) > 1:
        columns.append("ratio to " + arm_name(summary.arms[0]))
    rows = []
    for each in _all_figures(summary):
        prompt = NONE if each.prompt_tokens is None else f"{each.prompt_tokens:,.0f}"
        row = [*_names(each, summary), f"{each.requests:,}", f"{each.errors:,}", prompt]
        row += [spread(value, 1000) for value in (each.ttft.p50, each.ttft.p90, each.ttft.p99)]
        if len(summary.arms) > 1:
            ratio = summary.ratio(each.arm, each.group)
            row.append("1" if each.arm == summary.arms[0] else spread(ratio.ttft if ratio else None))
        rows.append(row)
    note = "Ratio: the same request in both arms, median of the ratios." if len(summary.arms) > 1 else ""
    return Table("Time to first token, ms", columns, rows, len(_columns(summary)), note)


def _itl(summary: Summary) -> Table:
    rows = [
        [*_names(each, summary), f"{each.itl.count:,}"]
        + [spread(value, 1000) for value in (each.itl.p50, each.itl.p90, each.itl.p99)]
        for each in _all_figures(summary)
        if each.itl.count
    ]
    columns = [*_columns(summary), "values", "p50", "p90", "p99"]
    return Table("Inter-token latency, ms", columns, rows, len(_columns(summary)))


def _tokens(summary: Summary, block_size: int) -> Table:
    rows = []
    for each in _all_figures(summary):
        told = sum(each.outcomes.values())
        if told or each.recomputed_per_new or each.compared:
            rows.append(
                [
                    *_names(each, summary),
                    count(each.outcomes.get("hit", 0), told),
                    count(each.outcomes.get("partial", 0), told),
                    spread(each.recomputed_per_new),
                    spread(each.beyond_new),
                    count(each.identical, each.compared),
                    NONE if each.logprob_gap is None else f"{each.logprob_gap:.1g}",
                ]
            )
    columns = ["hits", "partial", "computed / new", "beyond new", "identical outputs", "log-prob. gap"]
    block = f" of {block_size:,} tokens" if block_size else ""
    note = (
        "Of requests that follow another of their conversation; new is what lies behind that one's prompt and answer. "
        f"Only whole blocks{block} are held, so 1.0 computed for each new token is ideal, and up to a block a request "
        "beyond the new is expected. Outputs and the log-probabilities of their tokens are compared with those of "
        "the same prompt without reuse."
    )
    return Table("Prompt tokens", [*_columns(summary), *columns], rows, len(_columns(summary)), note)


def _reads(summary: Summary) -> Table:
    rows = [
        [
            arm_name(each.arm),
            DIRECTIONS.get(each.direction, each.direction),
            f"{each.count:,}",
            number(each.seconds * 1000),
            number(each.bytes / 1e6),
            NONE if each.bytes_per_s is None else number(each.bytes_per_s / 1e6),
        ]
        for each in summary.reads
    ]
    columns = ["arm", "direction", "reads", "ms a read", "MB a read", "MB/s"]
    return Table("KV transfer, by the engines' own metrics", columns, rows, text_columns=2)


def _costs(result: Result) -> Table:
    rows = [
        [
            str(each.get("prefill", NONE)),
            str(each.get("decode", NONE)),
            _learned(each.get("prefill_s_per_token"), 1000),
            _learned(each.get("read_s"), 1000),
            _learned(each.get("read_s_per_token"), 1000),
            _break_even(each.get("break_even_tokens")),
        ]
        for each in result.costs
    ]
    columns = ["prefill", "decode", "ms a token computed", "ms a read", "ms a token read", "a read pays from"]
    return Table("What the router learned", columns, rows, text_columns=2)


def _learned(value: float | None, scale: float) -> str:
    return NONE if value is None else f"{value * scale:.3g}"


def _break_even(tokens: int | None) -> str:
    if tokens is None:
        return NONE
    return "never" if tokens < 0 else f"{tokens:,} tokens"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
