"""Engines that come, go, drain and have names of many addresses: what clients and operators see of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Chat, Cluster, eventually
from router_process import RouterProcess
from service import TEXT, until, user
from stub_engine import Settings, StubEngine
from stub_engine.prompts import CHAT
from stub_engine.rank import Rank

PATIENT = Settings(grace_s=10_000)


def as_json(*engines: StubEngine, **fields: Any) -> dict[str, Any]:
    """The body of `POST /admin/engines`, and the engines of a configuration file."""
    return {
        "engines": [{"role": each.role, "url": each.url, "events": each.events, **fields} for each in engines]
    }


def name(engine: StubEngine) -> str:
    return engine.url.removeprefix("http://")


async def states(cluster: Cluster, router: Any) -> dict[str, str]:
    """What `GET /admin/engines` says of each."""
    listed = (await cluster.request("GET", f"{router.admin_url}/admin/engines")).json["data"]
    return {each["name"]: each["state"] for each in listed}


async def has_less(rank: Rank, count: int) -> bool:
    """Less is held than for so many requests."""
    return len(rank.held) < count


async def holder(cluster: Cluster, chat: Chat) -> str:
    """The engine that holds a chat's KV."""
    return str((await cluster.held(chat))["engine"])


# -- placement


async def test_conversations_stay_where_their_kv_is(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.engine("decode")
    await cluster.engine("prefill")
    router = await cluster.router()
    chats = [cluster.chat(router, f"chat-{number}", stream=True) for number in range(8)]
    await asyncio.gather(*(chat.say(f"{chat.id}. {TEXT}") for chat in chats))
    first = [await holder(cluster, chat) for chat in chats]
    assert len(set(first)) == 2
    for _ in range(2):
        answers = await asyncio.gather(*(chat.say() for chat in chats))
        assert {each.reuse.outcome for each in answers} == {"hit"}
        assert [await holder(cluster, chat) for chat in chats] == first


async def test_an_overloaded_holder_is_read_from_and_not_placed_on(cluster: Cluster) -> None:
    _, one = await cluster.pair()
    two = await cluster.engine("decode")
    router = await cluster.router(overload_factor=1.0, overload_slack_tokens=0)
    chat = cluster.chat(router)
    await chat.say()
    busy, idle = (one, two) if one.pinned else (two, one)
    busy.fault(contains="Keep busy", hop="decode", status_delay_s=1000)
    # The other one takes it first, if it can.
    await cluster.admin(router, "POST", f"/admin/engines/{name(idle)}/drain")
    load = asyncio.create_task(cluster.post(router, CHAT, {"messages": [user(f"Keep busy. {TEXT}")]}))
    await until(lambda: any("Keep busy" in str(each.body) for each in busy.requests))
    await cluster.admin(router, "POST", f"/admin/engines/{name(idle)}/undrain")
    assert (await chat.say()).reuse.outcome == "hit"
    assert await holder(cluster, chat) == name(idle)
    assert busy.pinned == 0
    load.cancel()


async def test_the_rank_that_holds_the_kv_is_addressed(cluster: Cluster) -> None:
    prefill = await cluster.engine("prefill")
    decode = await cluster.engine("decode", ranks=2, settings=PATIENT)
    router = await cluster.router()
    assert set(await states(cluster, router)) == {name(prefill), f"{name(decode)}#0", f"{name(decode)}#1"}
    chats = [cluster.chat(router, f"chat-{number}") for number in range(12)]
    for chat in chats:
        await chat.say(f"{chat.id}. {TEXT}")
    assert all(rank.pinned for rank in decode.ranks)
    for chat in chats:
        rank = await holder(cluster, chat)
        decode.received.clear()
        assert (await chat.say()).reuse.outcome == "hit"
        assert await holder(cluster, chat) == rank
        assert [each.headers["x-data-parallel-rank"] for each in decode.requests] == [rank[-1]]
    # What one rank holds, only that rank can let go of.
    for chat in chats:
        number = int((await holder(cluster, chat))[-1])
        mine, other = decode.ranks[number], decode.ranks[1 - number]
        mine_held, other_held = mine.held, other.held
        assert (await cluster.delete(router, f"/v1/conversations/{chat.id}")).status == 200
        await eventually(partial(has_less, mine, len(mine_held)))
        assert other.held == other_held
    assert decode.in_use == 0


# -- an operator changes them


async def test_engines_that_are_posted_take_the_place_of_those_there_are(cluster: Cluster) -> None:
    prefill, old = await cluster.pair(settings=PATIENT)
    router = await cluster.router()
    chat = cluster.chat(router)
    await chat.say()
    new = await cluster.engine("decode", settings=PATIENT)
    answer = await cluster.admin(router, "POST", "/admin/engines", as_json(prefill, new))
    assert (answer.status, answer.json["count"]) == (202, 2)
    await until(lambda: [each.name for each in router.pipeline.pool.of("decode")] == [name(new)])
    await cluster.hears(router, new)
    # What the old one holds is not lost: it stays until that was read.
    assert (await states(cluster, router))[name(old)] == "draining"

    async def is_shown() -> bool:
        return await cluster.metric(router, "engine_draining", engine=name(old)) == 1

    await eventually(is_shown)
    assert (await chat.say()).reuse.outcome == "hit"
    assert await holder(cluster, chat) == name(new)
    await until(lambda: old.in_use == 0)

    async def is_forgotten() -> bool:
        return name(old) not in await states(cluster, router)

    await eventually(is_forgotten)
    assert (await chat.say()).reuse.outcome == "hit"
    assert await cluster.metric(router, "engine_up", role="decode") == 1


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"no JSON", "engines"),
        ({"engine": []}, "engines"),
        ({"engines": []}, "no decode engine"),
        ({"engines": [{"role": "decode", "events": "tcp://h:2"}]}, "engines.0.url"),
        ({"engines": [{"role": "decode", "url": "http://[::1]"}]}, "engines.0"),
        ({"engines": [{"role": "both", "url": "http://h:1", "events": "tcp://h:2"}]}, "engines.0.role"),
        ({"engines": [{"role": "decode", "url": "http://::1:8200", "events": "tcp://h:2"}]}, "http://[::1]:8200"),
        ({"engines": [{"role": "decode", "url": "http://h:1", "events": "tcp://h:2", "port": 1}]}, "engines.0.port"),
    ],
)  # fmt: skip
async def test_engines_that_cannot_be_change_nothing(cluster: Cluster, body: Any, where: str) -> None:
    await cluster.pair()
    router = await cluster.router()
    before = await states(cluster, router)
    answer = await cluster.admin(router, "POST", "/admin/engines", body)
    assert answer.status == 400
    assert where in answer.error["message"]
    assert await states(cluster, router) == before
    await cluster.chat(router).say()


