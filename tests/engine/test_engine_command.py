"""`carryback engine` and `carryback router`, as on machines of their own: by address, not on loopback."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from carryback_server import address
from carryback_server.config import ConfigError
from carryback_server.launch import free_ports, is_free
from carryback_server.model import CHAT_TEMPLATE
from pair import ENGINE_ARGS, NAME, Client, document, eventually
from tiny_model import make_tiny_model

KEYS = {"CARRYBACK_KEY": "the key of this test", "CARRYBACK_EVENTS_KEY": "the events' key of this test"}


def ipv4() -> str:
    """This machine's address for others, if it has one."""
    try:
        return address.advertised(None)
    except ConfigError:
        return "127.0.0.1"


def ipv6() -> str:
    """The same for IPv6; where there is no IPv6, the other one."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect(("2001:db8::1", 9))
        return str(probe.getsockname()[0])
    return "::1" if Path("/proc/net/if_inet6").exists() else ipv4()


@asynccontextmanager
async def carryback(log: Path, *args: str) -> AsyncIterator[Process]:
    """The command in a process group of its own; all that it became is gone afterwards."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "carryback_server", *args,
            env=os.environ | KEYS, stdout=PIPE, stderr=errors, process_group=0,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def engine(stack: AsyncExitStack, folder: Path, role: str, host: str) -> tuple[Process, list[str]]:
    """An engine, and what it says is to be given to the router."""
    # One has three ports in a row, the other three of its own.
    ports = free_ports(3) if role == "decode" else [_three_in_a_row(host)]
    flags = zip(("--port", "--events-port", "--side-channel-port"), ports, strict=False)
    process = await stack.enter_async_context(
        carryback(
            folder / f"{role}.log", "engine", role, "--device", "cpu", "--model", str(folder / "tiny"),
            "--served-model-name", NAME, "--advertise-host", host,
            *(str(word) for flag in flags for word in flag), "--", *ENGINE_ARGS,
        )
    )  # fmt: skip
    assert process.stdout is not None
    said = (await process.stdout.readline()).decode()
    assert said.startswith("for the router: "), (folder / f"{role}.log").read_text()
    # What it says from now on is vLLM's; nobody reads it, and it must not wait for that.
    stack.push_async_callback(_end, asyncio.create_task(_forward(process, folder / f"{role}.out")))
    return process, shlex.split(said.removeprefix("for the router: "))


def _three_in_a_row(host: str) -> int:
    return next(port for port in free_ports(100) if all(is_free(host, port + more) for more in range(3)))


async def _forward(process: Process, log: Path) -> None:
    assert process.stdout is not None
    with log.open("wb") as out:
        while chunk := await process.stdout.read(65536):
            out.write(chunk)
            out.flush()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("ip") is not None, reason="tests/hosts does it, on several hosts"
)
async def test_two_engines_joined_by_address(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny", CHAT_TEMPLATE)
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=120)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        prefill, for_prefill = await engine(stack, tmp_path, "prefill", ipv4())
        decode, for_decode = await engine(stack, tmp_path, "decode", ipv6())
        urls = [words[1].partition(",")[0] for words in (for_prefill, for_decode)]
        assert (for_prefill[0], for_decode[0]) == ("--prefill", "--decode")
        assert ["," in words[1] for words in (for_prefill, for_decode)] == [False, True]

        async def is_up() -> bool:
            for process, log in ((prefill, "prefill.out"), (decode, "decode.out")):
                assert process.returncode is None, (tmp_path / log).read_text()[-3000:]
            with suppress(aiohttp.ClientError):
                for url in urls:
                    async with session.get(f"{url}/health") as response:
                        if response.status != 200:
                            return False
                return True
            return False

        await eventually(is_up, 300, "the engines are not up")
        port, admin_port = free_ports(2)
        router = await stack.enter_async_context(
            carryback(
                tmp_path / "router.log", "router", "--port", str(port), "--admin-port", str(admin_port),
                *for_prefill, *for_decode,
            )
        )  # fmt: skip
        assert router.stdout is not None
        await router.stdout.readuntil(b"is ready at")
        client = Client(session, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        await eventually(client.hears, 60, "the router does not hear the engines")

        conversation = uuid.uuid4().hex
        messages = [{"role": "user", "content": document(1, 20)}]
        first = await client.chat(messages, conversation)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": document(2, 2)},
        ]
        second = await client.chat(messages, conversation)
        assert second.reuse is not None
        assert second.reuse.outcome == "hit", second.headers
        assert second.reuse.tokens > 0
        second.assert_same(await client.chat(messages, reuse=False))

        # The process that was started is vLLM itself, and its signals are.
        decode.terminate()
        await asyncio.wait_for(decode.wait(), 60)
