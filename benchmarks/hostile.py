"""A hostile run: each attack against a router with two tenants, Redis and stub engines, and what the other tenant sees.

    .venv/bin/python benchmarks/hostile.py                             # all of them, fifteen minutes
    .venv/bin/python benchmarks/hostile.py --only bomb silent          # some
    .venv/bin/python benchmarks/hostile.py --root ../before            # against another checkout's router

See README.md for how to read the table. The exit status is 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from attacks import ATTACKS, Attack, Outcome, all_up  # noqa: E402
from innocent import Seen  # noqa: E402
from scene import scene  # noqa: E402

GAP_MS, HEALTH_MS = 100.0, 100.0
HEAD = """| attack | what came of it | gap ms | hits | errors | health ms | RSS MiB | descriptors | |
|---|---|---:|---:|---|---:|---:|---:|---|
"""


@dataclass
class Result:
    """One attack, and whether all held.

    Attributes:
        lost: what did not hold, in words; empty if all did.
    """

    attack: str
    outcome: Outcome
    seen: Seen
    lost: list[str]


async def run(attack: Attack, root: Path, folder: Path) -> tuple[Outcome, Seen]:
    """One attack, on everything newly started.

    Raises:
        RuntimeError: something does not start.
    """
    async with scene(
        root, folder, is_fast=attack.is_fast, settings=attack.settings, limits=attack.limits, redis_options=attack.redis
    ) as (place, innocent):  # fmt: skip
        await innocent.next()
        try:
            async with asyncio.timeout(attack.seconds):
                outcome = await attack.run(place)
        except TimeoutError:
            outcome = Outcome(f"not over after {attack.seconds:g} s", held=False)
        seen = await innocent.seen()
        if outcome.held and not await all_up(place):
            outcome = Outcome(f"{outcome.said}; engines {await place.states()}", held=False)
        return outcome, seen


def judged(attack: Attack, outcome: Outcome, seen: Seen, quiet: Seen) -> Result:
    """What did not hold.

    Args:
        quiet: what the innocent tenant sees of the same engines without an attack.
    """
    lost = [] if outcome.held else ["outcome"]
    lost += ["gap"] if seen.gap_ms > quiet.gap_ms + GAP_MS else []
    is_reused = quiet.hits == quiet.possible  # else the engines cannot
    lost += ["hits"] if attack.spares_reuse and is_reused and seen.hits < seen.possible else []
    lost += ["errors"] if seen.errors else []
    lost += ["health"] if seen.unhealthy or seen.health_ms > quiet.health_ms + HEALTH_MS else []
    lost += ["RSS"] if seen.rss_mib - seen.rss_before_mib > attack.rss_mib else []
    return Result(attack.name, outcome, seen, lost)


def row(result: Result) -> str:
    """A line of the table."""
    seen = result.seen
    errors = ", ".join(f"{what} x {times}" for what, times in seen.errors.items())
    health = f"{seen.health_ms:,.0f}" + (f" ({seen.unhealthy} failed)" if seen.unhealthy else "")
    cells = [
        result.attack, result.outcome.said, f"{seen.gap_ms:,.0f}", f"{seen.hits}/{seen.possible}", errors, health,
        f"+{max(0.0, seen.rss_mib - seen.rss_before_mib):,.0f}", f"{seen.descriptors_before} to {seen.descriptors}",
        f"**not held**: {', '.join(result.lost)}" if result.lost else "held",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def commit(root: Path) -> str:
    """Which version of the code a checkout has."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Attack, print, write."""
    args = arguments()
    if args.list:
        print("\n".join(f"{each.name:16}{each.about}" for each in ATTACKS.values()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the processes that were started end first
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    root = args.root.resolve()
    print(f"The router of {commit(root)}:\n\n{HEAD}", end="", flush=True)
    results: list[Result] = []
    quiet: dict[bool, Seen] = {}
    chosen = [ATTACKS[name] for name in args.only or ATTACKS]
    controls = [ATTACKS["none-fast" if is_fast else "none"] for is_fast in {each.is_fast for each in chosen}]
    for name, attack in {each.name: each for each in [*controls, *chosen]}.items():
        print(f"{name}: {attack.about} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="carryback-hostile-") as scratch:
            folder = args.logs / name if args.logs else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                outcome, seen = asyncio.run(run(attack, root, folder))
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                outcome, seen = Outcome("the run failed", held=False), Seen()
        results.append(judged(attack, outcome, seen, quiet.setdefault(attack.is_fast, seen)))
        print(row(results[-1]), flush=True)
        if args.json:
            attacks = [{**asdict(each), "seen": msgspec.to_builtins(each.seen)} for each in results]
            args.json.write_text(json.dumps({"commit": commit(root), "attacks": attacks}, indent=1) + "\n")
    sys.exit(any(result.lost for result in results))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="NAME", help="some attacks")
    parser.add_argument("--list", action="store_true", help="print what there is, and do nothing")
    parser.add_argument(
        "--root", type=Path, default=HERE.parent, metavar="FOLDER", help="the checkout to attack; this one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep all logs there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
