"""`carryback bench` on real engines: its figures are those of the engines."""

from __future__ import annotations

import pytest
from carryback_server.bench import workloads
from carryback_server.bench.client import Client as BenchClient
from carryback_server.bench.engine_metrics import EngineMetrics
from carryback_server.bench.run import Arm, Run
from pair import BLOCK, Client


async def test_a_tool_loop(client: Client) -> None:
    asked = BenchClient(client.session, client.url)
    await asked.connect()
    metrics = EngineMetrics(client.session, client.admin_url)
    await metrics.connect()
    arms = [Arm("no_reuse", asked, {"X-Carryback-Reuse": "off"}), Arm("reuse", asked)]
    agents = workloads.agent(
        conversations=1, turns=1, steps=3, system_tokens=150, result_tokens=8, answer_tokens=4, tool_s=0, seed=0
    )  # fmt: skip
    run = Run(arms, agents, metrics=metrics)
    await run()

    assert [each.error for each in run.requests if each.error] == []
    on, off = (
        [each for each in run.requests if each.is_measured and each.arm == arm]
        for arm in ("reuse", "no_reuse")
    )
    assert [each.outcome for each in on] == ["miss", "hit", "hit"]
    for one, other in zip(on, off, strict=True):
        assert one.is_identical
        assert one.logprob_gap == pytest.approx(0, abs=0.001)
        assert one.prompt_tokens == other.prompt_tokens
        assert one.new_tokens == other.new_tokens is not None
        assert one.output_tokens == 4 == len(one.itl_s) + 1
        assert one.recomputed_tokens is not None
        assert one.recomputed_tokens <= one.new_tokens + BLOCK
        assert other.recomputed_tokens == other.prompt_tokens
    assert on[0].new_tokens == on[0].prompt_tokens
    assert on[1].new_tokens == pytest.approx(150, abs=150)

    # Each prefill is read by the decode engine; the other way, only what was reused.
    reads = {(each.arm, each.direction): each for each in metrics.transfers()}
    assert reads["reuse", "decode_to_prefill"].count == 2
    assert ("no_reuse", "decode_to_prefill") not in reads
    assert reads["reuse", "prefill_to_decode"].count == reads["no_reuse", "prefill_to_decode"].count == 3
    assert all(each.bytes > 0 and each.seconds > 0 for each in reads.values())
    assert metrics.block_size == BLOCK
    await client_is_clean(client)


async def client_is_clean(client: Client) -> None:
    async with client.session.get(f"{client.url}/v1/conversations") as response:
        assert (await response.json())["data"] == []
