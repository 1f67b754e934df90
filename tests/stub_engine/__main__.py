"""`python -m stub_engine --role decode --port 8200 --events 8201`: a stub engine as a process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
from pathlib import Path

import uvloop

from stub_engine.engine import StubEngine
from stub_engine.fast import FastEngine


async def _run(args: argparse.Namespace) -> None:
    engine: FastEngine | StubEngine
    if args.fast:
        engine = FastEngine(
            args.role, host=args.host, port=args.port, events_port=args.events, model=args.model,
            chunks=args.chunks, chunk_interval_s=args.chunk_interval_s, ttft_s=args.ttft_s,
            capacity=args.capacity,
        )  # fmt: skip
    else:
        engine = StubEngine(
            args.role, host=args.host, port=args.port, events_port=args.events, model=args.model,
            answer_tokens=args.chunks, chunk_interval_s=args.chunk_interval_s, ttft_s=args.ttft_s,
            capacity=args.capacity, ranks=args.ranks, api_key=args.api_key, journal=args.journal,
        )  # fmt: skip
    await engine.start()
    gc.freeze()
    print(f"ready {engine.url} {engine.events}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await engine.kill()


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(prog="stub_engine", description=__doc__)
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="of the HTTP server; 0: a free one")
    parser.add_argument("--events", type=int, default=0, help="port of the event publisher; 0: a free one")
    parser.add_argument("--model", default="stub")
    parser.add_argument("--chunks", type=int, default=128, help="tokens of an answer without a smaller limit")
    parser.add_argument("--chunk-interval-s", type=float, default=0.0, help="0: as fast as it can")
    parser.add_argument("--ttft-s", type=float, default=0.0, help="before the answer, or its first chunk")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="KV blocks of 16 tokens")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks; not with --fast")
    parser.add_argument("--api-key", default="", help="what clients must send; not with --fast")
    parser.add_argument("--journal", type=Path, help="what it saw of records and violations; not with --fast")
    parser.add_argument("--fast", action="store_true", help="the same wire, next to no work: benchmarks")
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
