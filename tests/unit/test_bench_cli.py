"""What the command line of `carryback bench` refuses, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from carryback_server.cli import app
from typer.testing import CliRunner

URL = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("paper", "--sizes", "2000,1000"), "growing numbers"),
        (("paper", "--sizes", "2k"), "want numbers of tokens"),
        (("agent", "--turns", "0"), "greater than or equal to 1"),
        (("agent", *URL, "--device", "cpu"), "--device is for servers that are started"),
        (("agent", *URL, "--", "--max-model-len", "8"), "what follows -- is for servers that are started"),
        (("agent", "--aggregated-url", "http://127.0.0.1:9"), "--aggregated-url needs --url"),
        (("agent", "max-model-len"), "vLLM's arguments go after --"),
        (("agent", "--url", "localhost"), "--url localhost: want an address"),
        (("agent", "--url", "http://localhost:x"), "want an address"),
        (("agent", *URL, "--out", "no/such/folder"), "there is no folder"),
        (("trace", "no.json", *URL), "no.json: No such file"),
        (("compare", "no.json", "no.json"), "no.json: No such file"),
        (("agent", "--device", "tpu"), "setting 'device'"),
    ],
)
def test_options_that_are_wrong(args: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args], env={"TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2, result.output
    assert problem in result.output


def test_no_server() -> None:
    result = CliRunner().invoke(app, ["bench", "agent", *URL])
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9/v1/models" in result.output


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text, problem in (
        ("{}", "not a bench result"),
        ('{"version": 99}', "of version 99; this is 1"),
        ('{"version": 1}', "missing required field"),
    ):
        file.write_text(text)
        result = CliRunner().invoke(app, ["bench", "compare", str(file), str(file)])
        assert (result.exit_code, problem in result.output) == (2, True), result.output
