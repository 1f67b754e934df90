"""Engines that fail and clients that leave: every request ends in a right answer or a clear error."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from carryback_server.config import EngineConfig
from carryback_server.engines import Role
from raw_server import RawServer, whole
from service import ENDPOINTS, TEXT, Answer, Serve, Service, request_to, said, until, user
from stub_engine import CALL_MARKER, Settings, StubEngine, expected, expected_text
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

FIRST = [user(TEXT)]
SECOND = [*FIRST, said(expected_text(FIRST)), user("And then?")]
# Short, for what a decode engine that broke off may still read; it begins none in the last second.
LEASE_S = 3.0
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"required": ["where"]}}}]
MODELS = whole(b'{"data":[{"id":"stub"}]}')


async def first_turn(service: Service, name: str) -> tuple[StubEngine, list[Any]]:
    """A first turn; the decode engine that now pins its KV, and the messages of the second turn."""
    before = {id(engine): engine.pinned for engine in service.decodes}
    messages = [user(f"{name}: {TEXT}")]
    answer = await service.chat(messages, name)
    assert answer.status == 200
    await until(lambda: any(each.pinned > before[id(each)] for each in service.decodes), "it is pinned")
    holder = next(each for each in service.decodes if each.pinned > before[id(each)])
    return holder, [*messages, said(answer.text), user("And then?")]


def is_error_event(path: str, answer: Answer, code: str) -> bool:
    """Whether a stream ends, regularly, with an error event as the endpoint's clients expect it."""
    event = answer.raw.rstrip().rpartition(b"\n\n")[2].decode()
    name, _, data = event.rpartition("data: ")
    fields = json.loads(data)
    kinds = {
        CHAT: name == "" and fields["error"].get("code") == code,
        COMPLETIONS: name == "" and fields["error"].get("code") == code,
        RESPONSES: name == "event: error\n" and fields.get("type") == "error" and fields.get("code") == code,
        MESSAGES: name == "event: error\n" and fields["type"] == "error" and fields["error"]["type"] == "api_error",
    }  # fmt: skip
    return kinds[path] and not answer.is_cut and answer.raw.endswith(b"\n\n")


# -- a prefill engine is lost


@pytest.mark.parametrize(
    "fault",
    [{"status": 500}, {"status": 503}, {"drop": "before_status"}, {"drop": 1}, {"hang": True}, {"load_delay_s": 60}],
    ids=str,
)  # fmt: skip
async def test_a_prefill_engine_that_fails_is_replaced_by_another(
    serve: Serve, fault: dict[str, Any]
) -> None:
    timeout_s = 3.0 if {"hang", "load_delay_s"} & set(fault) else 30
    service = await serve(2, 1, prefill_timeout_s=timeout_s)
    bad, good = service.prefills
    for number in range(30):
        _, second = await first_turn(service, f"c{number}")
        set_up = bad.fault(hop="prefill", **fault)
        answer = await service.chat(second, f"c{number}")
        assert answer.status == 200
        assert answer.text == expected_text(second)
        # Whoever computes it asks what there is of it.
        assert (answer.reuse.outcome, answer.reuse.reason) == ("hit", "verified")
        if set_up not in bad.faults:
            break
        bad.faults.clear()
    assert good.requests[-1].params["carryback_ask"] == [service.decode.events]
    # What it stood for is let go of; what the newest answers left is pinned.
    await until(lambda: service.decode.leased == 0, "no lease is left")
    assert service.decode.ranks[0].expired == 0
    await until(lambda: len(service.decode.ranks[0].held) == number + 1, "one is pinned for each chat")
    third = [*second, said(answer.text), user("Go on.")]
    assert (await service.chat(third, f"c{number}")).reuse.outcome == "hit"


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_without_a_prefill_engine_the_decode_engine_does_all_of_it(serve: Serve, path: str) -> None:
    service = await serve(hold_first_s=60)
    _, second = await first_turn(service, "c")
    await service.prefill.kill()
    for number in range(3):
        body = request_to(path, f"{number} {TEXT}", stream=bool(number % 2))
        answer = await service.post(path, body, conversation=f"alone-{number}")
        assert (answer.status, answer.text) == (200, expected(body, path).text)
        assert answer.reuse.reason in ("prefill_failed", "prefill_unavailable")
    answer = await service.chat(second, "c")
    assert answer.text == expected_text(second)
    await service.prefill.start()
    await until(lambda: service.router.pipeline.pool.of("prefill"), "it is up again")
    third = [*second, said(answer.text), user("Go on.")]
    answer = await service.chat(third, "c")
    assert answer.text == expected_text(third)
    assert answer.reuse.outcome == "hit"


