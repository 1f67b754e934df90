"""Imports point one way: server and integrations need the SDK, never the other way round."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where each import package lives, and what of ours it may import besides itself.
PACKAGES = {
    "carryback": ("sdk/carryback", set()),
    # Which vLLM is supported is said once, and what the simulator does as engines do.
    "carryback_server": (
        "server/carryback_server",
        {"carryback.wire", "carryback.identity"}
        | {f"carryback_vllm.{name}" for name in ("version", "line", "holds", "match")},
    ),
    "carryback_vllm": ("server/carryback_vllm", {"carryback.wire"}),
    "carryback_langgraph": ("integrations/carryback_langgraph", {"carryback"}),
    "carryback_agents": ("integrations/carryback_agents", {"carryback"}),
}
ENGINE_ONLY = {"vllm", "nixl"}


def imports(source: Path, package: str) -> Iterator[str]:
    """The dotted names that a file imports, relative ones made absolute."""
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{package}.{module}".rstrip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def sources() -> list[tuple[str, Path]]:
    return [
        (package, source)
        for package, (folder, _) in PACKAGES.items()
        for source in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_the_packages_are_where_the_tests_look() -> None:
    assert {"carryback", "carryback_server", "carryback_vllm"} <= {package for package, _ in sources()}


@pytest.mark.parametrize(
    ("package", "source"), sources(), ids=lambda value: value.name if isinstance(value, Path) else value
)
def test_imports_point_one_way(package: str, source: Path) -> None:
    allowed = {package} | PACKAGES[package][1]
    for name in imports(source, package):
        if name.split(".")[0] in PACKAGES:
            assert any(name == one or name.startswith(f"{one}.") for one in allowed), (
                f"{source.relative_to(ROOT)} imports {name}"
            )
        if package != "carryback_vllm":
            assert name.split(".")[0] not in ENGINE_ONLY, f"{source.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("carryback", {"openai", "httpx", "msgspec", "tenacity"}),
        ("carryback.wire", {"openai", "httpx", "msgspec", "tenacity"}),
        ("carryback.identity", {"openai", "httpx", "msgspec", "tenacity"}),
        ("carryback.wire.events", {"openai", "httpx", "tenacity"}),
        ("carryback._client", {"vllm", "zmq", "tenacity", "carryback_server"}),
    ],
)
def test_an_import_costs_only_what_it_needs(module: str, without: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not without & {name.split(".")[0] for name in done.stdout.split()}


def test_public_names_are_there() -> None:
    program = """
import carryback
for name in carryback.__all__:
    assert getattr(carryback, name), name
assert carryback.__version__[0].isdigit()
assert set(carryback.__all__) < set(dir(carryback))
assert not hasattr(carryback, "no_such_name")
import carryback._conversation, carryback._reuse
assert callable(carryback.conversation) and callable(carryback.reuse)
from carryback import *
assert OpenAI is carryback.OpenAI
"""
    subprocess.run([sys.executable, "-c", program], check=True)
