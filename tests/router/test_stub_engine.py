"""The stub engine itself: a wrong router must not pass unseen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from carryback.wire import events
from stub_engine import CALL_MARKER, Settings, StubEngine, expected, expected_text
from stub_engine.fast import FastEngine
from stub_engine.prompts import MESSAGES, RESPONSES

TEXT = "Tell me about the sea, the wind, the boats and all the people who go there in winter. " * 4
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": {"required": ["where"]}}}
]


class Pair:
    """Two stub engines, and a router of a few lines that does as it is told."""

    def __init__(self, prefill: Any, decode: Any, session: aiohttp.ClientSession) -> None:
        self.prefill = prefill
        self.decode = decode
        self.session = session
        self.keys = 0
        self.events: asyncio.Queue[events.Event] = asyncio.Queue()
        self.heard: list[events.Event] = []

    async def post(self, engine: StubEngine, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self.session.post(engine.url + path, json=body) as response:
            return response.status, await response.read()

    async def turn(
        self, messages: list[dict[str, Any]], held: events.Held | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any], events.Held]:
        """Both hops: the text, what was reused, and what the decode engine has at the end.

        Args:
            held: what the conversation's last request left.
        """
        self.keys += 1
        key = f"k{self.keys}"
        body = {"messages": messages, **fields}
        tip = None if held is None else {"tokens": held.tokens, "digest": held.tip.hex()}
        status, raw = await self.prefilled(body, carryback_key=key, carryback_tip=tip)
        assert status == 200, raw
        params = json.loads(raw)["kv_transfer_params"]
        reuse = params.pop("carryback_reuse")
        params |= {"carryback_key": key, "hold_s": 60, "carryback_find": True}
        status, raw = await self.post(
            self.decode, "/v1/chat/completions", {**body, "kv_transfer_params": params}
        )
        assert status == 200, raw
        text = json.loads(raw)["choices"][0]["message"]["content"]
        return text, reuse, await self.event(events.Held)

    async def prefilled(self, body: dict[str, Any], **params: Any) -> tuple[int, bytes]:
        """The first hop."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "carryback_ask": [self.decode.events]}
        body = {**body, "max_tokens": 1, "kv_transfer_params": {**asked, **params}}
        return await self.post(self.prefill, "/v1/chat/completions", body)

    async def tell(self, engine: StubEngine, command: events.Command) -> None:
        """What a router says to an engine."""
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.XSUB)
            socket.connect(engine.events)
            await socket.send(b"\x01hello")
            await socket.recv_multipart()
            await socket.send(events.encode_command(command))
            socket.close(linger=1000)

    async def event(self, kind: type[events.Event]) -> Any:
        """The next event of a kind; others come later."""
        async with asyncio.timeout(10):
            while True:
                for event in self.heard:
                    if isinstance(event, kind):
                        self.heard.remove(event)
                        return event
                self.heard.append(await self.events.get())


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
        text, reuse, held = await both.turn(first)
        assert text == expected_text(first)
        assert (reuse["outcome"], reuse["reason"]) == ("miss", "new")
        assert both.prefill.pinned == 0  # the decode engine has read it
        assert both.decode.pinned == held.blocks > 0

        second = [*first, said(text), user("And then?")]
        text, reuse, later = await both.turn(second, held)
        assert text == expected_text(second)
        assert (reuse["outcome"], reuse["reason"]) == ("hit", "verified")
        assert reuse["tokens"] == reuse["found"] == held.tokens
        assert (reuse["holder"], reuse["asked"]) == (both.decode.id, 1)
        # The newer pin has all that the older one had.
        assert (await both.event(events.Released)).reason == "covered"
        assert both.decode.pinned == later.blocks
        await no_leases(both.decode)
        assert not both.prefill.violations + both.decode.violations


async def no_leases(engine: StubEngine) -> None:
    async with asyncio.timeout(10):
        while engine.leased:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_is_found_depends_on_content_alone() -> None:
    async with pair() as both:
        text, _, held = await both.turn([user(TEXT), said("ok"), user("What animal?")])
        edited = [user(TEXT), said("no"), user("What animal?"), said(text), user("Sure?")]
        answer, reuse, _ = await both.turn(edited, held)
        assert answer == expected_text(edited)
        assert (reuse["outcome"], reuse["reason"]) == ("partial", "history_changed")
        assert 0 < reuse["tokens"] == reuse["found"] < held.tokens
        # Two branches of one state, read beside each other; and nobody says whose they are.
        branches = [[*edited, said(answer), user(f"And {name}?")] for name in ("he", "she")]
        for branch in branches:
            answer, reuse, _ = await both.turn(branch)
            assert answer == expected_text(branch)
            assert (reuse["outcome"], reuse["reason"]) == ("hit", "verified")
            assert reuse["tokens"] > held.tokens
        # Another's salt is other content.
        _, reuse, _ = await both.turn(branches[0], cache_salt="another tenant")
        assert (reuse["tokens"], reuse["found"], reuse["reason"]) == (0, 0, "new")


