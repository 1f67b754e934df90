"""Settings for all tests."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that run engines beside the tests are slow at times; that is no fault of a test.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Engines start once for all tests of these.
_WITH_ENGINES = {Path(__file__).parent / name for name in ("engine", "hosts")}
# What they install is made once, so one process runs them all (`--dist loadgroup`).
_PACKAGING = Path(__file__).parent / "packaging"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _WITH_ENGINES.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        elif _PACKAGING in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("packaging"))


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """What a router draws at random in this process it draws in each run of a test."""
    random.seed(request.node.nodeid)


@pytest.fixture
def within_a_minute() -> None:
    """Begin early enough for the clock's minute not to end meanwhile: part of what a rate counted is then forgotten."""
    if (left := 60 - time.time() % 60) < 15:
        time.sleep(left)
