"""The names that sources use and define, as the tests of internals compare them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def uses(source: Path, ours: set[str]) -> Iterator[str]:
    """The private names of others that a file uses: modules that it imports, methods of `super()`, attributes."""
    for node in ast.walk(ast.parse(source.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.module.startswith(("carryback", "__"))
        ):
            if any(part.startswith("_") for part in node.module.split(".")):
                yield node.module
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of = node.value
            is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if is_super or node.attr not in ours:
                yield node.attr


def defined(source: Path) -> Iterator[str]:
    """The names that a file defines, attributes of `self` among them."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
