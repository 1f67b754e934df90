"""The stub engine itself: a wrong router must not pass unseen."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from carryback.wire import events
from stub_engine import CALL_MARKER, Settings, StubEngine, expected, expected_text
from stub_engine.prompts import MESSAGES, RESPONSES

TEXT = "Tell me about the sea, the wind, the boats and all the people who go there in winter. " * 4
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": {"required": ["where"]}}}
]


class Pair:
    """Two stub engines, and a router of a few lines that does as it is told."""

    def __init__(self, prefill: StubEngine, decode: StubEngine, session: aiohttp.ClientSession) -> None:
        self.prefill = prefill
        self.decode = decode
        self.session = session
        self.keys = 0
        self.events: asyncio.Queue[events.Event] = asyncio.Queue()

    async def post(self, engine: StubEngine, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self.session.post(engine.url + path, json=body) as response:
            return response.status, await response.read()

    async def turn(
        self, messages: list[dict[str, Any]], record: dict[str, Any] | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Both hops: the text, what was reused, and the record of what the decode engine holds."""
        self.keys += 1
        body = {"messages": messages, **fields}
        params = {**(record or {}), "do_remote_decode": True, "do_remote_prefill": False}
        status, raw = await self.post(
            self.prefill, "/v1/chat/completions", {**body, "max_tokens": 1, "kv_transfer_params": params}
        )
        assert status == 200, raw
        params = json.loads(raw)["kv_transfer_params"]
        reuse = params.pop("carryback_reuse")
        params |= {"carryback_key": f"k{self.keys}", "hold_s": 60}
        status, raw = await self.post(
            self.decode, "/v1/chat/completions", {**body, "kv_transfer_params": params}
        )
        assert status == 200, raw
        text = json.loads(raw)["choices"][0]["message"]["content"]
        return text, reuse, record_of(await self.event(events.Held))

    async def event(self, kind: type[events.Event]) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(event := await self.events.get(), kind):
                pass
        return event


def record_of(held: events.Held) -> dict[str, Any]:
    record = msgspec.json.decode(held.record)
    record["carryback"]["digests"] = base64.b64encode(held.digests).decode()
    return dict(record)


@asynccontextmanager
async def listening(engine: StubEngine, queue: asyncio.Queue[events.Event]) -> AsyncIterator[None]:
    """The engine's events, into a queue."""

    async def listen() -> None:
        while True:
            queue.put_nowait(events.decode((await socket.recv_multipart())[1]))

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.IPV6, 1)
    socket.subscribe(b"")
    socket.connect(engine.events)
    task = asyncio.create_task(listen())
    async with asyncio.timeout(10):
        await queue.get()  # a hello: all that comes from now on is heard
    try:
        yield
    finally:
        task.cancel()
        context.destroy(linger=0)


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[Pair]:
    async with (
        StubEngine("prefill", **options) as prefill,
        StubEngine("decode", **options) as decode,
        aiohttp.ClientSession() as session,
    ):
        both = Pair(prefill, decode, session)
        async with listening(decode, both.events):
            yield both


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_two_hops_and_a_second_turn() -> None:
    async with pair() as both:
        first = [user(TEXT)]
        text, reuse, record = await both.turn(first)
        assert text == expected_text(first)
        assert (reuse["outcome"], reuse["reason"]) == ("miss", "no_record")
        assert both.prefill.pinned == 0  # the decode engine has read it
        assert both.decode.pinned > 0

        second = [*first, said(text), user("And then?")]
        text, reuse, _ = await both.turn(second, record)
        assert text == expected_text(second)
        assert (reuse["outcome"], reuse["reason"]) == ("hit", "verified")
        assert reuse["tokens"] == record["remote_num_tokens"]
        assert not both.prefill.violations + both.decode.violations


async def test_reading_releases_and_an_edited_history_is_cut() -> None:
    async with pair() as both:
        text, _, record = await both.turn([user(TEXT), said("ok"), user("What animal?")])
        edited = [user(TEXT), said("no"), user("What animal?"), said(text), user("Sure?")]
        text, reuse, _ = await both.turn(edited, record)
        assert text == expected_text(edited)
        assert (reuse["outcome"], reuse["reason"]) == ("partial", "history_changed")
        assert 0 < reuse["tokens"] < record["remote_num_tokens"]


async def test_a_record_used_twice_is_a_violation_and_gives_wrong_text() -> None:
    async with pair(capacity=64) as both:
        text, _, record = await both.turn([user(TEXT)])
        assert len(both.decode.ranks[0].held) == 1
        again = [user(TEXT), said(text), user("And then?")]
        await both.turn(again, record)
        released = both.decode.ranks[0].pool.free
        await both.turn(again, dict(record))
        assert any("offered again" in each for each in both.prefill.violations)
        assert both.decode.ranks[0].pool.free <= released

        # Another prefill engine does not know that it was offered before, and reads what is there now.
        both.decode.ranks[0].pool.kv[:] = [b"other"] * 64
        async with StubEngine("prefill") as other:
            both.prefill = other
            text, _, _ = await both.turn(again, dict(record))
            assert text != expected_text(again)
            assert any("not its prompt's" in each for each in other.violations)
        assert any("is not held" in each for each in both.decode.violations)


async def test_a_forged_record_is_not_read() -> None:
    async with pair() as both:
        text, _, record = await both.turn([user(TEXT)])
        record["remote_block_ids"][0][0] += 1
        _, reuse, _ = await both.turn([user(TEXT), said(text), user("And then?")], record)
        assert (reuse["tokens"], reuse["reason"]) == (0, "unverified")
        assert both.decode.pinned > 0


