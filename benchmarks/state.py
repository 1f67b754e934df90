"""What a conversation costs between its requests: memory, and processor time to open, locate and save it.

    python benchmarks/state.py
    python benchmarks/state.py --count 10000 --state redis

They are kept in a router's own memory, then in a redis-server that is started for it, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
from carryback_server.config import RouterConfig
from carryback_server.state import Location, State, make_state

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from redis_server import RedisServer, redis_server

IN_FLIGHT = 32
RUN = "5f0c5a3e-7a55-4f0e-9b39-0d3d1f1a2b3c"
REUSE = "hit; tokens=23952; reason=verified; recomputed=211; cached=0; found=23952; asked=2; holder=" + RUN


def location(number: int, at: float) -> Location:
    """As it comes out of an engine's event."""
    key = f"cb0123456789abcd.{number}"
    return Location("decode-0", RUN, key, 24_000, at + 480, "turn-0001", os.urandom(16), at)


async def _request(state: State, number: int) -> None:
    """What one request does at the state."""
    conversation = await state.open("tenant", f"conversation-{number:012}")
    at = conversation.last_seen
    conversation.turn, conversation.step, conversation.boundary = "turn-0001", 1, "turn_end"
    conversation.reuse = REUSE
    await state.locate("tenant", conversation.id, location(number, at))
    await state.save(conversation)


async def _all(state: State, count: int) -> float:
    """A request of each conversation; seconds of processor time."""
    started = time.process_time()
    for first in range(0, count, IN_FLIGHT):
        await asyncio.gather(*(_request(state, n) for n in range(first, min(first + IN_FLIGHT, count))))
    return time.process_time() - started


async def _measure(url: str, count: int, server: RedisServer | None) -> None:
    def used() -> int:
        if server is None:
            return int(psutil.Process().memory_info().rss)
        return int(server.client.info("memory")["used_memory"])

    config = RouterConfig.model_validate({"state": url, "max_conversations": count, "state_timeout_s": 10})
    state = make_state(
        config, on_message=print, observe=lambda *_: None, on_junk=lambda: None, on_refused=lambda: None
    )
    await state.start()
    await _request(state, 0)
    await state.delete("tenant", "conversation-000000000000")
    before = used()
    first_s = await _all(state, count)
    after = used()
    next_s = await _all(state, count)
    await state.stop()

    what = "RSS of the router" if server is None else "used_memory of Redis"
    print(
        f"{what:22} {(after - before) / 1e6:8,.0f} MB, {(after - before) / count:8,.0f} bytes a conversation"
    )
    print(
        f"{'router, CPU':22} {first_s / count * 1e6:8,.0f} us for a first request, {next_s / count * 1e6:,.0f} us for "
        "a later one"
    )


def measure(kind: str, count: int) -> None:
    """Measure one kind of state, in this process."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server()) if kind == "redis" else None
        asyncio.run(_measure(server.url if server else "memory", count, server))


def main() -> None:
    """Measure what is asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000, help="conversations")
    parser.add_argument("--state", choices=["memory", "redis"], action="append", help="both unless given")
    args = parser.parse_args()
    for kind in args.state or ["memory", "redis"]:
        print(f"{kind}, {args.count:,} conversations")
        with ProcessPoolExecutor(1) as pool:
            pool.submit(measure, kind, args.count).result()


if __name__ == "__main__":
    main()
