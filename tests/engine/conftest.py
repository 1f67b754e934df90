"""One pair of real engines for the whole session of tests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from carryback_server import model
from carryback_server.launch import EngineCommand
from pair import Client, Pair, commands_for, running
from tiny_model import make_tiny_model


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    if file := os.environ.get("CARRYBACK_TEST_ENGINES"):
        commands = [EngineCommand(**each) for each in json.loads(Path(file).read_text())]  # noqa: ASYNC240
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            yield Pair(None, commands, session)
        return
    commands = commands_for(make_tiny_model(tmp_path_factory.mktemp("model"), model.CHAT_TEMPLATE))
    async with running(commands, tmp_path_factory.mktemp("logs")) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: Pair) -> AsyncIterator[Client]:
    """A client of a router with default settings."""
    async with pair.router() as client:
        yield client
