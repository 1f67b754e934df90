"""What tests of the installed carryback share: environments, and what has to be in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Built:
    """What `python -m build` makes."""

    sdist: Path
    wheel: Path


@dataclass(frozen=True)
class Environment:
    """A Python with packages of its own; what runs in it sees nothing of the tree."""

    folder: Path

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        return self.folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

    def process(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """Start one of its commands."""
        return subprocess.Popen(
            [str(self.folder / "bin" / words[0]), *words[1:]], text=True, **self._alone(), **options
        )  # type: ignore[call-overload,no-any-return]

    def run(self, *words: str, status: int = 0) -> str:
        """Run one of its commands to its end; what it printed."""
        process = self.process(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == status, f"{words} ended with {process.returncode}:\n{output}"
        return str(output)

    def _alone(self) -> dict[str, object]:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("CARRYBACK_", "PYTHON"))
        }
        return {
            "env": {**environ, "CARRYBACK_CACHE": str(self.folder / "cache"), "COLUMNS": "200"},
            "cwd": self.folder,
        }


def inputs() -> Iterator[Path]:
    """What is copied into an image to build the wheel from: all that a build needs, and nothing else."""
    stage = (ROOT / "Dockerfile").read_text().partition("AS wheel")[2].partition("\nFROM")[0]
    for words in re.findall(r"^COPY (.+) \S+$", stage, re.MULTILINE):
        yield from (ROOT / word for word in words.split())


def needed(distribution: metadata.Distribution, extras: set[str]) -> list[metadata.Distribution]:
    """What is installed here of all that a distribution with these extras asks for, itself left out.

    Raises:
        AssertionError: something is not installed, or in a version that is not asked for.
    """
    root = canonicalize_name(distribution.name)
    found = {root: distribution}
    asked: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in asked:
            continue
        asked.add((name, extra))
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            wanted = canonicalize_name(requirement.name)
            if wanted not in found:
                found[wanted] = metadata.distribution(wanted)
            version = found[wanted].version
            assert requirement.specifier.contains(version, prereleases=True), f"{name}: {text}, not {version}"
            waiting += [(wanted, each) for each in ("", *requirement.extras)]
    return [each for name, each in found.items() if name != root]


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Put links to a distribution's files into another environment."""
    for file in distribution.files or ():
        if ".." in file.parts or file.parts[0] == "__pycache__":
            continue  # its commands
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(distribution.locate_file(file))
