from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `fake_server`, in every import mode of pytest

from carryback import _headers, _servers
from carryback.identity import Identifier
from fake_server import FakeServer, running


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does: an earlier one's server may have had the same port."""
    monkeypatch.setattr(_headers, "_shared", Identifier())
    monkeypatch.setattr(_servers, "_servers", {})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as server:
        yield server
