"""The pool of engines, against small servers on real sockets that do what they are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Literal

import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from carryback.wire import curve, events
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.engines import Engine, EngineDown
from carryback_server.metrics import Metrics
from carryback_server.pool import Pool

ROUTER = "cb0123."
BODY = b'{"model": "m", "prompt": "hi"}'


class Server:
    """An engine, as far as the pool sees one.

    Attributes:
        mode: what it does with completions.
        seen: the headers of each completion, and its body.
        told: the commands that came over the link of its events.
    """

    def __init__(self, run: str, models: list[str]) -> None:
        self.run = run
        self.models = models
        self.mode: Literal["ok", "fail", "hang"] = "ok"
        self.is_well = True
        self.seen: list[tuple[dict[str, str], Any]] = []
        self.told: list[events.Command] = []
        self.hellos = 0
        self.seq = 0
        self.pinned = 0
        self.go_on = asyncio.Event()

    async def start(self, host: str = "127.0.0.1", port: int = 0, key: str | None = None) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]
        self.host = f"[{host}]" if ":" in host else host
        self.url = f"http://{self.host}:{self.port}"
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.IPV6, 1)
        if key is not None:
            self._publisher.curve_publickey, self._publisher.curve_secretkey = curve.key_pair(key)
            self._publisher.curve_server = True
        self.events_port = self._publisher.bind_to_random_port(f"tcp://{self.host}")
        self.events = f"tcp://{self.host}:{self.events_port}"
        self._tasks = [asyncio.create_task(self._say_hello()), asyncio.create_task(self._hear())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
        await self._runner.cleanup()

    def config(self, role: Literal["prefill", "decode"] = "decode", **fields: Any) -> EngineConfig:
        return EngineConfig(**{"role": role, "url": self.url, "events": self.events, **fields})

    async def publish(self, event: events.Event) -> None:
        await self._publisher.send_multipart(events.encode(event))

    async def hold(self, key: str, blocks: int) -> None:
        self.seq += 1
        self.pinned += blocks
        await self.publish(events.Held(self.run, self.seq, key, 64, blocks, 60.0, b"", self.pinned))

    async def let_go(self, key: str) -> None:
        self.seq += 1
        self.pinned = 0
        await self.publish(events.Released(self.run, self.seq, key, "expired", 0))

    async def _say_hello(self) -> None:
        while True:
            await self.publish(events.Hello(self.run, self.seq, self.pinned, 1000))
            self.hellos += 1
            await asyncio.sleep(0.02)

    async def _hear(self) -> None:
        while True:
            if (command := events.decode_command(await self._publisher.recv())) is not None:
                self.told.append(command)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_well else 503)

    async def _models(self, request: web.Request) -> web.Response:
        if self.models == ["no JSON"]:
            return web.Response(text="<html>")
        return web.json_response({"data": [{"id": each} for each in self.models]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.seen.append(({k.lower(): v for k, v in request.headers.items()}, await request.json()))
        if self.mode == "hang":
            await self.go_on.wait()
        return web.json_response({"ok": True}, status=500 if self.mode == "fail" else 200)


class Watched:
    """A pool, and what it reported."""

    def __init__(self, engines: list[EngineConfig], **settings: Any) -> None:
        self.metrics = Metrics()
        self.events: list[Any] = []
        self.lost: list[str] = []
        fast = {"probe_interval_s": 0.02, "probe_timeout_s": 5.0, "ejection_s": 0.05, "ejection_failures": 3}
        self.pool = Pool(
            RouterConfig(engines=engines, **{**fast, **settings}),
            self.metrics,
            router_id=ROUTER,
            on_event=lambda engine, event: self.handle(event),
            on_lost=lambda engine: self.lost.append(engine.name),
        )

    def handle(self, event: Any) -> None:
        self.events.append(event)

    def engine(self, server: Server) -> Engine:
        return next(each for each in self.pool.engines if each.site.url == server.url)


class World:
    """Servers and pools that end with the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def server(self, name: str = "run1", **options: Any) -> Server:
        server = Server(name, ["m"])
        await server.start(**options)
        self._stack.push_async_callback(server.stop)
        return server

    async def pool(self, engines: list[EngineConfig], **settings: Any) -> Watched:
        watched = Watched(engines, **settings)
        await watched.pool.start()
        self._stack.push_async_callback(watched.pool.stop)
        return watched


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def complete(engine: Engine, *, timeout_s: float = 20.0, **headers: str) -> int:
    """One request, as the pipeline does it; its status."""
    with engine.busy(10):
        async with engine.within(timeout_s):
            reply = await engine.post("/v1/completions", BODY, request_id="r1", headers=headers)
            await reply.read()
        if reply.status >= 500:
            raise EngineDown(engine, f"status {reply.status}", is_over=True)
    return reply.status


