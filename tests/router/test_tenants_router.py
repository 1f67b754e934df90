"""Tenants at the whole router: whose request it is, what they may do, and that they never meet."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from carryback_server.tenants import hash_key
from cluster import Cluster, eventually
from router_process import RouterProcess
from service import TEXT, Answer, until, user
from stub_engine import Settings
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES, block_hashes, prompts_of

PATIENT = Settings(grace_s=10_000)
ACME, GUESTS = "sk-acme-0123456789-0123456789", "sk-guests-0123456789-012345678"
HI = {"messages": [user("Hi")], "max_tokens": 4}


def tenants_file(folder: Path, **more: Any) -> Path:
    """Two tenants; `acme={...}` and `guests={...}` are further fields of theirs."""
    entries = [
        {"name": name, "keys": [hash_key(key)], **more.get(name, {})}
        for name, key in (("acme", ACME), ("guests", GUESTS))
    ]
    file = folder / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": entries}))
    return file


# -- keys


async def test_a_key_is_a_tenant_and_anything_else_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    prefill, decode = await cluster.pair()
    third = "sk-third-0123456789-0123456789"
    router = await cluster.router(
        tenants_file=tenants_file(tmp_path), api_keys=[f"third={third}", f"acme={third}2"]
    )
    for headers in (
        {"Authorization": f"Bearer {ACME}"},
        {"x-api-key": GUESTS},
        {"Authorization": f"bearer {third}"},
    ):
        assert (await cluster.post(router, CHAT, HI, headers=headers)).status == 200
    seen = [
        await cluster.metric(router, "tenant_requests_total", tenant=each)
        for each in ("acme", "guests", "third")
    ]
    assert seen == [1, 1, 1]
    prefill.received.clear()
    decode.received.clear()
    refused: list[dict[str, str]] = [
        {}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {ACME}x"}, {"x-api-key": ACME[:-1]},
        {"Authorization": f"Basic {ACME}"}, {"Authorization": ACME}, {"Authorization": f"Bearer {hash_key(ACME)}"},
    ]  # fmt: skip
    for headers in refused:
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize", "/v1/embeddings"):
            answer = await cluster.post(router, path, HI, headers=headers)
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            if path == MESSAGES:
                assert answer.json["type"] == "error"
                assert answer.error["type"] == "authentication_error"
            else:
                assert answer.error["code"] == "invalid_api_key"
                assert set(answer.error) == {"message", "type", "param", "code"}
        for path in ("/v1/models", "/v1/conversations", "/v1/conversations/chat-1", "/v1/responses/r-1"):
            assert (await cluster.get(router, path, headers=headers)).status == 401
        assert (await cluster.delete(router, "/v1/conversations/chat-1", headers=headers)).status == 401
    # What says nothing of anybody needs none.
    assert (await cluster.get(router, "/health")).status == 200
    assert prefill.received == decode.received == []


async def test_those_without_a_key_are_one_tenant_if_one_is_declared(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.pair()
    router = await cluster.router(tenants_file=tenants_file(tmp_path, guests={"anonymous": True}))
    nobody, guest, acme = (cluster.chat(router, key=key) for key in ("", GUESTS, ACME))
    await nobody.say()
    # The same tenant, with a key and without; and never acme.
    assert (await cluster.conversation(router, key=GUESTS))["tenant"] == "guests"
    assert await cluster.conversation(router, key=ACME) is None
    guest.messages = list(nobody.messages)
    assert (await guest.say()).reuse.outcome == "hit"
    acme.messages = list(guest.messages)
    assert (await acme.say()).reuse.reason == "new"
    # A key that nobody has is not nobody's.
    assert (await cluster.post(router, CHAT, HI, key="sk-unknown")).status == 401


async def test_a_key_that_is_taken_away_is_refused_after_a_reload(cluster: Cluster, tmp_path: Path) -> None:
    _, decode = await cluster.pair()
    file = tenants_file(tmp_path)
    router = await cluster.router(tenants_file=file)
    chat = cluster.chat(router, key=ACME)
    await chat.say()
    decode.fault(hop="decode", status_delay_s=0.5)
    running = asyncio.create_task(cluster.post(router, CHAT, HI, key=GUESTS))
    await until(lambda: len(decode.requests) == 2)
    file.write_text(yaml.safe_dump({"tenants": [{"name": "acme", "keys": [hash_key(ACME)]}]}))
    assert (await cluster.admin(router, "POST", "/admin/reload")).status == 200
    assert (await cluster.post(router, CHAT, HI, key=GUESTS)).status == 401
    assert (await running).status == 200
    assert (await chat.say()).reuse.outcome == "hit"
    file.write_text("tenants: []")
    assert (await cluster.admin(router, "POST", "/admin/reload")).status == 400
    assert (await cluster.post(router, CHAT, HI, key=ACME)).status == 200


# -- one id, two tenants


async def test_one_conversation_id_of_two_tenants_is_two_conversations(
    cluster: Cluster, tmp_path: Path
) -> None:
    # A23
    _, decode = await cluster.pair(settings=PATIENT)
    router = await cluster.router(tenants_file=tenants_file(tmp_path))
    one, two = cluster.chat(router, key=ACME), cluster.chat(router, key=GUESTS)
    for turn in range(3):
        for chat in (one, two):
            reuse = (await chat.say(f"{chat.key} {TEXT}", stream=True)).reuse
            assert reuse.outcome == ("hit" if turn else "miss")
    listed = (await cluster.get(router, "/v1/conversations", key=GUESTS)).json["data"]
    assert [(each["id"], each["tenant"], each["requests"]) for each in listed] == [("chat-1", "guests", 3)]
    everyone = (await cluster.admin(router, "GET", "/admin/conversations")).json["data"]
    assert sorted(each["tenant"] for each in everyone) == ["acme", "guests"]
    only = (await cluster.admin(router, "GET", "/admin/conversations?tenant=acme")).json["data"]
    assert [each["tenant"] for each in only] == ["acme"]
    before = decode.pinned
    await cluster.held(one)
    assert (await cluster.delete(router, "/v1/conversations/chat-1", key=GUESTS)).status == 200
    await until(lambda: decode.pinned < before)
    assert await cluster.conversation(router, key=GUESTS) is None
    assert (await cluster.delete(router, "/v1/conversations/chat-1", key=GUESTS)).status == 404
    assert (await one.say()).reuse.outcome == "hit"
    await two.say()
    assert (await cluster.conversation(router, key=GUESTS))["requests"] == 1
    # An operator may delete any of them.
    await cluster.admin(router, "DELETE", "/admin/conversations/guests/chat-1")
    await cluster.admin(router, "DELETE", "/admin/conversations/acme/chat-1")
    await until(lambda: decode.in_use == 0)


async def test_each_turn_is_held_for_its_whole_time(cluster: Cluster) -> None:
    # A23: the time does not run from the first turn on.
    await cluster.pair()
    chat = cluster.chat(await cluster.router(hold_s=30.0))
    await chat.say()
    for _ in range(4):
        await asyncio.sleep(0.3)
        said = time.monotonic()
        assert (await chat.say()).reuse.outcome == "hit"
        left = (await cluster.held(chat))["pinned_s"]
        assert 0 < left <= 30
        assert time.monotonic() + left >= said + 30 - 0.05  # it is rounded


async def test_equal_histories_of_two_tenants_are_never_one(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.pair()
    router = await cluster.router(tenants_file=tenants_file(tmp_path))
    mine, other = cluster.chat(router, None, key=ACME), cluster.chat(router, None, key=GUESTS)
    first = await mine.say()
    other.messages = list(mine.messages)
    answer = await other.say()
    assert answer.reuse.reason == "new"
    name = "x-carryback-conversation"
    assert answer.headers[name] != first.headers[name]
    # Nor by the other's ids.
    secret = cluster.chat(router, "secret", key=ACME)
    await secret.say(f"Nobody else said so. {TEXT}")
    stolen = {"X-Conversation-ID": "secret", "X-Conversation-Parent": "secret"}
    body = {"messages": [*secret.messages, user("And then?")]}
    assert (await cluster.post(router, CHAT, body, key=GUESTS, headers=stolen)).reuse.found == 0
    assert (await mine.say()).reuse.outcome == "hit"


# -- cache salts


async def test_no_two_tenants_share_blocks_of_an_engine_s_prefix_cache(
    cluster: Cluster, tmp_path: Path
) -> None:
    engines = await cluster.pair()
    router = await cluster.router(tenants_file=tenants_file(tmp_path))
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [user(TEXT)]}), (COMPLETIONS, {"prompt": TEXT}), (RESPONSES, {"input": TEXT}),
        (MESSAGES, {"messages": [user(TEXT)], "max_tokens": 20}),
    ]  # fmt: skip
    for path, body in bodies:
        salts = []
        for key, more in (
            (ACME, {}),
            (GUESTS, {}),
            (GUESTS, {"cache_salt": "mine"}),
            (ACME, {"cache_salt": "mine"}),
        ):
            for engine in engines:
                engine.received.clear()
            assert (await cluster.post(router, path, {**body, **more}, key=key)).status == 200
            # The same on both hops, or the decode engine could not verify what it reads.
            [salt] = {each.body["cache_salt"] for engine in engines for each in engine.requests if each.body}
            salts.append(salt)
            tokens = prompts_of(path, body)[0].tokens
            assert block_hashes(tokens, salt) != block_hashes(tokens)
        assert len(set(salts)) == 4, path
        assert not any(each in salt for salt in salts for each in ("acme", "guests", "mine", ACME))


async def test_a_tenant_s_salt_does_not_change(cluster: Cluster, tmp_path: Path) -> None:
    _, decode = await cluster.pair()
    salts = set()
    for _ in range(2):
        router = await cluster.router(tenants_file=tenants_file(tmp_path))
        await cluster.post(router, CHAT, HI, key=ACME)
        salts.add((decode.requests[-1].body or {})["cache_salt"])
        await cluster.stop(router)
    assert len(salts) == 1


async def test_alone_nobody_needs_a_salt(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    await cluster.post(router, CHAT, HI)
    await cluster.post(router, CHAT, {**HI, "cache_salt": "mine"})
    assert [(each.body or {}).get("cache_salt") for each in decode.requests] == [None, "mine"]


# -- limits


async def test_a_tenant_sees_and_uses_its_models_only(cluster: Cluster, tmp_path: Path) -> None:
    prefill, decode = await cluster.pair(model="large")
    more = {"acme": {"models": ["large"]}, "guests": {"models": ["small"]}}
    router = await cluster.router(tenants_file=tenants_file(tmp_path, **more))

    async def ask(path: str, key: str, **fields: Any) -> Answer:
        return await cluster.post(router, path, {**HI, "input": "Hi", "prompt": "Hi", **fields}, key=key)

    models = [(await cluster.get(router, "/v1/models", key=key)).json["data"] for key in (ACME, GUESTS)]
    assert [[each["id"] for each in listed] for listed in models] == [["large"], []]
    prefill.received.clear()
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize"):
        assert (await ask(path, ACME, model="large")).status == 200
        missing = await ask(path, GUESTS, model="large")
        unknown = await ask(path, ACME, model="no such model")
        assert missing.status == unknown.status == 404
        # One cannot tell what others have.
        assert missing.raw.replace(b"large", b"no such model") == unknown.raw
        assert (await ask(path, GUESTS)).status == 400
    assert {str((each.body or {}).get("model")) for each in decode.requests} == {"large"}
    # One that it may use and that no engine has: the engine's own answer.
    assert (await ask(CHAT, GUESTS, model="small")).status == 404


@pytest.mark.usefixtures("within_a_minute")
async def test_requests_in_flight_and_per_minute_are_limited_for_each(
    cluster: Cluster, tmp_path: Path
) -> None:
    _, decode = await cluster.pair()
    more = {"acme": {"max_in_flight": 2}, "guests": {"requests_per_minute": 3}}
    router = await cluster.router(tenants_file=tenants_file(tmp_path, **more))
    decode.fault(times=2, hop="decode", status_delay_s=1000)
    running = [asyncio.create_task(cluster.post(router, CHAT, HI, key=ACME)) for _ in range(2)]
    await until(lambda: len(decode.requests) == 2)
    for path in (CHAT, "/tokenize"):
        answer = await cluster.post(router, path, HI, key=ACME)
        assert (answer.status, answer.error["code"]) == (429, "too_many_requests")
        assert answer.headers["retry-after"] == "1"
    assert (await cluster.post(router, MESSAGES, HI, key=ACME)).error["type"] == "rate_limit_error"
    # The other one does not feel it.
    statuses = [(await cluster.post(router, CHAT, HI, key=GUESTS)).status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    late = await cluster.post(router, CHAT, HI, key=GUESTS)
    assert late.error["code"] == "rate_limit_exceeded"
    assert 0 < int(late.headers["retry-after"]) <= 120
    # A client that leaves makes room.
    for each in running:
        each.cancel()

    async def has_room() -> bool:
        return (await cluster.post(router, CHAT, HI, key=ACME)).status == 200

    await eventually(has_room)
    rejected = await cluster.metric(router, "tenant_rejected_requests_total", tenant="guests")
    assert rejected == 2


async def test_a_tenant_s_share_of_what_is_held_is_its_own_matter(cluster: Cluster, tmp_path: Path) -> None:
    _, decode = await cluster.pair(capacity=1000, settings=PATIENT)
    router = await cluster.router(
        tenants_file=tenants_file(tmp_path, guests={"pin_share": 0.25}), pin_budget=0.2
    )
    acme = [cluster.chat(router, f"acme-{number}", key=ACME) for number in range(5)]
    for chat in acme:
        await chat.say()
    held = decode.pinned
    guests = [cluster.chat(router, f"guest-{number}", key=GUESTS) for number in range(12)]
    for chat in guests:
        await chat.say()
    # 200 blocks may be held, and a quarter of them for guests.
    await until(lambda: decode.pinned - held <= 50)
    assert await cluster.metric(router, "tenant_held_blocks", tenant="guests") <= 50
    assert await cluster.metric(router, "tenant_held_blocks", tenant="acme") == held
    assert (await guests[-1].say()).reuse.outcome == "hit"
    # What is not pinned any more is there until it is overwritten.
    assert (await guests[0].say()).reuse.outcome == "hit"
    for chat in acme:
        assert (await chat.say()).reuse.outcome == "hit"


# -- ports and secrets


async def test_what_is_for_operators_is_not_on_the_clients_port(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    await cluster.chat(router).say()
    name = decode.url.removeprefix("http://")
    operators = [
        ("GET", "/metrics"), ("GET", "/admin/engines"), ("POST", "/admin/engines"), ("POST", "/admin/reload"),
        ("POST", f"/admin/engines/{name}/drain"), ("GET", "/admin/conversations"),
        ("DELETE", "/admin/conversations/default/chat-1"),
    ]  # fmt: skip
    for method, path in operators:
        answer = await cluster.request(method, router.url + path)
        assert (answer.status, answer.error["code"]) == (404, "unknown_endpoint"), path
    clients = [
        ("POST", CHAT), ("POST", RESPONSES), ("POST", "/tokenize"), ("GET", "/v1/models"),
        ("GET", "/v1/conversations"), ("DELETE", "/v1/conversations/chat-1"),
    ]  # fmt: skip
    for method, path in clients:
        assert (await cluster.admin(router, method, path)).status == 404, path
    assert await cluster.conversation(router)
    for url in (router.url, router.admin_url):
        assert (await cluster.request("GET", f"{url}/health")).status == 200


async def test_no_secret_is_logged(cluster: Cluster, tmp_path: Path) -> None:
    engine_key, own_key = "the-engines-secret-key-1", "the-engines-secret-key-2"
    prefill = await cluster.engine("prefill", api_key=engine_key)
    decode = await cluster.engine("decode", api_key=own_key)
    third = "sk-third-0123456789-0123456789"
    engines = [
        {"role": each.role, "url": each.url, "events": each.events} for each in (prefill, decode)
    ]  # fmt: skip
    engines[1]["api_key"] = own_key
    settings = {"engines": engines, "tenants_file": str(tenants_file(tmp_path)), "log_format": "json"}
    # All that any library logs, at the level at which it says the most.
    (tmp_path / "sitecustomize.py").write_text(
        "import logging\n"
        "real = logging.basicConfig\n"
        "def loud(**options):\n"
        "    real(**options)\n"
        "    logging.getLogger().setLevel(1)\n"
        "    logging.debug('as loud as can be')\n"
        "logging.basicConfig = loud\n"
    )
    environ = {
        "CARRYBACK_ENGINE_API_KEY": engine_key, "CARRYBACK_API_KEYS": f"third={third}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    said = "what a client said in confidence"
    async with RouterProcess(tmp_path, settings, environ=environ) as router:
        for key in (ACME, third, f"{ACME}-wrong"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                body = {"messages": [user(said)], "stream": True}
                await cluster.request("POST", router.url + CHAT, body, headers=headers)
                await cluster.request("GET", f"{router.url}/v1/models", headers=headers)
        # What is no HTTP, with a key in it.
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nAuthorization : Bearer {ACME}\r\n\r\n".encode())
        await reader.read()
        writer.close()
        bad = {
            "engines": [
                {
                    "role": "decode",
                    "url": f"http://u:{own_key}@h:1",
                    "events": "tcp://h:2",
                    "api_key": own_key,
                }
            ]
        }
        answer = await cluster.request("POST", f"{router.admin_url}/admin/engines", bad)
        assert own_key not in answer.raw.decode()
        await decode.kill()
        await cluster.request("POST", router.url + CHAT, HI, key=ACME)
    log = router.err + router.out
    assert "as loud as can be" in log
    lines = [json.loads(line) for line in router.err.splitlines() if line.startswith('{"')]
    assert {"acme", "third"} <= {line.get("tenant") for line in lines}
    for secret in (ACME, third, engine_key, own_key, "confidence", hash_key(ACME)):
        assert not re.search(re.escape(secret), log), secret


# -- what is asked for beside generations


async def test_all_that_a_tenant_asks_for_counts_in_its_limits(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.pair()
    paths = ("/v1/conversations", "/v1/conversations/chat-1", "/v1/responses/r-1", "/v1/models")
    for path in (*paths, "DELETE"):
        router = await cluster.router(tenants_file=tenants_file(tmp_path, acme={"requests_per_minute": 3}))

        async def ask(key: str, path: str = path, router: Any = router) -> Answer:
            if path == "DELETE":
                return await cluster.delete(router, "/v1/conversations/chat-1", key=key)
            return await cluster.get(router, path, key=key)

        answers = [await ask(ACME) for _ in range(5)]
        assert [each.status == 429 for each in answers] == [False] * 3 + [True] * 2, path
        assert int(answers[-1].headers["retry-after"]) > 0
        assert (await cluster.post(router, CHAT, HI, key=ACME)).status == 429
        assert (await ask(GUESTS)).status != 429


# -- what one's failures cost the others


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"drop": "before_status"}, {"hop": "decode", "drop": "before_first_byte"}]
)
async def test_requests_that_every_engine_fails_eject_none(
    cluster: Cluster, tmp_path: Path, fault: dict[str, Any]
) -> None:
    engines = [await cluster.engine(role) for role in ("prefill", "prefill", "decode", "decode")]
    router = await cluster.router(tenants_file=tenants_file(tmp_path), ejection_failures=3)
    chat = cluster.chat(router, key=GUESTS)
    await chat.say()
    for engine in engines:
        engine.fault(times=None, contains="poison", **fault)
    for number in range(12):
        body = {"messages": [user(f"poison {number}")], "stream": bool(number % 2)}
        assert (await cluster.post(router, CHAT, body, key=ACME)).status >= 500
    # The router has asked those in doubt itself.
    pool = router.pipeline.pool
    await until(lambda: not any(each.ejection.is_due for each in pool.engines))
    assert [(each.state, each.ejection.count) for each in pool.engines] == [("up", 0)] * 4
    assert (await chat.say()).reuse.outcome == "hit"


async def test_an_engine_that_fails_what_another_does_is_ejected_whatever_else_fails(
    cluster: Cluster, tmp_path: Path
) -> None:
    bad, good = await cluster.engine("decode"), await cluster.engine("decode")
    await cluster.engine("prefill")
    router = await cluster.router(tenants_file=tenants_file(tmp_path), ejection_failures=3, ejection_s=60.0)
    for engine in (bad, good):
        engine.fault(times=None, contains="poison", hop="decode", status=500)
    bad.fault(times=None, hop="decode", status=500)
    engine = next(each for each in router.pipeline.pool.engines if each.site.url == bad.url)

    async def is_out() -> bool:
        # A request that is refused does not make up for those that failed.
        for text in ("poison", TEXT):
            await cluster.post(router, CHAT, {"messages": [user(text)]}, key=ACME)
        return engine.state == "ejected"

    await eventually(is_out)
    assert engine.ejection.count == 1


async def test_an_answer_that_is_not_streamed_may_take_its_time(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router(first_byte_timeout_s=0.2, ejection_failures=1)
    decode.fault(times=None, hop="decode", status_delay_s=1.0)
    assert (await cluster.chat(router).say(stream=False)).status == 200
    assert (await cluster.post(router, CHAT, {**HI, "stream": True})).status == 504
    router = await cluster.router(answer_timeout_s=0.2)
    assert (await cluster.post(router, CHAT, HI)).status == 504
