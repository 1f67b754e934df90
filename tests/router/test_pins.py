"""What decode engines pin for later turns: for how long, and who lets go of it. What is not pinned can be read all the
same, for as long as it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from cluster import TOOLS, Chat, Cluster, eventually
from service import TEXT, until, user
from stub_engine import CALL_MARKER, Settings, expected, expected_text
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

# An engine that pins what it is not told to let go of until long after the test.
PATIENT = Settings(grace_s=10_000)


async def is_pinned(cluster: Cluster, chat: Chat) -> bool:
    """Whether a chat's newest request is pinned, as the router says."""
    return bool((await cluster.held(chat))["pinned_s"])


# -- from one turn to the next


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_reads_back_the_one_before(cluster: Cluster, stream: bool) -> None:
    _, decode = await cluster.pair()
    chat = cluster.chat(await cluster.router(), stream=stream)
    assert (await chat.say(tools=TOOLS)).reuse.reason == "new"
    tokens = 0
    for turn in (chat.say, chat.call, chat.result, chat.say):
        reuse = (await turn(tools=TOOLS)).reuse
        assert (reuse.outcome, reuse.reason) == ("hit", "verified")
        assert reuse.tokens > tokens
        tokens = reuse.tokens
    # A newer pin has all that the older one had.
    assert len(decode.ranks[0].held) == 1


async def test_a_listing_and_the_metrics_say_what_is_held(cluster: Cluster) -> None:
    _, decode = await cluster.pair(capacity=1000)
    router = await cluster.router(pin_budget=0.4)
    chat, other = cluster.chat(router), cluster.chat(router, "chat-2")
    await chat.say()
    await other.call()
    await chat.say()
    for each in (chat, other):
        await cluster.held(each)
    listed = (await cluster.get(router, "/v1/conversations")).json["data"]
    assert [each["id"] for each in listed] == ["chat-1", "chat-2"]
    one, two = listed
    assert (one["boundary"], one["requests"], one["in_flight"]) == ("turn_end", 2, 0)
    assert (two["boundary"], two["requests"]) == ("mid_turn", 1)
    assert one["last_reuse"].startswith("hit; tokens=")
    name = f"127.0.0.1:{decode.url.rpartition(':')[2]}"
    # It comes back in seconds; a person thinks for minutes.
    assert 0 < two["location"]["pinned_s"] < one["location"]["pinned_s"]
    for each in listed:  # clients are not told of engines
        assert "engine" not in each["location"]
        each["location"]["engine"] = name
    shown = (await cluster.admin(router, "GET", "/admin/conversations")).json["data"]
    for each in (*listed, *shown):
        each["location"]["pinned_s"] = round(each["location"]["pinned_s"], -1)
    assert shown == listed
    assert await cluster.metric(router, "held_tokens") == sum(each["location"]["tokens"] for each in listed)
    assert await cluster.metric(router, "held_blocks", engine=name) == decode.pinned
    assert await cluster.metric(router, "held_pins") == 2
    assert await cluster.metric(router, "tenant_held_blocks", tenant="default") == decode.pinned
    assert await cluster.metric(router, "pin_budget_blocks", engine=name) == 400
    assert await cluster.metric(router, "reuse_total", outcome="hit", reason="verified") == 1
    for each in (chat, other):
        assert (await cluster.delete(router, f"/v1/conversations/{each.id}")).status == 200
    await until(lambda: decode.in_use == 0)
    for gauge in ("held_pins", "held_tokens", "held_blocks", "tenant_held_blocks", "in_flight_requests"):
        assert await cluster.metric(router, gauge) == 0, gauge
    assert await cluster.metric(router, "locations_noted_total") >= 3
    assert await cluster.metric(router, "releases_total", role="decode") == 2


