"""The engines by hand, without the router: what each endpoint takes and returns, and what engines publish."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from carryback.wire import events
from pair import BLOCK, NAME, Pair, document, eventually

WITHIN_S = 60
# For each endpoint: how it spells the number of tokens, and the prompt.
ENDPOINTS = {
    "/v1/chat/completions": ("max_completion_tokens", "messages"),
    "/v1/completions": ("max_tokens", "prompt"),
    "/v1/responses": ("max_output_tokens", "input"),
    "/v1/messages": ("max_tokens", "messages"),
}


class Engines:
    """Asks the engines, and hears them."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._context = zmq.asyncio.Context()
        self._sockets = {}
        for command in pair.commands:
            socket = self._sockets[command.role] = self._context.socket(zmq.XSUB)
            socket.connect(command.events)
            socket.send(b"\x01")  # subscribed to all

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def ask(self, role: str, path: str, body: dict[str, Any], **params: Any) -> Any:
        """A request to one engine; its answer, or the text of its stream."""
        body = {**body, "kv_transfer_params": params}
        async with self._pair.session.post(self._pair.url(role) + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
        return json.loads(text) if response.content_type == "application/json" else text

    async def prefill(
        self, path: str, body: dict[str, Any], mine: str = "", **params: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The prefill hop, which asks the decode engine; what that is to be given, and what was reused.

        Args:
            mine: the request's key.
            params: more `kv_transfer_params`.
        """
        body = {**body, ENDPOINTS[path][0]: 1, "stream": False}
        decode = next(each for each in self._pair.commands if each.role == "decode")
        params = {
            "do_remote_decode": True, "do_remote_prefill": False, "carryback_key": mine or key(),
            "carryback_ask": [decode.events], **params,
        }  # fmt: skip
        answer = await self.ask("prefill", path, body, **params)
        report = answer["kv_transfer_params"].pop("carryback_reuse")
        return answer["kv_transfer_params"], report

    async def release(self, role: str, key: str) -> None:
        """Make an engine let go of a request's KV."""
        await self._sockets[role].send(events.encode_command(events.Release([key])))

    async def go(self, key: str, params: dict[str, Any]) -> None:
        """Tell a request that waits at the decode engine how it goes on."""
        await self._sockets["decode"].send(events.encode_command(events.Go(key, json.dumps(params).encode())))

    async def next(self, role: str, kind: type[Any]) -> Any:
        """The next event of a kind from an engine."""
        while await self._sockets[role].poll(WITHIN_S * 1000):
            event = events.decode((await self._sockets[role].recv_multipart())[-1])
            if isinstance(event, kind):
                return event
        pytest.fail(f"{role}: no {kind.__name__}")

    async def hello(self, role: str) -> events.Hello:
        """What an engine says of itself from now on."""
        while await self._sockets[role].poll(0):
            await self._sockets[role].recv_multipart()
        hello: events.Hello = await self.next(role, events.Hello)
        return hello


@pytest_asyncio.fixture(loop_scope="session")
async def engines(pair: Pair) -> AsyncIterator[Engines]:
    await pair.assert_unpinned()
    engines = Engines(pair)
    for role in ("prefill", "decode"):
        assert (await engines.hello(role)).pinned == 0
    yield engines
    engines.close()


def key() -> str:
    return f"cbtest.{uuid.uuid4().hex}"


def said(answer: dict[str, Any]) -> str:
    """An answer without what is new in each."""
    kept = {name: answer.get(name) for name in ("choices", "output", "content") if answer.get(name)}
    return re.sub(r'"(id|encrypted_content)": "[^"]*"', "", json.dumps(kept))


def request(path: str, text: str, salt: str) -> dict[str, Any]:
    limit, field = ENDPOINTS[path]
    prompt = [{"role": "user", "content": text}] if field == "messages" else text
    return {"model": NAME, field: prompt, limit: 8, "temperature": 0, "cache_salt": salt}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_reads_back(pair: Pair, engines: Engines, path: str, stream: bool) -> None:
    salt = key()
    first = request(path, document(1, 20), salt) | {"stream": stream}
    params, report = await engines.prefill(path, first)
    assert (report["reason"], report["found"], report["asked"]) == ("new", 0, 1)
    mine = key()
    answer = await engines.ask("decode", path, first, **params, carryback_key=mine, hold_s=60)
    held = await engines.next("decode", events.Held)
    # What a client is sent tells nothing about the engines.
    for secret in ("remote_", "carryback", params["remote_engine_id"], held.engine):
        assert secret not in json.dumps(answer)
    assert held.tokens > 10 * BLOCK
    assert len(held.tip) == 16
    assert held.pinned == held.blocks
    capacity = (await engines.hello("decode")).capacity
    assert await pair.pinned("decode") * capacity == pytest.approx(held.pinned, abs=0.01)

    second = request(path, f"{document(1, 20)} {document(2, 5)}", salt)
    tip = {"tokens": held.tokens, "digest": held.tip.hex()}
    unread = key()
    _, report = await engines.prefill(path, second, unread, carryback_tip=tip)
    assert report["outcome"] in (
        "hit",
        "partial",
    )  # the template's end of the first prompt is not in the second
    assert held.tokens - 2 * BLOCK <= report["tokens"] == report["found"] <= held.tokens
    assert report["holder"] == held.engine
    await engines.release("decode", mine)
    released = await engines.next("decode", events.Released)
    assert (released.key, released.reason, released.pinned) == (mine, "asked", 0)
    await engines.release("prefill", unread)
    await pair.assert_unpinned()
    assert (await engines.hello("decode")).leased == 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_takes_the_salt(engines: Engines, path: str) -> None:
    first = request(path, document(3, 20), key())
    params, _ = await engines.prefill(path, first)
    await engines.ask("decode", path, first, **params, carryback_key=key())
    unread = key()
    _, report = await engines.prefill(path, request(path, document(3, 20), key()), unread)
    assert (report["outcome"], report["tokens"], report["found"]) == ("miss", 0, 0)
    await engines.release("prefill", unread)


async def test_a_release_and_a_deadline(pair: Pair, engines: Engines) -> None:
    path = "/v1/completions"
    body = request(path, document(4, 20), "salt")
    for hold_s, reason in ((60, "asked"), (0.5, "expired")):
        mine = key()
        await engines.ask("decode", path, body, carryback_key=mine, hold_s=hold_s)
        held = await engines.next("decode", events.Held)
        assert held.pinned == held.blocks > 10
        if reason == "asked":
            assert (await engines.hello("decode")).pinned == held.pinned
            await engines.release("decode", mine)
        released = await engines.next("decode", events.Released)
        assert (released.key, released.reason, released.pinned) == (mine, reason, 0)
        await pair.assert_unpinned("decode")
    # What is not pinned is found for as long as it lies there.
    unread = key()
    _, report = await engines.prefill(path, body, unread)
    assert report["tokens"] > 10 * BLOCK
    await engines.release("prefill", unread)


async def test_a_newer_pin_takes_the_place_of_what_it_covers(pair: Pair, engines: Engines) -> None:
    path, salt, keys = "/v1/completions", key(), [key() for _ in range(3)]
    text = document(5, 10)
    for mine in keys[:2]:
        answer = await engines.ask("decode", path, request(path, text, salt), carryback_key=mine, hold_s=60)
        text += f"{answer['choices'][0]['text']} {document(7, 10)}"
    await engines.ask("decode", path, request(path, document(6, 10), salt), carryback_key=keys[2], hold_s=60)
    released = await engines.next("decode", events.Released)
    assert (released.key, released.reason) == (keys[0], "covered")
    for mine in keys[1:]:
        await engines.release("decode", mine)
        released = await engines.next("decode", events.Released)
        assert (released.key, released.reason) == (mine, "asked")
    await pair.assert_unpinned()


async def test_a_prefill_engine_says_what_waits_for_its_reader(pair: Pair, engines: Engines) -> None:
    path = "/v1/completions"
    body = request(path, document(5, 20), "salt")
    params, _ = await engines.prefill(path, body)
    assert (await engines.hello("prefill")).pinned > 10
    await engines.ask("decode", path, body, **params, hold_s=0)

    async def is_read() -> bool:
        return (await engines.hello("prefill")).pinned == 0

    await eventually(is_read, WITHIN_S, "prefill still holds KV")
    await pair.assert_unpinned()


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_request_waits_until_it_is_told_how_to_go_on(pair: Pair, engines: Engines, path: str) -> None:
    body = request(path, document(6, 20), "salt")
    mine = {"carryback_key": key(), "hold_s": 60}
    asked = asyncio.create_task(engines.ask("decode", path, body, **mine, carryback_await=60))
    params, _ = await engines.prefill(path, body)
    await asyncio.sleep(1)
    assert not asked.done()
    await engines.go(mine["carryback_key"], params)
    answer = await asked
    held = await engines.next("decode", events.Held)
    assert held.generated == 8
    await engines.release("decode", held.key)
    assert (await engines.hello("prefill")).pinned == 0  # it was read
    alone = await engines.ask("decode", path, body, hold_s=0, carryback_key=key())
    assert said(answer) == said(alone)


async def test_a_request_does_not_wait_for_ever(pair: Pair, engines: Engines) -> None:
    path = "/v1/completions"
    body = request(path, document(7, 20), "salt")
    waited = await engines.ask("decode", path, body, hold_s=0, carryback_key=key(), carryback_await=1)
    nonsense = key()
    await engines.go(nonsense, {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "tp_size": "x"})
    told = await engines.ask("decode", path, body, hold_s=0, carryback_key=nonsense, carryback_await=60)
    assert said(waited) == said(told)
    await pair.assert_unpinned()


async def test_a_prefill_engine_says_in_an_event_what_it_answers(engines: Engines) -> None:
    path = "/v1/chat/completions"
    body = request(path, document(8, 20), "salt") | {ENDPOINTS[path][0]: 1}
    mine = key()
    answer = await engines.ask(
        "prefill",
        path,
        body,
        do_remote_decode=True,
        do_remote_prefill=False,
        carryback_key=mine,
        carryback_tell=True,
    )
    told = await engines.next("prefill", events.Prefilled)
    assert told.key == mine
    params = answer["kv_transfer_params"]
    assert json.loads(told.params) == params
    work = params["carryback_work"]
    assert work["computed"] == params["carryback_reuse"]["recomputed"] > 100
    assert work["compute_s"] > 0 == work["read_s"]
    await engines.release("prefill", mine)


async def test_the_threshold_of_a_request_is_the_routers(engines: Engines) -> None:
    path = "/v1/completions"
    body = request(path, document(9, 20), "salt")
    await engines.ask("decode", path, body)
    for threshold, reason in ((10**6, "below_threshold"), (1, "verified")):
        mine = key()
        params, report = await engines.prefill(path, body, mine, carryback_threshold=threshold)
        assert report["reason"] == reason
        assert report["found"] > 10 * BLOCK
        assert (params["carryback_work"]["read_s"] > 0) == (reason == "verified")
        await engines.release("prefill", mine)


async def test_ranks_are_addressed_by_all_endpoints_but_responses(pair: Pair) -> None:
    """Which engines the router may address by rank: vLLM leaves the header of /v1/responses aside."""
    answers = {}
    for path in ENDPOINTS:
        body = request(path, "hello", "salt")
        headers = {"X-data-parallel-rank": "7"}
        async with pair.session.post(pair.url("decode") + path, json=body, headers=headers) as response:
            answers[path] = response.status
    assert answers == {path: 200 if path == "/v1/responses" else 400 for path in ENDPOINTS}
