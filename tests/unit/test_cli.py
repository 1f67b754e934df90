"""The command line, short of starting engines."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from carryback_server import cli, launch
from carryback_server.cli import app
from carryback_server.config import ServeConfig
from typer.testing import CliRunner, Result

SERVE_SETTINGS = [name for name in os.environ if name.startswith("CARRYBACK_")]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SERVE_SETTINGS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path / "cache"))


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def plan(*args: str) -> list[list[str]]:
    """The commands that a dry run prints, in words."""
    result = run("serve", "--dry-run", *args)
    assert result.exit_code == 0, result.output
    lines = result.stdout.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_dry_run_for_two_gpus() -> None:
    export, export_events, prefill, decode, router = plan(
        "--device", "cuda", "--model", "Qwen/Qwen3-32B", "--", "--max-model-len", "32768"
    )
    assert export == ["export", "CARRYBACK_KEY=$(openssl", "rand", "-hex", "32)"]
    assert export_events == ["export", "CARRYBACK_EVENTS_KEY=$(openssl", "rand", "-hex", "32)"]
    for words, gpu, url in ((prefill, "0", "http://127.0.0.1:8100"), (decode, "1", "http://127.0.0.1:8200")):
        program = words.index(sys.executable)
        assert all("=" in word for word in words[:program])
        assert f"CUDA_VISIBLE_DEVICES={gpu}" in words[:program]
        assert words[program + 1 : program + 3] == ["-m", "vllm.entrypoints.openai.api_server"]
        assert words[words.index("--model") + 1] == "Qwen/Qwen3-32B"
        assert words[words.index("--port") + 1] == url.rsplit(":", 1)[1]
        assert words[-2:] == ["--max-model-len", "32768"]
    assert router[:2] == ["carryback", "router"]
    assert router[router.index("--prefill") + 1] == "http://127.0.0.1:8100"
    assert router[router.index("--decode") + 1] == "http://127.0.0.1:8200"


def test_dry_run_needs_neither_vllm_nor_the_model(tmp_path: Path) -> None:
    # Where vLLM and torch cannot be imported.
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['vllm', 'torch', 'transformers', 'nixl']))\n"
        "from carryback_server.__main__ import main; main()"
    )
    args = ["serve", "--dry-run", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    assert "carryback model fetch" in done.stdout
    assert str(tmp_path / "cache") in done.stdout
    assert not (tmp_path / "cache").exists()


def test_dry_run_never_prints_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYBACK_KEY", "5ec7e7")
    monkeypatch.setenv("CARRYBACK_ENGINE_API_KEY", "hush")
    output = run("serve", "--dry-run").output
    assert "5ec7e7" not in output
    assert "hush" not in output
    assert "export VLLM_API_KEY" in output


def test_dry_run_without_a_key() -> None:
    *_, prefill, decode, _ = plan("--insecure-dev")
    for words in (prefill, decode):
        assert "CARRYBACK_INSECURE_DEV=1" in words


def test_settings_from_flag_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "carryback.yaml"
    file.write_text("port: 7001\nkv_recompute_threshold: 128\nprefill_args: --no-enable-prefix-caching\n")
    *_, prefill, decode, router = plan("--config", str(file))
    assert router[router.index("--port") + 1] == "7001"
    assert '"kv_recompute_threshold": 128' in prefill[prefill.index("--kv-transfer-config") + 1]
    assert "--no-enable-prefix-caching" in prefill
    assert "--no-enable-prefix-caching" not in decode

    monkeypatch.setenv("CARRYBACK_PORT", "7002")
    *_, router = plan("--config", str(file))
    assert router[router.index("--port") + 1] == "7002"
    *_, router = plan("--config", str(file), "--port", "7003")
    assert router[router.index("--port") + 1] == "7003"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 7001", "unknown setting 'prot'; did you mean 'port'?"),
        ("port: many", "setting 'port'"),
        ("device: tpu", "setting 'device'"),
        ("engines: [{role: decode, url: 'http://x', events: 'tcp://x:1'}]", "`carryback router`"),
        ("port: [", "while parsing"),
        ("- port", "carryback.yaml"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "carryback.yaml"
    file.write_text(text)
    result = run("serve", "--dry-run", "--config", str(file))
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "is_warned"),
    [
        (["serve", "--dry-run", "--", "--no-enable-prefix-caching"], True),
        (["serve", "--dry-run", "--decode-args=--no-enable-prefix-caching"], True),
        (["serve", "--dry-run", "--prefill-args=--no-enable-prefix-caching"], False),
        (["engine", "decode", "--dry-run", "--", "--no_enable_prefix_caching"], True),
        (["engine", "prefill", "--dry-run", "--", "--no-enable-prefix-caching"], False),
        (["engine", "decode", "--dry-run"], False),
    ],
)
def test_who_starts_a_decode_engine_without_a_prefix_cache_is_warned(
    args: list[str], is_warned: bool
) -> None:
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert ("WARNING: the decode engine is started without prefix caching" in result.stderr) == is_warned
    assert "WARNING" not in result.stdout


def test_a_decode_engine_has_no_peers() -> None:
    result = run("engine", "decode", "--decode-peers", "tcp://10.0.0.6:8201", "--dry-run")
    assert result.exit_code == 1
    assert "--decode-peers" in result.stderr
    result = run("engine", "prefill", "--decode-peers", "tcp://10.0.0.6", "--dry-run")
    assert result.exit_code == 1
    assert "setting 'decode_peers'" in result.stderr
    assert "the port is missing" in result.stderr


def test_missing_file() -> None:
    result = run("serve", "--dry-run", "--config", "/no/such.yaml")
    assert result.exit_code == 1
    assert "/no/such.yaml: no such configuration file" in result.output


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["serve", "--port", "TAKEN"], "--port"),
        (["serve", "--port", "0", "--admin-port", "TAKEN"], "--admin-port"),
        (["serve", "--port", "BELOW"], "--admin-port"),
        (["serve", "--port", "0", "--prefill-port", "TAKEN"], "--prefill-port"),
        (["serve", "--port", "0", "--decode-port", "TAKEN"], "--decode-port"),
        (["router", "--port", "TAKEN", "--decode", "http://127.0.0.1:1"], "--port"),
        (
            ["router", "--port", "0", "--admin-port", "TAKEN", "--decode", "http://127.0.0.1:1"],
            "--admin-port",
        ),
        (["router", "--port", "BELOW", "--decode", "http://127.0.0.1:1"], "--admin-port"),
    ],
)
def test_a_port_in_use_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, args: list[str], flag: str
) -> None:
    for starts in ("Engines", "Router", "_model_path"):
        monkeypatch.setattr(cli, starts, lambda *_, **__: pytest.fail("something was started"))
    below, port = next(
        (port, port + 1) for port in launch.free_ports(100) if launch.is_free("127.0.0.1", port + 1)
    )
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        result = run(*[{"TAKEN": str(port), "BELOW": str(below)}.get(arg, arg) for arg in args])
    assert result.exit_code == 1
    assert f"port {port}" in result.output
    assert "in use" in result.output
    assert flag in result.output


def test_the_routers_port_among_the_engines_usual_ones() -> None:
    # A prefill engine takes 8100 to 8102 unless something else does.
    *_, prefill, decode, router = plan("--port", "8100")
    ports = [words[words.index("--port") + 1] for words in (prefill, decode, router)]
    assert ports == ["8102", "8200", "8100"]
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=8104" in prefill


def test_ports_that_are_one() -> None:
    result = run("serve", "--dry-run", "--port", "9000", "--prefill-port", "9000")
    assert result.exit_code == 1
    assert "--port and --prefill-port both mean port 9000" in result.output


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_no_port(port: str) -> None:
    for command in (["serve", "--dry-run"], ["router", "--decode", "http://127.0.0.1:1"]):
        result = run(*command, "--port", port)
        assert result.exit_code == 1
        assert "setting 'port'" in result.output


def test_no_such_model_folder() -> None:
    result = run("serve", "--port", "0", "--model", "./no-such-folder")
    assert result.exit_code == 1
    assert "no such folder" in result.output


def test_arguments_before_the_dashes() -> None:
    assert run("serve", "--dry-run", "--max-model-len", "1").exit_code == 2
    result = run("serve", "--dry-run", "stray")
    assert result.exit_code == 2
    assert "vLLM's arguments go after --" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no decode engine"),
        (["--decode", "127.0.0.1:8200"], "want URL or URL,EVENTS"),
        (["--decode", "http://x"], "where are its events"),
        (["--decode", "dns+https://x:1"], "dns needs http"),
    ],
)
def test_router_needs_engines(args: list[str], message: str) -> None:
    result = run("router", *args)
    assert result.exit_code == 1
    assert message in result.output


def test_version() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert "carryback 0." in result.output
    assert "python 3." in result.output


def test_the_version_as_a_flag() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"carryback {metadata.version('carryback')}\n"


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "carryback_server", "--help"], capture_output=True, text=True, check=True
    )
    assert "serve" in done.stdout


def test_quick_to_import() -> None:
    program = "import sys, carryback_server.cli; print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    rows = dict(line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `"))
    documented = {name.strip(" `"): default.strip() for name, default in rows.items()}
    assert documented.keys() == ServeConfig.model_fields.keys()
    for name, field in ServeConfig.model_fields.items():
        if field.default not in (None, []):
            assert documented[name].lower() == f"{field.default}".lower().removesuffix(".0"), name
