"""Several routers: conversations and chains go on at any of them, with a Redis that they share and without."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from carryback_server.app import Router
from carryback_server.letters import Letters
from carryback_server.redis_state import VERSION
from cluster import Cluster, eventually
from redis_server import RedisServer, redis_server
from service import TEXT, Answer, until, user
from stub_engine import Settings, expected
from stub_engine.prompts import CHAT, RESPONSES

STATE_KEY = "a secret of these routers"
# An engine of a machine that is busy may answer late. (That is another test's.)
CALM = Settings(ask_timeout_s=30)
PATIENT = Settings(ask_timeout_s=30, grace_s=10_000)
KEYS = ["acme=sk-acme-0123456789-0123456789", "guests=sk-guests-0123456789-012345678"]
ACME, GUESTS = (each.partition("=")[2] for each in KEYS)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def shared(redis: RedisServer) -> dict[str, Any]:
    """Settings of routers that share one state, which is this test's own."""
    return {
        "state": redis.url,
        "state_prefix": uuid.uuid4().hex,
        "state_key": STATE_KEY,
        "state_timeout_s": 5.0,
    }


async def replicas(cluster: Cluster, settings: dict[str, Any], count: int = 2) -> list[Router]:
    return [await cluster.router(**settings) for _ in range(count)]


# -- conversations


@pytest.mark.parametrize("stream", [True, False])
async def test_a_conversation_goes_on_at_any_replica(
    cluster: Cluster, shared: dict[str, Any], stream: bool
) -> None:
    await cluster.pair(settings=CALM)
    await cluster.engine("decode", settings=CALM)
    routers = await replicas(cluster, shared, 3)
    chat = cluster.chat(routers[0], stream=stream)
    for turn in range(6):
        # At once: whether the state has heard already where the last turn was does not matter.
        reuse = (await chat.say(via=routers[turn % 3])).reuse
        assert reuse.outcome == ("hit" if turn else "miss"), reuse
    for router in routers:
        view = await cluster.conversation(router)
        assert view["requests"] == 6
        assert view["location"] is not None


async def test_a_location_noted_by_one_is_where_another_asks_and_decodes(
    cluster: Cluster, shared: dict[str, Any]
) -> None:
    prefill, first = await cluster.pair(settings=CALM)
    decodes = [first, *[await cluster.engine("decode", settings=CALM) for _ in range(3)]]
    routers = await replicas(cluster, {**shared, "ask_engines": 1}, 3)
    for router in routers:
        for engine in decodes:
            await cluster.hears(router, engine)
    chats = [cluster.chat(routers[0], f"chat-{number}") for number in range(4)]
    for turn in range(4):
        for chat in chats:
            chat.router = routers[turn % 3]
            reuse = (await chat.say(f"{chat.id} {turn} {TEXT}")).reuse
            assert reuse.outcome == ("hit" if turn else "miss")
            assert len(prefill.requests[-1].params["carryback_ask"]) == 1
            chat.router = routers[(turn + 1) % 3]  # which sees where that was before it needs it
            assert (await cluster.held(chat))["tokens"] > reuse.prompt_tokens - 16
    # One decode engine has each conversation, whoever served it.
    for chat in chats:
        began = chat.messages[0]["content"]
        homes = {
            engine.url
            for engine in decodes
            for each in engine.requests
            if each.body is not None and each.body["messages"][0]["content"] == began
        }
        assert len(homes) == 1


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("id", ["chat-1", None])
async def test_requests_of_one_conversation_at_once_all_read(
    cluster: Cluster, shared: dict[str, Any], is_shared: bool, id: str | None
) -> None:
    _, decode = await cluster.pair(settings=CALM)
    routers = await replicas(cluster, shared if is_shared else {})
    for router in routers:
        await cluster.hears(router, decode)
    chat = cluster.chat(routers[0], id)
    length = (await chat.say()).reuse.prompt_tokens
    for is_first in (True, False, False):
        parallel = [cluster.chat(routers[number % 2], id) for number in range(8)]
        for each in parallel:
            each.messages = list(chat.messages)
        answers = await asyncio.gather(*(each.say(f"{n} {TEXT}") for n, each in enumerate(parallel)))
        # (From then on another of them was the conversation's last request than the one that goes on.)
        assert {each.reuse.outcome for each in answers} <= ({"hit"} if is_first else {"hit", "partial"})
        assert min(each.reuse.tokens for each in answers) >= length // 16 * 16
        chat.messages = parallel[0].messages
        length = answers[0].reuse.prompt_tokens
    await until(lambda: decode.leased == 0)


