"""What simulations showed, as tables for a terminal and as plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from carryback_server.simulate.run import Quantiles, Report

# For pages of either colour: no background, and greys and colours that are seen on both.
_GREY = "#7f7f7f"
_COLORS = ("#2f81d6", "#d9822b", "#3a9d5d", "#b05cc6", "#c94f4f", "#7a8b2f", "#2aa6a6")
_MARKERS = "os^Dv*P"
# Over time; more lie on each other.
_MOST_CURVES = 4
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "carryback",
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "text.color": _GREY,
    "legend.frameon": False,
    "savefig.transparent": True,
}


class MissingPackage(Exception):
    """Plots need a package that is not installed."""


class Run(msgspec.Struct, kw_only=True):
    """One setup, simulated.

    Attributes:
        values: what a sweep set, by name.
        reuse: with reuse;
        no_reuse: and without it, if asked for.
    """

    values: dict[str, str | int | float]
    reuse: Report
    no_reuse: Report | None = None

    @property
    def label(self) -> str:
        """What it differs in from the others of its sweep."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


def table(run: Run) -> Table:
    """One simulation, figure by figure, beside the same without reuse."""
    reports = [run.reuse, *([run.no_reuse] if run.no_reuse is not None else [])]
    made = Table(title=run.label or None, title_justify="left")
    made.add_column("")
    for name in ("with reuse", "without")[: len(reports)]:
        made.add_column(name, justify="right")

    def row(name: str, *values: str) -> None:
        made.add_row(name, *values)

    row("requests a second", *(f"{each.requests_per_s:,.1f}" for each in reports))
    row("reused something", *(_percent(each.hit_rate) for each in reports))
    row("  at a turn's start", *(_percent(each.hit_rate_turn_start) for each in reports))
    row("  after a tool", *(_percent(each.hit_rate_mid_turn) for each in reports))
    row("of old tokens, not recomputed", *(_percent(each.token_hit_rate) for each in reports))
    row("recomputed per new token", *(f"{each.recomputed_per_new:,.2f}" for each in reports))
    row("TTFT p50 / p90 / p99", *(_times(each.ttft) for each in reports))
    row("  at a turn's start", *(_times(each.ttft_turn_start) for each in reports))
    row("  after a tool", *(_times(each.ttft_mid_turn) for each in reports))
    row("prefill engines: busy, KV used", *(_engines(each.prefill.busy, each.prefill.kv) for each in reports))
    row("decode engines: busy, KV used", *(_engines(each.decode.busy, each.decode.kv) for each in reports))
    row("answers in a decode batch", *(f"{each.decode.batch:,.1f}" for each in reports))
    row("waiting at a prefill / decode engine", *(_queues(each) for each in reports))
    row("held blocks a decode engine, of budget", *(_held(each) for each in reports))
    for name, count in run.reuse.given_up.items():
        row(f"given up: {name}", f"{count:,}", *([""] if len(reports) > 1 else []))
    for name, count in list(run.reuse.reasons.items())[:6]:
        row(f"returning: {name}", f"{count:,}", *([""] if len(reports) > 1 else []))
    return made


def sweep_table(runs: Sequence[Run]) -> Table:
    """Several simulations, a line each; the last ones without reuse."""
    made = Table()
    for name in runs[0].values:
        made.add_column(name, justify="right")
    for name in (
        "requests/s", "reused: all", "turn start", "after tool", "recomputed/new", "TTFT p50 / p90 / p99",
        "at a turn's start", "prefill busy", "decode KV", "held of budget",
    ):  # fmt: skip
        made.add_column(name, justify="right")
    shown = [(list(map(str, run.values.values())), run.reuse) for run in runs]
    seen: list[Report] = []
    for run in runs:
        if run.no_reuse is not None and run.no_reuse not in seen:
            seen.append(run.no_reuse)
            shown.append((["no reuse", *map(str, list(run.values.values())[1:])], run.no_reuse))
    for values, each in shown:
        made.add_row(
            *values,
            f"{each.requests_per_s:,.1f}",
            _percent(each.hit_rate),
            _percent(each.hit_rate_turn_start),
            _percent(each.hit_rate_mid_turn),
            f"{each.recomputed_per_new:,.2f}",
            _times(each.ttft),
            _times(each.ttft_turn_start),
            _percent(each.prefill.busy),
            _percent(each.decode.kv),
            _held(each),
        )
    return made


def plot(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw what is held over time, and what a sweep changes, as SVG files; their paths.

    Raises:
        MissingPackage: matplotlib is not installed.
        OSError: they cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingPackage("plots need matplotlib: pip install 'carryback[bench]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_SETTINGS):
        drawn = {"simulate-held.svg": _draw_held(runs[:: -(-len(runs) // _MOST_CURVES)])}
        if len(runs) > 1:
            drawn["simulate-sweep.svg"] = _draw_sweep(runs)
        for name, figure in drawn.items():
            figure.savefig(folder / name, metadata={"Date": None})
    return [folder / name for name in drawn]


def _draw_held(runs: Sequence[Run]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, color in zip(runs, _COLORS, strict=False):
        curve = run.reuse.curve
        minutes = [each / 60 for each in curve.time_s]
        axes.plot(minutes, curve.held, color=color, label=run.label or "held, mean")
        axes.axhline(run.reuse.budget_blocks, color=color, linestyle=":", linewidth=1.2)
        if len(runs) == 1:
            axes.plot(minutes, curve.held_most, color=_COLORS[1], label="held, most at one engine")
            axes.plot(minutes, curve.used, color=_COLORS[2], label="used by requests, mean")
    axes.set_xlabel("minutes")
    axes.set_ylabel("KV blocks of a decode engine")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("held for absent conversations (dotted: the pin budget)")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _draw_sweep(runs: Sequence[Run]) -> Any:
    from matplotlib.figure import Figure

    names = list(runs[0].values)
    x, others = names[-1], names[:-1]
    lines: dict[str, list[Run]] = {}
    for run in runs:
        lines.setdefault(", ".join(f"{name}={run.values[name]}" for name in others), []).append(run)
    panels: tuple[tuple[str, Callable[[Report], float]], ...] = (
        ("reused at a turn's start, %", lambda report: 100 * report.hit_rate_turn_start),
        ("TTFT p50, s", lambda report: report.ttft.p50),
        ("TTFT p90 at a turn's start, s", lambda report: report.ttft_turn_start.p90),
        ("held blocks, mean", _held_mean),
    )
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for (label, line), color, marker in zip(lines.items(), _COLORS, _MARKERS, strict=False):
            axes.plot(
                [str(run.values[x]) for run in line],
                [value(run.reuse) for run in line],
                color=color,
                marker=marker,
                label=label,
            )
        axes.set_title(title)
        axes.set_xlabel(x)
        if title.startswith("TTFT"):  # with too little held it is many times as long
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if others:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    return figure


def _held_mean(report: Report) -> float:
    """Over the second half of the time."""
    held = report.curve.held[len(report.curve.held) // 2 :]
    return sum(held) / len(held) if held else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _times(times: Quantiles) -> str:
    return " / ".join(map(_time, (times.p50, times.p90, times.p99)))


def _engines(busy: float, kv: float) -> str:
    return f"{_percent(busy)}, {_percent(kv)}"


def _queues(report: Report) -> str:
    return f"{report.prefill.queue:,.1f} / {report.decode.queue:,.1f}"


def _held(report: Report) -> str:
    return f"{_held_mean(report):,.0f} of {report.budget_blocks:,}"
