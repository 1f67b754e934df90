"""What a held record costs: memory, and processor time to store and take it.

    python benchmarks/records.py
    python benchmarks/records.py --count 10000 --state redis

Each record is of a conversation of 24k tokens in blocks of 16: 1,500 digests of 16 random bytes, and the
`kv_transfer_params` with 1,500 random block ids. They are put into a router's own memory, then into
a redis-server that is started for it, one after the other. 100,000 of them need about 4 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
from carryback.wire import events
from carryback_server.config import RouterConfig
from carryback_server.state import Conversation, Record, State, make_state

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from redis_server import RedisServer, redis_server

BLOCKS, BLOCK_SIZE = 1500, 16
POOL_BLOCKS = 200_000
IN_FLIGHT = 32
RUN = "5f0c5a3e-7a55-4f0e-9b39-0d3d1f1a2b3c"


def record(number: int) -> Record:
    """As it comes out of an engine's event."""
    key = f"cb0123456789ab.{number}"
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [random.choices(range(POOL_BLOCKS), k=BLOCKS)],
        "remote_engine_id": RUN,
        "remote_request_id": f"chatcmpl-{key}-1a2b3c4d",
        "remote_host": "10.0.0.17",
        "remote_port": 5600,
        "tp_size": 8,
        "remote_num_tokens": BLOCKS * BLOCK_SIZE,
        "remote_blocks_expiry_time": 1_234_567.891,
        "carryback": {"version": 1, "seal": os.urandom(32).hex(), "hash_block_size": BLOCK_SIZE},
    }
    sent = events.Held(
        engine=RUN,
        seq=number,
        key=key,
        request=f"chatcmpl-{key}-1a2b3c4d",
        tokens=BLOCKS * BLOCK_SIZE,
        blocks=BLOCKS,
        hold_s=3600,
        record=msgspec.json.encode(params),
        digests=os.urandom(16 * BLOCKS),
        pinned=BLOCKS,
    )
    held = events.decode(events.encode(sent)[1])
    assert isinstance(held, events.Held)
    return Record(
        engine="decode-0",
        run=RUN,
        key=held.key,
        request=held.request,
        tokens=held.tokens,
        blocks=held.blocks,
        deadline=time.time() + held.hold_s,
        params=held.record,
        digests=held.digests,
    )


async def _put(state: State, count: int) -> tuple[list[Conversation], float]:
    """Store this many; their conversations, and seconds of processor time for it all but the making."""
    conversations: list[Conversation] = []
    spent = 0.0

    async def put(number: int) -> None:
        conversation = await state.open("tenant", f"conversation-{number:012}")
        await state.put(conversation, made[number], 3600)
        conversations.append(conversation)

    for first in range(0, count, IN_FLIGHT):
        made = {number: record(number) for number in range(first, min(first + IN_FLIGHT, count))}
        started = time.process_time()
        await asyncio.gather(*map(put, made))
        spent += time.process_time() - started
    return conversations, spent


async def _take(state: State, conversations: list[Conversation]) -> float:
    """Take them all; seconds of processor time."""
    started = time.process_time()
    for first in range(0, len(conversations), IN_FLIGHT):
        taken = await asyncio.gather(*map(state.take, conversations[first : first + IN_FLIGHT]))
        assert all(taken)
    return time.process_time() - started


async def _measure(url: str, count: int, server: RedisServer | None) -> None:
    def used() -> int:
        if server is None:
            return int(psutil.Process().memory_info().rss)
        return int(server.client.info("memory")["used_memory"])

    config = RouterConfig.model_validate({"state": url, "max_conversations": count, "state_timeout_s": 10})
    state = make_state(
        config,
        on_evicted=print,
        on_message=print,
        observe=lambda *_: None,
        on_junk=lambda: None,
        on_refused=lambda: None,
    )
    await state.start()
    await state.take(await state.open("tenant", "first"))
    await state.delete("tenant", "first")
    before = used()
    conversations, put_s = await _put(state, count)
    after = used()
    resident = int(server.client.info("memory")["used_memory_rss"]) if server is not None else 0
    take_s = await _take(state, conversations)
    empty = used()
    await state.stop()

    what = "RSS of the router" if server is None else "used_memory of Redis"
    print(f"{what:22} {(after - before) / 1e6:8,.0f} MB, {(after - before) / count:8,.0f} bytes a record")
    if server is not None:
        print(f"{'':22} {(empty - before) / count:8,.0f} bytes a conversation without its record")
        print(f"{'':22} {resident / 1e6:8,.0f} MB RSS of Redis")
    print(
        f"{'router, CPU':22} {put_s / count * 1e6:8,.0f} us for open and put, {take_s / count * 1e6:,.0f} us for take"
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
    parser.add_argument("--count", type=int, default=100_000, help="records")
    parser.add_argument("--state", choices=["memory", "redis"], action="append", help="both unless given")
    args = parser.parse_args()
    one = record(0)
    print(f"{args.count:,} records of {BLOCKS * BLOCK_SIZE:,} tokens in {BLOCKS:,} blocks")
    print(f"{'one record':22} {len(one.digests):8,} bytes of digests, {len(one.params):,} of params")
    for kind in args.state or ["memory", "redis"]:
        print(f"\n{kind}")
        with ProcessPoolExecutor(1) as pool:
            pool.submit(measure, kind, args.count).result()


if __name__ == "__main__":
    main()
