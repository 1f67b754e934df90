"""`carryback engine`, short of becoming vLLM."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest
from carryback_server import address
from carryback_server.cli import app
from carryback_server.config import ConfigError
from carryback_server.launch import free_ports
from typer.testing import CliRunner, Result

OWN = [name for name in os.environ if name.startswith("CARRYBACK_")]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in OWN:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYBACK_KEY", "5ec7e7")
    monkeypatch.setenv("CARRYBACK_EVENTS_KEY", "whisper")


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["engine", *args])


def plan(*args: str) -> tuple[dict[str, str], list[str], str]:
    """What a dry run prints: the environment, the command, and the words for the router."""
    result = run("--dry-run", *args)
    assert result.exit_code == 0, result.output
    lines = result.stdout.replace("\\\n", " ").splitlines()
    words = next(shlex.split(line) for line in lines if sys.executable in line)
    program = words.index(sys.executable)
    (router,) = [line.partition("# For the router: ")[2] for line in lines if "# For the router: " in line]
    return dict(word.split("=", 1) for word in words[:program]), words[program:], router


def value(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def events(words: list[str]) -> str:
    extra = json.loads(value(words, "--kv-transfer-config"))["kv_connector_extra_config"]
    return str(extra["carryback_events"])


@pytest.mark.parametrize(("role", "port"), [("prefill", 8100), ("decode", 8200)])
def test_what_others_reach(role: str, port: int) -> None:
    env, words, router = plan(role, "--advertise-host", "10.0.0.5", "--device", "cuda", "--model", "m")
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.5"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(port + 2)
    assert (value(words, "--host"), value(words, "--port")) == ("10.0.0.5", str(port))
    assert events(words) == f"tcp://10.0.0.5:{port + 1}"
    assert router == f"--{role} http://10.0.0.5:{port}"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_ports_and_addresses_of_ones_own() -> None:
    env, words, router = plan(
        "decode", "--advertise-host", "10.0.0.5", "--host", "::", "--port", "9000", "--events-port", "9100",
        "--side-channel-port", "9200", "--device", "cuda", "--devices", "4,5", "--model", "m",
    )  # fmt: skip
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.5", "9200")
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert (value(words, "--host"), value(words, "--port")) == ("::", "9000")
    assert events(words) == "tcp://[::]:9100"
    assert router == "--decode http://10.0.0.5:9000,tcp://10.0.0.5:9100"


def test_ipv6() -> None:
    env, words, router = plan("prefill", "--advertise-host", "fd00::5", "--device", "cpu")
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "fd00::5"
    assert value(words, "--host") == "fd00::5"
    assert events(words) == "tcp://[fd00::5]:8101"
    assert shlex.split(router) == ["--prefill", "http://[fd00::5]:8100"]


def test_both_roles_agree_on_what_serve_makes_them_agree_on() -> None:
    flags = [
        "--advertise-host",
        "10.0.0.5",
        "--device",
        "cpu",
        "--hold-s",
        "60",
        "--",
        "--max-model-len",
        "4096",
    ]
    (prefill_env, prefill, _), (decode_env, decode, _) = plan("prefill", *flags), plan("decode", *flags)
    assert prefill_env["PYTHONHASHSEED"] == decode_env["PYTHONHASHSEED"] == "0"
    for flag in ("--block-size", "--prefix-caching-hash-algo", "--model", "--max-model-len"):
        assert value(prefill, flag) == value(decode, flag)
    config = json.loads(value(decode, "--kv-transfer-config"))
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 60


def test_settings_from_file_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("advertise_host: 10.0.0.7\nport: 9000\nengine_args: --max-model-len 4096\nhold_s: 30\n")
    monkeypatch.setenv("CARRYBACK_PORT", "9001")
    _, words, router = plan("decode", "--config", str(file))
    assert router == "--decode http://10.0.0.7:9001"
    assert value(words, "--max-model-len") == "4096"
    file.write_text("advertise_hots: 10.0.0.7\n")
    result = run("decode", "--dry-run", "--config", str(file))
    assert result.exit_code == 1
    assert "did you mean 'advertise_host'?" in result.output


@pytest.mark.usefixtures("keys")
def test_a_dry_run_shows_no_secret() -> None:
    result = run("prefill", "--dry-run", "--advertise-host", "10.0.0.5")
    assert result.exit_code == 0
    assert "CARRYBACK_KEY" in result.output
    assert "5ec7e7" not in result.output
    assert "whisper" not in result.output


@pytest.mark.parametrize("given", ["CARRYBACK_KEY", "CARRYBACK_EVENTS_KEY", None])
def test_missing_keys(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    if given is not None:
        monkeypatch.setenv(given, "5ec7e7")
    result = run("decode", "--advertise-host", "127.0.0.1")
    assert result.exit_code == 1
    named = result.output.partition(" not set")[0]
    for name in ("CARRYBACK_KEY", "CARRYBACK_EVENTS_KEY"):
        assert (name in named) == (name != given)
    assert "openssl rand -hex 32" in result.output


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("203.0.113.9", "NAT"),
        ("2001:db8::9", "NAT"),
        ("0.0.0.0", "no address that others could connect to"),
        ("::", "no address that others could connect to"),
        ("no-such-host.invalid", "no-such-host.invalid"),
    ],
)
def test_an_address_that_others_cannot_use(host: str, message: str) -> None:
    result = run("decode", "--device", "cpu", "--advertise-host", host)
    assert result.exit_code == 1
    assert "--advertise-host" in result.output
    assert message in result.output


def test_no_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ways that end on this machine, as where there is no network.
    monkeypatch.setattr(address, "_NOBODYS", {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"})
    with pytest.raises(ConfigError, match="--advertise-host"):
        address.advertised(None)


def test_the_default_address_is_ones_own() -> None:
    try:
        found = address.advertised(None)
    except ConfigError as error:
        pytest.skip(str(error))
    assert not found.startswith("127.")
    assert address.advertised(found) == found


def test_a_name_is_resolved() -> None:
    assert address.advertised("localhost") in ("127.0.0.1", "::1")


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("offset", "setting"), [(0, "--port"), (1, "--events-port"), (2, "--side-channel-port")]
)
def test_a_port_in_use(offset: int, setting: str) -> None:
    port, taken = free_ports(2)
    ports = [port, port + 1, port + 2]
    ports[offset] = taken
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        result = run(
            "prefill", "--device", "cpu", "--model", "/", "--advertise-host", "127.0.0.1",
            "--port", str(ports[0]), "--events-port", str(ports[1]), "--side-channel-port", str(ports[2]),
        )  # fmt: skip
    assert result.exit_code == 1
    assert f"port {taken}: it is in use" in result.output
    assert setting in result.output


@pytest.mark.usefixtures("keys")
def test_wrong_use() -> None:
    assert run("both").exit_code == 2
    assert run("decode", "stray").exit_code == 2
    result = run(
        "decode", "--dry-run", "--advertise-host", "10.0.0.5", "--port", "8201", "--events-port", "8201"
    )
    assert result.exit_code == 1
    assert "--port and --events-port both mean port 8201" in result.output
    result = run("decode", "--dry-run", "--advertise-host", "10.0.0.5", "--", "--port", "1")
    assert "--port among the engine arguments" in result.output
