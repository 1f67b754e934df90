"""The plots of a run: SVG for a page that sets their colours.

Where matplotlib wants a colour it gets one that stands for a CSS variable of the page, or for the colour of its
text, so that one drawing suits a light and a dark page. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from carryback_server.bench import stats
from carryback_server.bench.report import NONE, Table, arm_name, group_name, number, spread
from carryback_server.bench.result import Request, Result
from carryback_server.bench.stats import Estimate, Summary

# Of one arm in a plot's curve of sizes: the group, its median prompt, the figure.
Points = list[tuple[str, float, Estimate]]

_TEXT, _GRID = "#010101", "#010102"
_REUSED, _CACHED, _COMPUTED = "#010103", "#010104", "#010105"
_COLORS = {"reuse": "#010106", "no_reuse": "#010107", "aggregated": "#010108"}
_OTHER = "#010109"
_VARIABLES = {
    _TEXT: "currentColor",
    _GRID: "var(--grid)",
    _REUSED: "var(--reused)",
    _CACHED: "var(--cached)",
    _COMPUTED: "var(--computed)",
    _COLORS["reuse"]: "var(--reuse)",
    _COLORS["no_reuse"]: "var(--no-reuse)",
    _COLORS["aggregated"]: "var(--aggregated)",
    _OTHER: "var(--other)",
}
# Arms differ in more than their colour.
_MARKERS = {"reuse": "o", "no_reuse": "s", "aggregated": "^"}
_LINES = {"reuse": "solid", "no_reuse": "dashed", "aggregated": "dotted"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "carryback",
    "text.parse_math": False,
    "font.size": 11,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "text.color": _TEXT,
    "legend.frameon": False,
    "lines.linewidth": 2,
}
# Of a conversation's requests, and of dots and curve points: more cannot be told apart.
_MAX_STEPS, _MAX_POINTS = 40, 500


@dataclass(frozen=True)
class Plot:
    """A drawing, and the same as a table.

    Attributes:
        caption: what it shows, for those who see it and those who do not.
        is_wide: it needs twice the width of others.
    """

    title: str
    caption: str
    svg: str
    table: Table
    is_wide: bool = False


def draw(result: Result) -> list[Plot]:
    """The plots for which the run has values."""
    measured = [each for each in result.requests if each.is_measured]
    sizes = stats.summarize(by_size(result))
    with mpl.rc_context(_SETTINGS):
        plots = [
            _ttft(sizes, measured),
            _ratio(sizes),
            _tokens(result),
            _distribution("ttft", measured),
            _distribution("itl", measured),
        ]
    return [each for each in plots if each]


def by_size(result: Result) -> Result:
    """A run's requests, grouped by the size of their prompts.

    They may be so already. Else groups are powers of two, each named by the least tokens in it.
    """
    if result.workload == "paper":
        return result
    requests = [
        msgspec.structs.replace(each, group=str(1 << max(0, each.prompt_tokens.bit_length() - 1)))
        for each in result.requests
    ]
    return msgspec.structs.replace(result, requests=requests)


def _ttft(sizes: Summary, measured: Sequence[Request]) -> Plot | None:
    shown: dict[str, Points] = {arm: [] for arm in sizes.arms}
    for each in sizes.figures:
        if each.prompt_tokens and each.ttft.p50 and (each.group or not sizes.groups):
            shown[each.arm].append((each.group, each.prompt_tokens, each.ttft.p50))
    if not any(shown.values()):
        return None
    figure, axes = _figure()
    for arm, points in shown.items():
        dots = _thinned(stats.answered(stats.select(measured, arm)))
        axes.plot(
            [each.prompt_tokens for each in dots],
            [each.ttft_s for each in dots],
            linestyle="",
            marker=".",
            markersize=5,
            markeredgewidth=0,
            color=_COLORS.get(arm, _OTHER),
            alpha=0.4,
        )
        _curve(axes, arm, arm_name(arm), points)
    _size_axis(axes, shown)
    axes.set_yscale("log")
    _time_axis(axes.yaxis)
    axes.set_ylabel("time to first token")
    _legend(figure, axes)
    return Plot(
        "Time to first token by prompt size",
        "Medians with their 95% intervals; dots are requests. Both axes are logarithmic.",
        _svg(figure, "ttft", "Time to first token by prompt size, a curve for each arm"),
        _curve_table("p50, ms", shown, 1000),
    )


def _ratio(sizes: Summary) -> Plot | None:
    shown: dict[str, Points] = {arm: [] for arm in sizes.arms[1:]}
    for each in sizes.ratios:
        of = sizes.of(each.reference, each.group)
        if each.ttft and of and of.prompt_tokens and (each.group or not sizes.groups):
            shown[each.arm].append((each.group, of.prompt_tokens, each.ttft))
    if not any(shown.values()):
        return None
    reference = arm_name(sizes.arms[0])
    figure, axes = _figure()
    axes.axhline(1, color=_TEXT, linewidth=1)
    for arm, points in shown.items():
        _curve(axes, arm, f"{arm_name(arm)} / {reference}", points)
        # Of one arm: those of several would lie on each other.
        for _, tokens, ratio in points if arm == next(iter(shown)) else []:
            axes.annotate(
                f"{number(ratio.value)}×",
                (tokens, ratio.value if ratio.high is None else ratio.high),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
            )
    _size_axis(axes, shown)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"times as long as with {reference}")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    _legend(figure, axes)
    title = f"First token: how many times as long as with {reference}"
    return Plot(
        title,
        "The same request in both arms; medians of the ratios with their 95% intervals. At 1 there is no difference.",
        _svg(figure, "ratio", f"{title}, by prompt size"),
        _curve_table("ratio", shown),
    )


def _tokens(result: Result) -> Plot | None:
    labels, shown = _sources(result)
    if not shown:
        return None
    figure = Figure(figsize=(15, 3.8), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    x = np.arange(len(labels))
    for axes, (arm, means) in zip(panels, shown.items(), strict=True):
        reused, cached, computed, new = means
        axes.bar(x, reused, color=_REUSED, label="reused")
        axes.bar(x, cached, bottom=reused, color=_CACHED, label="cached")
        axes.bar(x, computed, bottom=reused + cached, color=_COMPUTED, label="computed")
        begin = reused + cached + computed - new
        axes.hlines(begin, x - 0.4, x + 0.4, color=_TEXT, linewidth=1.5, label="new tokens begin")
        axes.set_title(arm_name(arm), fontsize=11)
        ticks = x[:: -(-len(x) // 8)]
        axes.set_xticks(ticks, [labels[tick] for tick in ticks])
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("prompt size" if result.workload == "paper" else "request of a conversation")
    panels[0].set_ylabel("prompt tokens, mean")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(figure, panels[0])
    rows = [
        [label, arm_name(arm), *(f"{each[place]:,.0f}" for each in means)]
        for place, label in enumerate(labels)
        for arm, means in shown.items()
        if not np.isnan(means[0][place])
    ]
    return Plot(
        "Where the tokens of prompts came from",
        "Reused: read back from the decode engine. Cached: in the prefill engine's own cache. Computed: all else. "
        "What lies above the mark is new, and has to be computed.",
        _svg(
            figure, "tokens", "Tokens of prompts that were reused, cached and computed, stacked, for each arm"
        ),
        Table("", ["request", "arm", "reused", "cached", "computed", "new"], rows, text_columns=2),
        is_wide=True,
    )


def _sources(result: Result) -> tuple[list[str], dict[str, list[np.ndarray]]]:
    """Mean tokens that were reused, cached and computed, and that are new, at each step.

    Returns:
        The steps, and for each arm that tells: those four, with a number (NaN: none) for each step.
    """
    sized = result.workload == "paper"
    found: dict[str, dict[str, list[tuple[int, int, int, int]]]] = {}
    steps: dict[str, None] = {}
    seen: dict[tuple[str, str], int] = {}
    for each in sorted(result.requests, key=lambda request: (request.turn, request.step)):
        number_of = seen[each.arm, each.conversation] = seen.get((each.arm, each.conversation), 0) + 1
        if not each.is_measured or each.error or each.recomputed_tokens is None:
            continue
        if not sized and number_of > _MAX_STEPS:
            continue
        step = each.group if sized else str(number_of)
        steps[step] = None
        cached, reused = each.cached_tokens or 0, each.reused_tokens or 0
        new = each.recomputed_tokens if each.new_tokens is None else each.new_tokens
        tokens = (reused, cached, each.recomputed_tokens, new)
        found.setdefault(each.arm, {}).setdefault(step, []).append(tokens)
    order = sorted((step for step in steps if step), key=int)
    shown = {}
    for arm in stats.arms_of(result.requests):
        if arm in found:
            means = [
                np.mean(found[arm][step], axis=0) if step in found[arm] else np.full(4, np.nan)
                for step in order
            ]
            shown[arm] = list(np.array(means).T)
    return [group_name(step) for step in order], shown if order else {}


def _distribution(kind: Literal["ttft", "itl"], measured: Sequence[Request]) -> Plot | None:
    name = {"ttft": "Time to first token", "itl": "Inter-token latency"}[kind]
    figure, axes = _figure()
    rows = []
    for arm in stats.arms_of(measured):
        good = stats.answered(stats.select(measured, arm))
        values = np.sort(
            [each.ttft_s for each in good] if kind == "ttft" else [s for each in good for s in each.itl_s]
        )
        values = values[values > 0]
        if not len(values):
            continue
        shares = np.arange(1, len(values) + 1) / len(values)
        places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
        axes.step(
            values[places],
            shares[places] * 100,
            where="post",
            color=_COLORS.get(arm, _OTHER),
            linestyle=_LINES.get(arm, "dashdot"),
            label=arm_name(arm),
        )
        quantiles = np.quantile(values, (0.1, 0.25, 0.5, 0.75, 0.9)) * 1000
        rows.append([arm_name(arm), f"{len(values):,}", *map(number, quantiles), number(values[-1] * 1000)])
    if not rows:
        return None
    axes.set_xscale("log")
    _time_axis(axes.xaxis)
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    axes.set_xlabel(name.lower())
    axes.set_ylabel("of all values" if kind == "itl" else "of all requests")
    _legend(figure, axes)
    return Plot(
        f"{name}: distribution",
        "How many took at most so long. Farther left is faster; a tail to the right is what percentiles hide.",
        _svg(
            figure, f"{kind}-distribution", f"Cumulative distribution of {name.lower()}, a curve for each arm"
        ),
        Table("", ["arm", "values", "10%", "25%", "50%", "75%", "90%", "most, ms"], rows),
    )


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=4)


def _curve(axes: Axes, arm: str, label: str, points: Points) -> None:
    """Figures by prompt size, with their intervals."""
    if not points:
        return
    values = [estimate.value for _, _, estimate in points]
    ends = [(each.low or each.value, each.high or each.value) for _, _, each in points]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(
        [tokens for _, tokens, _ in points],
        values,
        yerr=[below, above],
        color=_COLORS.get(arm, _OTHER),
        linestyle=_LINES.get(arm, "dashdot"),
        marker=_MARKERS.get(arm, "D"),
        markersize=6,
        capsize=4,
        elinewidth=1.5,
        label=label,
    )


def _curve_table(column: str, shown: dict[str, Points], scale: float = 1.0) -> Table:
    groups = dict.fromkeys(group for points in shown.values() for group, _, _ in points)
    rows = [
        [group_name(group), arm_name(arm), f"{tokens:,.0f}", spread(estimate, scale)]
        for group in groups
        for arm, points in shown.items()
        for of, tokens, estimate in points
        if of == group
    ]
    return Table("", ["prompts from", "arm", "tokens, median", column], rows, text_columns=2)


def _size_axis(axes: Axes, shown: dict[str, Points]) -> None:
    """Prompt sizes, as far as there is room for them."""
    sizes = sorted({round(tokens) for _, tokens, _ in next(filter(None, shown.values()))})
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for size in sizes:
        if not ticks or size >= ticks[-1] * max(1.15, (sizes[-1] / sizes[0]) ** (1 / 10)):
            ticks.append(size)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.08)
    axes.set_xlabel("prompt tokens")


def _time_axis(axis: Axis) -> None:
    """A logarithmic axis of seconds."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 2000 * low else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))


def _time(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds > 0 else NONE


def _thinned(requests: Sequence[Request]) -> Sequence[Request]:
    return requests[:: -(-len(requests) // _MAX_POINTS)] if requests else requests


def _svg(figure: Figure, name: str, label: str) -> str:
    """A drawing for a page: with the page's colours and font, and ids that no other drawing has."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    svg = re.sub(r"(font(?:-family)?:[^;\"]*?)'[^;\"]*", r"\1inherit", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("xlink:href", "href")
    size = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg class="plot" role="img" aria-label="{escape(label)}" {size[0] if size else ""}>'
    return opening + svg[svg.index(">") + 1 :]