async def test_another_sites_page_in_an_operators_browser_changes_nothing(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    before = await states(cluster, router)
    async with aiohttp.ClientSession(router.admin_url) as browser:
        for path in ("/admin/engines/decode/drain", "/admin/engines", "/admin/reload"):
            answer = await browser.post(path, headers={"Origin": "http://evil.example"})
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "foreign_origin")
        assert await states(cluster, router) == before
        assert (await browser.post("/admin/reload", headers={"Origin": router.admin_url})).status == 200


async def test_a_drained_engine_gets_nothing_new_and_is_read_from(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.engine("decode")
    router = await cluster.router()
    chat = cluster.chat(router)
    await chat.say()
    drained = await holder(cluster, chat)
    answer = await cluster.admin(router, "POST", f"/admin/engines/{drained}/drain")
    assert answer.json == {"name": drained, "role": "decode", "state": "draining"}
    assert (await states(cluster, router))[drained] == "draining"
    assert (await chat.say()).reuse.outcome == "hit"
    others = [cluster.chat(router, f"other-{number}") for number in range(4)]
    for other in [chat, *others]:
        if other is not chat:
            await other.say()
        assert await holder(cluster, other) != drained
    await cluster.admin(router, "POST", f"/admin/engines/{drained}/undrain")
    assert (await states(cluster, router))[drained] == "up"
    assert (await cluster.admin(router, "POST", "/admin/engines/nobody/drain")).status == 404


async def test_a_router_whose_last_engine_is_drained_says_so(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    await cluster.admin(router, "POST", f"/admin/engines/{name(decode)}/drain")
    ready = await cluster.get(router, "/ready")
    assert (ready.status, ready.json["status"]) == (503, "no decode engine")
    answer = await cluster.post(router, CHAT, {"messages": [user("Hi")]})
    assert (answer.status, answer.error["code"]) == (503, "no_engine")


async def test_a_process_reads_its_file_again_on_sighup(cluster: Cluster, tmp_path: Path) -> None:
    prefill, old = await cluster.pair()
    new = await cluster.engine("decode")
    tenants = tmp_path / "tenants.yaml"
    keys = [f"a-key-of-a-tenant-{number}" * 2 for number in range(2)]
    tenants.write_text(f"tenants: [{{name: acme, keys: [{keys[0]}]}}]")
    settings = {**as_json(prefill, old), "tenants_file": str(tenants), "log_format": "text"}
    async with RouterProcess(tmp_path, settings) as router:

        async def status(key: str) -> int:
            body = {"messages": [user("Hi")]}
            return (await cluster.request("POST", router.url + CHAT, body, key=key)).status

        assert [await status(key) for key in keys] == [200, 401]
        tenants.write_text(f"tenants: [{{name: acme, keys: [{keys[1]}]}}]")
        router.write(**as_json(prefill, new))
        router.process.send_signal(signal.SIGHUP)

        async def is_new() -> bool:
            return (await states(cluster, router)).get(name(new)) == "up"

        await eventually(is_new)
        assert [await status(key) for key in keys] == [401, 200]
        assert len(new.requests) == 1
        before = await states(cluster, router)
        # What is wrong changes nothing, and the log says what it is.
        tenants.write_text(f"tenants: [{{name: acme, keys: [{keys[0]}], modles: []}}]")
        router.write(engines=[{"role": "decode", "url": "http://::1:8200", "events": "tcp://h:1"}])
        router.process.send_signal(signal.SIGHUP)
        await until(lambda: "engines are as before" in router.err, router.err)
        assert "http://[::1]:8200" in router.err
        assert "did you mean 'models'?" in router.err
        assert await states(cluster, router) == before
        assert [await status(key) for key in keys] == [401, 200]
        reload = await cluster.request("POST", f"{router.admin_url}/admin/reload")
        assert reload.status == 400
    assert router.process.returncode == 0
    assert not any(key in router.err + router.out for key in keys)


# -- a name of several addresses


async def test_a_name_of_several_addresses_is_several_engines(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, one = await cluster.pair(settings=PATIENT)
    port, events_port = (int(each.rpartition(":")[2]) for each in (one.url, one.events))
    two = await cluster.engine(
        "decode", host="127.0.0.2", port=port, events_port=events_port, settings=PATIENT
    )
    addresses = ["127.0.0.1", "127.0.0.2"]
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> list[Any]:
        if host != "decode.test":  # nobody can add a name to a test machine's name server
            return list(await real(host, port, **options))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    config = {
        "role": "decode",
        "url": f"http://decode.test:{port}",
        "events": f"tcp://decode.test:{events_port}",
    }
    router = await cluster.router(engines=[prefill.config(), {**config, "dns": True}], dns_interval_s=0.05)
    chats = [cluster.chat(router, f"chat-{number}") for number in range(8)]
    for chat in chats:
        await chat.say(f"{chat.id}. {TEXT}")
    assert one.pinned
    assert two.pinned
    for chat in chats:
        assert (await chat.say()).reuse.outcome == "hit"
    addresses.remove("127.0.0.2")
    await until(lambda: len(router.pipeline.pool.of("decode")) == 1)
    for chat in chats:
        # Read from where it is, wherever that is in the name service.
        assert (await chat.say()).reuse.outcome == "hit"
        assert await holder(cluster, chat) == f"127.0.0.1:{port}"
    await until(lambda: two.in_use == 0)


# -- the engines' own keys


async def test_engines_get_their_own_keys(cluster: Cluster) -> None:
    prefill = await cluster.engine("prefill", api_key="the key of most engines")
    decode = await cluster.engine("decode", api_key="the key of this engine")
    own = decode.config().model_dump() | {"api_key": "the key of this engine"}
    router = await cluster.router(engines=[prefill.config(), own], engine_api_key="the key of most engines")
    chat = cluster.chat(router, key="what a client sends")
    await chat.say()
    assert (await chat.say(stream=True)).reuse.outcome == "hit"
    for engine in (prefill, decode):
        assert {each.headers["authorization"] for each in engine.received} == {f"Bearer {engine.api_key}"}
    shown = (await cluster.admin(router, "GET", "/admin/engines")).raw
    assert b"the key of" not in shown


async def test_a_wrong_key_for_an_engine_is_a_clear_error(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.pair(api_key="right")
    caplog.set_level(logging.INFO, "carryback")
    router = await cluster.router(engine_api_key="a wrong secret", probe_interval_s=0.02)
    await until(lambda: len([line for line in caplog.messages if "status 401" in line]) == 2)
    answer = await cluster.post(router, CHAT, {"messages": [user("Hi")]})
    assert (answer.status, answer.error["code"]) == (503, "no_engine")
    assert "a wrong secret" not in caplog.text
