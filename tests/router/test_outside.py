"""What misbehaving engines, strangers on the engines' port, and faults in the background do to a router: nothing."""

from __future__ import annotations

import pytest
from carryback.wire import events
from carryback_server.engines import Engine
from cluster import Cluster, eventually
from msgspec.structs import replace

DEEP = b"\x91" * 100_000


def hostile(event: events.Event) -> tuple[bytes, bytes]:
    """An engine that nests what it says of itself."""
    topic, payload = events.encode(event)
    return topic, payload[:1] + DEEP if isinstance(event, events.Hello) else payload


def faulty(event: events.Event) -> tuple[bytes, bytes]:
    """An engine whose plug-in had three faults."""
    return events.encode(replace(event, faults=3) if isinstance(event, events.Hello) else event)


async def test_nested_events_make_no_router_deaf(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.engine("decode", frames=hostile)
    router = await cluster.router()

    async def refused() -> bool:
        return await cluster.metric(router, "engine_events_refused_total", role="decode") > 2

    await eventually(refused)
    for turn in range(4):
        answer = await cluster.chat(router, f"chat-{turn}").say()
        assert answer.status == 200
    assert await cluster.metric(router, "background_faults_total") == 0


async def test_faults_of_a_plug_in_are_counted(cluster: Cluster) -> None:
    await cluster.engine("prefill")
    decode = await cluster.engine("decode", frames=faulty)
    router = await cluster.router()
    await cluster.hears(router, decode)

    async def counted() -> bool:
        return await cluster.metric(router, "engine_plugin_faults_total", role="decode") == 3

    await eventually(counted)


async def test_keys_of_requests_cannot_be_guessed(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router)
    for _ in range(3):
        await chat.say()
    keys = [each.params["carryback_key"] for each in (*prefill.requests, *decode.requests) if each.params]
    router_ids = {key.partition(".")[0] for key in keys}
    assert len(router_ids) == 1
    assert len(set(keys)) == len(keys)
    assert all(len(key.partition(".")[2]) == 16 for key in keys)


async def test_probes_go_on_after_a_fault(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = iter([RuntimeError("one"), RecursionError("two")])
    show = Engine.show
    is_on = False

    def fails_twice(self: Engine) -> None:
        for error in faults if is_on else ():
            raise error
        show(self)

    monkeypatch.setattr(Engine, "show", fails_twice)
    await cluster.pair()
    router = await cluster.router()
    is_on = True

    async def counted() -> bool:
        return await cluster.metric(router, "background_faults_total", task="probe") == 2

    await eventually(counted)
    assert (await cluster.chat(router).say()).status == 200


async def test_an_engine_whose_name_is_none_is_down(cluster: Cluster) -> None:
    """A label of a name has 63 characters at most; looking up a longer one is no OSError."""
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    engines = [{"role": each.role, "url": each.url, "events": each.events} for each in (prefill, decode)]
    for letter, dns in (("a", True), ("b", False)):
        url = f"http://{letter * 70}.example:8000"
        engines.append({"role": "decode", "url": url, "events": "tcp://127.0.0.1:1", "dns": dns})
        accepted = await cluster.request("POST", f"{router.admin_url}/admin/engines", {"engines": engines})
        assert accepted.status == 202
    assert (await cluster.chat(router).say()).status == 200
