from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_server import FakeServer, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as server:
        yield server
