"""carryback as a stranger gets it: built, installed outside of the tree, and run from there.

One environment is made as a user makes it, by `pip install 'carryback[server]'`. To see what an import needs, others
hold a client alone, or one extra: their packages are links to what is installed here already, exactly those that the
wheel's metadata asks for, so that each is there in a second and no resolver has to be asked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from installed import ROOT, Built, Environment, inputs, link, needed

# What `pip install` has been given before, so that tests ask no index twice.
WHEELS = Path(sys.prefix) / "wheels"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel, built from the source distribution, built from what the Dockerfile copies."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in inputs():
        if path.is_dir():
            shutil.copytree(
                path, source / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Where `pip install 'carryback[server]'` was run, with the versions that the images have."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wanted = ["--constraint", str(ROOT / "requirements/cpu.txt"), f"{built.wheel}[server]"]
    install = [
        *pip,
        "--python",
        str(folder),
        "install",
        "--no-compile",
        "--no-index",
        "--find-links",
        str(WHEELS),
        *wanted,
    ]
    if subprocess.run(install, capture_output=True).returncode:
        # The first time, or the pins have changed.
        subprocess.run([*pip, "download", "--dest", str(WHEELS), *wanted], check=True)
        subprocess.run(install, check=True)
    return Environment(folder)


@pytest.fixture(scope="session")
def with_extra(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Makes an environment with the wheel, one extra of it, or none, and nothing else."""
    made: dict[str, Environment] = {}

    def make(extra: str) -> Environment:
        if extra not in made:
            environment = Environment(tmp_path_factory.mktemp(extra or "client"))
            venv.create(environment.folder, symlinks=True)
            with zipfile.ZipFile(built.wheel) as wheel:
                wheel.extractall(environment.packages)
            (carryback,) = metadata.distributions(name="carryback", path=[str(environment.packages)])
            for distribution in needed(carryback, {extra} - {""}):
                link(distribution, environment.packages)
            made[extra] = environment
        return made[extra]

    return make
