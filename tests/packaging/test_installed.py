"""What a user runs after `pip install 'carryback[server]'`, where the tree is not there to help."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from installed import ROOT, Environment
from router_process import free_ports

START_LIMIT_S = 60.0

# Asks each command and each group of commands for its help; prints their words.
ALL_HELP = """
import sys, typer
from carryback_server.cli import app
def walk(command, words):
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from walk(each, [*words, name])
for words in list(walk(typer.main.get_command(app), ["carryback"])):
    try:
        app([*words[1:], "--help"], prog_name="carryback")
    except SystemExit as end:
        assert end.code == 0, words
    print("HELP OF", *words)
"""

# A conversation of two requests; prints what each reused.
CONVERSATION = """
import sys, carryback
client = carryback.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
messages = [{"role": "user", "content": "Once upon a time " * 40}]
with carryback.Conversation("tale"):
    for _ in range(2):
        answer = client.chat.completions.create(model="stub", messages=messages)
        print(carryback.last_reuse().outcome)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
"""


def test_it_is_not_the_tree(installed: Environment) -> None:
    program = "import carryback, carryback_server, carryback_vllm as v; print(carryback.__file__, carryback_server.__file__, v.__file__)"
    for file in installed.run("python", "-c", program).split():
        assert Path(file).is_relative_to(installed.packages)
        assert not Path(file).is_relative_to(ROOT)


def test_version(installed: Environment) -> None:
    version = installed.run("python", "-c", "import carryback; print(carryback.__version__)").strip()
    assert installed.run("carryback", "--version") == f"carryback {version}\n"
    assert f"carryback {version}\n" in installed.run("carryback", "version")


def test_help_of_each_command(installed: Environment) -> None:
    assert "Usage: carryback [OPTIONS] COMMAND" in installed.run("carryback", "--help")
    # The others in one process: each would import the whole command again.
    output = installed.run("python", "-c", ALL_HELP)
    commands = re.findall("HELP OF (.+)", output)
    assert {
        f"carryback {name}" for name in ("serve", "engine", "router", "bench agent", "simulate", "doctor")
    } < {*commands}
    for command in commands:
        assert f"Usage: {command} " in output


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run(installed: Environment, device: str) -> None:
    output = installed.run("carryback", "serve", "--dry-run", "--device", device)
    assert output.count("vllm.entrypoints.openai.api_server") == 2
    assert f"{installed.packages}/carryback_server/chat_template.jinja" in output
    assert (installed.packages / "carryback_server/chat_template.jinja").is_file()


@pytest.mark.parametrize("profile", ["cpu-smollm2", "h200-qwen3-32b"])
def test_some_virtual_minutes(installed: Environment, profile: str) -> None:
    size = ["--prefill", "1", "--decode", "1", "--agents", "4", "--duration-s", "300"]
    size += ["--set", "first_tokens=1000", "--set", "max_context_tokens=6000"]
    output = installed.run("carryback", "simulate", "--profile", profile, *size)
    # The first column is with reuse.
    share = re.search(r"reused something\W+([\d.]+)%", output)
    assert share is not None, output
    assert float(share[1]) > 50


def test_doctor_says_what_is_missing(installed: Environment) -> None:
    output = installed.run("carryback", "doctor", status=1)
    assert "pip install 'carryback[gpu]'" in output


@dataclass(frozen=True)
class Running:
    """A router that is ready."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str


@pytest.fixture(scope="module")
def router(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The installed router, before stub engines, which run from the tree."""
    port, admin_port = free_ports(2)
    log = tmp_path_factory.mktemp("router") / "log"
    with ExitStack() as stack:
        engines = []
        for role in ("prefill", "decode"):
            url, events = stack.enter_context(stub_engine(role))
            engines += [f"--{role}", f"{url},{events}"]
        err = stack.enter_context(log.open("wb"))
        words = ["carryback", "router", "--port", str(port), "--admin-port", str(admin_port), *engines]
        process = installed.process(*words, stdout=err, stderr=err)
        try:
            running = Running(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
            deadline = time.monotonic() + START_LIMIT_S
            while get(f"{running.url}/ready")[0] != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(START_LIMIT_S)
        assert status == 0, log.read_text()


@contextmanager
def stub_engine(role: str) -> Iterator[list[str]]:
    """A stub engine; its addresses."""
    command = [sys.executable, "-m", "stub_engine", "--role", role]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            out: IO[str] | None = process.stdout
            assert out is not None
            ready, *addresses = out.readline().split()
            assert ready == "ready"
            yield addresses
        finally:
            process.terminate()


def get(url: str) -> tuple[int, str]:
    """Status and body; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=START_LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_a_conversation_from_an_installed_client(
    router: Running, with_extra: Callable[[str], Environment]
) -> None:
    assert with_extra("").run("python", "-c", CONVERSATION, router.url).split() == ["miss", "hit"]


def test_the_dashboard(router: Running) -> None:
    status, page = get(f"{router.admin_url}/dashboard")
    assert status == 200
    sources: Any = sorted((ROOT / "server/carryback_server/dashboard").glob("*.js"))
    assert len(sources) > 3
    for source in sources:
        assert source.read_text() in page
    assert "src=" not in page


def test_its_metrics(router: Running) -> None:
    status, text = get(f"{router.admin_url}/metrics")
    assert status == 200
    assert "carryback_requests_total" in text