async def test_release_and_expiry() -> None:
    async with pair(settings=Settings(grace_s=0)) as both:
        _, _, record = await both.turn([user(TEXT)])
        ask = {"prompt": [0], "max_tokens": 1}
        release = {"carryback_release": [record["remote_request_id"]], "hold_s": 0}
        await both.post(both.decode, "/v1/completions", {**ask, "kv_transfer_params": release})
        released = await both.event(events.Released)
        assert (released.reason, released.pinned) == ("asked", 0)
        short = {"carryback_key": "k", "hold_s": 0.1}
        body = {"messages": [user(TEXT)], "kv_transfer_params": short}
        await both.post(both.decode, "/v1/chat/completions", body)
        assert (await both.event(events.Released)).reason == "expired"
        assert both.decode.in_use == 0


async def test_a_client_that_leaves_frees_all() -> None:
    async with pair() as both:
        hold = both.decode.fault(first_delay_s=60)
        body = {"messages": [user(TEXT)], "stream": True, "kv_transfer_params": {"carryback_key": "k"}}
        async with both.session.post(both.decode.url + "/v1/chat/completions", json=body):
            assert hold.times == 0
            assert both.decode.running == 1
        async with asyncio.timeout(10):
            while both.decode.running or both.decode.in_use:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_too_little_room_waits_and_too_much_is_refused() -> None:
    async with pair(capacity=20, chunk_interval_s=0.02) as both:
        body = {"messages": [user(TEXT)]}
        answers = await asyncio.gather(
            *(both.post(both.decode, "/v1/chat/completions", body) for _ in range(3))
        )
        assert all(status == 200 for status, _ in answers)
        assert both.decode.state()["starved"] > 0
        status, raw = await both.post(both.decode, "/v1/chat/completions", {"messages": [user(TEXT * 9)]})
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")


@pytest.mark.parametrize("path", ["/v1/chat/completions", RESPONSES, MESSAGES])
async def test_streams_say_what_whole_answers_say(path: str) -> None:
    async with StubEngine("decode") as engine, aiohttp.ClientSession() as session:
        messages = [user(TEXT + CALL_MARKER)]
        body: dict[str, Any] = {"messages": messages, "tools": TOOLS, "max_tokens": 100}
        if path == RESPONSES:
            body = {"input": messages, "tools": [{"type": "function", **TOOLS[0]["function"]}]}
        if path == MESSAGES:
            body["tools"] = [{"name": "look", "input_schema": {"required": ["where"]}}]
        call = expected(body, path).call
        assert call is not None
        async with session.post(engine.url + path, json=body) as response:
            whole = await response.text()
        async with session.post(engine.url + path, json={**body, "stream": True}) as response:
            streamed = [
                json.loads(line[6:]) for line in (await response.text()).splitlines() if "data: {" in line
            ]
        assert (call[1] in whole) or (json.dumps(call[1])[1:-1] in whole)
        pieces = []
        for event in streamed:
            for choice in event.get("choices", ()):
                for each in choice["delta"].get("tool_calls", ()):
                    pieces.append(each["function"]["arguments"])
            delta = event.get("delta")
            pieces.append(delta if isinstance(delta, str) else (delta or {}).get("partial_json", ""))
        assert "".join(pieces) == call[1]


async def test_faults() -> None:
    async with StubEngine("decode", host="::1", api_key="secret") as engine:
        headers = {"Authorization": "Bearer secret"}
        body = {"messages": [user(TEXT)], "stream": True}
        async with aiohttp.ClientSession() as session:

            async def ask() -> bytes:
                async with session.post(
                    engine.url + "/v1/chat/completions", json=body, headers=headers
                ) as answer:
                    assert answer.status == 200
                    return await answer.read()

            async with session.get(engine.url + "/v1/models") as answer:
                assert answer.status == 401
            engine.fault(status=503)
            async with session.post(
                engine.url + "/v1/chat/completions", json=body, headers=headers
            ) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, 503)
            for drop in ("before_status", "before_first_byte", 3):
                engine.fault(drop=drop)
                with pytest.raises(aiohttp.ClientError):
                    await ask()
            assert engine.running == engine.in_use == 0
            engine.fault(framing="crlf", split=True, comments=2)
            raw = await ask()
            assert raw.startswith(b": wait\n\n: wait\n\ndata: {")
            assert raw.endswith(b"data: [DONE]\r\n\r\n")
            async with session.post(
                engine.url + "/stub/faults", json={"omit_done": True, "omit_finish": True}
            ) as answer:
                assert answer.status == 200
            raw = await ask()
            assert b"[DONE]" not in raw
            assert b'"finish_reason":"stop"' not in raw
            engine.fault(error_after=2)
            raw = await ask()
            assert raw.count(b"data: ") == 4
            assert b'data: {"error":{' in raw
            engine.fault(script=[(0, b"data: a\r"), (0.01, b"\n\r\n")])
            assert await ask() == b"data: a\r\n\r\n"
            assert b'"finish_reason":"stop"' in await ask()


async def test_restart_and_ranks() -> None:
    async with StubEngine("decode", ranks=2) as engine, aiohttp.ClientSession() as session:
        url, address, run = engine.url, engine.events, engine.id
        await engine.kill()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url + "/health")
        await engine.start()
        assert (engine.url, engine.events) == (url, address)
        assert engine.id != run
        assert engine.config().data_parallel_size == 2
        body = {"messages": [user(TEXT)], "kv_transfer_params": {"carryback_key": "k", "hold_s": 60}}
        headers = {"X-data-parallel-rank": "1"}
        async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
        assert [rank.pinned > 0 for rank in engine.ranks] == [False, True]
