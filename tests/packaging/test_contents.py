"""What is in the source distribution and in the wheel, and what they say of themselves."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from installed import ROOT, Built

# Where packages are; the folder below is the package's name.
PLACES = ("sdk", "server", "integrations")


def tree() -> set[str]:
    """All files of the packages, from the repository's root on."""
    return {
        str(path.relative_to(ROOT))
        for place in PLACES
        for path in (ROOT / place).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.parent.name.endswith(".egg-info")
    }


def described(built: Built) -> Message:
    """The wheel's metadata."""
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(name))


def test_the_wheel_has_every_file_of_the_packages_and_no_other(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {path.partition("/")[2] for path in tree()}


def test_the_source_distribution_has_them_and_what_builds_them(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - made == tree() | {"pyproject.toml", "README.md", "LICENSE"}


def test_an_index_takes_both(built: Built) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(built.sdist), str(built.wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_metadata(built: Built) -> None:
    said = described(built)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said["Version"] == project["version"]
    assert {url.partition(",")[0] for url in said.get_all("Project-URL", ())} >= {
        "Homepage",
        "Documentation",
        "Issues",
    }
    classifiers = said.get_all("Classifier", ())
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert {"Operating System :: OS Independent", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert said.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()


def test_the_project_has_one_address() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    home = urls["Homepage"]
    assert all(url.startswith(home) for url in urls.values())
    # Nowhere else, so that it is changed in one place.
    pages = [ROOT / "README.md", ROOT / "mkdocs.yml", *Path(ROOT, "docs").glob("*.md")]
    assert not [page.name for page in pages if home in page.read_text()]