async def test_a_router_that_ends_leaves_nothing_pinned(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    for number in range(5):
        await cluster.chat(router, f"chat-{number}").say(stream=bool(number % 2))
    assert decode.pinned
    await cluster.stop(router)
    assert decode.in_use == 0


# -- it ends


async def test_what_an_engine_unpinned_by_itself_counts_no_more_and_is_read_all_the_same(
    cluster: Cluster,
) -> None:
    _, decode = await cluster.pair()
    chat = cluster.chat(await cluster.router())
    await chat.say()
    assert await is_pinned(cluster, chat)
    decode.ranks[0].unpin("expired")
    assert decode.in_use == 0

    async def is_counted() -> bool:
        return await cluster.metric(chat.router, "held_blocks") > 0

    await eventually(lambda: _not(is_counted))
    held = await cluster.held(chat)
    reuse = (await chat.say()).reuse
    assert (reuse.outcome, reuse.tokens) == ("hit", held["tokens"])


async def _not(condition: Callable[[], Awaitable[object]]) -> bool:
    return not await condition()


async def test_an_engine_started_anew_holds_nothing(cluster: Cluster) -> None:
    # No probe sees that it was away: its events say that it is another run.
    _, decode = await cluster.pair()
    chat = cluster.chat(await cluster.router(probe_interval_s=1000))
    await chat.say()
    await decode.kill()
    await decode.start()

    async def is_counted() -> bool:
        return await cluster.metric(chat.router, "held_blocks") > 0

    await eventually(lambda: _not(is_counted))
    assert (await chat.say()).reuse.reason == "engine_lost"
    assert (await chat.say()).reuse.outcome == "hit"


async def test_an_engine_that_is_gone_holds_nothing(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    other = await cluster.engine("decode")
    chat = cluster.chat(await cluster.router())
    await chat.say()
    holder, rest = (decode, other) if decode.pinned else (other, decode)
    await holder.kill()

    async def is_counted() -> bool:
        return await cluster.metric(chat.router, "held_blocks") > 0

    await eventually(lambda: _not(is_counted))
    assert (await chat.say()).reuse.reason == "engine_lost"
    assert rest.pinned
    assert (await chat.say()).reuse.outcome == "hit"


# -- retention by turn boundary


async def test_a_tool_that_takes_too_long_costs_its_conversation_the_pin(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router(hold_mid_turn_s=0.3)
    ended, calling = cluster.chat(router, "ended"), cluster.chat(router, "calling", stream=True)
    await ended.say()
    blocks = decode.pinned
    await calling.call()
    await until(lambda: decode.pinned == blocks)
    assert await is_pinned(cluster, ended)
    assert not await is_pinned(cluster, calling)
    given_up = await cluster.metric(router, "pins_given_up_total", rank="mid_turn", reason="retention")
    assert given_up == 1
    assert (await calling.result()).reuse.outcome == "hit"  # nothing else has come there meanwhile
    assert (await ended.say()).reuse.outcome == "hit"


async def test_after_a_turn_its_kv_is_held_for_hold_s(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router(hold_s=0.3)
    chat = cluster.chat(router)
    await chat.say()
    await until(lambda: decode.pinned == 0)
    assert await cluster.metric(router, "pins_given_up_total", rank="turn_end", reason="retention") == 1


async def test_a_first_request_without_an_id_is_held_briefly(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router(hold_first_s=0.3)
    named, guessed = cluster.chat(router, "named"), cluster.chat(router, None)
    await named.say()
    blocks = decode.pinned
    await guessed.say(f"Something else. {TEXT}")
    await until(lambda: decode.pinned == blocks)
    assert await cluster.metric(router, "pins_given_up_total", rank="first", reason="retention") == 1
    # It was no one-shot after all. From now on it is a conversation like any other.
    assert (await guessed.say()).reuse.outcome == "hit"
    assert decode.pinned > blocks


async def test_a_conversation_that_ends_leaves_nothing(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    for number, more in enumerate(({}, {"X-Carryback-Reuse": "off"})):
        chat = cluster.chat(router, f"chat-{number}")
        await chat.say()
        assert decode.pinned
        await chat.say(headers={"X-Conversation-End": "true", **more})
        await until(lambda: decode.in_use == 0)
        assert await cluster.conversation(router, chat.id) is None
    assert await cluster.metric(router, "held_pins") == 0


async def test_with_hold_s_0_nothing_is_pinned_and_all_is_read(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    chat = cluster.chat(await cluster.router(hold_s=0))
    await chat.say()
    assert decode.in_use == 0
    assert not await is_pinned(cluster, chat)
    assert (await chat.say()).reuse.outcome == "hit"
    await until(lambda: decode.in_use == 0, "what was read is let go of")


# -- the pin budget


async def test_the_budget_takes_first_requests_then_ended_turns_then_running_tools(cluster: Cluster) -> None:
    _, decode = await cluster.pair(capacity=1000, settings=PATIENT)
    router = await cluster.router(pin_budget=0.019)
    tool, ended, first = (
        cluster.chat(router, "tool"),
        cluster.chat(router, "ended"),
        cluster.chat(router, None),
    )
    await tool.call()
    await ended.say()
    await first.say(f"Who are you? {TEXT}")
    # Three of them take up most of 19 blocks, and a fourth is too much.
    assert 14 < decode.pinned <= 19
    more = [cluster.chat(router, f"more-{number}") for number in range(4)]
    gone = []
    for chat in more:
        # (Of equal prompts a newer one's pin has all of an older one's.)
        await chat.say(f"{chat.id}: {CALL_MARKER} {TEXT}", tools=TOOLS)
        await until(lambda: decode.pinned <= 19)
        views = (await cluster.get(router, "/v1/conversations")).json["data"]
        held = {each["id"] for each in views if each["location"] and each["location"]["pinned_s"]}
        known = {each["id"] for each in views}
        gone.append({each if not each.startswith("c-") else "first" for each in known - held})
    assert [sorted(each) for each in gone] == [
        ["first"],
        ["ended", "first"],
        ["ended", "first", "tool"],
        ["ended", "first", "more-0", "tool"],
    ]
    ranks = {
        rank: await cluster.metric(router, "pins_given_up_total", rank=rank) for rank in ("first", "turn_end")
    }
    assert ranks == {"first": 1, "turn_end": 1}
    assert (await more[3].result()).reuse.outcome == "hit"
    assert (await more[0].result()).reuse.outcome == "hit"  # nothing was overwritten


async def test_one_shots_do_not_take_the_blocks_of_live_requests(cluster: Cluster) -> None:
    # A3: fifty prompts of some 500 tokens, which are 35 blocks each, on an engine of 200.
    _, decode = await cluster.pair(capacity=200, settings=PATIENT)
    router = await cluster.router(pin_budget=0.4)
    chat = cluster.chat(router)
    await chat.say()
    for number in range(0, 50, 2):
        asks = [
            cluster.chat(router, None).say(f"Number {number + each}. {TEXT * 6}", stream=bool(each))
            for each in range(2)
        ]
        await asyncio.gather(*asks)
        assert decode.pinned <= 80 + 2 * 40  # the budget, and what has just come
        await until(lambda: decode.pinned <= 80)
    assert (await chat.say()).reuse.outcome == "hit"
    assert decode.state()["starved"] == 0
    assert await cluster.metric(router, "pins_given_up_total", rank="first", reason="budget") > 40


# -- a lease that is over


async def test_a_request_that_outlives_the_lease_is_computed_again(cluster: Cluster) -> None:
    # A3, A4: the decode hop comes so late that the prefill engine has given the blocks to others.
    prefill, decode = await cluster.pair(capacity=64, settings=Settings(grace_s=0.0))
    router = await cluster.router(prefill_lease_s=1.2, pin_budget=0)
    decode.fault(status_delay_s=1.5, hop="decode")
    late = asyncio.create_task(cluster.chat(router, "late").say())
    await until(lambda: prefill.pinned)
    for number in range(8):
        await cluster.chat(router, f"chat-{number}").say(f"Number {number}. {TEXT * 2}")
    await late  # the answer is compared with the right one
    assert await cluster.metric(router, "retries_total", hop="decode") == 1
    await until(lambda: prefill.in_use == 0)


async def test_a_client_that_leaves_while_kv_is_read_costs_no_blocks(cluster: Cluster) -> None:
    # A2: and the prefill engine dies at the same moment.
    prefill, decode = await cluster.pair(capacity=40)
    router = await cluster.router()
    for number in range(4):
        await until(lambda: len(router.pipeline.pool.of("prefill")) == 1)
        decode.fault(load_delay_s=0.3, hop="decode")
        body = {"messages": [user(f"Number {number}. {TEXT * 3}")], "stream": True}
        asking = asyncio.create_task(cluster.post(router, CHAT, body))
        await until(lambda: decode.running)
        asking.cancel()
        await prefill.kill()
        await until(lambda: decode.running == 0 and decode.in_use == 0)
        await prefill.start()
    await until(lambda: len(router.pipeline.pool.of("prefill")) == 1)
    await cluster.chat(router).say(TEXT * 3)
    await until(lambda: prefill.in_use == 0)


# -- events and answers, in any order


@pytest.mark.parametrize("how", [0.3, "never", "lost"])
async def test_an_event_that_is_late_or_does_not_come_costs_no_reuse(
    cluster: Cluster, how: str | float
) -> None:
    _, decode = await cluster.pair()
    chat = cluster.chat(await cluster.router())
    for stream in (False, True):
        decode.fault(held=how, hop="decode")
        await chat.say(stream=stream)
        assert (await chat.say()).reuse.outcome == "hit"


async def test_an_event_that_comes_after_the_next_turn_s_changes_nothing(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    chat = cluster.chat(await cluster.router())
    decode.fault(held=1.0, hop="decode")
    await chat.say()
    first = decode.ranks[0].held
    assert (await chat.say()).reuse.outcome == "hit"
    held = (await cluster.held(chat))["tokens"]
    await eventually(lambda: _reaches(cluster.metric(chat.router, "locations_noted_total"), 2))
    assert (await cluster.held(chat))["tokens"] == held
    assert first[0] not in decode.ranks[0].held
    assert await cluster.metric(chat.router, "held_blocks") == decode.pinned
    reuse = (await chat.say()).reuse
    assert (reuse.outcome, reuse.tokens) == ("hit", held)


async def _reaches(value: Awaitable[float], least: float) -> bool:
    return await value >= least


async def test_an_answer_that_broke_off_leaves_nothing_pinned_even_if_its_event_comes_later(
    cluster: Cluster,
) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    # After all of its words, and before it says that it has ended.
    decode.fault(held=0.2, hop="decode", drop=17)
    body = {"messages": [user(TEXT)], "stream": True}
    answer = await cluster.post(router, CHAT, body, headers={"X-Conversation-ID": "chat-1"})
    assert answer.events[-1]["error"]["code"] == "engine_lost"
    assert len(decode.ranks[0].held) == 1
    await until(lambda: decode.in_use == 0)
    chat = cluster.chat(router)
    assert not await is_pinned(cluster, chat)
    # Its prompt is asked again: all of it is there.
    assert (await chat.say()).reuse.outcome in ("hit", "partial")


async def test_a_router_that_stops_waits_for_what_broke_off_to_be_let_go_of(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    decode.fault(held=0.5, hop="decode", drop=17)
    answer = await cluster.post(router, CHAT, {"messages": [user(TEXT)], "stream": True})
    assert answer.events[-1]["error"]["code"] == "engine_lost"
    assert decode.in_use
    await cluster.stop(router)
    assert decode.in_use == 0


async def test_a_client_that_hangs_up_at_the_end_keeps_its_pin(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    decode.fault(held=0.2, hop="decode")
    body = {"messages": [user(TEXT)], "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(router.url + CHAT, json=body, headers={"X-Conversation-ID": "chat-1"})
        seen = b""
        while b"[DONE]" not in seen:
            seen += await response.content.readany()
        response.close()
    chat = cluster.chat(router)
    assert await is_pinned(cluster, chat)
    chat.messages = [user(TEXT), {"role": "assistant", "content": expected_text([user(TEXT)])}]
    assert (await chat.say()).reuse.outcome == "hit"


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_pinned(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT, chunk_interval_s=0.05)
    router = await cluster.router()
    for stream in (False, True):
        body = {"messages": [user(TEXT)], "stream": stream}
        asking = asyncio.create_task(
            cluster.post(router, CHAT, body, headers={"X-Conversation-ID": "chat-1"})
        )
        await until(lambda: decode.running and decode.in_use)
        asking.cancel()
        await until(lambda: decode.running == 0 and decode.in_use == 0)
    await eventually(lambda: _reaches(cluster.metric(router, "requests_total", status="499"), 2))
    assert await cluster.metric(router, "in_flight_requests") == 0


@pytest.mark.parametrize("when", ["while it runs", "before its event"])
async def test_a_conversation_deleted_meanwhile_stays_deleted(cluster: Cluster, when: str) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    chat = cluster.chat(router)
    is_early = when == "while it runs"
    decode.fault(hop="decode", **({"first_delay_s": 0.3} if is_early else {"held": 0.3}))
    asking = asyncio.create_task(chat.say())
    if is_early:
        await until(lambda: decode.running)
    else:
        await asking
    assert (await cluster.delete(router, "/v1/conversations/chat-1")).status == 200
    await asking
    await until(lambda: decode.in_use == 0)
    assert await cluster.conversation(router) is None
    assert (await chat.say()).reuse.outcome == "hit"  # its content is there, whatever its name was


async def test_a_budget_of_nothing_pins_nothing(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    chat = cluster.chat(await cluster.router(pin_budget=0))
    await chat.say()
    assert decode.in_use == 0
    assert not await is_pinned(cluster, chat)
    assert (await chat.say()).reuse.outcome == "hit"


# -- on the wire


async def test_a_stream_of_small_pieces_arrives_as_it_is_made_and_leaves_a_record(cluster: Cluster) -> None:
    # A6
    _, decode = await cluster.pair(chunk_interval_s=0.05, answer_tokens=20)
    router = await cluster.router()
    body = {"messages": [user(TEXT)], "stream": True}
    headers = {"X-Conversation-ID": "chat-1"}
    async with cluster.client.post(router.url + CHAT, json=body, headers=headers) as response:
        seen = await response.content.readany()
        assert b'"role":"assistant"' in seen
        while b'"content":" ' not in seen:
            seen += await response.content.readany()
        # Some words are here, and the engine is still at it.
        assert decode.running == 1
        assert b"[DONE]" not in seen
        await response.read()
    chat = cluster.chat(router)
    text = expected({"messages": [user(TEXT)]}, length=20).text
    chat.messages = [user(TEXT), {"role": "assistant", "content": text}, user(TEXT)]
    answer = await cluster.post(router, CHAT, {"messages": chat.messages}, headers=headers)
    assert answer.reuse.outcome == "hit"


async def three_turns(cluster: Cluster, url: str, path: str, stream: bool) -> list[tuple[Any, bytes]]:
    """The same conversation over one endpoint: what each turn reused, and all that the client got."""
    said: list[Any] = []
    text, seen = "", []
    for number in range(3):
        question = f"<|user|>Question {number}. {TEXT.strip()}"  # texts that are cut where a token ends
        text += question
        said.append(user(question))
        body: dict[str, Any] = {"stream": stream}
        if path == COMPLETIONS:
            body |= {"prompt": text, "max_tokens": 16}
        elif path == RESPONSES:
            body |= {"input": said}
        else:
            body |= {"messages": said, "max_tokens": 1000}
        answer = await cluster.request("POST", url + path, body, headers={"X-Conversation-ID": path})
        assert answer.status == 200, answer.raw
        right = expected(body, path).text
        got = answer.raw if stream else json.dumps(answer.json, ensure_ascii=False).encode()
        assert right.split()[-1].encode() in got
        text += right
        said.append({"role": "assistant", "content": right})
        seen.append((answer.reuse, repr(answer.headers).encode() + answer.raw))
    return seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_every_endpoint_reuses_and_tells_nothing_of_the_engines(
    cluster: Cluster, path: str, stream: bool
) -> None:
    # A7
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    turns = await three_turns(cluster, router.url, path, stream)
    assert [reuse.outcome for reuse, _ in turns] == ["miss", "hit", "hit"]
    secrets = [
        b"remote_",
        b"block_ids",
        b"carryback_key",
        b"hold_s",
        b"do_remote",
        prefill.id.encode(),
        decode.id.encode(),
    ]
    secrets += [
        each.rpartition(":")[2].encode()
        for engine in (prefill, decode)
        for each in (engine.url, engine.events)
    ]
    for _, raw in turns:
        assert [each for each in secrets if each in raw] == []
        assert b"kv_transfer_params" not in raw.replace(b'"kv_transfer_params":null', b"")


async def test_requests_with_one_id_do_not_meet(cluster: Cluster) -> None:
    # A8
    engines = await cluster.pair(chunk_interval_s=0.02)
    router = await cluster.router()

    async def ask(text: str) -> None:
        body = {"messages": [user(text)], "stream": True}
        answer = await cluster.post(router, CHAT, body, headers={"X-Request-Id": "same"})
        assert answer.text == expected_text([user(text)])
        assert answer.headers["x-request-id"] == "same"

    await asyncio.gather(ask(f"One. {TEXT}"), ask(f"Two. {TEXT}"))
    await ask(f"Three. {TEXT}")
    for engine in engines:
        ids = [each.headers["x-request-id"] for each in engine.requests]
        assert len(set(ids)) == len(ids) == 3
        assert "same" not in "".join(ids)


PARAMS = [
    {"do_remote_prefill": True}, {}, None, [], "x", 7, {"remote_block_ids": ["a", "b"]},
    {"do_remote_decode": True, "remote_block_ids": [[-1, 10**12]], "remote_host": "127.0.0.1", "remote_port": -5},
    {"carryback_ask": ["tcp://127.0.0.1:1"], "carryback_find": True, "carryback_tip": {"tokens": 10**12}},
    {"hold_s": 10**12, "carryback_key": "mine"},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_a_client_s_own_transfer_parameters_reach_no_engine(cluster: Cluster, path: str) -> None:
    # A9
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    for params in PARAMS:
        body: dict[str, Any] = {"messages": [user("Hi")], "max_tokens": 20, "kv_transfer_params": params}
        if path in (COMPLETIONS, RESPONSES):
            body = {"prompt": "Hi", "input": "Hi", "kv_transfer_params": params}
        answer = await cluster.post(router, path, body)
        assert answer.status == 200, answer.raw
    for engine in (prefill, decode):
        assert len(engine.requests) == len(PARAMS)
        for received in engine.requests:
            assert str(received.params["carryback_key"]).startswith("cb")
            assert received.params["hold_s"] in (0, 30, 60, 480)
            assert b"tcp://127.0.0.1:1" not in received.raw.replace(decode.events.encode(), b"")
            assert b"1000000000000" not in received.raw
    assert decode.running == prefill.running == 0


async def test_a_tool_call_in_a_stream_is_the_middle_of_a_turn(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    for path, body in (
        (CHAT, {"messages": [user(CALL_MARKER + TEXT)], "tools": TOOLS}),
        (RESPONSES, {"input": CALL_MARKER + TEXT, "tools": [{"type": "function", "name": "look"}]}),
        (MESSAGES, {"messages": [user(CALL_MARKER + TEXT)], "max_tokens": 99, "tools": [{"name": "look"}]}),
    ):
        for stream in (False, True):
            name = f"{path.split('/')[2]}-{stream}"
            headers = {"X-Conversation-ID": name}
            await cluster.post(router, path, {**body, "stream": stream}, headers=headers)
            assert (await cluster.conversation(router, name))["boundary"] == "mid_turn", name
