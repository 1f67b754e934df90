"""The figures of a run as one HTML page that needs nothing else: no script, no request."""

from __future__ import annotations

from html import escape

from carryback_server.bench import report, stats
from carryback_server.bench.report import Table
from carryback_server.bench.result import Result
from carryback_server.bench.stats import Estimate, Summary


class MissingPackage(Exception):
    """A package that draws the plots is not installed; the message says how to get it."""


# The colours of Okabe and Ito, which people who see few colours tell apart, darker on light and lighter on dark.
_STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f7f9; --line: #d8dee4; --text: #1b2127; --faint: #57616b; --grid: #c9d0d7;
  --reuse: #0067a8; --no-reuse: #c24e00; --aggregated: #00795a; --other: #a34a82;
  --reused: #0067a8; --cached: #7fb8de; --computed: #e08a3c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161b; --card: #1a2027; --line: #303942; --text: #e4e9ee; --faint: #9da8b3; --grid: #3a444e;
    --reuse: #5ab4e8; --no-reuse: #f08a45; --aggregated: #35c197; --other: #dd8fbf;
    --reused: #3d9bd4; --cached: #24516f; --computed: #d9792e;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.25rem; margin: 3rem 0 1rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 0.5rem 0; max-width: 48rem; }
.faint, figcaption, .note { color: var(--faint); font-size: 0.875rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 1rem; margin: 2rem 0 0; padding: 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 1rem 1.25rem; }
.card dt { color: var(--faint); font-size: 0.875rem; }
.card dd { margin: 0; }
.card .value { font-size: 1.75rem; line-height: 1.4; white-space: nowrap; font-weight: 650; font-variant-numeric: tabular-nums; }
.card .more { color: var(--faint); font-size: 0.875rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; padding: 1.25rem; border: 1px solid var(--line); border-radius: 0.5rem; min-width: 0; }
figcaption { margin: 0.25rem 0 0.75rem; }
@media (min-width: 70rem) { figure.wide { grid-column: 1 / -1; } }
svg.plot { display: block; width: 100%; height: auto; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; font-size: 0.875rem; color: var(--faint); }
section > .scroll { margin-bottom: 0.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.4rem 1.25rem 0.4rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
th.name, td.name { text-align: left; }
td.long { white-space: normal; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--reuse); outline-offset: 2px; }
@media print { figure, .card { break-inside: avoid; } }
"""


def html(result: Result) -> str:
    """The page.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        from carryback_server.bench import plots
    except ImportError as error:
        raise MissingPackage(
            f"the page's plots need packages that are not installed ({error.name}): pip install 'carryback[bench]'"
        ) from error
    summary = stats.summarize(result)
    title = f"carryback bench: {escape(result.workload)}"
    drawings = "".join(
        f"<figure{' class=wide' if plot.is_wide else ''}><h3>{escape(plot.title)}</h3><figcaption>{escape(plot.caption)}</figcaption>{plot.svg}"
        f"<details><summary>The same as a table</summary>{_table(plot.table)}</details></figure>"
        for plot in plots.draw(result)
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="faint">{escape(_about_run(result))}</p>',
        f'<dl class="cards">{"".join(_cards(summary))}</dl>',
        f'<h2>Plots</h2><div class="plots">{drawings}</div>' if drawings else "",
        *(_section(table) for table in report.tables(summary, result)),
        f'<p class="note">{escape(report.about(summary))}</p>',
        *(_section(table) for table in report.setting_tables(result)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _about_run(result: Result) -> str:
    about = [str(result.environment.get("model", "")), result.started, f"carryback {result.carryback}"]
    about += [f"{sum(each.is_measured for each in result.requests):,} measured requests"]
    return " · ".join(filter(None, about))


def _cards(summary: Summary) -> list[str]:
    """The figures that a reader looks for first."""
    if not summary.arms:
        return []
    cards = []
    group = report.largest_size(summary)
    reference = report.arm_name(summary.arms[0])
    for arm in summary.arms[1:]:
        ratio = summary.ratio(arm, group)
        if ratio and ratio.ttft:
            name = f"First token, {report.arm_name(arm)} / {reference}"
            where = report.at_size(group).strip()
            cards.append(_card(name, f"{report.number(ratio.ttft.value)}×", _interval(ratio.ttft), where))
    figures = summary.of(summary.arms[0])
    if figures and figures.recomputed_per_new:
        value = figures.recomputed_per_new
        more = f"{reference}; 1.0 is ideal"
        cards.append(
            _card("Tokens computed for each new one", report.number(value.value), _interval(value), more)
        )
    if figures and (told := sum(figures.outcomes.values())):
        hits = report.count(figures.outcomes.get("hit", 0), told)
        cards.append(_card("Full reuse", hits, "of requests that follow another"))
    of_all = [each for arm in summary.arms if (each := summary.of(arm))]
    if compared := sum(each.compared for each in of_all):
        same = sum(each.identical for each in of_all)
        cards.append(_card("Identical outputs", report.count(same, compared), "to those of another arm"))
    failed = sum(each.errors for each in of_all)
    if failed:
        cards.append(_card("Failed", report.count(failed, sum(each.requests for each in of_all)), "requests"))
    return cards


def _card(name: str, value: str, *more: str) -> str:
    lines = "".join(f'<dd class="more">{escape(line)}</dd>' for line in more if line)
    return f'<div class="card"><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>{lines}</div>'


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "too few requests for an interval"
    return f"95%: {report.number(estimate.low)} to {report.number(estimate.high)}"


def _section(table: Table) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<section><h2>{escape(table.title)}</h2>{_table(table)}{note}</section>"


def _table(table: Table) -> str:
    def cells(tag: str, row: list[str]) -> str:
        return "".join(
            f'<{tag} class="name{" long" if len(text) > 40 else ""}">{escape(text)}</{tag}>'
            if place < table.text_columns
            else f"<{tag}>{escape(text)}</{tag}>"
            for place, text in enumerate(row)
        )

    head = cells("th", table.columns).replace("<th", '<th scope="col"')
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