async def test_a13_a_prefill_engine_refuses_and_the_client_hears_it_at_once(serve: Serve) -> None:
    service = await serve(2, 2, engine={"max_model_len": 400})
    for path in ENDPOINTS:
        headers = {"X-Conversation-ID": path}
        text = f"{path}: {TEXT}"
        assert (await service.post(path, request_to(path, text), headers)).status == 200
        refused = await service.post(path, request_to(path, TEXT * 20), headers)
        assert refused.status == 400
        assert "maximum context length is 400" in refused.error["message"]
        await service.idle()
        trimmed = await service.post(path, request_to(path, text), headers)
        assert trimmed.text == expected(request_to(path, text), path).text
    await until(lambda: sum(each.pinned for each in service.prefills) == 0, "prefill engines hold nothing")
    await until(
        lambda: sum(len(each.ranks[0].held) for each in service.decodes) == len(ENDPOINTS),
        "decode engines pin what the last turns left, and no more",
    )


@pytest.mark.parametrize("when", ["as it asks", "as it reads", "when it has read"])
async def test_a_prefill_engine_that_is_killed_leaves_no_lease(serve: Serve, when: str) -> None:
    service = await serve(2, 1, engine={"settings": Settings(reader_lease_s=4, ask_timeout_s=30)})
    victim = service.prefills[0]
    has_begun = {
        "as it asks": lambda: True,
        "as it reads": lambda: service.decode.leased,
        "when it has read": lambda: victim.ranks[0].reads,
    }
    for number in range(30):
        _, second = await first_turn(service, f"c{number}")
        fault = {"first_delay_s": 60} if when == "when it has read" else {"load_delay_s": 60}
        set_up = victim.fault(hop="prefill", **fault)
        service.decode.answers = 1.0 if when == "as it asks" else ""
        asking = asyncio.create_task(service.chat(second, f"c{number}"))
        asked = service.decode.asked
        await until(lambda asked=asked: service.decode.asked > asked, "it asks")
        if victim.running:
            await until(has_begun[when], when)
            await victim.kill()
        answer = await asking
        assert (answer.status, answer.text) == (200, expected_text(second))
        if set_up not in victim.faults:
            break
        victim.faults.clear()
    assert not victim._is_up
    assert answer.reuse.outcome == "hit"
    service.decode.answers = ""
    await until(lambda: service.decode.leased == 0, "no lease is left")
    await victim.start()
    for number in range(4):
        await first_turn(service, f"again-{number}")


@pytest.mark.parametrize("answers", ["never", 5.0, "too_many_leases"])
async def test_decode_engines_that_do_not_say_what_they_have_cost_reuse_and_nothing_else(
    serve: Serve, answers: str | float
) -> None:
    service = await serve(1, 2, engine={"settings": Settings(ask_timeout_s=0.5)})
    holder, second = await first_turn(service, "c")
    holder.answers = answers
    answer = await service.chat(second, "c")
    assert (answer.status, answer.text, answer.reuse.tokens) == (200, expected_text(second), 0)
    refuses = answers == "too_many_leases"
    # (The other one has answered that it has nothing.)
    assert answer.reuse.reason == ("too_many_leases" if refuses else "overwritten")
    holder.answers = ""
    asked = holder.asked
    third = [*second, said(answer.text), user("Go on.")]
    answer = await service.chat(third, "c")
    assert answer.text == expected_text(third)
    # Who did not answer is left out for a while.
    assert (holder.asked > asked, answer.reuse.outcome == "hit") == (refuses, refuses)
    await until(lambda: not any(each.leased for each in service.decodes), "no lease is left")


# -- a decode engine is lost before its first byte

