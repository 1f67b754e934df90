"""Behind routers that know nothing of carryback, later turns read back what the decode engine has.

A prefill engine asks the decode engines of `carryback_peers`, whoever sent it the prompt. The two routers here are as they
are: vllm-router from its wheel, and a proxy that does what vLLM's own example for NIXL does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from carryback_server.launch import free_ports
from pair import BLOCK, NAME, Client, Pair, document, eventually

# vLLM's counter of prompt tokens that a connector brought from elsewhere, with the connector's own words for it.
READ = "vllm:external_prefix_cache_hits_total"
WITHIN_S = 60
TURNS = 4
# What vLLM's NIXL connector is asked for, by whoever wants a prompt's KV for another engine.
FOR_ANOTHER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@asynccontextmanager
async def example_proxy(pair: Pair, folder: Path) -> AsyncIterator[str]:
    """The prompt to the prefill engine for one token, then the request with the answer's parameters to the decode engine."""

    async def both_hops(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {**body, "kv_transfer_params": FOR_ANOTHER, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        async with pair.session.post(
            pair.url("prefill") + request.path, json=first, headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            params = (await answer.json())["kv_transfer_params"]
        second = {**body, "kv_transfer_params": params}
        async with pair.session.post(
            pair.url("decode") + request.path, json=second, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response

    proxy = web.Application()
    proxy.router.add_post("/v1/{path:.*}", both_hops)
    runner = web.AppRunner(proxy)
    await runner.setup()
    (port,) = free_ports(1)
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def vllm_router(pair: Pair, folder: Path) -> AsyncIterator[str]:
    """`vllm-router`, once it serves."""
    port, metrics = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics), "--vllm-pd-disaggregation",
        "--prefill", pair.url("prefill"), "--decode", pair.url("decode"), "--worker-startup-check-interval", "1",
    ]  # fmt: skip
    with (folder / "vllm-router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)

    async def serves() -> bool:
        assert process.returncode is None, (folder / "vllm-router.log").read_text()
        try:
            async with pair.session.get(url + "/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    try:
        await eventually(serves, WITHIN_S, "vllm-router does not serve")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.parametrize("router", [example_proxy, vllm_router], ids=["example", "vllm-router"])
async def test_later_turns_read_back_what_the_decode_engine_has(
    pair: Pair, tmp_path: Path, router: Any
) -> None:
    await pair.assert_unpinned()
    # Not every router takes a request's least tokens out of what the prefill engine gets.
    fields: dict[str, Any] = {"min_tokens": 0, "ignore_eos": True, "tokens": 16}
    # Nothing that was said elsewhere is found.
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{uuid.uuid4().hex} {document(1, 20)}"}]
    decode = Client(pair.session, pair.url("decode"), "")
    prompts: list[int] = []
    read: list[int] = []
    async with router(pair, tmp_path) as url:
        client = Client(pair.session, url, "")
        for turn in range(TURNS):
            before = await pair.metric("prefill", READ)
            answer = await client.chat(messages, stream=turn % 2 == 0, **fields)
            read.append(int(await pair.metric("prefill", READ) - before))
            answer.assert_same(await decode.chat(messages, reuse=False, **fields))
            # All full blocks of the last prompt, and what of its answer is the same as text.
            assert not prompts or prompts[-1] // BLOCK * BLOCK <= read[-1], (read, prompts)
            prompts.append(await count(pair, messages))
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": f"And then? {document(turn + 2, 2)}"},
            ]
        # Another client's salt keeps it out.
        before = await pair.metric("prefill", READ)
        await Client(pair.session, url, "").chat(messages, **fields)
        assert await pair.metric("prefill", READ) == before
    assert read[0] == 0
    assert all(read[1:]), read
    print(f"\n{router.__name__}: read back {read} of {prompts}")
    await pair.assert_unpinned()


async def count(pair: Pair, messages: list[dict[str, Any]]) -> int:
    """Tokens of a prompt."""
    body = {"model": NAME, "messages": messages, "add_generation_prompt": True}
    async with pair.session.post(pair.url("decode") + "/tokenize", json=body) as response:
        assert response.status == 200, await response.text()
        tokens: int = (await response.json())["count"]
    return tokens
