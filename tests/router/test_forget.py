"""Engines that are told to forget, and engines that are paused."""

from __future__ import annotations

import asyncio

import pytest
from carryback_server.cli import app
from cluster import Cluster, eventually
from service import until
from stub_engine import StubEngine
from typer.testing import CliRunner


def name(engine: StubEngine) -> str:
    return engine.url.removeprefix("http://")


@pytest.mark.parametrize("how", ["http", "command", "all"])
async def test_an_engine_that_forgets_has_nothing_and_the_next_turn_computes(
    cluster: Cluster, how: str
) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router)
    await chat.say()
    await cluster.held(chat)
    if how == "http":
        answer = await cluster.admin(router, "POST", f"/admin/engines/{name(decode)}/forget")
        assert (answer.status, answer.json["pins"]) == (200, 1)
    else:
        which = ["--all"] if how == "all" else [name(decode)]
        command = ["forget", *which, "--url", router.admin_url]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.output
        assert f"{name(decode)}: told; 1 pins" in " ".join(result.output.split())
    await until(lambda: decode.pinned == 0)
    again = await chat.say()
    assert (again.reuse.outcome, again.reuse.reason) == ("miss", "overwritten")
    assert (await chat.say()).reuse.outcome == "hit"


async def test_all_routers_hear_that_an_engine_forgot(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    one, other = await cluster.router(), await cluster.router()
    chat = cluster.chat(one)
    await chat.say()
    await cluster.held(chat)
    await cluster.admin(other, "POST", f"/admin/engines/{name(decode)}/forget")

    async def has_heard() -> bool:
        return await cluster.metric(one, "held_blocks") == 0

    await eventually(has_heard)
    assert decode.pinned == 0
    again = await chat.say()
    assert again.reuse.reason == "overwritten"


async def test_an_engine_that_cannot_be_told_is_an_error(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    assert (await cluster.admin(router, "POST", "/admin/engines/nobody/forget")).status == 404
    await decode.kill()
    answer = await cluster.admin(router, "POST", f"/admin/engines/{name(decode)}/forget")
    assert (answer.status, answer.json["error"]["code"]) == (502, "engine_failed")


async def test_nothing_is_placed_on_a_paused_engine_while_another_works(cluster: Cluster) -> None:
    _, one = await cluster.pair()
    two = await cluster.engine("decode")
    router = await cluster.router()
    for rank in one.ranks:
        rank.publisher.is_paused = True

    async def state() -> str:
        listed = (await cluster.admin(router, "GET", "/admin/engines")).json["data"]
        return str(next(each["state"] for each in listed if each["name"] == name(one)))

    async def is_seen() -> bool:
        return await state() == "paused"

    await eventually(is_seen)
    for number in range(6):
        assert (await cluster.chat(router, f"chat-{number}").say()).status == 200
    assert (len(one.requests), len(two.requests)) == (0, 6)