async def fail(engine: Engine, times: int, **options: Any) -> None:
    for _ in range(times):
        with pytest.raises(EngineDown):
            await complete(engine, **options)


# -- what an engine is, and what is sent to it


async def test_an_engine_that_answers_is_up_and_says_what_it_is(world: World) -> None:
    server = await world.server()
    await server.hold(ROUTER + "1", 7)
    watched = await world.pool([server.config()])
    (engine,) = watched.pool.of("decode")
    await until(lambda: engine.capacity)
    assert watched.pool.of("prefill") == []
    assert watched.pool.find(f"127.0.0.1:{server.port}") is engine
    with engine.busy(100) as visit:
        visit.update(40)
        view = engine.view()
    assert view == {
        "role": "decode",
        "name": f"127.0.0.1:{server.port}",
        "url": server.url,
        "state": "up",
        "load_tokens": 40,
        "in_flight": 1,
        "pinned_blocks": 7,
        "capacity_blocks": 1000,
        "models": ["m"],
        "events": True,
        "ejections": 0,
        "events_address": server.events,
        "about": {},
        "clock_offset_s": None,
        "mismatches": {},
    }
    assert engine.load == engine.in_flight == 0


async def test_each_request_has_the_engines_key_and_the_traces_headers(world: World) -> None:
    one, other = await world.server(), await world.server()
    watched = await world.pool([one.config(), other.config(api_key="own")], engine_api_key="all")
    for server, key in ((one, "all"), (other, "own")):
        engine = watched.engine(server)
        await complete(engine, traceparent="00-1-2-01")
        [(sent, _)] = server.seen
        assert sent["authorization"] == f"Bearer {key}"
        assert sent["x-request-id"] == "r1"
        assert sent["traceparent"] == "00-1-2-01"
        assert key not in str(engine.view())


async def test_each_rank_is_an_engine_that_is_addressed_as_such(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config(data_parallel_size=2)])
    ranks = watched.pool.of("decode")
    assert [each.name for each in ranks] == [f"127.0.0.1:{server.port}#{rank}" for rank in (0, 1)]
    assert [each.site.events for each in ranks] == [
        f"tcp://127.0.0.1:{server.events_port + rank}" for rank in (0, 1)
    ]
    await complete(ranks[1])
    await complete(ranks[0])
    assert [headers["x-data-parallel-rank"] for headers, _ in server.seen] == ["1", "0"]


async def test_ipv6_addresses_are_bracketed_everywhere(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="carryback")
    server = await world.server(host="::1")
    watched = await world.pool([server.config()])
    (engine,) = watched.pool.of("decode")
    assert engine.name == f"[::1]:{server.port}"
    assert await complete(engine) == 200
    assert engine.is_heard
    assert f'engine="[::1]:{server.port}"' in watched.metrics.exposition().decode()
    assert f"decode engine [::1]:{server.port} is up" in caplog.text


# -- events


async def test_events_say_what_is_pinned_and_a_new_run_loses_all(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config()])
    engine = watched.engine(server)
    await server.hold(ROUTER + "1", 5)
    await server.hold("cbother.1", 3)  # another router's: counted, but not told of
    await until(lambda: engine.pinned == 8)
    await server.let_go(ROUTER + "1")
    await until(lambda: engine.pinned == 0 and len(watched.events) == 2)
    assert [type(event).__name__ for event in watched.events] == ["Held", "Released"]
    assert watched.lost == [engine.name]
    server.models, server.run = ["n"], "run2"
    await until(lambda: engine.models == ["n"])
    assert watched.lost == [engine.name, engine.name]