@pytest.mark.parametrize("id", ["chat-1", None])
async def test_a_router_that_knows_nothing_reuses_as_well(cluster: Cluster, id: str | None) -> None:
    """One that has just started, or that shares no state with the one that served the turns before."""
    await cluster.pair(settings=CALM)
    decodes = [await cluster.engine("decode", settings=CALM) for _ in range(3)]
    old = await cluster.router()
    chat = cluster.chat(old, id)
    await chat.say()
    known = (await chat.say()).reuse
    new = await cluster.router()
    for engine in decodes:
        await cluster.hears(new, engine)
    reuse = (await chat.say(via=new)).reuse
    assert (reuse.outcome, reuse.reason) == ("hit", "verified")
    assert reuse.tokens > known.tokens
    await cluster.stop(old)
    assert (await chat.say(via=new)).reuse.tokens > reuse.tokens
    await cluster.stop(new)
    newest = await cluster.router()
    for engine in decodes:
        await cluster.hears(newest, engine)
    assert (await chat.say(via=newest)).reuse.outcome == "hit"


async def test_a_conversation_deleted_at_another_replica_pins_nothing(
    cluster: Cluster, shared: dict[str, Any]
) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    one, two = await replicas(cluster, shared)
    for router in (one, two):
        await cluster.hears(router, decode)
    chat = cluster.chat(one)
    await chat.say()
    await cluster.held(chat)
    assert decode.pinned
    assert (await cluster.delete(two, "/v1/conversations/chat-1")).status == 200
    await until(lambda: decode.in_use == 0)
    for router in (one, two):
        assert await cluster.conversation(router) is None
    # Also while it runs at the other one.
    decode.fault(hop="decode", first_delay_s=0.3)
    asking = asyncio.create_task(chat.say())
    await until(lambda: decode.running)
    assert (await cluster.delete(two, "/v1/conversations/chat-1")).status == 200
    await asking
    await until(lambda: decode.in_use == 0)
    assert await cluster.conversation(one) is None
    # It is another conversation from here on. What the engine has still is found.
    reuse = (await chat.say(via=two)).reuse
    assert (reuse.outcome, (await cluster.conversation(two))["requests"]) == ("hit", 1)


async def test_what_is_pinned_is_seen_and_counted_once(cluster: Cluster, shared: dict[str, Any]) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    one, two = await replicas(cluster, shared)
    for router in (one, two):
        await cluster.hears(router, decode)
    chats = [cluster.chat(router, f"chat-{number}") for number, router in enumerate((one, two))]
    for chat in chats:
        await chat.say(f"{chat.id} {TEXT}")  # nothing that is pinned for one is the other's as well
        await cluster.held(chat)
    listed = [(await cluster.get(router, "/v1/conversations")).json["data"] for router in (one, two)]
    assert [each["id"] for each in listed[0]] == [each["id"] for each in listed[1]] == ["chat-1", "chat-0"]

    async def is_counted() -> bool:
        held = [await cluster.metric(router, "held_blocks") for router in (one, two)]
        return min(held) > 0 and sum(held) == decode.pinned

    await eventually(is_counted)
    # The next turn's pin is the other one's. It has all blocks of the one before, whose end the engine says.
    for chat, via in zip(chats, (two, one), strict=True):
        assert (await chat.say(via=via)).reuse.outcome == "hit"
    await eventually(is_counted)
    for router, chat in ((two, chats[0]), (one, chats[1])):
        assert (await cluster.delete(router, f"/v1/conversations/{chat.id}")).status == 200
    await until(lambda: decode.in_use == 0)

    async def is_empty() -> bool:
        return sum([await cluster.metric(router, "held_blocks") for router in (one, two)]) == 0

    await eventually(is_empty)