EARLY: list[dict[str, Any]] = [
    {"status": 500}, {"status": 503}, {"drop": "before_status"}, {"drop": "before_first_byte"}, {"drop": 0},
    {"error_after": 0}, {"error_after": 1}, {"fail_load": True},
]  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a15_before_the_first_byte_another_decode_engine_does_it(
    serve: Serve, stream: bool, early: bool
) -> None:
    service = await serve(1, 2, prefill_lease_s=LEASE_S, admit_early=early)
    for number, fault in enumerate(EARLY):
        if not stream and "error_after" in fault:
            continue
        holder, second = await first_turn(service, f"c{number}")
        other = next(each for each in service.decodes if each is not holder)
        pending = holder.fault(hop="decode", **fault)
        service.prefill.fault(hop="prefill", first_delay_s=0.3)
        asked = len(other.requests)
        answer = await service.chat(second, f"c{number}", stream=stream)
        assert pending not in holder.faults
        assert (answer.status, answer.is_cut, answer.text) == (200, False, expected_text(second)), fault
        assert len(other.requests) == asked + 1
        # What broke off while it waited says nothing about the transfer.
        at_once = "status" in fault or fault.get("drop") in ("before_status", "before_first_byte")
        waited = early and at_once and (stream or fault != {"drop": "before_first_byte"})
        assert ("remote_block_ids" in other.requests[-1].params) == waited
        await until(lambda: service.prefill.pinned == 0, f"the prefill engine lets go: {fault}")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_decode_engine_that_is_gone_is_replaced_or_there_is_a_503(serve: Serve, path: str) -> None:
    service = await serve(1, 2)
    for stream in (False, True):
        body = request_to(path, stream=stream)
        await service.decode.kill()
        answer = await service.post(path, body)
        assert (answer.status, answer.text) == (200, expected(body, path).text)
        await service.decode.start()
        await until(lambda: len(service.router.pipeline.pool.of("decode")) == 2, "it is up again")
    for engine in service.decodes:
        await engine.kill()
    for _ in range(3):
        answer = await service.post(path, request_to(path, stream=True))
        assert answer.status in (502, 503)
        assert "decode engine" in answer.error["message"]
    await until(lambda: service.prefill.pinned == 0, "the prefill engine lets go")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a14_a_decode_engines_error_is_the_clients(serve: Serve, path: str, stream: bool) -> None:
    service = await serve(prefill_lease_s=LEASE_S)
    body = request_to(path, stream=stream)
    for status in (400, 404, 422, 429):
        fault = service.decode.fault(hop="decode", status=status, times=None)
        asked = len(service.decode.requests)
        answer = await service.post(path, body)
        assert (answer.status, answer.error["message"]) == (status, "told to fail")
        assert len(service.decode.requests) == asked + 1  # trying it again would help nobody
        service.decode.faults.remove(fault)
    for status in (500, 503):
        fault = service.decode.fault(hop="decode", status=status, times=None)
        asked = len(service.decode.requests)
        answer = await service.post(path, body)
        assert (answer.status, answer.error["message"]) == (status, "told to fail")
        assert len(service.decode.requests) == asked + 2
        service.decode.faults.remove(fault)
    for drop in ("before_status", "before_first_byte"):
        fault = service.decode.fault(hop="decode", drop=drop, times=None)
        answer = await service.post(path, body)
        assert answer.status == 502
        assert "decode engine" in answer.error["message"]
        service.decode.faults.remove(fault)
    await until(lambda: service.prefill.pinned == 0, "the prefill engine lets go")


async def test_a_stream_that_fails_before_its_first_token_is_an_error_with_a_status(serve: Serve) -> None:
    service = await serve()
    for path in (CHAT, COMPLETIONS, MESSAGES):
        fault = service.decode.fault(hop="decode", error_after=0, times=None)
        answer = await service.post(path, request_to(path, stream=True))
        assert answer.status == 500
        assert answer.headers["content-type"] == "application/json"
        assert "Internal server error" in answer.error["message"]
        service.decode.faults.remove(fault)


# -- a decode engine is lost after its first byte


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a15_after_the_first_byte_the_stream_ends_with_an_error_event(serve: Serve, path: str) -> None:
    service = await serve(1, 2)
    body = request_to(path, stream=True)
    right = expected(body, path).text
    for engine in service.decodes:
        engine.fault(hop="decode", drop=9, times=None)
    answer = await service.post(path, body, conversation="c")
    assert answer.status == 200
    assert is_error_event(path, answer, "engine_lost")
    assert 0 < len(answer.text) < len(right)
    assert right.startswith(answer.text)
    assert sum(len(engine.requests) for engine in service.decodes) == 1
    assert (await service.conversation("c"))["boundary"] == "unfinished"
    for engine in service.decodes:
        engine.faults.clear()
    again = await service.post(path, body, conversation="c")
    assert again.text == right


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_decode_engine_that_is_killed_while_it_streams(serve: Serve, path: str) -> None:
    service = await serve()
    service.decode.fault(hop="decode", drop="", chunk_delay_s=0.05)
    body = request_to(path, stream=True, max_tokens=400, ignore_eos=True)
    asking = asyncio.create_task(service.post(path, body))
    await until(lambda: service.decode.running, "it runs")
    await until(lambda: service.router.metrics.streams._value.get() > 0, "it streams")
    await service.decode.kill()
    assert is_error_event(path, await asking, "engine_lost")