async def test_what_an_engine_is_told_comes_over_the_link_of_its_events(world: World) -> None:
    server, silent = await world.server(), await world.server()
    watched = await world.pool([server.config(), silent.config()])
    engine, other = watched.engine(server), watched.engine(silent)
    engine.go("k1", {"carryback_cached": 1})
    engine.release("k1", "k2")
    await until(lambda: len(server.told) == 2)
    assert server.told == [events.Go("k1", b'{"carryback_cached":1}'), events.Release(["k1", "k2"])]
    assert await engine.forget()
    assert server.told[2:] == [events.Forget()]
    # Whoever says nothing any more was perhaps not told.
    silent._tasks[0].cancel()
    assert not await other.forget()
    assert not other.is_heard
    other.release("k3")
    assert 'carryback_releases_total{role="decode"} 2.0' in watched.metrics.exposition().decode()


async def test_whom_a_prefill_engine_can_ask(world: World) -> None:
    prefill, one, two, silent = [await world.server(f"run{number}") for number in range(4)]
    configs = [prefill.config("prefill"), one.config(), two.config(), silent.config()]
    watched = await world.pool(configs)
    asker = watched.engine(prefill)

    def asked() -> set[str]:
        return {each.url for each in watched.pool.askable(asker)}

    assert asked() == {one.url, two.url, silent.url}
    silent._tasks[0].cancel()
    await until(lambda: asked() == {one.url, two.url})
    watched.engine(two).is_drained = True  # what it has can be read
    assert asked() == {one.url, two.url}
    watched.engine(two).mismatches = {asker.name: []}
    assert asked() == {one.url}
    watched.engine(one).mismatches = {asker.name: []}
    assert asked() == {one.url, two.url}  # for these, engines say why not
    assert watched.pool.of_run("run2") is watched.engine(two)
    assert watched.pool.of_run("run0") is None  # it does not decode
    # Where other engines reach one is what it says, if it does.
    assert watched.engine(one).events_address == one.events
    watched.engine(one).about = {"events": "tcp://10.0.0.9:1"}
    assert watched.engine(one).events_address == "tcp://10.0.0.9:1"
    for wrong in ("", 7, None):
        watched.engine(one).about = {"events": wrong}
        assert watched.engine(one).events_address == one.events


async def test_one_event_that_cannot_be_handled_is_not_the_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await world.server()
    watched = await world.pool([server.config()])
    monkeypatch.setattr(watched, "handle", lambda event: watched.events.append(1 / (event.blocks - 1)))
    await server.hold(ROUTER + "1", 1)
    await server.hold(ROUTER + "2", 2)
    await until(lambda: watched.events)


@pytest.mark.parametrize("key", [None, "another secret"])
async def test_events_with_a_key_are_for_those_who_have_it(world: World, key: str | None) -> None:
    server = await world.server(key="the secret")
    trusted = await world.pool([server.config()], events_key="the secret")
    assert trusted.engine(server).is_heard
    stranger = Watched([server.config()], **({"events_key": key} if key else {}))
    starting = asyncio.create_task(stranger.pool.start())
    await until(lambda: stranger.pool.engines and stranger.engine(server).is_up)
    heard, hellos = len(trusted.events), server.hellos
    await server.hold(ROUTER + "1", 1)
    await until(lambda: len(trusted.events) > heard and server.hellos > hellos + 25)
    assert not stranger.engine(server).is_heard
    assert not stranger.events
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    await stranger.pool.stop()


async def test_open_events_are_not_taken_for_those_of_an_engine_with_the_key(world: World) -> None:
    forger, engine = await world.server(), await world.server(key="the secret")
    watched = Watched([forger.config(), engine.config()], events_key="the secret")
    starting = asyncio.create_task(watched.pool.start())
    await until(lambda: len(watched.pool.engines) == 2 and watched.engine(engine).is_heard)
    hellos = forger.hellos
    await until(lambda: forger.hellos > hellos + 25)
    assert not watched.engine(forger).is_heard
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    await watched.pool.stop()


# -- up and down