async def test_a_pin_that_is_given_up_leaves_a_location_that_all_see(
    cluster: Cluster, shared: dict[str, Any]
) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    one, two = await replicas(cluster, {**shared, "hold_mid_turn_s": 0.0})
    for router in (one, two):
        await cluster.hears(router, decode)
    chats = [cluster.chat(one, f"chat-{number}") for number in range(5)]
    for number, chat in enumerate(chats):
        await chat.call(stream=bool(number % 2))
        await cluster.held(chat)
    await until(lambda: decode.in_use == 0)
    for chat in chats:
        assert (await chat.result(via=two)).reuse.outcome == "hit"


async def test_a_replica_that_ends_leaves_its_conversations_to_the_others(
    cluster: Cluster, shared: dict[str, Any]
) -> None:
    await cluster.pair(settings=CALM)
    one, two = await replicas(cluster, shared)
    chat = cluster.chat(one)
    await chat.say()
    await cluster.stop(one)
    assert (await chat.say(via=two)).reuse.outcome == "hit"


async def test_tenants_do_not_meet_in_a_shared_state(cluster: Cluster, shared: dict[str, Any]) -> None:
    # A23, over two replicas.
    await cluster.pair(settings=CALM)
    routers = await replicas(cluster, {**shared, "api_keys": KEYS})
    one, two = (cluster.chat(routers[0], key=key) for key in (ACME, GUESTS))
    for turn in range(4):
        for chat in (one, two):
            reuse = (await chat.say(f"{chat.key} {TEXT}", via=routers[turn % 2])).reuse
            assert reuse.outcome == ("hit" if turn else "miss")
    listed = (await cluster.get(routers[1], "/v1/conversations", key=GUESTS)).json["data"]
    assert [each["tenant"] for each in listed] == ["guests"]
    assert (await cluster.delete(routers[1], "/v1/conversations/chat-1", key=GUESTS)).status == 200
    assert (await one.say(via=routers[1])).reuse.outcome == "hit"
    assert (await cluster.conversation(routers[0], key=GUESTS)) is None
    assert (await cluster.conversation(routers[0], key=ACME))["requests"] == 5


# -- engines


async def test_engines_posted_to_one_replica_reach_all(cluster: Cluster, shared: dict[str, Any]) -> None:
    prefill, old = await cluster.pair(settings=CALM)
    routers = await replicas(cluster, shared)
    chat = cluster.chat(routers[0])
    await chat.say()
    new = await cluster.engine("decode", settings=CALM)
    body = {
        "engines": [{"role": each.role, "url": each.url, "events": each.events} for each in (prefill, new)]
    }

    async def have_all() -> bool:
        await cluster.admin(
            routers[1], "POST", "/admin/engines", body
        )  # one that does not listen yet misses it
        name = new.url.removeprefix("http://")
        return all([each.name for each in router.pipeline.pool.of("decode")] == [name] for router in routers)

    await eventually(have_all)
    for router in routers:
        await cluster.hears(router, new)
    assert (await chat.say()).reuse.outcome == "hit"
    assert (await chat.say(via=routers[1])).reuse.outcome == "hit"
    assert (await cluster.delete(routers[0], "/v1/conversations/chat-1")).status == 200
    await until(lambda: old.in_use == new.in_use == 0)


