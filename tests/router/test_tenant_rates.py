"""Request rates that routers count together, in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from carryback_server.errors import ApiError
from carryback_server.tenants import Tenants
from multidict import CIMultiDict
from redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Replica:
    """One router's tenants: one tenant, of 10 requests a minute.

    A busy machine's Redis may be late: so long is it waited for, unless it is to hang.
    """

    def __init__(self, folder: Path, url: str, prefix: str = "carryback", timeout_s: float = 30) -> None:
        file = folder / "tenants.yaml"
        file.write_text("tenants: [{name: acme, anonymous: true, requests_per_minute: 10}]")
        self.uncounted = 0
        self._tenants = Tenants(
            file, redis_url=url, redis_prefix=prefix, redis_timeout_s=timeout_s, on_uncounted=self._count
        )
        self.stop = self._tenants.stop

    def _count(self) -> None:
        self.uncounted += 1

    async def admits(self) -> bool:
        try:
            async with self._tenants.of(CIMultiDict()).admit():
                return True
        except ApiError:
            return False

    async def wait_counted(self) -> None:
        """Until Redis counts its requests."""
        async with asyncio.timeout(30):
            while True:
                before = self.uncounted
                await self.admits()
                if self.uncounted == before:
                    return
                await asyncio.sleep(0.1)


@pytest.mark.usefixtures("within_a_minute")
async def test_routers_count_together(server: RedisServer, tmp_path: Path) -> None:
    first, second = Replica(tmp_path, server.url), Replica(tmp_path, server.url)
    other = Replica(tmp_path, server.url, prefix="another")
    assert [await each.admits() for _ in range(10) for each in (first, second)] == [True] * 10 + [False] * 10
    assert await other.admits()
    for each in (first, second, other):
        assert each.uncounted == 0
        await each.stop()


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "hanging"])
async def test_without_redis_each_counts_alone(
    server: RedisServer, tmp_path: Path, is_dead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = [Replica(tmp_path, server.url, timeout_s=30 if is_dead else 0.5) for _ in range(2)]
    await replicas[0].wait_counted()
    caplog.clear()
    if is_dead:
        server.kill()
    else:
        server.pause()
    for each in replicas:
        before = each.uncounted  # of its own ten, where Redis was late
        assert sum([await each.admits() for _ in range(12)]) == 10 - before
        assert each.uncounted == before + 12
    assert caplog.text.count("Redis is gone") == len(replicas)
    if is_dead:
        server.start()
    else:
        server.resume()
    for each in replicas:
        await each.wait_counted()
        await each.stop()
