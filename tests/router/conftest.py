"""What the tests of the whole router share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from cluster import Cluster, running_cluster
from service import Serve, Service


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Engines, routers and a client; at the end no engine may have seen a violation."""
    async with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a `Service`, with its arguments.

    When the test is over, nothing may have been done that a correct router never does, and once the router
    has stopped, nothing may be held by any engine that is still up.
    """
    services: list[Service] = []
    async with AsyncExitStack() as stack:

        async def start(*args: int, **options: object) -> Service:
            service = await stack.enter_async_context(Service(*args, **options))  # type: ignore[arg-type]
            services.append(service)
            return service

        yield start
        for service in services:
            await service.finish()
