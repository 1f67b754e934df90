"""What the tests of the whole router share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Engines, routers and a client; at the end no engine may have seen a violation."""
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        await cluster.start()
        yield cluster
        await cluster.close()
