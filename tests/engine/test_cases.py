"""Faults that users of such systems met, tried on real engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from carryback.wire import events
from carryback_server.config import EngineConfig
from carryback_server.launch import free_ports
from carryback_vllm.seal import Sealer
from pair import KEY, NAME, Answer, Client, Pair, document, eventually


def prompt(seed: int, sentences: int = 20) -> list[dict[str, Any]]:
    return [{"role": "user", "content": document(seed, sentences)}]


class Delay:
    """A proxy in front of an engine that waits before it passes a completion on."""

    def __init__(self, pair: Pair, target: str) -> None:
        self.pair = pair
        self.target = target
        self.seconds = 0.0

    async def start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        host, port = self.runner.addresses[0]
        return f"http://{host}:{port}"

    async def _pass(self, request: web.Request) -> web.Response:
        data = await request.read()
        if b"do_remote_prefill" in data:
            await asyncio.sleep(self.seconds)
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request.headers.get("X-Request-Id", ""),
        }
        async with self.pair.session.request(
            request.method, self.target + request.path, data=data or None, headers=headers
        ) as response:
            return web.Response(
                status=response.status, body=await response.read(), content_type=response.content_type
            )


@pytest.mark.parametrize("stream", [False, True])
async def test_a4_lease_ended_before_the_read(pair: Pair, client: Client, stream: bool) -> None:
    prefill, decode = pair.commands
    delay = Delay(pair, decode.url)
    slow = EngineConfig(role="decode", url=await delay.start(), events=decode.events)
    async with pair.router([prefill.engine(), slow], prefill_lease_s=2, admit_early=False) as late:
        delay.seconds = 4
        call = asyncio.create_task(late.chat(prompt(1), stream=stream))
        await asyncio.sleep(3)
        # The prefill engine's blocks are free again: overwrite them.
        await asyncio.gather(*(client.chat(prompt(seed), reuse=False, tokens=1) for seed in range(50, 58)))
        answer = await call
        metrics = await late.metrics()
    await delay.runner.cleanup()
    answer.assert_same(await client.chat(prompt(1), reuse=False))
    assert metrics['carryback_retries_total{hop="decode",reason="down"}'] == 1


class Impostor:
    """In a decode engine's place: passes on what a prefill engine asks, and the answer, changed.

    Args:
        change: changes the record of an answer, and gives its digests.
    """

    def __init__(self, pair: Pair, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
        self.port = free_ports(1)[0]
        self._change = change
        self._context = zmq.asyncio.Context()
        self._asked, self._real = self._context.socket(zmq.XPUB), self._context.socket(zmq.XSUB)
        self._asked.bind(f"tcp://127.0.0.1:{self.port}")
        self._real.connect(next(each.events for each in pair.commands if each.role == "decode"))
        self._tasks = [asyncio.create_task(work()) for work in (self._up, self._down)]

    async def _up(self) -> None:
        while True:
            await self._real.send(await self._asked.recv())

    async def _down(self) -> None:
        while True:
            topic, payload = await self._real.recv_multipart()
            event = events.decode(payload)
            if isinstance(event, events.Leased) and event.record:
                record = json.loads(event.record)
                digests = self._change(record, event.digests)
                event = msgspec.structs.replace(event, record=json.dumps(record).encode(), digests=digests)
                topic, payload = events.encode(event)
            await self._asked.send_multipart((topic, payload))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._context.destroy(linger=0)


def seal_again(record: dict[str, Any], digests: bytes, key: str, **changes: Any) -> None:
    """Change a record, and seal it with a key."""
    seal = record["carryback"]
    record.update(changes)
    Sealer(key.encode()).seal(
        record,
        digests=digests,
        tail="",
        block_size=seal["block_size"],
        epoch=seal["epoch"],
        made=seal["made"],
    )
    del record["carryback"]["digests"]


async def reads(
    pair: Pair, client: Client, seed: int, change: Callable[[dict[str, Any], bytes], bytes]
) -> Any:
    """What a prefill engine reports of a prompt that the decode engine has, if the answer is changed on its way."""
    messages = prompt(seed)
    assert (await client.chat(messages, tokens=2)).status == 200
    impostor = Impostor(pair, change)
    body = {
        "model": NAME, "messages": messages, "max_tokens": 1, "temperature": 0, "cache_salt": client.salt,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "hold_s": 0,
            "carryback_ask": [f"tcp://127.0.0.1:{impostor.port}"],
        },
    }  # fmt: skip
    try:
        async with pair.session.post(pair.url("prefill") + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["kv_transfer_params"]["carryback_reuse"]
    finally:
        await impostor.close()


@pytest.mark.parametrize("peer", ["nobody", "another engine"])
async def test_a5_a_handshake_that_cannot_succeed(pair: Pair, client: Client, peer: str) -> None:
    """The record is right in all but where it points, as after a restart of the decode engine."""
    side_channel = int(pair.commands[1].env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    port = free_ports(1)[0] if peer == "nobody" else side_channel

    def change(record: dict[str, Any], digests: bytes) -> bytes:
        seal_again(record, digests, KEY, remote_engine_id="no-such-engine", remote_port=port)
        return digests

    report = await reads(pair, client, 2, change)
    assert (report["outcome"], report["tokens"], report["reason"]) == ("miss", 0, "load_failed")
    assert report["recomputed"] > 700
    # Both engines are alive and right.
    messages = prompt(2)
    answer = await client.chat(messages, "a5" + peer)
    again = await client.chat(messages, "a5" + peer)
    assert again.reuse.outcome == "hit"
    again.assert_same(answer)


@pytest.mark.parametrize("tampering", ["nothing", "blocks", "request", "digest", "host", "key", "no seal"])
async def test_a_record_that_was_tampered_with_is_not_read(
    pair: Pair, client: Client, tampering: str
) -> None:
    def change(record: dict[str, Any], digests: bytes) -> bytes:
        if tampering == "blocks":
            record["remote_block_ids"][0].reverse()
        elif tampering == "request":
            record["remote_request_id"] += "x"
        elif tampering == "digest":
            return digests[:-1] + bytes([digests[-1] ^ 1])
        elif tampering == "host":
            record["remote_host"] = "127.0.0.2"
        elif tampering == "key":
            seal_again(record, digests, "another key")
        elif tampering == "no seal":
            del record["carryback"]["mac"]
        return digests

    report = await reads(pair, client, 3, change)
    if tampering == "nothing":
        assert (report["outcome"], report["reason"]) == ("hit", "verified")
        assert report["tokens"] > 700
    else:
        assert (report["outcome"], report["tokens"], report["reason"]) == ("miss", 0, "unverified")


async def test_a6_a_stream_is_passed_on_as_it_comes(pair: Pair, client: Client) -> None:
    body = {
        "model": NAME, "messages": prompt(6), "max_tokens": 60, "min_tokens": 60, "temperature": 0, "stream": True,
        "cache_salt": client.salt,
    }  # fmt: skip
    headers = {"X-Conversation-ID": "a6"}
    async with client.session.post(
        client.url + "/v1/chat/completions", json=body, headers=headers
    ) as response:
        assert response.content_type == "text/event-stream"
        assert (await response.content.readline()).startswith(b"data: {")
        # The first chunk is here while the engine still generates.
        assert await pair.metric("decode", "vllm:num_requests_running") == 1
        rest = await response.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert rest.count(b"data: ") > 10
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in rest.splitlines()
        if line.startswith(b"data: {")
    )
    messages = [*prompt(6), {"role": "assistant", "content": text}, *prompt(7, 2)]
    following = await client.chat(messages, "a6", stream=True)
    assert following.reuse.outcome == "hit"


async def test_a8_one_request_id_for_several_requests(client: Client) -> None:
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(
        *(client.chat(prompt(seed), f"a8-{seed}", stream=True, headers=headers) for seed in (10, 11))
    )
    answers.append(await client.chat(prompt(12), "a8-12", stream=True, headers=headers))
    for seed, answer in zip((10, 11, 12), answers, strict=True):
        assert answer.headers["X-Request-Id"] == "same"
        answer.assert_same(await client.chat(prompt(seed), reuse=False))


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {},
        None,
        [],
        "x",
        {"do_remote_decode": True, "remote_block_ids": ["1"], "remote_engine_id": "e", "remote_request_id": "r",
         "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": 10**12},
        {"do_remote_prefill": True, "remote_block_ids": [[-1, 10**12]], "remote_engine_id": "e",
         "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1},
        {"hold_s": 10**9, "carryback_key": "stolen", "carryback_ask": ["tcp://127.0.0.1:1"]},
        {"carryback_ask": "x", "carryback_tip": {"tokens": "x"}, "carryback_find": 7, "carryback_await": "x"},
    ],
)  # fmt: skip
async def test_a9_kv_transfer_params_of_a_client(pair: Pair, client: Client, params: Any) -> None:
    answer = await client.chat(prompt(13), tokens=4, kv_transfer_params=params)
    answer.assert_same(await client.chat(prompt(13), reuse=False, tokens=4))
    if isinstance(params, dict):
        # And an engine that is asked directly is not harmed either.
        for role in ("prefill", "decode"):
            body = {
                "model": NAME,
                "messages": prompt(13, 3),
                "max_tokens": 1,
                "kv_transfer_params": {**params, "hold_s": 0},
            }
            async with pair.session.post(pair.url(role) + "/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()


async def test_a10_min_tokens(client: Client) -> None:
    body = {"model": NAME, "messages": prompt(14, 3), "max_tokens": 150, "min_tokens": 100, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    answer = await client.post("/v1/chat/completions", body)
    assert answer.status == 200
    assert answer.body[-1]["usage"]["completion_tokens"] >= 100
    body = {"model": NAME, "prompt": document(14, 3), "max_tokens": 150, "min_tokens": 100}
    answer = await client.post("/v1/completions", body)
    assert answer.body["usage"]["completion_tokens"] >= 100
    answer = await client.post("/v1/completions", {**body, "min_tokens": 600, "max_tokens": 500})
    assert answer.status == 400
    assert "min_tokens" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_completion_tokens": 20}, 20),
        ({"max_tokens": 20}, 20),
        ({"max_completion_tokens": 20, "max_tokens": 30}, 20),
        ({}, None),
    ],
)
async def test_a11_spellings_of_the_limit(
    pair: Pair, client: Client, limits: dict[str, int], expected: int | None
) -> None:
    before = await pair.metric("prefill", "vllm:generation_tokens_total")
    # Without a limit the answer fills the context, so the prompt leaves little of it.
    body = {"model": NAME, "messages": prompt(15, 105), "ignore_eos": True, "temperature": 0, **limits}
    answer = await client.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    usage = answer.body["usage"]
    assert usage["completion_tokens"] == (expected or 4096 - usage["prompt_tokens"])
    assert await pair.metric("prefill", "vllm:generation_tokens_total") == before + 1


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"logprobs": 2}, {"prompt_logprobs": 1}])
async def test_a12_logprobs_of_the_prompt(pair: Pair, client: Client, fields: dict[str, Any]) -> None:
    body = {"model": NAME, "prompt": document(16, 2), "max_tokens": 3, "temperature": 0, **fields}
    answer = await client.post("/v1/completions", body, {"X-Conversation-ID": uuid.uuid4().hex})
    assert answer.status == 200, answer.raw
    async with pair.session.post(pair.url("decode") + "/v1/completions", json=body) as response:
        single = await response.json()
    mine, theirs = answer.body["choices"][0], single["choices"][0]
    assert mine["text"] == theirs["text"]
    if fields.get("logprobs"):
        assert mine["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        for a, b in zip(
            mine["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
        ):
            assert a == b or a == pytest.approx(b, abs=0.001)
    else:
        assert len(mine["prompt_logprobs"]) == len(theirs["prompt_logprobs"])


async def test_several_answers_are_served_without_reuse(pair: Pair, client: Client) -> None:
    headers = {"X-Conversation-ID": "several"}
    await client.chat(prompt(17), "several")
    body = {"model": NAME, "messages": prompt(17), "n": 3, "max_tokens": 8, "seed": 1}
    answer = await client.post("/v1/chat/completions", body, headers)
    assert len(answer.body["choices"]) == 3
    assert (answer.reuse.outcome, answer.reuse.reason) == ("miss", "several_answers")
    # What the turn before left is still there.
    assert (await client.chat(prompt(17), "several")).reuse.outcome == "hit"


async def test_a13_a_prompt_that_is_too_long(pair: Pair, client: Client) -> None:
    await client.chat(prompt(18), "a13")
    answer = await client.chat(prompt(18, 150), "a13")
    assert answer.status == 400
    assert "4096" in answer.body["error"]["message"]
    following = await client.chat(prompt(18), "a13")
    following.assert_same(await client.chat(prompt(18), reuse=False))


async def test_a1_decode_refuses_what_prefill_took(pair: Pair) -> None:
    async with pair.router() as client:
        await pair.assert_unpinned()
        for _ in range(5):
            # The prefill hop drops `min_tokens`; with it, the prompt leaves too little room.
            answer = await client.chat(prompt(19, 105), tokens=500)
            assert answer.status == 400
            assert "min_tokens" in answer.body["error"]["message"]
        await pair.assert_unpinned()
        assert (await client.chat(prompt(19))).status == 200


async def test_a20_the_usage_chunk(client: Client) -> None:
    plain = await client.chat(prompt(20), stream=True, tokens=8)
    assert all(chunk.get("usage") is None for chunk in plain.body)
    asked = await client.chat(prompt(20), stream=True, tokens=8, stream_options={"include_usage": True})
    (usage,) = [chunk for chunk in asked.body if chunk.get("usage")]
    assert usage is asked.body[-1]
    assert usage["choices"] == []
    assert usage["id"]
    assert usage["model"] == NAME
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens"] == asked.reuse.prompt_tokens


async def test_a22_a_body_that_is_too_large(pair: Pair) -> None:
    async with pair.router(max_body_bytes=100_000) as client:
        for chunked in (False, True):
            data = json.dumps({"model": NAME, "messages": prompt(21, 4000)}).encode()
            assert len(data) > 100_000
            headers = {"Content-Type": "application/json"}
            async with client.session.post(
                client.url + "/v1/chat/completions", data=slowly(data) if chunked else data, headers=headers
            ) as response:
                assert response.status == 413
                assert "max_body_bytes" in (await response.json())["error"]["message"]
        assert (await client.chat(prompt(21), tokens=2)).status == 200


async def slowly(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 20_000):
        yield data[at : at + 20_000]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"model": "tiny", "messages": 7}', 400, None),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, None),
        (b'{"model": "tiny", "conversation_id": 7, "messages": []}', 400, "invalid_id"),
        (b'{"model": "tiny", "conversation_id": "' + b"x" * 257 + b'", "messages": []}', 400, "invalid_id"),
    ],
)
async def test_bad_requests_get_openai_errors(
    client: Client, data: bytes, status: int, code: str | None
) -> None:
    answer = await client.post("/v1/chat/completions", data)
    assert answer.status == status, answer.raw
    error = answer.body["error"]
    assert isinstance(error["message"], str)
    assert error["type"]
    if code is not None:
        assert error["code"] == code


async def test_a_turn_does_not_wait_behind_new_conversations(pair: Pair, client: Client) -> None:
    conversation = uuid.uuid4().hex
    messages = prompt(70)
    first = await client.chat(messages, conversation)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    done: list[str] = []

    async def ask(name: str, *args: Any, **fields: Any) -> Answer:
        answer = await client.chat(*args, **fields)
        done.append(name)
        return answer

    with pair.paused("prefill"):
        new = [asyncio.create_task(ask("new", prompt(seed, 85), tokens=1)) for seed in range(80, 86)]
        await eventually(lambda: client.is_busy("prefill", 6), 30, "they do not come to the prefill engine")
        turn = asyncio.create_task(ask("turn", messages, conversation, tokens=1))
        await eventually(lambda: client.is_busy("prefill", 7), 30, "it does not come to the prefill engine")
    answer = await turn
    assert {each.status for each in await asyncio.gather(*new)} == {200}
    assert answer.reuse.outcome == "hit"
    # It came last, and some of those that have 3,000 tokens to compute went after it.
    assert done.index("turn") <= 4
    answer.assert_same(await client.chat(messages, reuse=False, tokens=1))
