"""`carryback doctor` on stub engines: each planted fault is found by the check that is meant for it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.doctor.finding import Finding
from carryback_server.doctor.run import Asked, Limits, after_start
from carryback_server.profiles import PROFILES
from redis_server import free_port, redis_server
from router_process import free_ports
from service import Serve, Service
from stub_engine import Settings, StubEngine

QUICK = Limits(answer_s=5.0, conversation_s=30.0)
# What nobody reads of a prompt's KV is held for so long, and these tests wait until nothing is.
LEASE_S = 2.0
# Of an engine, with which NIXL need not be tried here.
UCX_LOG = "[1.0] [vm:1 :0] ucp_worker.c:1997 UCX  INFO  a inter-node cfg#1 rma(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "engine.log"
    file.write_text(UCX_LOG)
    return file


async def findings(service: Service, log: Path | None, **asked: Any) -> list[Finding]:
    """What doctor finds, told the router's addresses."""
    settings = {"config": RouterConfig(prefill_lease_s=LEASE_S), "limits": QUICK, **asked}
    wanted = Asked(
        router=service.url, admin=service.router.admin_url, logs=[log] if log is not None else (), **settings
    )
    return [each async for each in after_start(wanted)]


async def alone(engines: list[EngineConfig], log: Path, **settings: Any) -> list[Finding]:
    """What doctor finds, told engines and no router."""
    config = RouterConfig(engines=engines, prefill_lease_s=LEASE_S, **settings)
    return [each async for each in after_start(Asked(config, logs=[log], limits=QUICK))]


def failed(found: list[Finding]) -> set[str]:
    return {each.check for each in found if each.status == "FAIL"}


def one(found: list[Finding], check: str, status: str = "FAIL") -> Finding:
    """The finding of a check, the only one with this status."""
    [finding] = [each for each in found if (each.check, each.status) == (check, status)]
    return finding


