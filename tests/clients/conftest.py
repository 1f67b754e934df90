from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `fake_server`, in every import mode of pytest

from fake_server import FakeServer, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as server:
        yield server
