"""Profiles and recipes: what docs/deploy.md says is what engines are started with."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from carryback_server.cli import app
from carryback_server.config import EngineSettings, LaunchConfig, SharedConfig
from carryback_server.profiles import PROFILES, RECIPES, ProfileName
from typer.testing import CliRunner

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
# What carryback sets whatever the profile.
ALWAYS = {
    "--model", "--served-model-name", "--host", "--port", "--kv-transfer-config", "--prefix-caching-hash-algo",
    "--enable-prompt-tokens-details", "--enable-prefix-caching",
}  # fmt: skip
ALWAYS_ENV = {
    "PYTHONHASHSEED", "VLLM_NO_USAGE_STATS", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "UCX_TCP_USER_TIMEOUT",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = {name for profile in PROFILES.values() for name in profile.env}
    for name in [*os.environ]:
        if name.startswith("CARRYBACK_") or name in profiles:
            monkeypatch.delenv(name)


def table(header: str) -> list[dict[str, str]]:
    """The rows of the table in the page whose first column has this header."""
    lines = PAGE[PAGE.index(f"| {header} |") :].split("\n\n")[0].splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def plan(command: str, *args: str) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and command of each engine that a dry run prints."""
    words = [command] if command == "serve" else command.split()
    result = CliRunner().invoke(app, [*words, "--dry-run", *args])
    assert result.exit_code == 0, result.output
    lines = result.stdout.replace("\\\n", " ").splitlines()
    engines = [shlex.split(line) for line in lines if sys.executable in line]
    return [
        (
            dict(word.split("=", 1) for word in words[: words.index(sys.executable)]),
            words[words.index("--model") :],
        )
        for words in engines
    ]


def options(words: list[str]) -> dict[str, str]:
    """vLLM's options by name; the value is empty for a flag."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            found[name := word] = ""
        else:
            found[name] = word
    return found


def of_profile(words: list[str]) -> dict[str, str]:
    return {name: value for name, value in options(words).items() if name not in ALWAYS}


def kv_transfer(words: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(options(words)["--kv-transfer-config"])
    return config


def written_options(cell: str) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition(" ") for each in code(cell))}


def test_the_table_has_all_profiles() -> None:
    names = [code(row["profile"])[0] for row in table("profile | for")]
    assert names == list(PROFILES) == list(get_args(ProfileName))


@pytest.mark.parametrize("row", table("profile | for"), ids=lambda row: row["profile"])
def test_serve_starts_what_the_table_says(row: dict[str, str]) -> None:
    (name,) = code(row["profile"])
    assert row["for"] == PROFILES[name].purpose
    engines = plan("serve", "--profile", name, "--model", "some/model")
    assert len(engines) == 2
    for env, words in engines:
        assert of_profile(words) == written_options(row["vLLM arguments"])
        written = [each.partition("=") for each in code(row["environment"])]
        devices = PROFILES[name].devices_variable
        assert env.keys() - ALWAYS_ENV - {devices} == {variable for variable, *_ in written}
        for variable, is_given, value in written:
            assert env[variable] == value if is_given else int(env[variable]) >= 1
        config = kv_transfer(words)
        assert config["kv_connector_extra_config"]["backends"] == code(row["NIXL backend"])
        assert [config["kv_buffer_device"]] == code(row["`kv_buffer_device`"])


@pytest.mark.parametrize("name", PROFILES)
def test_an_engine_by_itself_starts_the_same(name: str) -> None:
    pair = plan("serve", "--profile", name, "--model", "some/model")
    for role, (env, words) in zip(("prefill", "decode"), pair, strict=True):
        ((alone_env, alone),) = plan(
            f"engine {role}", "--profile", name, "--model", "some/model", "--advertise-host", "10.0.0.5"
        )
        assert of_profile(alone) == of_profile(words)
        assert kv_transfer(alone)["kv_buffer_device"] == kv_transfer(words)["kv_buffer_device"]
        for variable in PROFILES[name].env.keys() - {"OMP_NUM_THREADS"}:  # by the engines on the machine
            assert alone_env[variable] == env[variable]


@pytest.mark.parametrize("row", table("model | profile"), ids=lambda row: row["model"] + row["profile"])
def test_recipes_are_what_the_table_says(row: dict[str, str]) -> None:
    (model,) = code(row["model"])
    recipe = RECIPES[model]
    arguments = row["arguments"]
    if arguments == "the same":
        arguments = next(each for each in table("model | profile") if each["model"] == row["model"])[
            "arguments"
        ]
    for name in code(row["profile"]):
        gpus: list[str] = []
        for env, words in plan("serve", "--profile", name, "--model", model):
            size = {"--tensor-parallel-size": row["tensor parallel, prefill and decode"]}
            gpus += env["CUDA_VISIBLE_DEVICES"].split(",")
            assert of_profile(words) == size | written_options(arguments)
        assert gpus == [str(each) for each in range(2 * int(size["--tensor-parallel-size"]))]
    assert row["weights"] == f"{recipe.weights_gb:g} GB"
    share = recipe.tensor_parallel["efa"] if model == "zai-org/GLM-5-FP8" else 1
    assert row["KV for a token"].startswith(f"{recipe.kv_bytes_per_token / share / 1024:.0f} KiB")


def test_the_table_has_all_recipes() -> None:
    written = {
        (code(row["model"])[0], name) for row in table("model | profile") for name in code(row["profile"])
    }
    assert written == {(model, name) for model, recipe in RECIPES.items() for name in recipe.tensor_parallel}


def test_no_recipe_without_a_profile_or_where_the_model_does_not_fit() -> None:
    for args in (["--device", "cuda"], ["--profile", "nvlink"]):
        for _, words in plan("serve", "--model", "zai-org/GLM-5-FP8", *args):
            assert of_profile(words) == {}


def test_the_operator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    args = ["--profile", "infiniband", "--model", "Qwen/Qwen3-32B", "--kv-backend", "Mooncake"]
    args += ["--decode-args", "--tensor_parallel_size 4", "--", "--block-size=128"]
    (env, prefill), (_, decode) = plan("serve", *args)
    assert env["UCX_TLS"] == "all"
    assert kv_transfer(prefill)["kv_connector_extra_config"]["backends"] == ["Mooncake"]
    assert options(prefill)["--tensor-parallel-size"] == "2"
    assert "--tensor-parallel-size" not in decode
    assert "--block-size" not in prefill
    assert "--block-size=128" in prefill


def test_a_profile_for_another_device() -> None:
    result = CliRunner().invoke(app, ["serve", "--dry-run", "--profile", "efa", "--device", "cpu"])
    assert result.exit_code == 1
    assert "profile efa is for device cuda" in result.output
    result = CliRunner().invoke(app, ["serve", "--dry-run", "--profile", "tpu"])
    assert result.exit_code == 2


@pytest.mark.parametrize("name", PROFILES)
def test_every_need_can_be_checked_and_says_what_to_do(name: str) -> None:
    for need in PROFILES[name].needs:
        assert need.why
        assert bool(need.names) != (need.kind == "memlock")
        if need.kind == "path":
            assert all(each.startswith("/") for each in need.names)


def test_every_engine_setting_is_documented() -> None:
    section = PAGE.partition("## Engine settings")[2].partition("\n## ")[0]
    shared = set(code(section.partition("\n\n|")[0])) - {"CARRYBACK_", "carryback serve", "--config"}
    assert shared == LaunchConfig.model_fields.keys() >= SharedConfig.model_fields.keys()
    own = {code(row["setting"])[0] for row in table("setting | default")}
    assert own == EngineSettings.model_fields.keys() - shared
