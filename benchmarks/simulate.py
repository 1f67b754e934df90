"""Simulator and reality, side by side: real engines under agents, and `carryback simulate` of the same.

    python benchmarks/simulate.py --out simulated            # ten minutes
    python benchmarks/simulate.py --again simulated          # simulate once more what was measured

Starts `carryback serve` on the CPU with little room for KV, and

1. measures how quick the engines are, one thing at a time;
2. sends the requests of several agents who work at once, and notes what came;
3. simulates agents who ask for the same, after the same pauses, on engines of the rates of step 1.

Step 3 knows nothing of what was measured in step 2 but what was asked for: tokens of prompts and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import yaml
from carryback import wire
from carryback_server.bench import target, workloads
from carryback_server.bench.client import Answer, Client
from carryback_server.config import RouterConfig
from carryback_server.explain import common_prefix
from carryback_server.simulate.agents import Agent, Step
from carryback_server.simulate.profile import Profile
from carryback_server.simulate.run import Scenario, Seen, Simulation
from rich.console import Console
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)

BLOCK = 32
# Before a request that is timed. An agent's request finds engines that have been idle and whose caches others
# have used; right behind another one it takes a sixth less.
IDLE_S = 1.5
# Without a prefix cache there is one way for the prefill engine not to compute.
PREFILL_ARGS = "--no-enable-prefix-caching"
# Numbers of the model.
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  # layers, KV heads, their size, keys and values, bytes
MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS = 2048, 32


@dataclass(frozen=True)
class Load:
    """What the agents do.

    Attributes:
        agents: at once.
        first_words: of their first prompts.
        step_words: that each further prompt adds.
        max_words: of a prompt; then the agent begins anew.
        output_tokens: of each answer.
        pause_s, pause_sigma: between answer and next request, log-normal: median, and sigma of the logarithm.
        duration_s: for how long they send requests.
    """

    agents: int = 6
    first_words: int = 100
    step_words: int = 40
    max_words: int = 400
    output_tokens: int = 8
    pause_s: float = 7.0
    pause_sigma: float = 1.0
    duration_s: float = 300.0


@dataclass(frozen=True)
class Asked:
    """One request and what came of it. Seconds are from the beginning of the run."""

    agent: int
    conversation: str
    is_first: bool
    pause_s: float
    prompt_tokens: int
    common_tokens: int
    output_tokens: int
    started_s: float
    ttft_s: float
    duration_s: float
    outcome: str
    reason: str


class Pair:
    """The running servers, as a client and as a reader of the router's log."""

    def __init__(self, client: Client, log: Path) -> None:
        self.client = client
        self._log = log
        self._count = 0

    async def ask(
        self, messages: Sequence[workloads.Message], conversation: str, *, output: int = 1, reuse: bool = True
    ) -> tuple[Answer, str]:
        """One request; its answer, and its id in the log."""
        self._count += 1
        name = f"{conversation}-{self._count}"
        headers = {wire.CONVERSATION_ID: conversation, "X-Request-Id": name}
        if not reuse:
            headers[wire.CARRYBACK_REUSE] = "off"
        answer = await self.client.chat(
            messages, [], max_tokens=output, seed=0, salt="simulate", headers=headers
        )
        if answer.error:
            sys.exit(f"a request failed: {answer.error}")
        return answer, name

    async def logged(self, name: str) -> dict[str, float]:
        """What the router's log says of a request, in seconds."""
        for _ in range(100):
            for line in reversed(self._log.read_text().splitlines()):
                if name in line and line.startswith("{"):
                    found: dict[str, float] = json.loads(line)
                    return found
            await asyncio.sleep(0.05)
        sys.exit(f"{self._log} has no line of request {name}")


def said(text: str) -> list[workloads.Message]:
    """A prompt of one message."""
    return [{"role": "user", "content": text}]


# -- calibration


