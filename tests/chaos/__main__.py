"""`python -m chaos`: see `chaos`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import chaos


def main() -> None:
    """Run it, and print what happened; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="chaos", description=chaos.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=3.0, help="mean time between two faults")
    parser.add_argument("--faults", type=int, help="how many, whatever time they take")
    parser.add_argument("--folder", type=Path, help="for logs; a new one unless given")
    parser.add_argument("--json", type=Path, help="a file for the report")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = chaos.Plan(**{field.name: getattr(args, field.name) for field in fields(chaos.Plan)})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    report = asyncio.run(chaos.run(plan, folder))
    print(report.table())
    print(f"seed {plan.seed}, logs in {folder}")
    if args.json is not None:
        args.json.write_text(report.json())
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
