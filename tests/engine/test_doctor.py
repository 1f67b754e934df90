"""`carryback doctor` on real engines. All ten faults on engines of their own: benchmarks/doctor.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.doctor.finding import Finding
from carryback_server.doctor.run import Asked, Limits, after_start
from carryback_server.launch import free_ports
from carryback_server.profiles import PROFILES
from carryback_server.supervisor import Engines
from pair import KEY, Client, Pair

LIMITS = Limits(answer_s=20.0, probe_s=200.0)
UCX_LOG = "UCX  INFO  agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An engine's, so that NIXL need not be tried."""
    file = tmp_path / "engine.log"
    file.write_text(UCX_LOG)
    return file


async def findings(engines: list[EngineConfig], **asked: Any) -> list[Finding]:
    config = RouterConfig(engines=engines, **asked.pop("config", {}))
    return [each async for each in after_start(Asked(config, limits=LIMITS, **asked))]


def failed(found: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in found if each.status == "FAIL"}


async def test_a_healthy_pair_reads_and_leaves_nothing(pair: Pair, client: Client) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carryback_server", "doctor", "--json", "--timeout-s", "20",
        "--probe-timeout-s", "200", "--router", client.url, "--admin-url", client.admin_url,
        stdout=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("CARRYBACK_")},
    )  # fmt: skip
    out, _ = await process.communicate()
    report = json.loads(out)
    bad = [each for each in report["findings"] if each["status"] in ("WARN", "FAIL")]
    assert (process.returncode, report["ok"], bad) == (0, True, [])
    told = {each["check"]: each["found"] for each in report["findings"]}
    assert "hit; tokens=" in told["reuse"]
    assert "the prefill engine counted" in told["pull"]
    assert "GB/s" in told["bandwidth"]
    assert "UCX takes tcp" in told["transport"]
    assert KEY not in out.decode()
    await pair.assert_unpinned()


async def test_what_is_not_pinned_for_long_is_found(pair: Pair, log: Path) -> None:
    async with pair.router(hold_s=4.0, hold_mid_turn_s=4.0) as client:
        found = await findings([], router=client.url, admin=client.admin_url, logs=[log])
    assert not failed(found)


async def test_what_does_not_need_another_engine(pair: Pair, log: Path) -> None:
    prefill, decode = (command.engine() for command in pair.commands)
    port, redis = free_ports(2)
    blocked = decode.model_copy(update={"events": f"tcp://127.0.0.1:{port}"})
    found = failed(
        await findings([prefill, blocked], config={"state": f"redis://127.0.0.1:{redis}/0"}, logs=[log],
                       profile=PROFILES["infiniband"], profile_name="infiniband")
    )  # fmt: skip
    assert found.keys() == {"events", "redis", "transport", "hold", "reuse"}
    assert "carryback_events" in found["events"].fix
    assert "UCX_TLS=rc" in found["transport"].fix
    assert "--state" in found["redis"].fix


async def test_an_engine_with_another_key_blocks_and_seed(pair: Pair, log: Path, tmp_path: Path) -> None:
    odd = pair.another(
        "prefill", "odd", "--block-size", "64", env={"CARRYBACK_KEY": "another", "PYTHONHASHSEED": "1"}
    )
    async with Engines([odd], log_dir=tmp_path) as engines:
        with pair.paused("prefill"):
            await engines.wait_ready()
            found = failed(await findings([odd.engine(), pair.commands[1].engine()], logs=[log]))
    assert found.keys() == {"key", "block-size", "hash-seed", "reuse"}
    assert "CARRYBACK_KEY" in found["key"].fix
    assert "--block-size" in found["block-size"].fix
    assert "PYTHONHASHSEED" in found["hash-seed"].fix