async def test_a15_the_official_client_raises(serve: Serve) -> None:
    service = await serve()
    service.decode.fault(hop="decode", drop=9, times=None)
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as client:
        for path, api in (
            (CHAT, client.chat.completions),
            (COMPLETIONS, client.completions),
            (RESPONSES, client.responses),
        ):
            call: Any = api.create
            stream = await call(model="stub", **request_to(path, stream=True))
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in stream:
                    pass
    assert len(service.decode.requests) == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_an_engines_own_error_event_passes_as_it_is(serve: Serve, path: str) -> None:
    service = await serve(1, 2)
    for engine in service.decodes:
        engine.fault(hop="decode", error_after=9)
    answer = await service.post(path, request_to(path, stream=True), conversation="c")
    assert not answer.is_cut
    assert answer.raw.count(b"Internal server error") == 1
    assert b"engine_lost" not in answer.raw
    assert sum(len(engine.requests) for engine in service.decodes) == 1
    assert (await service.conversation("c"))["boundary"] == "unfinished"


# -- timeouts


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_decode_engine_that_sends_nothing_in_time(serve: Serve, path: str) -> None:
    service = await serve(first_byte_timeout_s=0.3, answer_timeout_s=0.3, prefill_lease_s=LEASE_S)
    for stream in (False, True):
        for fault in ({"hang": True}, {"first_delay_s": 60}):
            service.decode.fault(hop="decode", **fault)
            answer = await service.post(path, request_to(path, stream=stream))
            assert answer.status == 504
            assert "within 0.3 s" in answer.error["message"]
            await service.idle()
    await until(lambda: service.prefill.pinned == 0, "the prefill engine lets go")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_stream_that_stops_coming(serve: Serve, path: str) -> None:
    service = await serve(idle_timeout_s=0.3, prefill_lease_s=LEASE_S)
    service.decode.fault(hop="decode", chunk_delay_s=60)
    if path == COMPLETIONS:  # its first event has a token in it; of the others only those after the greeting
        answer = await service.post(path, request_to(path, stream=True))
        assert is_error_event(path, answer, "engine_lost")
        assert b"idle_timeout_s" in answer.raw
    else:
        script = [
            (0.0, json.dumps({"choices": [{"delta": {"content": "a"}}]}).encode().join((b"data: ", b"\n\n")))
        ]
        service.decode.faults.clear()
        service.decode.fault(hop="decode", script=[*script, (60.0, b"")])
        answer = await service.post(path, request_to(path, stream=True), {"X-Carryback-Reuse": "off"})
        assert is_error_event(path, answer, "engine_lost")
        assert b"idle_timeout_s" in answer.raw
    await service.idle()