async def test_an_engine_that_has_ended_is_gone_and_one_that_comes_back_is_up(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config()])
    engine = watched.engine(server)
    await server._runner.cleanup()
    await until(lambda: engine.is_gone)
    assert engine.state == "down"
    with pytest.raises(EngineDown) as caught:
        await complete(engine)
    assert caught.value.is_over  # it never got the request
    assert watched.pool.of("decode") == []
    await until(lambda: watched.lost.count(engine.name) == 2)
    again = await world.server("run2", port=server.port)
    await until(lambda: watched.pool.of("decode") == [engine])
    assert await complete(engine) == 200
    assert again.seen


async def test_a_server_that_is_no_engine_is_not_up(world: World) -> None:
    server, well = await world.server(), await world.server()
    server.models = ["no JSON"]
    watched = await world.pool([server.config(), well.config()])
    assert watched.pool.of("decode") == [watched.engine(well)]
    server.models = ["m"]
    await until(lambda: len(watched.pool.of("decode")) == 2)


async def test_an_engine_that_is_unwell_is_down(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config()])
    server.is_well = False
    await until(lambda: not watched.pool.of("decode"))
    assert not watched.engine(server).is_gone
    server.is_well = True
    await until(lambda: watched.pool.of("decode"))


# -- ejection


async def test_an_engine_that_hangs_is_ejected_until_it_works_again(world: World) -> None:
    hung, well = await world.server(), await world.server()
    watched = await world.pool([hung.config(), well.config()], trial_timeout_s=0.1)
    engine = watched.engine(hung)
    hung.mode = "hang"
    await fail(engine, 3, timeout_s=0.05)
    assert engine.state == "ejected"
    assert engine.is_up  # it answers its probes
    assert watched.pool.of("decode") == [watched.engine(well)]
    trials = len(hung.seen)
    await until(lambda: len(hung.seen) >= trials + 2)  # the router's own, which hang as well
    assert watched.pool.of("decode") == [watched.engine(well)]
    assert hung.seen[-1][1]["max_tokens"] == 1
    text = watched.metrics.exposition().decode()
    labels = f'engine="{engine.name}",reason="timeout",role="decode"'
    assert f"carryback_engine_ejections_total{{{labels}}} 1.0" in text
    hung.mode = "ok"
    hung.go_on.set()
    await until(lambda: len(watched.pool.of("decode")) == 2)
    hung.mode = "fail"
    await fail(engine, 1)  # once is enough, until it has worked for a client
    assert engine.state == "ejected"


async def test_the_last_engines_of_a_role_are_not_ejected(world: World) -> None:
    servers = [await world.server() for _ in range(3)]
    alone = await world.server()
    watched = await world.pool(
        [*(each.config() for each in servers), alone.config("prefill")], ejection_s=60.0, ejection_max_s=60.0
    )
    for server in [*servers, alone]:
        server.mode = "fail"
        await fail(watched.engine(server), 9)
    assert [watched.engine(each).state for each in servers] == ["ejected", "up", "up"]
    assert watched.pool.of("prefill") == [watched.engine(alone)]
    # The ejected one is better than none.
    await asyncio.gather(*(each._runner.cleanup() for each in servers[1:]))
    await until(lambda: watched.pool.of("decode") == [watched.engine(servers[0])])


async def test_failures_that_are_not_the_engines_do_not_eject_it(world: World) -> None:
    one, other = await world.server(), await world.server()
    watched = await world.pool([one.config(), other.config()])
    engine = watched.engine(one)
    one.mode = "hang"
    for _ in range(6):
        request = asyncio.create_task(complete(engine))
        seen = len(one.seen)
        await until(lambda seen=seen: len(one.seen) > seen)  # type: ignore[misc]
        request.cancel()  # the client left
        with pytest.raises(asyncio.CancelledError):
            await request
    one.mode = "fail"
    await fail(engine, 2)
    one.mode = "ok"
    await complete(engine)
    one.mode = "fail"
    await fail(engine, 2)
    assert engine.state == "up"
    with engine.busy(1) as visit:
        visit.fail()
    assert engine.state == "ejected"


# -- reload and drain


