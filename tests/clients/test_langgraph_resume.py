"""A run that is interrupted in one process and goes on in another."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from carryback import wire
from carryback_langgraph import conversation_id
from fake_server import FakeServer

PROGRAM = Path(__file__).with_name("resuming.py")


async def part(server: FakeServer, folder: Path, graph: str, way: str, action: str) -> None:
    """Run a part of a run in a process of its own."""
    arguments = [graph, way, server.base_url, str(folder / "checkpoints.sqlite"), action]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


@pytest.mark.parametrize("way", ["stream", "ainvoke"])
async def test_an_agent_goes_on_in_another_process(server: FakeServer, tmp_path: Path, way: str) -> None:
    server.calls_tools = True
    for action in ("start", "resume"):
        await part(server, tmp_path, "agent", way, action)
    first, second, release = server.requests
    main = conversation_id("thread-7")
    assert [first.conversation, second.conversation] == [main, main]
    # One turn: the user's question is answered only now.
    assert [each.value(wire.TURN_ID) for each in (first, second)] == ["1", "1"]
    assert [each.value(wire.TURN_STEP) for each in (first, second)] == ["1", "2"]
    assert second.body["messages"][-1]["content"] == "go on"
    # What the first process began, the second one ends.
    assert (release.method, release.path) == ("DELETE", f"/v1/conversations/{main}")


@pytest.mark.parametrize("way", ["invoke", "astream"])
async def test_branches_go_on_in_another_process(server: FakeServer, tmp_path: Path, way: str) -> None:
    for action in ("start", "resume"):
        await part(server, tmp_path, "branches", way, action)
    asked = {
        request.conversation: [message["content"] for message in request.body["messages"]]
        for request in server.requests
    }
    assert asked == {
        conversation_id("thread-7", f"worker#{number}", node=node): [payload, *more]
        for number, payload in enumerate(("one", "two", "three"))
        for node, more in (("think", []), ("think_on", ["Hello.", "go on"]))
    }