def fitted(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Factors of the columns that give the values, none negative, with least squares of the relative errors."""
    x, y = np.array(columns, dtype=float).T, np.array(values, dtype=float)
    x, y = x / y[:, None], np.ones(len(y))
    used = list(range(x.shape[1]))
    while True:
        found = np.linalg.lstsq(x[:, used], y, rcond=None)[0]
        if not len(found) or found.min() >= 0:
            factors = dict(zip(used, found, strict=True))
            return [float(factors.get(column, 0.0)) for column in range(x.shape[1])]
        del used[int(found.argmin())]


@dataclass(frozen=True)
class Hop:
    """One request that nobody else was beside, in tokens and seconds."""

    read: int
    computed: int
    read_s: float
    compute_s: float
    prefill_s: float
    ttft_s: float


async def hop(pair: Pair, messages: Sequence[workloads.Message], conversation: str) -> Hop:
    """Send one, and see what the router's log says of it."""
    await asyncio.sleep(IDLE_S)
    answer, name = await pair.ask(messages, conversation)
    line = await pair.logged(name)
    assert answer.reuse is not None
    return Hop(
        answer.reuse.tokens, answer.reuse.recomputed, line.get("read_s", 0.0), line["compute_s"],
        line["prefill_s"], answer.ttft_s,
    )  # fmt: skip


def middle(hops: Sequence[Hop]) -> Hop:
    """The one that took neither the longest nor the shortest."""
    return sorted(hops, key=lambda each: each.prefill_s)[len(hops) // 2]


async def calibrate(pair: Pair, capacity: int) -> Profile:
    """Measure the engines, one thing at a time."""
    await pair.ask(said(workloads.text("warm", 300)), "warm", output=4)
    await pair.ask([*said(workloads.text("warm", 300)), *said("more")], "warm", output=4)

    # Prompts that are computed, and prompts whose beginning is read back. Three of each, the middle one counts.
    first: list[Hop] = []
    again: list[Hop] = []
    for words in (40, 120, 250, 450):
        ones, others = [], []
        for number in range(3):
            name, text = f"c{words}-{number}", workloads.text(f"calibrate {words} {number}", words)
            ones.append(await hop(pair, said(text), name))
            others.append(await hop(pair, [*said(text), *said(f"and {words} more?")], name))
        first.append(middle(ones))
        again.append(middle([each for each in others if each.read] or others))
    reads = [each for each in again if each.read]
    step_s, token_s, attention_s = fitted(
        [
            [1.0] * (len(first) + len(again)),
            [each.computed for each in first + again],
            [each.computed * (each.read + (each.computed + 1) / 2) for each in first + again],
        ],
        [each.compute_s for each in first + again],
    )
    prefill_request_s = statistics.median(
        each.prefill_s - each.read_s - each.compute_s for each in first + again
    )
    transfer_s, transfer_token_s = fitted(
        [[1.0] * len(reads), [each.read for each in reads]], [each.read_s for each in reads]
    )

    # A batch of answers, of one and of several.
    steps: list[tuple[int, int, float]] = []
    for batch, words in ((1, 60), (1, 450), (2, 200), (4, 100), (4, 350)):
        await asyncio.sleep(IDLE_S)
        asked = [
            pair.ask(
                said(workloads.text(f"decode {batch} {words} {each}", words)), "d", output=24, reuse=False
            )
            for each in range(batch)
        ]
        answers = [answer for answer, _ in await asyncio.gather(*asked)]
        context = sum(answer.prompt_tokens + 12 for answer in answers)
        # While all of them generate, towards the end. The mean: chunks may arrive together.
        itl = [seconds for answer in answers for seconds in answer.itl_s[-12:-4]]
        steps.append((batch, context, statistics.mean(itl)))
    decode_step_s, sequence_s, context_s = fitted(
        [[1.0] * len(steps), [b for b, _, _ in steps], [c for _, c, _ in steps]], [s for _, _, s in steps]
    )

    def decode_s(each: Hop) -> float:
        # What the prefill engine has read, the decode engine has.
        sent_s = transfer_s + transfer_token_s * each.computed
        return sent_s + decode_step_s + sequence_s + context_s * (each.read + each.computed)

    rest = [max(each.ttft_s - each.prefill_s - decode_s(each), 0.0) for each in first + again]

    # Both at once: prompts are computed while a long answer is generated.
    generating = asyncio.create_task(pair.ask(said(workloads.text("long", 60)), "l", output=500, reuse=False))
    await asyncio.sleep(2)
    slowed: list[float] = []
    windows: list[tuple[float, float]] = []
    for number in range(6):
        await asyncio.sleep(IDLE_S)
        answer, name = await pair.ask(said(workloads.text(f"slow {number}", 250)), "s", reuse=False)
        if generating.done():
            break
        n = answer.prompt_tokens
        line = await pair.logged(name)
        slowed.append(line["compute_s"] / (step_s + token_s * n + attention_s * n * (n + 1) / 2))
        windows.append((answer.started, answer.started + line["prefill_s"]))
    background, _ = await generating
    alone: list[float] = []
    beside: list[float] = []
    now = background.started + background.ttft_s
    for number, seconds in enumerate(background.itl_s):
        now += seconds
        # Less what the growing context takes.
        rest_s = seconds - context_s * number
        (beside if any(start <= now <= end for start, end in windows) else alone).append(rest_s)
    return Profile(
        description="SmolLM2-135M-Instruct, float32, both engines on one CPU; by benchmarks/simulate.py.",
        block_size=BLOCK,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        prefill_blocks=capacity,
        decode_blocks=capacity,
        prefill_request_s=max(prefill_request_s, 0.0),
        prefill_step_s=step_s,
        prefill_token_s=token_s,
        prefill_attention_s=attention_s,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        transfer_s=transfer_s,
        transfer_bytes_per_s=KV_BYTES_PER_TOKEN / max(transfer_token_s, 1e-9),
        decode_request_s=statistics.median(rest),  # in which it also waits, and so at least this
        decode_go_s=statistics.median(rest),
        decode_step_s=max(decode_step_s, 1e-4),
        decode_sequence_s=sequence_s,
        decode_context_s=context_s,
        control_s=0.01,
        prefill_slowdown=max(statistics.median(slowed), 1.0) if slowed else 1.0,
        # The mean: a step waits for its turn now and then.
        decode_slowdown=max(statistics.mean(beside) / statistics.mean(alone), 1.0)
        if beside and alone
        else 1.0,
    )


# -- reality


async def work(pair: Pair, load: Load, seed: int) -> list[Asked]:
    """All agents, for a while."""
    begun = time.monotonic()
    asked: list[Asked] = []

    async def agent(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        pause_s = draw.random() * load.pause_s
        for conversation in range(10_000):
            name = f"a{number}-{conversation}"
            messages: list[workloads.Message] = []
            before: list[int] = []
            words = load.first_words
            count = 0
            while words <= load.max_words:
                added = load.step_words if messages else load.first_words
                messages += said(workloads.text(f"{seed} {name} {count}", added))
                if time.monotonic() - begun + pause_s > load.duration_s:
                    return
                await asyncio.sleep(pause_s)
                started = time.monotonic() - begun
                answer, _ = await pair.ask(messages, name, output=load.output_tokens)
                assert answer.prompt is not None
                assert answer.generated is not None
                assert answer.reuse is not None
                asked.append(
                    Asked(
                        number, name, not before, pause_s, len(answer.prompt), common_prefix(before, answer.prompt),
                        len(answer.generated), started, answer.ttft_s, answer.duration_s, answer.reuse.outcome,
                        answer.reuse.reason,
                    )
                )  # fmt: skip
                before = [*answer.prompt, *answer.generated]
                messages.append({"role": "assistant", "content": answer.text})
                pause_s = draw.lognormvariate(math.log(load.pause_s), load.pause_sigma)
                words += load.step_words + load.output_tokens
                count += 1

    await asyncio.gather(*(agent(number) for number in range(load.agents)))
    return asked


# -- and the simulation of it


def simulated(profile: Profile, router: RouterConfig, asked: Iterable[Asked]) -> list[Seen]:
    """The same requests after the same pauses."""
    steps: dict[int, list[Step]] = {}
    for each in sorted(asked, key=lambda each: each.started_s):
        steps.setdefault(each.agent, []).append(
            Step(
                each.pause_s, each.conversation, each.prompt_tokens, each.common_tokens, each.output_tokens,
                is_first=each.is_first, is_cut=True,
            )
        )  # fmt: skip
    scenario = Scenario(prefill=1, decode=1, duration_s=1e6, warmup_share=0.0)
    agents = [Agent(0.0, each) for each in steps.values()]
    return Simulation(scenario, profile, router, agents, keep=True).run().seen


def show(asked: Sequence[Asked], seen: Sequence[Seen]) -> dict[str, tuple[float, float]]:
    """Measured and predicted, side by side."""
    firsts = {
        each.conversation: min(e.started_s for e in asked if e.conversation == each.conversation)
        for each in asked
    }
    predicted_firsts: dict[str, float] = {}
    for one in seen:
        predicted_firsts.setdefault(one.conversation, one.started_s)
        predicted_firsts[one.conversation] = min(predicted_firsts[one.conversation], one.started_s)
    real = [each for each in asked if each.started_s != firsts[each.conversation]]
    model = [each for each in seen if each.started_s != predicted_firsts[each.conversation]]

    def rate(each: Sequence[Asked | Seen]) -> float:
        return 100 * sum(one.outcome != "miss" for one in each) / len(each)

    def quantile(each: Sequence[Asked | Seen], share: float) -> float:
        return float(np.quantile([one.ttft_s for one in each], share)) if each else math.nan

    def only(each: Sequence[Asked | Seen], *, hit: bool) -> list[Asked | Seen]:
        return [one for one in each if (one.outcome != "miss") == hit]

    figures = {
        "returning requests": (float(len(real)), float(len(model))),
        "that reused, %": (rate(real), rate(model)),
        "TTFT p50, s": (quantile(asked, 0.5), quantile(seen, 0.5)),
        "TTFT p90, s": (quantile(asked, 0.9), quantile(seen, 0.9)),
        "TTFT p99, s": (quantile(asked, 0.99), quantile(seen, 0.99)),
        "TTFT p50 of hits, s": (quantile(only(asked, hit=True), 0.5), quantile(only(seen, hit=True), 0.5)),
        "TTFT p50 of misses, s": (
            quantile(only(asked, hit=False), 0.5),
            quantile(only(seen, hit=False), 0.5),
        ),
        "until the last request, s": (max(e.started_s for e in asked), max(e.started_s for e in seen)),
    }
    table = Table()
    for name in ("", "measured", "simulated", "simulated / measured"):
        table.add_column(name, justify="right" if name else "left")
    for name, (measured, predicted) in figures.items():
        table.add_row(name, f"{measured:,.2f}", f"{predicted:,.2f}", f"{predicted / measured:.2f}")
    out.print(table)
    for name, each in (("measured", real), ("simulated", model)):
        reasons = Counter(f"{one.outcome} {one.reason}" for one in each)
        out.print(f"{name}: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))
    return figures


async def measured(config: Path, log: Path, load: Load, seed: int) -> tuple[Profile, list[Asked]]:
    """Steps 1 and 2.

    Args:
        config: of `carryback serve`.
        log: where its log will be.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        target.started(
            lambda engines: None, config=config, device="cpu", prefill_args=PREFILL_ARGS, aggregated=False
        ) as servers,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        client = Client(session, servers.url)
        await client.connect()
        async with session.get(f"{servers.admin_url}/admin/engines") as response:
            engines = (await response.json())["data"]
        capacity = next(each["capacity_blocks"] for each in engines if each["role"] == "decode")
        pair = Pair(client, log)
        out.print("1. calibration")
        profile = await calibrate(pair, capacity)
        out.print(yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False), markup=False)
        out.print("2. agents")
        return profile, await work(pair, load, seed)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("simulated"), help="folder for what is measured")
    parser.add_argument("--again", type=Path, help="a folder of an earlier run: only step 3")
    parser.add_argument("--agents", type=int, default=Load.agents)
    parser.add_argument("--duration-s", type=float, default=Load.duration_s)
    parser.add_argument("--pause-s", type=float, default=Load.pause_s)
    parser.add_argument("--hold-s", type=float, default=25.0, help="of the router")
    parser.add_argument("--pin-budget", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder: Path = args.again or args.out
    if args.again is None:
        load = replace(Load(), agents=args.agents, duration_s=args.duration_s, pause_s=args.pause_s)
        router = {"hold_s": args.hold_s, "pin_budget": args.pin_budget}
        folder.mkdir(parents=True, exist_ok=True)
        logs = folder.resolve() / "logs"
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump({**router, "log_dir": str(logs)}))
        profile, asked = asyncio.run(measured(config, logs / "carryback.log", load, args.seed))
        (folder / "profile.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False))
        data = {
            "router": router,
            "load": asdict(load),
            "seed": args.seed,
            "asked": [asdict(each) for each in asked],
        }
        (folder / "measured.json").write_text(json.dumps(data, indent=1))
    found = json.loads((folder / "measured.json").read_text())
    profile = msgspec.convert(yaml.safe_load((folder / "profile.yaml").read_text()), Profile, strict=False)
    asked = [Asked(**each) for each in found["asked"]]
    out.print("3. simulation")
    seen = simulated(profile, RouterConfig(**found["router"]), asked)
    figures = show(asked, seen)
    (folder / "compared.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
