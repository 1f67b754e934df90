"""One pair of real engines, two routers and Redis, on hosts of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from carryback_server.model import CHAT_TEMPLATE
from hosts.machines import HOSTS, Machines
from hosts.network import Network
from tiny_model import make_tiny_model


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def machines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need ip (Debian: iproute2)")
    # By hand: all in IPv6. Else the prefill engine's address is one, as is a router's.
    only_ipv6 = "CARRYBACK_TEST_IPV6" in os.environ
    with Network(HOSTS, ipv4=not only_ipv6) as network:
        folder = tmp_path_factory.mktemp("hosts")
        in_ipv6 = HOSTS if only_ipv6 else ("prefill", "router-2")
        address = {host: (network.ipv6 if host in in_ipv6 else network.ipv4)(host) for host in HOSTS}
        tiny = make_tiny_model(folder / "tiny", CHAT_TEMPLATE)
        async with Machines(network, tiny, folder, address) as machines:
            yield machines
