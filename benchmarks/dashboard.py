"""The dashboard under load: agents before stub engines, a router, and pictures of its page.

    python benchmarks/dashboard.py --agents 500 --seconds 60 --pictures pictures
    python benchmarks/dashboard.py --agents 40                    # until interrupted; prints the address
    python benchmarks/dashboard.py --url http://127.0.0.1:8001 --pictures pictures    # of a router that runs

The engines take as long as they are told: so long for each token that has to be computed, and much less for
one that is read back. Needs the tests' packages and Chromium for pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from carryback_server.app import Router
from cluster import TOOLS, Cluster, message_of
from stub_engine import StubEngine
from stub_engine.prompts import CALL_MARKER, CHAT, Answer
from stub_engine.rank import Job, Rank

COMPUTE_S = 0.0004
"For a token of a prompt."
READ_S, READ_TOKEN_S = 0.004, 0.000004
"For a read, and for each of its tokens."
SIZES = {"light": (1440, 900, "light"), "dark": (1440, 900, "dark"), "narrow": (480, 900, "light")}


class SlowEngine(StubEngine):
    """A stub engine whose prefills take time."""

    async def _answer(self, rank: Rank, job: Job, body: Mapping[str, Any], index: int) -> Answer:
        given = await super()._answer(rank, job, body, index)
        if self.role == "prefill":
            read_s = READ_S + READ_TOKEN_S * job.match.read if job.match.read else 0.0
            compute_s = COMPUTE_S * job.work["computed"] * random.uniform(0.9, 1.2)
            await asyncio.sleep(read_s + compute_s)
            job.work |= {"read_s": read_s, "compute_s": compute_s}
        return given


def text(most: int) -> str:
    """Some words, a token or so each."""
    return "".join(f" w{random.randrange(1000)}" for _ in range(random.randrange(most // 4, most)))


class Agent:
    """One conversation: turn after turn a question, some tool calls with their results, an answer."""

    def __init__(self, cluster: Cluster, router: Router, id: str) -> None:
        self._cluster, self._router, self._id = cluster, router, id
        self._messages: list[dict[str, Any]] = []

    async def live(self, pace_s: float) -> None:
        """Go through some turns, so many seconds apart on average; give up when something fails."""
        for turn in range(1, random.randrange(6, 16)):
            if random.random() < 0.03 and self._messages:  # it edits what it read long ago
                self._messages[0]["content"] = text(600)
            self._messages.append({"role": "user", "content": f"{CALL_MARKER} {text(600)}"})
            for step in range(1, random.randrange(3, 7)):
                if not await self._step(turn, step):
                    return
                await asyncio.sleep(random.expovariate(2 / pace_s))
                if not (calls := self._messages[-1].get("tool_calls")):
                    break
                result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": text(200)}
                self._messages.append(result)
            await asyncio.sleep(random.expovariate(1 / pace_s))

    async def _step(self, turn: int, step: int) -> bool:
        headers = {"X-Conversation-ID": self._id, "X-Turn-ID": str(turn), "X-Turn-Step": str(step)}
        if random.random() < 0.01:
            headers["X-Carryback-Reuse"] = "off"
        body = {
            "messages": self._messages,
            "tools": TOOLS,
            "stream": True,
            "max_tokens": random.randrange(20, 160),
        }
        answer = await self._cluster.post(self._router, CHAT, body, headers=headers)
        if answer.status == 200:
            self._messages.append(message_of(answer))
        return answer.status == 200


async def main() -> None:
    """Parse the command line, and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=40)
    parser.add_argument("--pace-s", type=float, default=3.0, help="between an agent's turns, on average")
    parser.add_argument("--seconds", type=float, default=0, help="until the pictures; 0: until interrupted")
    parser.add_argument("--pictures", type=Path, help="folder for pictures")
    parser.add_argument(
        "--url", help="operators' port of a router that runs: pictures of that, and no agents"
    )
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    if args.url is not None:
        await photograph(f"{args.url}/dashboard", args.pictures or Path(), args.chromium)
        return
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        await cluster.start()
        for role in ("prefill", "prefill", "decode", "decode", "decode"):
            number = sum(each.role == role for each in cluster.engines)
            name = f"{role}-{number}"
            engine = SlowEngine(
                role, name=name, capacity=80 * args.agents + 2000, answer_tokens=400, chunk_interval_s=0.01
            )
            cluster.engines.append(await stack.enter_async_context(engine))
        router = await cluster.router(
            pin_budget=0.6, probe_interval_s=1.0, probe_timeout_s=60.0, connect_timeout_s=60.0
        )
        print(f"{router.admin_url}/dashboard", flush=True)

        async def work(number: int) -> None:
            while True:
                await asyncio.sleep(random.uniform(0, 2 * args.pace_s))
                kind = random.choice(("research", "coding", "support", "review"))
                await Agent(cluster, router, f"{kind}-{random.randrange(16**4):04x}").live(args.pace_s)

        workers = [asyncio.create_task(work(number)) for number in range(args.agents)]
        ended = asyncio.gather(*workers)
        done, _ = await asyncio.wait([ended], timeout=args.seconds or None)
        if done:
            await ended
        if args.pictures is not None:
            await photograph(f"{router.admin_url}/dashboard", args.pictures, args.chromium)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, ended, return_exceptions=True)
        await router.stop()


async def photograph(url: str, folder: Path, chromium: str) -> None:
    """Pictures of the page, in all of `SIZES`."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium)
        for name, (width, height, scheme) in SIZES.items():
            page = await browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page.on("console", lambda message: print(message.type, message.text))
            page.on("pageerror", lambda error: print(error))
            await page.goto(url)
            await page.locator("#rows .row").first.wait_for()
            await asyncio.sleep(6)
            await page.screenshot(path=folder / f"{name}.png", full_page=name == "narrow")
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