@asynccontextmanager
async def unreachable(config: EngineConfig) -> AsyncIterator[EngineConfig]:
    """An engine whose host takes no connections, and refuses none."""
    with socket.socket() as listener, socket.socket() as one, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for each in (one, other):  # they fill its queue
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield config.model_copy(update={"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})


async def test_engines_that_cannot_be_reached_are_done_without(serve: Serve) -> None:
    async with StubEngine("prefill") as heard, unreachable(heard.config()) as prefill:
        decode = prefill.model_copy(update={"role": "decode"})
        service = await serve(0, 1, engines=[prefill, decode], connect_timeout_s=0.2)
        answer = await service.chat(FIRST)
        assert answer.text == expected_text(FIRST)
        assert answer.reuse.reason == "prefill_unavailable"


# -- a client leaves


async def leave(service: Service, path: str, body: dict[str, Any], when: Any, *, reset: bool) -> None:
    """Ask, and hang up once something holds."""
    parts = urlsplit(service.url)
    data = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Conversation-ID: c\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await until(when, "it is under way")
    if reset:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a16_a_client_that_leaves_ends_both_hops(serve: Serve, path: str, reset: bool) -> None:
    service = await serve()
    prefill, decode = service.prefill, service.decode
    for stream in (False, True):
        body = request_to(path, stream=stream)
        # While the prompt is computed.
        prefill.fault(hop="prefill", first_delay_s=60)
        await leave(service, path, body, lambda: prefill.running and decode.running, reset=reset)
        await service.unpinned()
        # While nothing of the answer has come.
        decode.fault(hop="decode", first_delay_s=60)
        await leave(service, path, body, lambda: decode.running, reset=reset)
        await service.unpinned()
    # While it streams.
    decode.fault(hop="decode", chunk_delay_s=0.1)
    body = request_to(path, stream=True, max_tokens=500, ignore_eos=True)
    streams = service.router.metrics.streams._value
    await leave(service, path, body, lambda: streams.get(), reset=reset)
    await service.unpinned()
    await until(lambda: not service.router.pipeline.in_flight, "the router knows")
    body = request_to(path)
    assert (await service.post(path, body, conversation="c")).text == expected(body, path).text


async def test_a16_a_client_that_leaves_during_a_later_turn_leaves_what_the_one_before_left(
    serve: Serve,
) -> None:
    service = await serve()
    for fault, hop in (
        ({"load_delay_s": 60}, "prefill"),
        ({"first_delay_s": 60}, "prefill"),
        ({"load_delay_s": 0.3}, "decode"),
        ({"first_delay_s": 60}, "decode"),
    ):
        await service.chat(FIRST, "c")
        await until(lambda: service.decode.pinned, "it is pinned")
        pinned = service.decode.pinned
        engine = service.prefill if hop == "prefill" else service.decode
        engine.fault(hop=hop, **fault)
        body = {"messages": SECOND, "stream": True}
        await leave(service, CHAT, body, lambda engine=engine: engine.running and engine.in_use, reset=False)
        await service.idle()
        await until(lambda: service.prefill.in_use == 0 == service.decode.leased, "nothing is left of it")
        assert service.decode.ranks[0].expired == 0
        await until(lambda pinned=pinned: service.decode.in_use == pinned, "what was pinned is pinned")
        following = await service.chat(SECOND, "c")
        assert (following.text, following.reuse.outcome) == (expected_text(SECOND), "hit")
        await service.session.delete(service.url + "/v1/conversations/c")
        await service.unpinned()


async def test_a16_thirty_clients_leave(serve: Serve) -> None:
    service = await serve()
    service.decode.fault(hop="decode", chunk_delay_s=0.05, times=None)

    async def one(number: int) -> None:
        body = request_to(CHAT, f"{number} {TEXT}", stream=bool(number % 2), max_tokens=2000, ignore_eos=True)
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            asking = asyncio.create_task(session.post(service.url + CHAT, json=body))
            if body["stream"]:
                async for _ in (await asking).content:
                    break
            else:
                await until(
                    lambda: any(f"{number} Tell".encode() in each.raw for each in service.decode.requests)
                )
            asking.cancel()

    await asyncio.gather(*map(one, range(30)))
    await service.unpinned()
    assert re.search(r'requests_total\{[^}]*status="499"\} 30', await service.metrics())


# -- a hung engine


@pytest.mark.parametrize(
    ("hop", "fault"),
    [
        ("prefill", {"hang": True}), ("prefill", {"status": 500}), ("prefill", {"drop": "before_status"}),
        ("decode", {"hang": True}), ("decode", {"status": 500}), ("decode", {"drop": "before_status"}),
        ("decode", {"drop": 9}),
    ],
)  # fmt: skip
async def test_an_engine_that_only_fails_is_put_out_and_comes_back(
    serve: Serve, hop: str, fault: dict[str, Any]
) -> None:
    timeout_s = 1.0 if "hang" in fault else 30.0
    service = await serve(
        2, 2, prefill_lease_s=LEASE_S, first_byte_timeout_s=timeout_s, prefill_timeout_s=timeout_s,
        answer_timeout_s=timeout_s, trial_timeout_s=timeout_s, ejection_failures=2, ejection_s=1.0,
    )  # fmt: skip
    bad = service.prefills[0] if hop == "prefill" else service.decodes[0]
    bad.fault(times=None, **fault)

    async def state() -> str:
        async with service.session.get(service.router.admin_url + "/admin/engines") as response:
            engines = (await response.json())["data"]
        return next(str(each["state"]) for each in engines if each["url"] == bad.url)

    for number in range(100):
        answer = await service.chat([user(f"{number} {TEXT}")], stream=fault == {"drop": 9})
        assert answer.status == 200 or (hop, answer.status) == ("decode", 504)
        if await state() == "ejected":
            break
    assert await state() == "ejected"
    asked = len(bad.requests)
    for number in range(10):
        answer = await service.chat([user(f"again {number} {TEXT}")])
        assert answer.status == 200
    clients = [each for each in bad.requests[asked:] if len(each.raw) > 300]
    assert clients == []
    bad.faults.clear()
    async with asyncio.timeout(30):
        while await state() != "up":  # noqa: ASYNC110  (it has no event)
            await asyncio.sleep(0.05)


# -- engines that answer anything


class Odd:
    """An engine that passes probes and answers what it is told."""

    def __init__(self) -> None:
        self.answer = b""
        self.closes = False

    async def handle(self, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target.startswith("GET /health"):
            writer.write(whole(b""))
        elif target.startswith("GET"):
            writer.write(MODELS)
        else:
            writer.write(self.answer)
            await writer.drain()
            if self.closes:
                writer.close()


@asynccontextmanager
async def odd_engine(role: Role) -> AsyncIterator[tuple[Odd, EngineConfig, StubEngine]]:
    """It, what a router is told of it, and the stub engine whose events are taken to be its own."""
    odd = Odd()
    async with StubEngine(role) as heard, RawServer(odd.handle) as raw:
        yield odd, heard.config().model_copy(update={"url": raw.url}), heard


GARBAGE = [
    (b"", True),
    (b"SSH-2.0-OpenSSH_9.6\r\n", True),
    (b"\x00" * 1000, False),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}", True),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", False),
    (whole(b"<html>", kind="text/html"), False),
    (whole(b"{"), False),
    (whole(b"[]"), False),
    (whole(b""), False),
    (whole(b'{"kv_transfer_params": []}'), False),
    (whole(b'{"kv_transfer_params": {"carryback_reuse": {}}}'), False),
    (whole(b'{"kv_transfer_params": {"carryback_reuse": {"outcome": 1, "tokens": "x", "reason": null}}}'), False),
    (whole(b'{"kv_transfer_params": {"carryback_reuse": {"outcome": "hit", "tokens": 1, "reason": "a\\r\\nX-Y: z"}}}'), False),
    (whole(b'{"kv_transfer_params": {"carryback_reuse": {"outcome": "hit", "tokens": 1, "reason": "verified", "new": 1}}}'), False),
    (whole(b"\xff\xfe"), False),
    (whole(b"", status="302 Found", more="location: http://127.0.0.1:1/\r\n"), False),
    (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    (whole(b"{}", kind="\xff"), False),
]  # fmt: skip


async def test_a_prefill_engine_that_answers_garbage_is_done_without(serve: Serve) -> None:
    async with odd_engine("prefill") as (odd, config, _):
        service = await serve(0, 1, engines=[config], ejection_failures=1000)
        for odd.answer, odd.closes in GARBAGE:
            answer = await service.chat(FIRST)
            assert (answer.status, answer.text) == (200, expected_text(FIRST)), odd.answer
            assert "x-y" not in answer.headers


async def test_a_decode_engine_that_answers_garbage_harms_nobody(serve: Serve) -> None:
    async with odd_engine("decode") as (odd, config, _):
        service = await serve(1, 0, engines=[config], ejection_failures=1000, prefill_lease_s=0.1)
        for odd.answer, odd.closes in GARBAGE:
            for stream in (False, True):
                answer = await service.chat(FIRST, stream=stream)
                if answer.status == 200:  # whatever it is, it is what the engine said
                    assert answer.raw == odd.answer.partition(b"\r\n\r\n")[2]
                    assert b"application/json" in odd.answer
                else:
                    assert (answer.status, answer.error["code"]) == (502, "engine_failed"), odd.answer
        odd.closes = False
        events = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        for odd.answer in (
            events + b"content-length: 0\r\n\r\n",
            events + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ):
            answer = await service.chat(FIRST, stream=True)
            assert (answer.status, answer.error["code"]) == (502, "engine_failed")


FOREIGN = [
    (413, "text/html", b"<html><h1>413 Request Entity Too Large</h1></html>"),
    (404, "text/plain", b"404 page not found"),
    (500, "text/plain; charset=utf-8", b"Internal Server Error"),
    (503, "text/html", b"<html>"),
]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("status", "kind", "page"), FOREIGN)
async def test_a_page_of_a_proxy_is_an_error_object(
    serve: Serve, role: Role, status: int, kind: str, page: bytes, path: str
) -> None:
    async with odd_engine(role) as (odd, config, _):
        odd.answer, odd.closes = whole(page, status=f"{status} Odd", kind=kind), False
        counts = (0, 1) if role == "prefill" else (1, 0)
        service = await serve(*counts, engines=[config], ejection_failures=1000, prefill_lease_s=0.1)
        answer = await service.post(path, {"model": "stub", "messages": FIRST, "max_tokens": 8})
        if role == "prefill" and status >= 500:
            assert answer.status == 200  # it is done without
            return
        assert answer.status == status
        assert answer.headers["content-type"].startswith("application/json")
        assert kind.partition(";")[0] in answer.error["message"]
        assert page not in answer.raw


async def test_a_compressed_answer_is_passed_on_plain_and_understood(serve: Serve) -> None:
    """By a mesh that was not asked to: body and headers agree, and turn end, tool calls and errors are seen."""
    ask: dict[str, object] = {
        "messages": [{"role": "user", "content": f"{CALL_MARKER} Look."}],
        "tools": TOOLS,
    }
    async with odd_engine("decode") as (odd, config, heard), aiohttp.ClientSession() as session:
        odd.closes = False
        service = await serve(1, 0, engines=[config], prefill_lease_s=0.1)
        for number, stream in enumerate((False, True)):
            async with session.post(heard.url + CHAT, json={**ask, "stream": stream}) as response:
                content, kind = await response.read(), response.content_type
            packed = gzip.compress(content)
            odd.answer = whole(packed, kind=kind, more="content-encoding: gzip\r\n")
            headers = {"X-Conversation-ID": f"c{number}"}
            answer = await service.post(CHAT, {**ask, "stream": stream}, headers=headers)
            assert (answer.status, answer.raw) == (200, content)
            assert "content-encoding" not in answer.headers
            async with session.get(f"{service.router.url}/v1/conversations/c{number}") as response:
                assert (await response.json())["boundary"] == "mid_turn"
        refusal = b'{"error": {"message": "too long", "type": "x", "param": null, "code": 400}}'
        packed = gzip.compress(refusal)
        odd.answer = whole(packed, status="400 Bad Request", more="content-encoding: gzip\r\n")
        answer = await service.post(CHAT, ask)
        assert (answer.status, answer.raw) == (400, refusal)
        odd.answer = whole(b"x", more="content-encoding: zstd\r\n")
        answer = await service.post(CHAT, ask)
        assert (answer.status, answer.error["code"]) == (502, "engine_failed")
        assert "zstd" in answer.error["message"]


async def test_a_decode_engine_may_frame_its_answer_as_it_likes(serve: Serve) -> None:
    async with odd_engine("decode") as (odd, config, heard), aiohttp.ClientSession() as session:
        service = await serve(1, 0, engines=[config], prefill_lease_s=0.1)
        for stream in (False, True):
            async with session.post(heard.url + CHAT, json={"messages": FIRST, "stream": stream}) as response:
                content = await response.read()
            kind = "text/event-stream" if stream else "application/json"
            plain = whole(content, kind=kind)
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n".encode()
            chunk = b"%x\r\n%b\r\n" % (len(content), content)
            for odd.answer, odd.closes in (
                (plain, False),
                (b"HTTP/1.1 100 Continue\r\n\r\n" + plain, False),
                (b"HTTP/1.1 103 Early Hints\r\nlink: </>\r\n\r\n" + plain, False),
                (whole(content, kind=kind, more="connection: close\r\n"), True),
                (whole(content, kind=kind, more=f"x-huge: {'h' * 60_000}\r\n"), False),
                (head + b"\r\n" + content, True),
                (b"HTTP/1.0" + head[8:] + b"\r\n" + content, True),
                (head + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\nx-trailer: 1\r\n\r\n", False),
                (head + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n", True),
            ):
                answer = await service.chat(FIRST, stream=stream)
                assert (answer.status, answer.is_cut, answer.raw) == (200, False, content), odd.answer[:80]
                assert "x-huge" not in answer.headers


# -- the router as a process


@asynccontextmanager
async def router_process(
    *configs: EngineConfig, **settings: object
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """`carryback router`: the process, its URL and its operators' URL."""
    command = [sys.executable, "-m", "carryback_server", "router", "--port", "0", "--admin-port", "0"]
    for config in configs:
        command += [f"--{config.role}", f"{config.url},{config.events}"]
    given = {f"CARRYBACK_{name.upper()}": str(value) for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **given},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
            while "metrics" not in line:
                line += (await process.stdout.readline()).decode()
                assert line.strip(), "it ended"
        urls = re.findall(r"http://[\d.:]+", line)
        yield process, urls[0], urls[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_drains() -> None:
    async with (
        StubEngine("prefill") as prefill,
        StubEngine("decode") as decode,
        router_process(prefill.config(), decode.config(), shutdown_wait_s=0.5) as (process, url, admin),
        aiohttp.ClientSession() as session,
    ):
        async with session.post(
            url + CHAT, json={"messages": FIRST}, headers={"X-Conversation-ID": "c"}
        ) as response:
            assert response.status == 200
        await until(lambda: decode.pinned, "it is held")
        decode.fault(hop="decode", chunk_delay_s=0.1, times=None)

        async def ask(stream: bool) -> bytes:
            body = {"messages": FIRST, "stream": stream, "max_tokens": 30, "ignore_eos": True}
            async with session.post(url + CHAT, json=body) as response:
                assert response.status == 200
                return await response.read()

        asking = [asyncio.create_task(ask(stream)) for stream in (False, True)]
        await until(lambda: decode.running == 2, "both are under way")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while True:
                async with session.get(admin + "/ready") as response:
                    ready = response.status, (await response.json())["status"]
                if ready == (503, "draining"):
                    break
        right = expected({"messages": FIRST, "max_tokens": 30, "ignore_eos": True}).text
        plain, streamed = await asyncio.gather(*asking)
        assert json.loads(plain)["choices"][0]["message"]["content"] == right
        assert streamed.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0
        await until(lambda: not (prefill.in_use or decode.in_use), "nothing is held")
        assert prefill.violations == decode.violations == []


def memory(process: asyncio.subprocess.Process) -> int:
    """Of a process, resident, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


async def test_a_slow_client_costs_little_memory_and_no_other_stream() -> None:
    chunk = (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": {"content": "s" * 65_000}}]}).encode()
        + b"\n\n"
    )
    count = 1000  # 65 MB
    sent = 0

    async def handle(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if not target.startswith("POST"):
            writer.write(MODELS)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if b"quick" in body:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) * 3)
        else:
            for _ in range(count):
                writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await writer.drain()
                sent += 1
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with StubEngine("decode") as heard, RawServer(handle) as raw:
        config = heard.config().model_copy(update={"url": raw.url})
        async with router_process(config) as (process, url, _), aiohttp.ClientSession() as session:

            async def quick() -> bytes:
                async with session.post(
                    url + CHAT, json={"messages": [user("quick")], "stream": True}
                ) as response:
                    return await response.read()

            await quick()
            before = memory(process)
            parts = urlsplit(url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**16)
            body = json.dumps({"messages": [user("slow")], "stream": True}).encode()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            seen = -1
            while seen != sent or not sent:  # until nothing moves any more
                seen = sent
                for answer in await asyncio.gather(*(quick() for _ in range(5))):
                    assert answer == chunk * 3 + b"data: [DONE]\n\n"
                await asyncio.sleep(0.3)
            assert sent < count // 2
            assert memory(process) - before < 20e6
            await reader.readuntil(b"\r\n\r\n")
            received = 0
            tail = b""
            while data := await reader.read(2**20):
                received += len(data)
                tail = (tail + data)[-40:]
            assert received == count * len(chunk) + 14
            assert tail.endswith(b"data: [DONE]\n\n")
            assert memory(process) - before < 20e6
            writer.close()


async def test_a_client_that_never_reads_is_given_up(serve: Serve) -> None:
    service = await serve(idle_timeout_s=0.5, prefill_lease_s=0.1)
    chunk = (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": {"content": "s" * 65_000}}]}).encode()
        + b"\n\n"
    )
    service.decode.fault(hop="decode", script=[(0.0, chunk)] * 400)
    parts = urlsplit(service.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**16)
    body = json.dumps(request_to(CHAT, stream=True)).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    await until(lambda: service.router.pipeline.in_flight, "it is asked")
    await until(lambda: not service.router.pipeline.in_flight, "the router is done with it")
    writer.close()


async def test_a_prefill_engine_without_the_plugin_reads_nothing(serve: Serve) -> None:
    """It would read what it is told to, whatever its prompt is."""
    async with StubEngine("prefill", settings=Settings(plugin=False)) as stock:
        service = await serve(prefill=0, engines=[stock.config()])
        held = await service.chat(FIRST, "c")
        assert (held.text, held.reuse.reason) == (expected_text(FIRST), "no_plugin")
        await until(lambda: service.decode.pinned, "it is pinned")
        edited = [user("#" + TEXT[1:]), *SECOND[1:]]
        answer = await service.chat(edited, "c")
        assert (answer.text, answer.reuse.reason) == (expected_text(edited), "no_plugin")
        assert not any(rank.reads for rank in stock.ranks)
        assert not stock.violations
        await service.finish()
