"""A rush of new conversations, and turns of others right behind it: how long each waits for its first token.

    .venv/bin/python benchmarks/rush.py                  # ten minutes on two cores
    .venv/bin/python benchmarks/rush.py --rounds 1 --new 3

Two prefill engines before one decode engine, equal but for `prefill_patience_s`: the default, and 0, which is first
come, first served. They take turns, a round each; the other one is stopped (SIGSTOP) meanwhile. In a round some
conversations have their first turn, then new ones come all at once, and behind them the others' second turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

from carryback import wire  # noqa: E402
from carryback_server import model  # noqa: E402
from carryback_server.bench.client import Answer, Client  # noqa: E402
from carryback_server.bench.workloads import Message  # noqa: E402
from carryback_server.config import ServeConfig  # noqa: E402
from carryback_server.launch import EngineCommand, Ports, engine_commands, free_ports  # noqa: E402
from carryback_server.supervisor import Engines  # noqa: E402
from pair import Pair, document  # noqa: E402

# Without a prefix cache there is one way for the prefill engine not to compute.
PREFILL_ARGS = ["--no-enable-prefix-caching"]
ARMS = {"prefill": "by what is left to compute", "in-line": "first come, first served"}
OUT = Console(highlight=False, soft_wrap=True)


def commands(**settings: Any) -> list[EngineCommand]:
    """A prefill engine and a decode engine with the default model."""
    numbers = free_ports(6)
    return engine_commands(
        ServeConfig(prefill_args=PREFILL_ARGS, **settings),
        device="cpu",
        model_path=str(model.fetch_default_model()),
        ports={"prefill": Ports(*numbers[:3]), "decode": Ports(*numbers[3:])},
        key="the key of this benchmark",
    )


async def ask(client: Client, name: str, question: list[Message]) -> Answer:
    """An answer of eight tokens."""
    answer = await client.chat(
        question, [], max_tokens=8, seed=0, salt="rush", headers={wire.CONVERSATION_ID: name}
    )
    assert not answer.error, answer.error
    return answer


async def one_round(client: Client, new: int, turns: int, seed: int) -> dict[str, list[float]]:
    """Seconds to the first tokens of new conversations and of turns, and until all were done."""
    talks = []
    for number in range(turns):
        name, messages = uuid.uuid4().hex, [{"role": "user", "content": document(seed + number, 25)}]
        answered = {"role": "assistant", "content": (await ask(client, name, messages)).text}
        talks.append((name, [*messages, answered, {"role": "user", "content": "And the next one?"}]))
    began = time.monotonic()
    rush = [
        asyncio.create_task(
            ask(client, uuid.uuid4().hex, [{"role": "user", "content": document(seed + 50 + number, 80)}])
        )
        for number in range(new)
    ]
    await asyncio.sleep(1)
    seconds = await asyncio.gather(*(ask(client, name, messages) for name, messages in talks))
    assert {each.reuse and each.reuse.outcome for each in seconds} == {"hit"}
    firsts = await asyncio.gather(*rush)
    took = time.monotonic() - began
    for name, _ in talks:
        await client.release(name)
    return {
        "turns": [each.ttft_s for each in seconds],
        "new": [each.ttft_s for each in firsts],
        "all": [took],
    }


async def run(rounds: int, new: int, turns: int, folder: Path) -> dict[str, list[dict[str, list[float]]]]:
    """All rounds of both engines."""
    measured: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        prefill, decode = commands()
        pair = Pair(None, [prefill, decode], session)
        in_line = replace(commands(prefill_patience_s=0)[0], name="in-line")
        by_name = {"prefill": prefill, "in-line": in_line}
        async with Engines([*by_name.values(), decode], log_dir=folder) as engines:
            await engines.wait_ready()
            pair.engines = engines
            for number in range(rounds + 1):
                for arm in ARMS if number % 2 else reversed(ARMS):
                    other = next(name for name in ARMS if name != arm)
                    with pair.paused(other):
                        async with pair.router([by_name[arm].engine(), decode.engine()]) as router:
                            client = Client(session, router.url)
                            await client.connect()
                            seen = await one_round(client, new, turns, 1000 * number)
                    if number:  # the first is for warming up, and for learning how long a token takes
                        measured[arm].append(seen)
    return measured


def show(measured: dict[str, list[dict[str, list[float]]]]) -> None:
    """Medians, and ratios of rounds."""
    table = Table("", *ARMS.values(), "ratio of a round (lowest to highest)")
    ours, theirs = (measured[arm] for arm in ARMS)
    for what, title in (
        ("turns", "TTFT of turns"),
        ("new", "TTFT of new conversations"),
        ("all", "all answered after"),
    ):
        ratios = [
            statistics.median(there[what]) / statistics.median(here[what])
            for here, there in zip(ours, theirs, strict=True)
        ]
        medians = [statistics.median([each for seen in arm for each in seen[what]]) for arm in (ours, theirs)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(title, *(f"{median:.2f} s" for median in medians), spread)
    OUT.print(table)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each engine, counted (3)")
    parser.add_argument("--new", type=int, default=5, metavar="N", help="new conversations of a round (5)")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="turns behind them (3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="carryback-rush-") as folder:
        show(asyncio.run(run(args.rounds, args.new, args.turns, Path(folder))))


if __name__ == "__main__":
    main()
