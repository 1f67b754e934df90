"""One pair of real engines for the whole session of tests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from carryback_server import model
from carryback_server.launch import EngineCommand
from carryback_server.supervisor import Engines
from pair import Client, Pair, commands_for
from tiny_model import make_tiny_model


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        if running := os.environ.get("CARRYBACK_TEST_ENGINES"):
            commands = [EngineCommand(**each) for each in json.loads(Path(running).read_text())]  # noqa: ASYNC240
            yield Pair(None, commands, session)
            return
        commands = commands_for(make_tiny_model(tmp_path_factory.mktemp("model"), model.CHAT_TEMPLATE))
        engines = Engines(commands, log_dir=tmp_path_factory.mktemp("logs"), restart_wait_s=0.1)
        await stack.enter_async_context(engines)
        await engines.wait_ready()
        yield Pair(engines, commands, session)


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: Pair) -> AsyncIterator[Client]:
    """A client of a router with default settings."""
    async with pair.router() as client:
        yield client