async def test_redis_gives_routers_no_engines(
    cluster: Cluster, shared: dict[str, Any], redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not whoever publishes there, also if it was said by a router before, or by one of another deployment."""
    prefill, decode = await cluster.pair(settings=CALM)
    one, two = await replicas(cluster, shared)
    other = await cluster.router(**shared | {"state_key": "a secret of other routers"})
    evil, good = await cluster.engine("decode", settings=CALM), await cluster.engine("decode", settings=CALM)

    def engines(*decodes: Any) -> dict[str, Any]:
        return {
            "engines": [
                {"role": each.role, "url": each.url, "events": each.events, "api_key": "sk-of-an-engine"}
                for each in (prefill, *decodes)
            ]
        }

    def names(router: Router) -> set[str]:
        return {each.site.url for each in router.pipeline.pool.of("decode") if not each.is_draining}

    channel = f"{shared['state_prefix']}:{VERSION}:messages"
    said = []
    with redis.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(channel)
        pubsub.get_message(timeout=5)

        async def has_said() -> bool:
            await cluster.admin(one, "POST", "/admin/engines", engines(decode, good))
            while (message := pubsub.get_message()) is not None:
                said.append(message["data"])
            return names(one) == names(two) == {decode.url, good.url}

        await eventually(has_said)
        assert said
        assert all(good.url.encode() not in each and b"sk-of" not in each for each in said)
        await cluster.admin(one, "POST", "/admin/engines", engines(decode))
    await eventually(lambda: _is(names(one) == names(two) == {decode.url}))
    refused = await cluster.metric(one, "messages_refused_total")
    plain = json.dumps(engines(evil)).encode()
    forged = Letters("a secret of nobody here...", channel).seal(plain)
    elsewhere = Letters(STATE_KEY, f"other:{channel}").seal(plain)
    tokens = [
        plain,
        forged,
        elsewhere,
        said[-1],
        said[-1] + b"=",
        b"[" * 100_000,
        b"",
        b"\xff" * 100,
        b"x" * 2**21,
    ]
    for token in tokens:
        assert redis.client.publish(channel, token) == 3

    async def are_refused() -> bool:
        counts = [await cluster.metric(each, "messages_refused_total") for each in (one, two)]
        return min(counts) >= refused + len(tokens)

    await eventually(are_refused)
    assert names(one) == names(two) == {decode.url}
    assert names(other) == {decode.url}
    assert not evil.received
    # Still heard, by those that have the key.
    await cluster.admin(two, "POST", "/admin/engines", engines(good))
    await eventually(lambda: _is(names(one) == names(two) == {good.url}))


async def _is(value: bool) -> bool:
    return value


async def test_without_a_key_routers_tell_each_other_nothing(
    cluster: Cluster, shared: dict[str, Any], redis: RedisServer
) -> None:
    prefill, decode = await cluster.pair(settings=CALM)
    router = await cluster.router(**shared | {"state_key": None})
    body = {"engines": [{"role": each.role, "url": each.url} for each in (prefill, decode)]}
    answer = await cluster.admin(router, "POST", "/admin/engines", body)
    assert (answer.status, answer.error["param"]) == (409, "state_key")
    assert redis.client.publish(f"{shared['state_prefix']}:{VERSION}:messages", json.dumps(body)) == 0


# -- Redis is gone


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_without_redis_there_is_service_and_reuse(cluster: Cluster, how: str) -> None:
    _, decode = await cluster.pair(settings=PATIENT)
    await cluster.engine("decode", settings=PATIENT)
    with redis_server() as redis:
        router = await cluster.router(state=redis.url, state_timeout_s=0.3 if how == "hangs" else 5.0)
        for engine in cluster.engines[1:]:
            await cluster.hears(router, engine)
        chat = cluster.chat(router)

        async def has_listing() -> bool:  # a machine that is busy may make it wait
            return (await cluster.get(router, "/v1/conversations")).status == 200

        await eventually(has_listing)
        await chat.say()
        assert (await chat.say()).reuse.outcome == "hit"
        if how == "killed":
            redis.kill()
        else:
            redis.pause()
        for stream in (True, False):
            assert (await chat.say(stream=stream)).reuse.outcome == "hit"
        fresh = cluster.chat(router, "chat-2")
        assert (await fresh.say("Something else. " + TEXT)).reuse.reason == "new"
        assert (await fresh.say()).reuse.outcome == "hit"
        listing = await cluster.get(router, "/v1/conversations")
        assert (listing.status, listing.error["code"]) == (503, "state_unavailable")
        assert (await cluster.delete(router, "/v1/conversations/chat-1")).status == 503

        async def is_counted() -> bool:
            return await cluster.metric(router, "locations_lost_total") > 0

        await eventually(is_counted)
        if how == "killed":
            redis.start()
        else:
            redis.resume()
        await eventually(has_listing)
        assert (await chat.say()).reuse.outcome == "hit"
        assert (await cluster.conversation(router))["requests"] > 0
        await cluster.stop(router)
    assert decode.running == 0


async def test_a_router_starts_without_redis_and_takes_it_when_it_comes(cluster: Cluster) -> None:
    _, decode = await cluster.pair(settings=CALM)
    redis = RedisServer()
    try:
        router = await cluster.router(state=redis.url)
        await cluster.hears(router, decode)
        chat = cluster.chat(router)
        assert (await chat.say()).reuse.reason == "new"
        assert (await chat.say()).reuse.outcome == "hit"
        assert (await cluster.get(router, "/ready")).status == 200
        redis.start()

        async def is_remembered() -> bool:
            assert (await chat.say()).reuse.outcome == "hit"
            return await cluster.conversation(router) is not None

        await eventually(is_remembered)
        await cluster.stop(router)
    finally:
        redis.close()


@pytest.mark.parametrize("after", ["k8t_-AAAAAAAAKF0oWk=", "k8t_8AAAAAAAAKF0oWk=", "nonsense"])
async def test_a_wrong_cursor_of_one_tenant_costs_others_nothing(
    cluster: Cluster, shared: dict[str, Any], after: str
) -> None:
    # NaN, infinity, and no cursor.
    await cluster.pair(settings=CALM)
    router = await cluster.router(**shared, api_keys=KEYS)
    chat = cluster.chat(router, key=GUESTS)
    await chat.say()
    for _ in range(3):
        answer = await cluster.get(router, f"/v1/conversations?after={after}", key=ACME)
        assert (answer.status, answer.error["param"]) == (400, "after")
        assert (await chat.say()).reuse.outcome == "hit"
    assert await cluster.metric(router, "locations_lost_total") == 0


async def test_junk_in_redis_is_no_500(cluster: Cluster, shared: dict[str, Any], redis: RedisServer) -> None:
    await cluster.pair(settings=CALM)
    router = await cluster.router(**shared)
    chain = Chain(cluster)
    response, first = await chain.ask(router, TEXT)
    name = conversation(first)
    for key in redis.client.scan_iter(f"{shared['state_prefix']}:*:response"):
        for junk in (b"junk", b"{}", b'{"conversation":"a\\r\\nb","input":[],"response":{}}', b"[" * 10_000):
            redis.client.set(key, junk)
            answer = await cluster.get(router, f"/v1/responses/{response}")
            assert answer.status in (200, 404), answer.raw  # the other key says which is the newest
    answer = await cluster.get(router, f"/v1/responses/{response}")
    assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    body = {"input": TEXT, "previous_response_id": response}
    assert (await cluster.post(router, RESPONSES, body)).status == 404
    for field in ("location", "at", "meta", "created"):
        chat = cluster.chat(router, field)
        await chat.say(f"{field} {TEXT}")
        await cluster.held(chat)
        for key in redis.client.scan_iter(f"{shared['state_prefix']}:*:conversation"):
            redis.client.hset(key, field, b"junk")
        assert (await cluster.get(router, "/v1/conversations")).status == 200
        assert (await chat.say()).reuse.outcome == "hit"
        assert (await cluster.conversation(router, field))["requests"] == 1
        await cluster.held(chat)
        assert (await chat.say()).reuse.outcome == "hit"
    assert await cluster.metric(router, "state_junk_total") > 0
    await cluster.delete(router, f"/v1/conversations/{name}")


# -- chains of responses


class Chain:
    """Responses that continue each other; every answer is compared with the right one."""

    def __init__(self, cluster: Cluster, key: str = "") -> None:
        self.cluster = cluster
        self.key = key
        self.histories: dict[str, list[dict[str, Any]]] = {}

    async def ask(self, router: Router, text: str, previous: str | None = None) -> tuple[str, Answer]:
        """One more, streamed: its id, and the answer."""
        body: dict[str, Any] = {"input": text, "stream": True}
        if previous is not None:
            body["previous_response_id"] = previous
        answer = await self.cluster.post(router, RESPONSES, body, key=self.key)
        assert answer.status == 200, answer.raw
        items = [*self.histories.get(previous or "", ()), user(text)]
        right = expected({"input": items}, RESPONSES).text
        response = answer.events[-1]["response"]
        assert response["output"][0]["content"][0]["text"] == right
        self.histories[response["id"]] = [*items, {"role": "assistant", "content": right}]
        return response["id"], answer


def conversation(answer: Answer) -> str:
    return answer.headers["x-carryback-conversation"]


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_chain_of_responses_is_one_conversation(
    cluster: Cluster, shared: dict[str, Any], is_shared: bool
) -> None:
    # A24
    await cluster.pair(settings=CALM)
    settings = {**(shared if is_shared else {}), "api_keys": KEYS}
    one, two = await replicas(cluster, settings) if is_shared else [await cluster.router(**settings)] * 2
    chain = Chain(cluster, ACME)
    r1, first = await chain.ask(one, TEXT)
    r2, second = await chain.ask(two, TEXT, r1)
    r3, third = await chain.ask(one, TEXT, r2)
    assert conversation(first) == conversation(second) == conversation(third)
    assert [each.reuse.outcome for each in (first, second, third)] == ["miss", "hit", "hit"]
    # A second continuation is a fork, at whichever router, and the first one is as it was.
    fork, forked = await chain.ask(two, f"Or rather. {TEXT}", r1)
    assert conversation(forked) != conversation(first)
    view = await cluster.conversation(one, conversation(forked), key=ACME)
    assert view["parent"] == conversation(first)
    _, on_fork = await chain.ask(one, TEXT, fork)
    assert (conversation(on_fork), on_fork.reuse.outcome) == (conversation(forked), "hit")
    _, fourth = await chain.ask(two, TEXT, r3)
    assert (conversation(fourth), fourth.reuse.outcome) == (conversation(first), "hit")
    # Made up, or another tenant's: one cannot tell which.
    errors = []
    for router in (one, two):
        for key, previous in ((ACME, "resp_made_up"), (GUESTS, r2)):
            body = {"input": "Hi", "previous_response_id": previous}
            answer = await cluster.post(router, RESPONSES, body, key=key)
            assert answer.status == 404
            assert answer.error["code"] == "response_not_found"
            errors.append(answer.raw.replace(previous.encode(), b""))
            assert (await cluster.get(router, f"/v1/responses/{previous}", key=key)).status == 404
    assert len(set(errors)) == 1
    kept = (await cluster.get(two, f"/v1/responses/{r1}", key=ACME)).json
    assert (kept["id"], kept["status"]) == (r1, "completed")


async def test_a_chain_outlives_the_router_that_began_it(cluster: Cluster, shared: dict[str, Any]) -> None:
    await cluster.pair(settings=CALM)
    one = await cluster.router(**shared)
    chain = Chain(cluster)
    r1, first = await chain.ask(one, TEXT)
    await cluster.stop(one)
    two = await cluster.router(**shared)
    _, second = await chain.ask(two, TEXT, r1)
    assert (conversation(second), second.reuse.outcome) == (conversation(first), "hit")


@pytest.mark.usefixtures("within_a_minute")
async def test_rates_are_counted_over_all_replicas(
    cluster: Cluster, shared: dict[str, Any], tmp_path: Any
) -> None:
    await cluster.pair(settings=CALM)
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: [{{name: acme, keys: [{ACME}], requests_per_minute: 4}}]")
    routers = await replicas(cluster, {**shared, "tenants_file": file})
    body = {"messages": [user("Hi")]}
    statuses = [(await cluster.post(routers[n % 2], CHAT, body, key=ACME)).status for n in range(6)]
    assert statuses == [200, 200, 200, 200, 429, 429]