async def command(*args: str, environ: Mapping[str, str] = {}, limit_s: float = 120) -> tuple[int, str, str]:
    """`carryback doctor` as a process: its exit status, what it printed, and its errors."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CARRYBACK_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carryback_server", "doctor", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**clean, **environ},
    )  # fmt: skip
    async with asyncio.timeout(limit_s):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_healthy_pair_has_no_failure_and_nothing_is_left(serve: Serve) -> None:
    service = await serve(engine={"events_key": "hush"}, events_key="hush")
    args = ("--router", service.url, "--admin-url", service.router.admin_url, "--json")
    status, out, err = await command(*args, environ={"CARRYBACK_EVENTS_KEY": "hush"})
    report = json.loads(out)
    assert (status, report["ok"], err) == (0, True, "")
    seen = Counter((each["check"], each["status"]) for each in report["findings"])
    assert {check for check, status in seen if status in ("WARN", "FAIL")} == set()
    for check in ("health", "vllm", "plugin", "events", "side-channel", "address"):
        assert seen[check, "ok"] == 2, check
    assert seen["hold", "ok"] == 2
    for check in (
        "key",
        "model",
        "block-size",
        "conversation",
        "reuse",
        "pull",
        "bandwidth",
        "transport",
    ):
        assert seen[check, "ok"] == 1, check
    [transport] = [each for each in report["findings"] if each["check"] == "transport"]
    assert "tcp" in transport["found"]
    [reuse] = [each for each in report["findings"] if each["check"] == "reuse"]
    assert "hit; tokens=" in reuse["found"]
    assert "hush" not in out
    assert "the key of the tests" not in out
    await service.unpinned()
    async with service.session.get(f"{service.url}/v1/conversations") as response:
        assert (await response.json())["data"] == []


async def test_without_a_router_it_has_one_of_its_own(serve: Serve, log: Path) -> None:
    service = await serve()
    args = [f"--{each.role}={each.url},{each.events}" for each in service.engines]
    status, out, _ = await command(*args, "--engine-log", str(log))
    lines = out.splitlines()
    assert status == 0, out
    assert any(line.startswith("ok    reuse ") and "hit" in line for line in lines), out
    assert "rc_mlx5" in out
    assert lines[-1].endswith("0 WARN, 0 FAIL, 1 skip")
    await service.unpinned()


async def test_another_key(serve: Serve, log: Path) -> None:
    async with StubEngine("decode", key="another") as odd:
        service = await serve(decode=0, engines=[odd.config()], prefill_lease_s=LEASE_S)
        found = await findings(service, log)
        # With seals that are not valid, nothing is reused, and the decode engine computes prompts itself.
        assert failed(found) == {"key", "reuse"}
        assert "CARRYBACK_KEY" in one(found, "key").fix
        assert "decode" in one(found, "key").found
        await service.stop_router()


@pytest.mark.parametrize(
    ("about", "check", "fix"),
    [
        ({"block_size": 32}, "block-size", "--block-size"),
        ({"model": "another"}, "model", "--model"),
        ({"max_model_len": 99}, "max-model-len", "--max-model-len"),
        ({"hash_seed": "1234"}, "hash-seed", "PYTHONHASHSEED"),
        ({"dtype": "bfloat16"}, "dtype", "--dtype"),
        ({"lease_s": 6.0}, "lease", "kv_lease_duration"),
        ({"backends": ["LIBFABRIC"]}, "backend", "--kv-backend"),
        ({"side_channel_host": "no-such-host.invalid"}, "address", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    ],
)
async def test_engines_that_are_set_up_differently(
    serve: Serve, log: Path, about: dict[str, Any], check: str, fix: str
) -> None:
    async with StubEngine("decode", about=about) as odd:
        service = await serve(decode=0, engines=[odd.config()], prefill_lease_s=LEASE_S)
        found = await findings(service, log)
        assert failed(found) - {"side-channel"} == {check}
        assert fix in one(found, check).fix
        await service.stop_router()


async def test_an_old_vllm_without_the_plugin(log: Path) -> None:
    stock = Settings(plugin=False)
    async with StubEngine("prefill", version="0.19.2", settings=stock) as old, StubEngine("decode") as decode:
        found = await alone([old.config(), decode.config()], log)
        assert failed(found) == {"vllm", "plugin", "events", "reuse"}
        assert "prefill" in one(found, "plugin").found
        assert "kv_connector_module_path carryback_vllm.connector" in one(found, "plugin").fix
        assert "0.19.2" in one(found, "vllm").found
        assert "pip install 'carryback[gpu]'" in one(found, "vllm").fix


async def test_an_events_port_that_is_blocked(log: Path) -> None:
    async with StubEngine("prefill") as prefill, StubEngine("decode") as decode:
        blocked = decode.config().model_copy(update={"events": f"tcp://127.0.0.1:{free_ports(1)[0]}"})
        found = await alone([prefill.config(), blocked], log)
        # It has the plug-in, and nobody hears what it holds.
        assert failed(found) == {"events", "hold", "reuse"}
        events = one(found, "events")
        assert "connection refused" in events.found
        assert "carryback_events" in events.fix
        assert {each.status for each in found if each.check == "plugin"} == {"ok"}


async def test_a_side_channel_that_is_blocked(serve: Serve, log: Path) -> None:
    async with StubEngine("decode", about={"side_channel_port": free_ports(1)[0]}) as engine:
        service = await serve(decode=0, engines=[engine.config()])
        found = await findings(service, log)
        assert failed(found) == {"side-channel"}
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in one(found, "side-channel").fix
        await service.stop_router()


async def test_another_key_of_the_events(log: Path) -> None:
    right = {"events_key": "right"}
    async with StubEngine("prefill", **right) as prefill, StubEngine("decode", **right) as decode:
        found = await alone([prefill.config(), decode.config()], log, events_key="wrong")
        assert failed(found) == {"events", "hold", "reuse"}
        assert {each.fix for each in found if each.check == "events"} == {
            "give engines, routers and doctor the same CARRYBACK_EVENTS_KEY (events_key)"
        }


async def test_without_pins_there_is_reuse_and_a_warning(serve: Serve, log: Path) -> None:
    service = await serve(pin_budget=0)
    found = await findings(service, log)
    assert failed(found) == set()
    assert "pin_budget" in one(found, "hold", "WARN").fix
    assert one(found, "reuse", "ok")


async def test_a_decode_engine_without_a_prefix_cache(log: Path) -> None:
    async with (
        StubEngine("prefill", about={"prefix_caching": False}) as prefill,
        StubEngine("decode", about={"prefix_caching": False}) as decode,
    ):
        found = await alone([prefill.config(), decode.config()], log)
    finding = one(found, "prefix-caching", "WARN")
    assert finding.found.startswith("decode")
    assert "--enable-prefix-caching" in finding.fix


async def test_a_clock_that_is_wrong(serve: Serve, log: Path) -> None:
    async with StubEngine("prefill", clock_offset_s=-300) as late:
        service = await serve(prefill=0, engines=[late.config()])
        found = await findings(service, log)
        assert failed(found) == {"clock"}
        assert " s behind ours" in one(found, "clock").found
        assert "NTP" in one(found, "clock").fix
        await service.stop_router()


async def test_a_transport_that_is_not_the_profiles(serve: Serve, tmp_path: Path) -> None:
    profile = {"profile_name": "infiniband", "profile": PROFILES["infiniband"]}
    service = await serve(engine={"about": {"ucx": {"UCX_TLS": "tcp"}}})
    found = await findings(service, None, **profile)
    assert failed(found) == {"transport"}
    assert "tcp" in one(found, "transport").found
    assert "UCX_TLS=rc,cuda_ipc,cuda_copy,sm" in one(found, "transport").fix
    # And by what an engine's UCX says itself.
    file = tmp_path / "log"
    for text, expected in (
        (UCX_LOG, set()),
        (UCX_LOG.replace("rc_mlx5/mlx5_0:1", "tcp/eth0"), {"transport"}),
    ):
        file.write_text(text)
        assert failed(await findings(service, file, **profile)) == expected


async def test_redis_that_is_down_and_redis_that_is_up(serve: Serve, log: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    # What a router pins when its Redis goes stays pinned for its time.
    service = await serve(state=url, engine={"settings": Settings(grace_s=0.5)}, hold_s=7, hold_mid_turn_s=7)
    found = await findings(service, log, config=RouterConfig(state=url))
    assert failed(found) == {
        "redis",
        "hold",
    }  # nobody knows where the conversation is, and it reuses all the same
    assert "state" in one(found, "redis").fix
    with redis_server(port=port) as server:
        found = await findings(service, log, config=RouterConfig(state=url))
        assert one(found, "redis", "ok")
        server.client.config_set("maxmemory", "1gb")
        server.client.config_set("maxmemory-policy", "volatile-ttl")
        found = await findings(service, log, config=RouterConfig(state=url))
        assert "noeviction" in one(found, "redis", "WARN").fix


async def test_several_engines_are_tried_in_pairs(serve: Serve, log: Path) -> None:
    async with StubEngine("decode", key="another", name="odd") as odd:
        service = await serve(engines=[odd.config()], prefill_lease_s=LEASE_S)
        found = await findings(service, log)
        pairs = [each for each in found if each.check == "reuse" and "prefill" in each.found]
        assert Counter(each.status for each in pairs) == {"ok": 1, "FAIL": 1}
        assert all(("decode odd" in each.found) == (each.status == "FAIL") for each in pairs)
        await service.unpinned()
        assert odd.in_use == 0
        await service.stop_router()


async def test_engines_that_hang_or_are_gone_hold_nothing_up(serve: Serve, log: Path) -> None:
    service = await serve(prefill_timeout_s=2.0)
    service.prefill.fault(hang=True, times=None)
    await service.decode.kill()
    found = await findings(service, log, limits=Limits(answer_s=1.0, conversation_s=3.0))
    assert {"health", "conversation"} <= failed(found)
    gone = next(each for each in found if each.check == "health" and each.status == "FAIL")
    assert "--decode" in gone.fix
    await service.decode.start()
    service.prefill.faults.clear()


async def test_a_tenants_key_is_asked_for_and_not_shown(serve: Serve, log: Path) -> None:
    service = await serve(api_keys=["acme=hush-hush-hush-hush-hush-hush"])
    assert "--api-key" in one(await findings(service, log), "conversation").fix
    found = await findings(service, log, headers={"Authorization": "Bearer hush-hush-hush-hush-hush-hush"})
    assert failed(found) == set()
    assert "hush-hush-hush-hush-hush-hush" not in str(found)


async def test_engines_of_before_that_say_nothing(serve: Serve, log: Path) -> None:
    service = await serve(engine={"about": None})
    found = await findings(service, log)
    assert failed(found) == set()
    assert one(found, "key", "skip")
    assert one(found, "reuse", "ok")
