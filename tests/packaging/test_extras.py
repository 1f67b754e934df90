"""Each package imports with its own extra, and needs no other."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from installed import ROOT, Built, Environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Imports all modules of a package; prints those that miss something, and what.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
missing = {}
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name.partition(".")[0]
print(json.dumps(missing))
"""

# What of a package needs another extra than the package itself.
ELSEWHERE = {
    "carryback": {"carryback.wire.events": "server", "carryback.wire.curve": "server"},
    "carryback_server": {
        "carryback_server.redis_state": "redis",
        "carryback_server.letters": "redis",
        "carryback_server.otel": "otel",
        **{
            f"carryback_server.bench.{name}": "bench"
            for name in ("compare", "page", "plots", "report", "stats")
        },
    },
}
EXTRAS = {
    "carryback": "",
    "carryback_langgraph": "langgraph",
    "carryback_agents": "agents",
    "carryback_server": "server",
}


def missing(environment: Environment, package: str) -> dict[str, str]:
    """The modules of a package that cannot be imported, and what each misses."""
    found: dict[str, str] = json.loads(environment.run("python", "-c", IMPORT_ALL, package))
    return found


@pytest.mark.parametrize("package", EXTRAS)
def test_a_package_needs_its_own_extra_only(package: str, with_extra: Callable[[str], Environment]) -> None:
    found = missing(with_extra(EXTRAS[package]), package)
    assert found.keys() == ELSEWHERE.get(package, {}).keys(), found


def test_what_vllm_loads_needs_only_the_client(with_extra: Callable[[str], Environment]) -> None:
    # In the environment of a vLLM that is not ours, the plug-in is there wherever the client is.
    found = missing(with_extra(""), "carryback_vllm")
    assert not {"carryback_vllm.cpu", "carryback_vllm.version"} & found.keys(), found
    program = "from importlib.metadata import entry_points as e; e(group='vllm.general_plugins')['carryback'].load()()"
    with_extra("").run("python", "-c", program)


def test_the_plug_in_imports_beside_vllm(built: Built, tmp_path: Path) -> None:
    # vLLM is here in one version, and too large to be linked: the wheel goes in front of the tree.
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL + "print(package.__file__)", "carryback_vllm"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["{}", str(tmp_path / "carryback_vllm/__init__.py")]


@pytest.mark.parametrize("extra", ["redis", "otel", "bench"])
def test_the_servers_other_extras(extra: str, with_extra: Callable[[str], Environment]) -> None:
    found = missing(with_extra(extra), "carryback_server")
    assert found.keys() == {
        name for name, other in ELSEWHERE["carryback_server"].items() if other != extra
    }, found


def test_the_client_without_the_server_says_what_the_command_needs(
    with_extra: Callable[[str], Environment],
) -> None:
    output = with_extra("").run("python", "-m", "carryback_server", "serve", status=1)
    assert output == (
        "error: the carryback command needs packages that the client does not (aiohttp is missing): "
        "pip install 'carryback[server]'\n"
    )


def test_what_is_imported_is_asked_for() -> None:
    """Each package that a module of ours imports is named in pyproject.toml, not only brought along by another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    homes = metadata.packages_distributions()
    for folder, names in {
        "sdk/carryback": ("", "server"),
        "integrations/carryback_langgraph": ("", "langgraph"),
        "integrations/carryback_agents": ("", "agents"),
        "server/carryback_server": ("server", "redis", "otel", "bench"),
    }.items():
        asked = {canonicalize_name(Requirement(text).name) for name in names for text in extras[name]}
        for source in sorted((ROOT / folder).rglob("*.py")):
            for module in imported(source):
                if module in sys.stdlib_module_names or module.startswith("carryback"):
                    continue
                home = {canonicalize_name(name) for name in homes[module]}
                # A core that is one with its package.
                home |= {"pydantic"} if module == "pydantic_core" else set()
                assert asked & home, f"{source.relative_to(ROOT)} imports {module}, of {home}"


def imported(source: Path) -> set[str]:
    """The top-level modules that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found