async def test_a_reload_keeps_what_stays_and_drains_what_goes(world: World) -> None:
    stays, goes, comes = [await world.server(name) for name in ("run1", "run2", "run3")]
    watched = await world.pool([stays.config(), goes.config()])
    kept, leaving = watched.engine(stays), watched.engine(goes)
    goes.mode = "hang"
    await goes.hold(ROUTER + "1", 5)
    await until(lambda: leaving.pinned == 5)
    with kept.busy(50):
        request = asyncio.create_task(complete(leaving))
        await until(lambda: leaving.in_flight and goes.seen)
        await watched.pool.apply([comes.config(), stays.config()])
        assert watched.engine(stays) is kept
        assert kept.load == 50
    assert {each.name for each in watched.pool.of("decode")} == {kept.name, watched.engine(comes).name}
    assert leaving.state == "draining"
    goes.mode = "ok"
    goes.go_on.set()
    assert await request == 200  # it goes on to its end
    assert watched.pool.find(leaving.name) is leaving  # what it holds can still be read
    assert watched.lost.count(leaving.name) == 1
    await goes.let_go(ROUTER + "1")
    await until(lambda: watched.lost.count(leaving.name) == 2)
    assert watched.pool.find(leaving.name) is None
    assert f'engine="{leaving.name}"' not in _gauges(watched.metrics)
    assert watched.lost.count(kept.name) == 1


async def test_an_engine_that_holds_on_is_forgotten_in_the_end(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config()], drain_timeout_s=0.1)
    engine = watched.engine(server)
    await server.hold(ROUTER + "1", 5)
    await until(lambda: engine.pinned == 5)
    await watched.pool.apply([])
    await until(lambda: not watched.pool.engines)
    assert watched.lost.count(engine.name) == 2


async def test_an_engine_that_comes_back_while_it_drains_is_the_same(world: World) -> None:
    server = await world.server()
    watched = await world.pool([server.config()])
    engine = watched.engine(server)
    with engine.busy(5):
        await watched.pool.apply([])
        assert watched.pool.of("decode") == []
        await watched.pool.apply([server.config()])
        assert watched.pool.of("decode") == [engine]


async def test_a_drained_engine_gets_nothing_new_until_it_is_taken_back(world: World) -> None:
    one, other = await world.server(), await world.server()
    watched = await world.pool([one.config(name="one"), other.config(name="other")])
    watched.engine(one).is_drained = True
    assert [each.name for each in watched.pool.of("decode")] == ["other"]
    await until(
        lambda: 'carryback_engine_draining{engine="one",role="decode"} 1.0' in _gauges(watched.metrics)
    )
    await watched.pool.apply([one.config(name="one"), other.config(name="other")])
    assert watched.engine(one).state == "draining"  # a reload does not undo what an operator did
    watched.engine(one).is_drained = False
    assert {each.name for each in watched.pool.of("decode")} == {"one", "other"}


# -- names of many addresses


async def test_a_name_of_many_addresses_is_as_many_engines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await world.server(host="127.0.0.1")
    found: list[str] | None = ["127.0.0.1", "127.0.0.2"]

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        if found is None:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    second = await world.server("run2", host="127.0.0.2", port=first.port)
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> list[Any]:
        # Nobody can add a name to a test machine's name server.
        return await (resolve if host == "decode.test" else real)(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    config = EngineConfig(
        role="decode", url=f"http://decode.test:{first.port}", events="tcp://decode.test:8201", dns=True
    )
    watched = await world.pool([config], dns_interval_s=0.02)

    def names() -> set[str]:
        return {each.name for each in watched.pool.of("decode")}

    assert names() == {f"127.0.0.{each}:{first.port}" for each in (1, 2)}
    assert {each.site.events for each in watched.pool.engines} == {
        f"tcp://127.0.0.{each}:8201" for each in (1, 2)
    }
    before = watched.engine(first)
    found = ["127.0.0.1"]
    await until(lambda: names() == {f"127.0.0.1:{first.port}"})
    found = None
    third = await world.server("run3", host="127.0.0.3", port=first.port)
    await asyncio.sleep(0.1)  # some resolutions that fail
    assert names() == {f"127.0.0.1:{first.port}"}
    found = ["127.0.0.3", "127.0.0.1"]
    await until(lambda: names() == {f"127.0.0.{each}:{first.port}" for each in (1, 3)})
    assert watched.engine(first) is before
    assert await complete(watched.engine(third)) == 200
    assert not second.seen


def _gauges(metrics: Metrics) -> str:
    lines = metrics.exposition().decode().splitlines()
    return "\n".join(each for each in lines if not each.startswith("#") and "_total" not in each)
