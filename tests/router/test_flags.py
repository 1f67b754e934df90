"""`carryback router --prefill URL --decode URL`: engines named on the command line."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import Cluster
from router_process import RouterProcess, free_ports
from service import TEXT, user
from stub_engine import StubEngine
from stub_engine.prompts import CHAT


def two_in_a_row() -> int:
    """A free port whose next one is free, too."""
    while True:
        (port,) = free_ports(1)
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


async def usual(cluster: Cluster, role: Any) -> StubEngine:
    """An engine whose events are one port above its URL's."""
    port = two_in_a_row()
    return await cluster.engine(role, port=port, events_port=port + 1)


async def two_turns(cluster: Cluster, router: RouterProcess) -> str:
    """What the second turn reused."""
    body: dict[str, Any] = {"messages": [user(TEXT)]}
    headers = {"X-Conversation-ID": "c"}
    first = await cluster.post(router, CHAT, body, headers=headers)
    body["messages"] += [{"role": "assistant", "content": first.text}, user(TEXT)]
    return (await cluster.post(router, CHAT, body, headers=headers)).reuse.outcome


async def test_urls_are_enough_where_the_events_are_one_port_above(cluster: Cluster, tmp_path: Path) -> None:
    prefill, decode = await usual(cluster, "prefill"), await usual(cluster, "decode")
    flags = ["--prefill", prefill.url, "--decode", decode.url]
    async with RouterProcess(tmp_path, {}, *flags) as router:
        assert await two_turns(cluster, router) == "hit"


async def test_events_of_their_own_and_engines_by_name(cluster: Cluster, tmp_path: Path) -> None:
    prefill, decode = await cluster.engine("prefill"), await usual(cluster, "decode")
    by_name = decode.url.replace("127.0.0.1", "localhost")
    flags = ["--prefill", f"{prefill.url},{prefill.events}", "--decode", f"dns+{by_name}"]
    async with RouterProcess(tmp_path, {}, *flags) as router:
        assert await two_turns(cluster, router) == "hit"
        shown = (await cluster.admin(router, "GET", "/admin/engines")).json["data"]
        names = {each["name"] for each in shown if each["role"] == "decode"}
        assert decode.url.removeprefix("http://") in names  # by its address, not by the name
