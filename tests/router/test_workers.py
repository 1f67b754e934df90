"""`carryback router --workers 2`: several processes on one port, as one router."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, eventually
from redis_server import RedisServer, redis_server
from router_process import RouterProcess
from service import TEXT, until, user
from stub_engine import StubEngine, expected_text
from stub_engine.prompts import CHAT

# Connections, of which each worker gets some: all of them go to one with a chance of 2^-31.
CONNECTIONS = 32


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def settings(redis: RedisServer, *engines: StubEngine) -> dict[str, Any]:
    return {
        "engines": [{"role": each.role, "url": each.url, "events": each.events} for each in engines],
        "state": redis.url, "state_timeout_s": 5.0, "log_format": "text",
    }  # fmt: skip


def workers_of(router: RouterProcess) -> list[int]:
    """The ids of a router's worker processes."""
    # Not /proc/<pid>/task/<pid>/children, which may leave some out.
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, (_, parent) = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == router.process.pid:
                found.append(pid)
    return found


def is_running(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


async def ask(url: str, session: aiohttp.ClientSession, id: str, messages: list[Any]) -> str:
    """One streamed turn over a connection of its own; what was reused. Its answer goes into the messages."""
    body = {"messages": messages, "stream": True}
    headers = {"X-Conversation-ID": id, "Connection": "close"}
    async with session.post(url + CHAT, json=body, headers=headers) as response:
        assert response.status == 200
        raw = await response.read()
    text = expected_text(messages)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert text.split()[-1] in raw.decode()
    messages += [{"role": "assistant", "content": text}, user(TEXT)]
    return response.headers["X-Carryback-Reuse"].partition(";")[0]


async def test_workers_are_one_router(cluster: Cluster, redis: RedisServer, tmp_path: Path) -> None:
    prefill, decode = await cluster.pair()
    async with RouterProcess(tmp_path, settings(redis, prefill, decode), "--workers", "2") as router:
        chats: list[list[Any]] = [[user(f"{number}. {TEXT}")] for number in range(CONNECTIONS)]

        async def turn() -> list[str]:
            asks = [ask(router.url, cluster.client, f"chat-{n}", chat) for n, chat in enumerate(chats)]
            return list(await asyncio.gather(*asks))

        assert set(await turn()) == {"miss"}
        # Each worker has a name of its own, which its requests to the engines begin with.
        names = {each.headers["x-request-id"].partition(".")[0] for each in decode.requests}
        assert len(names) == 2
        # Over new connections: about half of the conversations go on at the other worker.
        assert set(await turn()) == {"hit"}
        assert set(await turn()) == {"hit"}
        total = await cluster.metric(router.admin_url, "requests_total", endpoint=CHAT)
        assert total == 3 * CONNECTIONS
        assert await cluster.metric(router.admin_url, "workers") == 2

        async def are_added_up() -> bool:
            return await cluster.metric(router.admin_url, "held_blocks") == decode.pinned

        await eventually(are_added_up)
        # What an engine says of itself is not added up.
        assert await cluster.metric(router.admin_url, "engine_up", role="decode") == 1

        async def is_not_added_up() -> bool:
            pinned = await cluster.metric(router.admin_url, "engine_pinned_blocks", role="decode")
            return pinned == decode.pinned

        await eventually(is_not_added_up)
        pids = workers_of(router)
        assert len(pids) == 2
    assert router.process.returncode == 0
    await until(lambda: not any(is_running(pid) for pid in pids))
    for url in (router.url, router.admin_url):
        with pytest.raises(aiohttp.ClientConnectorError):
            await cluster.request("GET", f"{url}/health")


async def test_a_worker_that_dies_is_started_again_and_none_is_left_behind(
    cluster: Cluster, redis: RedisServer, tmp_path: Path
) -> None:
    prefill, decode = await cluster.pair()
    async with RouterProcess(tmp_path, settings(redis, prefill, decode), "--workers", "2") as router:
        chat = [user(TEXT)]
        await ask(router.url, cluster.client, "chat", chat)
        before = workers_of(router)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(workers_of(router)) == 2 and before[0] not in workers_of(router))
        assert "starting it again" in router.err
        assert before[1] in workers_of(router)
        # The other one has gone on serving, whoever held the conversation.
        assert await ask(router.url, cluster.client, "chat", chat) in ("hit", "miss")

        async def are_both_counted() -> bool:
            return await cluster.metric(router.admin_url, "workers") == 2

        await eventually(are_both_counted)
        # All are told to read the file again.
        pids = workers_of(router)
        router.write(engines=[])
        router.process.send_signal(signal.SIGHUP)
        await until(lambda: router.err.count("engines are as before") == 2, router.err)
        # None is left behind by a process that could not tell them to end.
        router.process.kill()
        await router.process.wait()
        await until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2"], "state must be a redis:// URL"),
        (["--workers", "2", "--state", "redis://h", "--port", "0"], "port and admin_port cannot be 0"),
        (["--workers", "0"], "'workers'"),
    ],
)
def test_workers_that_cannot_be_are_a_clear_error(words: list[str], message: str) -> None:
    command = [sys.executable, "-m", "carryback_server", "router", "--decode", "http://h:1,tcp://h:2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