async def test_what_is_not_pinned_is_found_until_it_is_overwritten() -> None:
    async with pair(capacity=48) as both:
        text, _, held = await both.turn([user(TEXT)])
        await both.tell(both.decode, events.Release(["k1"]))
        released = await both.event(events.Released)
        assert (released.key, released.reason, released.pinned) == ("k1", "asked", 0)
        assert both.decode.in_use == 0
        again = [user(TEXT), said(text), user("And then?")]
        _, reuse, _ = await both.turn(again, held)
        assert reuse["tokens"] == held.tokens

        # A pin is not overwritten, however much else comes; and without it, it is.
        other = {"messages": [user("Other words. " * 90)], "max_tokens": 20}
        assert (await both.post(both.decode, "/v1/chat/completions", other))[0] == 200
        _, reuse, _ = await both.turn(again, held)
        assert reuse["reason"] == "verified"
        await both.tell(both.decode, events.Release(["k2", "k3"]))
        await both.event(events.Released)
        for number in range(6):
            other["messages"] = [user(f"{number} words. " * 90)]
            assert (await both.post(both.decode, "/v1/chat/completions", other))[0] == 200
        _, reuse, _ = await both.turn(again, held)
        assert (reuse["tokens"], reuse["reason"]) == (0, "overwritten")


async def test_a_request_says_what_is_found_of_it() -> None:
    async with pair() as both:
        text, _, held = await both.turn([user(TEXT)])
        await both.turn([user(TEXT), said(text), user("And then?")])
        assert (await both.event(events.Found)).cached_tokens == 0
        found = await both.event(events.Found)
        assert (found.key, found.cached_tokens) == ("k2", held.tokens)
        assert found.prompt_tokens > found.cached_tokens


async def test_wrong_kv_under_a_valid_lease_is_seen() -> None:
    async with pair() as both:
        text, _, _ = await both.turn([user(TEXT)])
        both.decode.ranks[0].pool.spoil()
        again = [user(TEXT), said(text), user("And then?")]
        status, _ = await both.prefilled({"messages": again})
        assert status == 200
        assert any("not its prompt's" in each for each in both.prefill.violations)


async def test_a_lease_is_sealed_and_ends_when_its_reader_is_gone() -> None:
    async with pair(settings=Settings(reader_lease_s=0.5, ask_timeout_s=5)) as both:
        text, _, _ = await both.turn([user(TEXT)])
        again = [user(TEXT), said(text), user("And then?")]
        async with StubEngine("prefill", key="another") as stranger:
            mine, both.prefill = both.prefill, stranger
            _, raw = await both.prefilled({"messages": again})
            reuse = json.loads(raw)["kv_transfer_params"]["carryback_reuse"]
            assert (reuse["tokens"], reuse["reason"]) == (0, "unverified")
            await no_leases(both.decode)
            both.prefill = mine

        both.prefill.fault(load_delay_s=600)
        asked = asyncio.create_task(both.prefilled({"messages": again}))
        async with asyncio.timeout(10):
            while not both.decode.leased:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await both.prefill.kill()
        await no_leases(both.decode)
        assert both.decode.ranks[0].expired == 1
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_a_reader_says_that_it_still_waits_and_that_it_has_read() -> None:
    async with pair(settings=Settings(reader_lease_s=4)) as both:
        text, _, held = await both.turn([user(TEXT)])
        both.prefill.fault(load_delay_s=5)  # longer than a lease lasts of which nothing is heard
        status, raw = await both.prefilled({"messages": [user(TEXT), said(text), user("And then?")]})
        assert (status, json.loads(raw)["kv_transfer_params"]["carryback_reuse"]["tokens"]) == (
            200,
            held.tokens,
        )
        await no_leases(both.decode)
        assert both.decode.ranks[0].expired == 0


@pytest.mark.parametrize(
    ("answers", "reason", "found"),
    [("never", "no_answer", False), (5.0, "no_answer", False), ("too_many_leases", "too_many_leases", False),
     ("paused", "paused", False), (0.1, "verified", True)],
)  # fmt: skip
async def test_questions_that_are_not_answered_as_they_should(
    answers: str | float, reason: str, found: bool
) -> None:
    async with pair(settings=Settings(ask_timeout_s=0.5)) as both:
        text, _, held = await both.turn([user(TEXT)])
        both.decode.answers = answers
        second = [user(TEXT), said(text), user("And then?")]
        answer, reuse, _ = await both.turn(second)
        assert answer == expected_text(second)
        assert (reuse["reason"], reuse["tokens"]) == (reason, held.tokens if found else 0)
        assert both.decode.asked >= 2


async def test_more_than_may_be_leased_is_refused_and_found() -> None:
    async with pair(settings=Settings(max_leased=0.0)) as both:
        text, _, held = await both.turn([user(TEXT)])
        _, reuse, _ = await both.turn([user(TEXT), said(text), user("And then?")], held)
        assert (reuse["tokens"], reuse["found"], reuse["reason"]) == (0, held.tokens, "too_many_leases")
        assert both.decode.asked == 3  # twice for the second turn: once more when its turn had come


