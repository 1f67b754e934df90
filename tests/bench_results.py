"""Results of bench runs that nobody measured, for the tests of what is made of results."""

from __future__ import annotations

import random
from typing import Any

from carryback_server.bench.result import Request, Result, Transfers


def request(
    arm: str = "reuse", conversation: str = "c1", turn: int = 2, step: int = 1, **fields: Any
) -> Request:
    """One request that went well."""
    usual: dict[str, Any] = {
        "started_s": 0.0,
        "prompt_tokens": 1000,
        "output_tokens": 8,
        "ttft_s": 0.1,
        "duration_s": 0.3,
    }
    return Request(arm=arm, conversation=conversation, turn=turn, step=step, **(usual | fields))


def result(requests: list[Request], **fields: Any) -> Result:
    """A run with these requests."""
    usual: dict[str, Any] = {
        "carryback": "0.1.0",
        "workload": "agent",
        "settings": {"model": "default", "seed": 0},
        "environment": {"model": "SmolLM2-135M-Instruct", "device": "cpu"},
        "started": "2026-11-30T05:00:00Z",
        "duration_s": 61.0,
        "block_size": 32,
        "transfers": [],
    }
    return Result(requests=requests, **(usual | fields))


def paper(
    *, rounds: int = 8, sizes: tuple[int, ...] = (512, 1024, 2048, 4096), speed: float = 1.0, seed: int = 1
) -> Result:
    """Prompts of several sizes in three arms: without reuse a token takes 4 ms, with reuse a new one does.

    Args:
        speed: what times are multiplied by.
    """
    rng = random.Random(seed)
    requests = []
    for number in range(rounds):
        for place, size in enumerate(sizes):
            new = rng.randint(20, 40)
            for arm in ("reuse", "no_reuse", "aggregated"):
                reused = (size - new) // 32 * 32 if arm == "reuse" else 0
                noise = rng.lognormvariate(0, 0.1)
                slowness = {"reuse": 0.08, "no_reuse": 0.05, "aggregated": 0.02}[arm]
                itl = [0.14 * rng.lognormvariate(0, 0.2) for _ in range(15)]
                ttft = speed * noise * (slowness + 0.004 * (size - reused))
                requests.append(
                    request(
                        arm,
                        f"round-{number}",
                        place + 2,
                        group=str(size),
                        prompt_tokens=size + rng.randint(-5, 5) * (arm == "reuse"),
                        output_tokens=16,
                        new_tokens=new,
                        reused_tokens=None if arm == "aggregated" else reused,
                        cached_tokens=None if arm == "aggregated" else 0,
                        recomputed_tokens=None if arm == "aggregated" else size - reused,
                        outcome={"reuse": "hit", "no_reuse": "miss"}.get(arm, ""),
                        reason={"reuse": "verified", "no_reuse": "off"}.get(arm, ""),
                        ttft_s=ttft,
                        duration_s=ttft + sum(itl),
                        itl_s=itl,
                        output="d1",
                        is_identical=None if arm == "no_reuse" else True,
                    )
                )
    count = rounds * len(sizes)
    transfers = [
        Transfers(
            arm="reuse", direction="decode_to_prefill", count=count, seconds=0.02 * count, bytes=4e7 * count
        ),
        Transfers(
            arm="reuse", direction="prefill_to_decode", count=count, seconds=0.03 * count, bytes=4e7 * count
        ),
        Transfers(
            arm="no_reuse",
            direction="prefill_to_decode",
            count=count,
            seconds=0.03 * count,
            bytes=4e7 * count,
        ),
    ]
    costs: list[dict[str, Any]] = [
        {
            "prefill": "p0",
            "decode": "d0",
            "prefill_s_per_token": 0.004,
            "read_s": 0.02,
            "read_s_per_token": 1e-5,
            "break_even_tokens": 6,
            "samples": {"prefill": count, "read": count},
        }
    ]
    return result(requests, workload="paper", transfers=transfers, costs=costs)
