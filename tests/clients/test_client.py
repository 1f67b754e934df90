"""The drop-in clients against a recording server: what goes over the wire, and what comes back."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import carryback
import openai
import pytest
from carryback import _headers, wire
from fake_server import FakeServer
from pydantic import BaseModel

HI: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
HIT = "hit; tokens=1024; reason=verified; recomputed=37; cached=16; found=1024"


class City(BaseModel):
    city: str


def sync_client(server: FakeServer, **more: Any) -> carryback.OpenAI:
    return carryback.OpenAI(base_url=server.base_url, api_key="k", **more)


def async_client(server: FakeServer, **more: Any) -> carryback.AsyncOpenAI:
    return carryback.AsyncOpenAI(base_url=server.base_url, api_key="k", **more)


def grown(messages: list[Any], text: str) -> list[Any]:
    return [*messages, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": text}]


# The official client's usage patterns. Each makes one request with `messages` and returns the text.


def plain(client: openai.OpenAI, messages: list[Any]) -> str | None:
    return client.chat.completions.create(model="m", messages=messages).choices[0].message.content


def streamed(client: openai.OpenAI, messages: list[Any]) -> str:
    with client.chat.completions.create(model="m", messages=messages, stream=True) as stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def raw(client: openai.OpenAI, messages: list[Any]) -> str | None:
    response = client.chat.completions.with_raw_response.create(model="m", messages=messages)
    assert response.headers["content-type"].startswith("application/json")
    return response.parse().choices[0].message.content


def streaming_response(client: openai.OpenAI, messages: list[Any]) -> str | None:
    create = client.chat.completions.with_streaming_response.create
    with create(model="m", messages=messages) as response:
        return response.parse().choices[0].message.content


def stream_helper(client: openai.OpenAI, messages: list[Any]) -> str | None:
    with client.chat.completions.stream(model="m", messages=messages) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message.content


def parsed(client: openai.OpenAI, messages: list[Any]) -> str:
    answer = client.chat.completions.parse(model="m", messages=messages, response_format=City)
    city = answer.choices[0].message.parsed
    assert city is not None
    return city.city


def copied(client: openai.OpenAI, messages: list[Any]) -> str | None:
    return plain(client.with_options(timeout=5, max_retries=0), messages)


def copied_raw(client: openai.OpenAI, messages: list[Any]) -> str | None:
    return raw(client.copy(default_headers={"X-Org": "a"}), messages)


def responses(client: openai.OpenAI, messages: list[Any]) -> str:
    return client.responses.create(model="m", input=messages).output_text


def responses_streamed(client: openai.OpenAI, messages: list[Any]) -> str:
    *_, last = client.responses.create(model="m", input=messages, stream=True)
    assert last.type == "response.completed"
    return last.response.output_text


def responses_raw(client: openai.OpenAI, messages: list[Any]) -> str:
    return client.responses.with_raw_response.create(model="m", input=messages).parse().output_text


async def async_plain(client: openai.AsyncOpenAI, messages: list[Any]) -> str | None:
    return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content


async def async_streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def async_raw(client: openai.AsyncOpenAI, messages: list[Any]) -> str | None:
    response = await client.chat.completions.with_raw_response.create(model="m", messages=messages)
    return response.parse().choices[0].message.content


async def async_streaming_response(client: openai.AsyncOpenAI, messages: list[Any]) -> str | None:
    create = client.chat.completions.with_streaming_response.create
    async with create(model="m", messages=messages) as response:
        return (await response.parse()).choices[0].message.content


async def async_stream_helper(client: openai.AsyncOpenAI, messages: list[Any]) -> str | None:
    async with client.chat.completions.stream(model="m", messages=messages) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0].message.content


async def async_parsed(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    answer = await client.chat.completions.parse(model="m", messages=messages, response_format=City)
    city = answer.choices[0].message.parsed
    assert city is not None
    return city.city


async def async_copied(client: openai.AsyncOpenAI, messages: list[Any]) -> str | None:
    return await async_plain(client.with_options(timeout=5), messages)


async def async_responses(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    return (await client.responses.create(model="m", input=messages)).output_text


SYNC: list[Callable[[openai.OpenAI, list[Any]], str | None]] = [
    plain, streamed, raw, streaming_response, stream_helper, parsed, copied, copied_raw,
    responses, responses_streamed, responses_raw,
]  # fmt: skip
ASYNC: list[Callable[[openai.AsyncOpenAI, list[Any]], Awaitable[str | None]]] = [
    async_plain, async_streamed, async_raw, async_streaming_response, async_stream_helper, async_parsed,
    async_copied, async_responses,
]  # fmt: skip


def check_two_turns(server: FakeServer) -> None:
    first, second = server.requests
    assert first.conversation is not None
    assert first.conversation == second.conversation
    assert [r.value(wire.TURN_ID) for r in (first, second)] == ["1", "2"]
    assert [r.value(wire.TURN_STEP) for r in (first, second)] == ["1", "1"]
    assert first.value(wire.CONVERSATION_PARENT) is None


@pytest.mark.parametrize("use", SYNC, ids=lambda use: use.__name__)
def test_every_pattern_carries_the_headers(server: FakeServer, use: Any) -> None:
    server.reuse = HIT
    with sync_client(server) as client:
        assert use(client, HI) in ("Hello.", "Bern")
        assert use(client, grown(HI, "more")) in ("Hello.", "Bern")
    check_two_turns(server)
    last = carryback.last_reuse()
    assert last is not None
    assert (last.outcome, last.tokens, last.turn) == ("hit", 1024, "2")
    assert last.conversation == server.last.conversation


@pytest.mark.parametrize("use", ASYNC, ids=lambda use: use.__name__)
async def test_every_async_pattern_carries_the_headers(server: FakeServer, use: Any) -> None:
    server.reuse = HIT
    async with async_client(server) as client:
        assert await use(client, HI) in ("Hello.", "Bern")
        assert await use(client, grown(HI, "more")) in ("Hello.", "Bern")
    check_two_turns(server)
    last = carryback.last_reuse()
    assert last is not None
    assert (last.outcome, last.tokens, last.turn) == ("hit", 1024, "2")


def comparable(server: FakeServer, skip: int = 0) -> list[Any]:
    """Requests without what differs between any two requests."""
    own = {"idempotency-key", "x-stainless-read-timeout"}
    return [
        (
            r.method,
            r.path,
            sorted((k.lower(), v) for k, v in r.headers if k.lower() not in own),
            r.body,
        )
        for r in server.requests[skip:]
    ]


@pytest.mark.parametrize("use", SYNC, ids=lambda use: use.__name__)
def test_against_any_other_server_it_is_the_original(server: FakeServer, use: Any) -> None:
    server.is_carrybacks = False
    with openai.OpenAI(base_url=server.base_url, api_key="k") as original:
        expected = use(original, HI)
    with sync_client(server) as client:
        assert use(client, HI) == expected
    assert carryback.last_reuse() is None
    before, after = comparable(server)
    assert after == before


def test_the_original_and_ours_have_the_same_signatures() -> None:
    for ours, theirs in ((carryback.OpenAI, openai.OpenAI), (carryback.AsyncOpenAI, openai.AsyncOpenAI)):
        for name in ("__init__", "copy", "with_options"):
            assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name))
        client = ours(api_key="k", timeout=3)
        assert isinstance(client, theirs)
        assert type(client.with_options(timeout=5)) is ours
        assert client.with_options(timeout=5).timeout == 5


def test_errors_are_the_originals(server: FakeServer) -> None:
    server.failures = [400]
    client = sync_client(server)
    with pytest.raises(openai.BadRequestError, match="as told"):
        plain(client, HI)


def test_other_endpoints_carry_nothing(server: FakeServer) -> None:
    client = sync_client(server)
    with carryback.conversation("thread-7"):
        client.models.list()
    assert not [name for name, _ in server.last.headers if "conversation" in name.lower()]


# Whose value goes over the wire


@pytest.mark.parametrize("name", ["X-Conversation-ID", "x-conversation-id", "X-CONVERSATION-ID"])
@pytest.mark.parametrize("where", ["call", "client", "copy"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_header_that_the_caller_set_wins(server: FakeServer, name: str, where: str, inside: bool) -> None:
    theirs = {name: "mine", "X-Org": "a", "x-turn-id": "t-9"}
    client = sync_client(server, default_headers=theirs if where == "client" else None)
    if where == "copy":
        client = client.with_options(default_headers=theirs)
    extra = theirs if where == "call" else None
    with carryback.conversation("outer"), carryback.conversation("thread-7" if inside else "outer"):
        client.chat.completions.create(model="m", messages=HI, extra_headers=extra)
    assert server.last.conversation == "mine"
    assert server.last.value("X-Org") == "a"
    assert server.last.value(wire.TURN_ID) == "t-9"
    assert server.last.value(wire.TURN_STEP) == "1"
    assert server.last.value(wire.CONVERSATION_PARENT) is None, "the parent was of another conversation"


def test_a_header_that_the_caller_removed_stays_away(server: FakeServer) -> None:
    client = sync_client(server)
    extra: Any = {"x-conversation-id": openai.omit, "X-Turn-Step": openai.omit}
    client.chat.completions.create(model="m", messages=HI, extra_headers=extra)
    assert server.last.conversation is None
    assert server.last.value(wire.TURN_STEP) is None
    assert server.last.value(wire.TURN_ID) == "1"


@pytest.mark.parametrize(
    "named",
    [
        {"extra_headers": {"X-Session-ID": "s"}},
        {"extra_headers": {"x-litellm-session-id": "s"}},
        {"extra_body": {"conversation_id": "s"}},
        {"extra_body": {"session_params": {"session_id": "s"}}},
    ],
)
def test_a_conversation_named_in_another_way_is_not_named_again(
    server: FakeServer, named: dict[str, Any]
) -> None:
    client = sync_client(server)
    client.chat.completions.create(model="m", messages=HI, **named)
    assert server.last.conversation is None
    assert server.last.value(wire.TURN_ID) == "1"
    with carryback.conversation("thread-7"):
        client.chat.completions.create(model="m", messages=HI, **named)
    assert server.last.conversation == "thread-7"


def test_other_headers_pass(server: FakeServer) -> None:
    client = sync_client(server)
    extra = {wire.CONVERSATION_END: "true", wire.CARRYBACK_REUSE: "off"}
    client.chat.completions.create(model="m", messages=HI, extra_headers=extra)
    assert server.last.value(wire.CONVERSATION_END) == "true"
    assert server.last.value(wire.CARRYBACK_REUSE) == "off"
    assert server.last.conversation is not None


# Inferred conversations


def test_steps_of_a_turn_and_answers_appended_as_objects(server: FakeServer) -> None:
    client = sync_client(server)
    messages = [*HI]
    for step in (1, 2):
        completion = client.chat.completions.create(model="m", messages=messages)
        assert server.last.value(wire.TURN_STEP) == str(step)
        messages.append(completion.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": "c", "content": "42"})
    assert len({request.conversation for request in server.requests}) == 1
    assert {request.value(wire.TURN_ID) for request in server.requests} == {"1"}


def test_a_fork_names_its_parent(server: FakeServer) -> None:
    client = sync_client(server)
    plain(client, HI)
    plain(client, grown(HI, "one way"))
    plain(client, grown(HI, "another way"))
    trunk, _, branch = server.requests
    assert branch.conversation != trunk.conversation
    assert branch.value(wire.CONVERSATION_PARENT) == trunk.conversation


def test_copies_share_what_they_know_and_clients_do_not(server: FakeServer) -> None:
    client = sync_client(server)
    plain(client, HI)
    plain(client.with_options(timeout=9), grown(HI, "more"))
    plain(sync_client(server), grown(HI, "more"))
    first, copy, other = server.requests
    assert copy.conversation == first.conversation
    assert other.conversation != first.conversation
    assert other.value(wire.CONVERSATION_PARENT) is None


def test_a_client_remembers_a_bounded_number_of_histories(server: FakeServer) -> None:
    client = sync_client(server)
    assert client._identifier.capacity == 5_000
    assert _headers._shared.capacity == 5_000
    plain(client, HI)
    for number in range(5_000):
        another = [{"role": "user", "content": f"another {number}"}]
        client._identifier.identify(another, scope=str(client.base_url))
    plain(client, grown(HI, "more"))
    assert len(client._identifier) == 5_000
    assert server.requests[0].conversation != server.last.conversation, "the oldest was forgotten"


def test_retries_keep_the_ids(server: FakeServer) -> None:
    server.failures = [500, 503]
    client = sync_client(server)
    plain(client, HI)
    assert len(server.requests) == 3
    assert len({request.conversation for request in server.requests}) == 1
    assert {request.value(wire.CONVERSATION_PARENT) for request in server.requests} == {None}
    plain(client, grown(HI, "more"))
    assert server.last.conversation == server.requests[0].conversation


async def test_async_retries_keep_the_ids(server: FakeServer) -> None:
    server.failures = [500]
    async with async_client(server) as client:
        await async_plain(client, HI)
        await async_plain(client, grown(HI, "more"))
    assert len(server.requests) == 3
    assert len({request.conversation for request in server.requests}) == 1


def test_a_text_prompt_has_no_history(server: FakeServer) -> None:
    client = sync_client(server)
    client.completions.create(model="m", prompt="Once upon a time")
    assert server.last.conversation is None
    with carryback.conversation("thread-7", turn="t1"):
        *_, last = client.completions.create(model="m", prompt="Once upon a time", stream=True)
        assert last.choices[0].finish_reason == "stop"
    assert server.last.conversation == "thread-7"
    assert server.last.value(wire.TURN_ID) == "t1"
    assert server.last.value(wire.TURN_STEP) is None


def test_a_responses_chain_is_the_servers(server: FakeServer) -> None:
    client = sync_client(server)
    client.responses.create(model="m", input="hi", previous_response_id="resp_0")
    assert server.last.conversation is None
    assert server.last.value(wire.TURN_ID) is None
    with carryback.conversation("thread-7"):
        client.responses.create(model="m", input="hi", previous_response_id="resp_0")
    assert server.last.conversation == "thread-7"


def test_responses_with_a_text_and_instructions(server: FakeServer) -> None:
    client = sync_client(server)
    answer = client.responses.create(model="m", input="hi", instructions="Be brief.")
    history: list[Any] = [{"role": "user", "content": "hi"}, *answer.output]
    client.responses.create(
        model="m", input=[*history, {"role": "user", "content": "more"}], instructions="Be brief."
    )
    client.responses.create(model="m", input="hi", instructions="Be a poet.")
    first, second, other = server.requests
    assert first.conversation == second.conversation
    assert other.conversation != first.conversation


def test_prompt_cache_key_narrows_and_names_nothing(server: FakeServer) -> None:
    client = sync_client(server)
    for key in ("a", "b"):
        client.chat.completions.create(model="m", messages=HI, prompt_cache_key=key)
    one, two = server.requests
    assert one.conversation != two.conversation
    assert two.value(wire.CONVERSATION_PARENT) is None
    assert two.body["prompt_cache_key"] == "b"


# Named conversations


def test_a_named_conversation(server: FakeServer) -> None:
    client = sync_client(server)
    with carryback.conversation("thread-7") as c:
        assert (c.id, c.parent) == ("thread-7", None)
        plain(client, HI)
        plain(client, [{"role": "user", "content": "something else entirely"}])
    assert [request.conversation for request in server.requests] == ["thread-7", "thread-7"]
    with c:
        plain(client, HI)
    assert server.last.conversation == "thread-7"
    plain(client, HI)
    assert server.last.conversation not in (None, "thread-7")


def test_an_id_is_made_if_none_is_given() -> None:
    with carryback.conversation() as one, carryback.conversation() as two:
        assert one.id != two.id
        assert two.parent == one.id


def test_nested_conversations(server: FakeServer) -> None:
    client = sync_client(server)
    with carryback.conversation("outer"):
        with carryback.conversation("inner") as inner:
            assert inner.parent == "outer"
            plain(client, HI)
        with carryback.conversation("given", parent="elsewhere"):
            plain(client, HI)
        with carryback.conversation("outer") as same:
            assert same.parent is None
        plain(client, HI)
    sent = [(r.conversation, r.value(wire.CONVERSATION_PARENT)) for r in server.requests]
    assert sent == [("inner", "outer"), ("given", "elsewhere"), ("outer", None)]


@pytest.mark.parametrize("bad", ["", "x" * 257, "a\nb", "é"])
def test_bad_ids_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="conversation id"):
        carryback.conversation(bad)
    with pytest.raises(ValueError, match="parent"):
        carryback.conversation("a", parent=bad)
    with pytest.raises(ValueError, match="turn"):
        carryback.conversation("a", turn=bad)


async def test_named_conversations_cross_tasks_and_stay_apart(server: FakeServer) -> None:
    async with async_client(server) as client:

        async def ask(text: str) -> None:
            await async_plain(client, [{"role": "user", "content": text}])

        async def child(name: str) -> None:
            async with carryback.conversation(name):
                await ask(name)
                await asyncio.sleep(0.01)
                await ask(name)

        async with carryback.conversation("outer"):
            await asyncio.gather(ask("outer"), child("a"), child("b"), asyncio.create_task(ask("outer")))
            await asyncio.to_thread(
                lambda: plain(sync_client(server), [{"role": "user", "content": "outer"}])
            )
            await ask("outer")
    for request in server.requests:
        name = request.body["messages"][0]["content"]
        assert request.conversation == name
        assert request.value(wire.CONVERSATION_PARENT) == (None if name == "outer" else "outer")


def test_threads_stay_apart(server: FakeServer) -> None:
    server.reuse = HIT
    client = sync_client(server)
    wrong: list[Any] = []

    def run(name: str, named: bool) -> None:
        messages: list[Any] = [HI[0], {"role": "user", "content": name}]
        for turn in range(3):
            if named:
                with carryback.conversation(name):
                    plain(client, messages)
            else:
                plain(client, messages)
            last = carryback.last_reuse()
            if last is None or last.turn != str(turn + 1) or (named and last.conversation != name):
                wrong.append((name, turn, last))
            messages = grown(messages, str(turn))

    threads = [threading.Thread(target=run, args=(f"thread-{n}", n % 2 == 0)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    check_apart(server, 12)


def check_apart(server: FakeServer, conversations: int) -> None:
    """One id for each first user message, and one first user message for each id."""
    ids: dict[str, set[str | None]] = {}
    for request in server.requests:
        ids.setdefault(request.body["messages"][1]["content"], set()).add(request.conversation)
    assert len(ids) == conversations
    assert all(len(one) == 1 and None not in one for one in ids.values())
    assert len(set().union(*ids.values())) == conversations


@pytest.mark.parametrize("named", [True, False])
async def test_200_tasks_share_one_client(server: FakeServer, named: bool) -> None:
    rng = random.Random(7)
    uses = [async_plain, async_streamed, async_raw, async_streaming_response, async_copied]

    async with async_client(server, default_headers={"X-Org": "a"}, timeout=60) as client:

        async def run(number: int) -> None:
            messages: list[Any] = [HI[0], {"role": "user", "content": f"task {number}"}]
            for turn in range(3):
                use = rng.choice(uses)
                if named:
                    async with carryback.conversation(f"task {number}"):
                        await use(client, messages)
                else:
                    await use(client, messages)
                messages = grown(messages, str(turn))
                await asyncio.sleep(rng.random() / 50)

        tasks = [asyncio.create_task(run(number)) for number in range(200)]
        await asyncio.sleep(0.3)
        for task in rng.sample(tasks, 20):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended)
    seen = {request.body["messages"][1]["content"] for request in server.requests}
    check_apart(server, len(seen))
    assert len(seen) >= 180
    assert {request.value("X-Org") for request in server.requests} == {"a"}
    if named:
        assert all(r.conversation == r.body["messages"][1]["content"] for r in server.requests)


# The end of a conversation


def deletes(server: FakeServer) -> list[str]:
    return [request.path for request in server.requests if request.method == "DELETE"]


def test_end_releases_where_the_conversation_was_used(server: FakeServer) -> None:
    client = sync_client(server)
    with carryback.conversation("a/b 7%?#") as c:
        plain(client, HI)
        plain(client.with_options(timeout=5), HI)
    c.end()
    assert deletes(server) == ["/v1/conversations/a%2Fb%207%25%3F%23"]
    assert server.last.value("Authorization") == "Bearer k"
    c.end()
    assert len(deletes(server)) == 1, "nothing is held any more"


def test_end_asks_each_server_and_each_account(server: FakeServer) -> None:
    with carryback.conversation("c") as c:
        for key in ("k1", "k2"):
            plain(sync_client(server).with_options(api_key=key), HI)
    c.end()
    asked = [request for request in server.requests if request.method == "DELETE"]
    assert sorted(request.value("Authorization") or "" for request in asked) == ["Bearer k1", "Bearer k2"]


def test_end_of_an_unused_conversation_asks_nobody(server: FakeServer) -> None:
    with carryback.conversation("c") as c:
        pass
    c.end()
    assert server.requests == []


def test_end_keeps_what_was_reused_last(server: FakeServer) -> None:
    server.reuse = HIT
    with carryback.conversation("c") as c:
        plain(sync_client(server), HI)
    c.end()
    assert carryback.last_reuse() is not None


@pytest.mark.parametrize("status", [404, 405, 401, 500])
def test_end_leaves_other_servers_alone(server: FakeServer, status: int) -> None:
    with carryback.conversation("c") as c:
        plain(sync_client(server, max_retries=0), HI)
    server.failures = [status]
    c.end()
    assert len(deletes(server)) == 1


async def test_aend(server: FakeServer) -> None:
    server.knows_conversations = False
    async with async_client(server) as client, carryback.conversation("c") as c:
        await async_plain(client, HI)
        with pytest.raises(RuntimeError, match="aend"):
            c.end()
        await c.aend()
    assert deletes(server) == ["/v1/conversations/c"]


async def test_aend_for_a_sync_client(server: FakeServer) -> None:
    async with carryback.conversation("c") as c:
        plain(sync_client(server), HI)
    await c.aend()
    assert deletes(server) == ["/v1/conversations/c"]


# What was reused


def test_reuse_of_a_stream_is_known_when_it_opens(server: FakeServer) -> None:
    server.reuse = "partial; tokens=512; reason=history_changed; recomputed=90; cached=0; found=512"
    with sync_client(server).chat.completions.create(model="m", messages=HI, stream=True) as stream:
        last = carryback.last_reuse()
        assert last is not None
        assert (last.outcome, last.tokens, last.reason) == ("partial", 512, "history_changed")
        assert last.prompt_tokens == 602
        assert carryback.reuse(stream.response) == last


def test_reuse_by_raw_response_and_headers(server: FakeServer) -> None:
    server.reuse = HIT
    response = sync_client(server).chat.completions.with_raw_response.create(model="m", messages=HI)
    seen = carryback.reuse(response)
    assert seen is not None
    assert seen == carryback.reuse(response.headers) == carryback.last_reuse()
    assert seen == carryback.reuse({k.upper(): v for k, v in response.headers.items()})
    assert seen.conversation == server.last.conversation


def test_a_failed_request_has_no_reuse(server: FakeServer) -> None:
    server.reuse = HIT
    client = sync_client(server, max_retries=0)
    plain(client, HI)
    assert carryback.last_reuse() is not None
    server.failures = [500]
    with pytest.raises(openai.InternalServerError):
        plain(client, HI)
    assert carryback.last_reuse() is None


@pytest.mark.parametrize("header", [None, "nonsense", "hit; tokens=many", "hit" + " " * 7000 + "x"])
def test_no_reuse_header_or_one_that_is_not_ours(server: FakeServer, header: str | None) -> None:
    server.reuse = header
    assert plain(sync_client(server), HI) == "Hello."
    assert carryback.last_reuse() is None


async def test_each_task_sees_its_own_reuse(server: FakeServer) -> None:
    server.reuse = HIT
    async with async_client(server) as client:

        async def ask(name: str) -> str:
            async with carryback.conversation(name):
                await async_plain(client, [{"role": "user", "content": name}])
            await asyncio.sleep(0.01)
            last = carryback.last_reuse()
            assert last is not None
            return last.conversation

        names = [f"c{n}" for n in range(20)]
        assert await asyncio.gather(*[ask(name) for name in names]) == names