async def test_its_own_prefix_cache_comes_first() -> None:
    async with pair(settings=Settings(caching=True)) as both:
        text, _, held = await both.turn([user(TEXT)])
        second = [user(TEXT), said(text), user("And then?")]
        _, reuse, _ = await both.turn(second, held)
        assert (reuse["outcome"], reuse["reason"]) == ("partial", "below_threshold")
        assert 0 < reuse["cached"] < reuse["found"] == held.tokens
        long = {"max_tokens": 200, "ignore_eos": True}
        text, _, held = await both.turn([user(TEXT)], **long)
        _, reuse, _ = await both.turn([user(TEXT), said(text), user("And then?")], held)
        assert (reuse["outcome"], reuse["reason"]) == ("hit", "verified")
        assert reuse["cached"] + reuse["tokens"] == held.tokens
        assert min(reuse["cached"], reuse["tokens"]) > 0


async def test_a_prompt_is_held_until_it_is_released_or_its_time_is_over() -> None:
    async with pair() as both:
        await both.prefilled({"messages": [user(TEXT)]}, carryback_key="mine")
        assert both.prefill.pinned > 0
        await both.tell(both.prefill, events.Release(["mine"]))
        async with asyncio.timeout(10):
            while both.prefill.pinned:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert both.prefill.ranks[0].expired == 0
        await both.prefilled({"messages": [user(TEXT)]}, carryback_key="mine", hold_s=0.1)
        async with asyncio.timeout(10):
            while both.prefill.in_use:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert both.prefill.ranks[0].expired == 1
        short = {"carryback_key": "k", "hold_s": 0.1}
        body = {"messages": [user(TEXT)], "kv_transfer_params": short}
        await both.post(both.decode, "/v1/chat/completions", body)
        released = await both.event(events.Released)
        assert (released.key, released.reason, released.pinned) == ("k", "expired", 0)
        assert both.decode.in_use == 0


async def test_an_engine_that_forgets_has_nothing_and_leases_are_void() -> None:
    async with pair() as both:
        text, _, _ = await both.turn([user(TEXT)])
        again = [user(TEXT), said(text), user("And then?")]
        both.prefill.fault(load_delay_s=0.5)
        asked = asyncio.create_task(both.prefilled({"messages": again}, carryback_key="mine"))
        async with asyncio.timeout(10):
            while not both.decode.leased:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await both.tell(both.decode, events.Forget())
        assert (await both.event(events.Released)).reason == "void"
        _, raw = await asked
        reuse = json.loads(raw)["kv_transfer_params"]["carryback_reuse"]
        assert (reuse["tokens"], reuse["reason"]) == (0, "load_failed")
        assert both.decode.in_use == 0
        assert both.prefill.pinned > 0
        await both.tell(both.prefill, events.Forget())
        _, reuse, _ = await both.turn(again)
        assert (reuse["tokens"], reuse["reason"]) == (0, "new")
        assert both.prefill.pinned == 0


async def test_the_fast_one_finds_by_content_too() -> None:
    prefill, decode = FastEngine("prefill"), FastEngine("decode")
    await prefill.start()
    await decode.start()
    async with aiohttp.ClientSession() as session:
        both = Pair(prefill, decode, session)
        async with listening(decode, both.events):
            messages = [user(TEXT * 4)]
            text, reuse, held = await both.turn(messages)
            assert (reuse["outcome"], reuse["reason"]) == ("miss", "new")
            for name in ("he", "she"):
                _, reuse, later = await both.turn([*messages, said(text), user(f"And {name}?")], held)
                assert (reuse["outcome"], reuse["reason"]) == ("hit", "verified")
                assert reuse["tokens"] >= held.tokens
            assert reuse["holder"] == decode.id
            found = [(await both.event(events.Found)).cached_tokens for _ in range(3)]
            assert found[0] == 0
            assert min(found[1:]) >= held.tokens
            await both.tell(decode, events.Release(["k3"]))
            reasons = {(await both.event(events.Released)).key for _ in range(3)}
            assert reasons == {"k1", "k2", "k3"}
            _, reuse, _ = await both.turn([user("#" + TEXT * 4)], later)
            assert (reuse["outcome"], reuse["reason"]) == ("miss", "history_changed")
    await prefill.kill()
    await decode.kill()


async def test_a_client_that_leaves_frees_all() -> None:
    async with pair() as both:
        hold = both.decode.fault(first_delay_s=60)
        asked = {"carryback_key": "k", "hold_s": 60}
        body = {"messages": [user(TEXT)], "stream": True, "kv_transfer_params": asked}
        async with both.session.post(both.decode.url + "/v1/chat/completions", json=body):
            assert hold.times == 0
            assert both.decode.running == 1
        held = await both.event(events.Held)
        assert (held.blocks, held.hold_s) == (0, 0)
        assert held.tokens > 0  # it has computed the prompt
        async with asyncio.timeout(10):
            while both.decode.running or both.decode.in_use:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_too_little_room_waits_and_too_much_is_refused() -> None:
    async with pair(capacity=20, chunk_interval_s=0.02) as both:
        bodies = [{"messages": [user(f"{number} {TEXT}")]} for number in range(3)]
        answers = await asyncio.gather(
            *(both.post(both.decode, "/v1/chat/completions", body) for body in bodies)
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
