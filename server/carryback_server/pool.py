"""All engines: where they are, probed and listened to, and which of them a request can go to."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import zmq
from carryback.wire import curve, events
from carryback.wire.outside import Malformed

from carryback_server import background
from carryback_server.address import in_url
from carryback_server.alike import Need, differences
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.engine_client import EngineClient, Role
from carryback_server.engines import HELLO_LOST_S, Engine, Site
from carryback_server.metrics import Metrics

logger = logging.getLogger("carryback")

# An engine that is up and not heard for so long is complained of.
UNHEARD_S = 3.0
EVENTS_AT_ONCE = 200
# A host that has lost its power or its link closes no connection: after so long without an answer there is a new
# one. Not much sooner, since what an engine said meanwhile is lost with the old one.
HEARTBEAT_S = 5.0
HEARTBEAT_LOST_S = 30.0
# After which an engine gives up a router, and what it has queued for it.
HEARTBEAT_TTL_S = 60.0
# The first byte of a subscription, sent by hand over XSUB.
_SUBSCRIBE = b"\x01"
# Probes for which nothing is left to be done for an engine, until it is forgotten: an event may be on its way.
PROBES_DONE = 2


class Pool:
    """All engines.

    Args:
        router_id: the prefix of this router's request keys.
        on_event: called with each event for this router, which is each but `Hello`.
        on_lost: called when an engine's KV is gone: it stopped, was taken out, or is a new run.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: Metrics,
        *,
        router_id: str,
        on_event: Callable[[Engine, events.Told], None],
        on_lost: Callable[[Engine], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self.faults = metrics.background_faults
        self._router_id = router_id
        self._on_event = on_event
        self._on_lost = on_lost
        self._configured = config.engines
        self._addresses: dict[str, list[str]] = {}
        self._applying = asyncio.Lock()
        self._minders: dict[Engine, asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None

    @property
    def engines(self) -> list[Engine]:
        """All engines, those that are down, ejected or about to leave as well."""
        return list(self._minders)

    def of(self, role: Role, beside: EngineClient | None = None) -> list[Engine]:
        """The engines of a role that a request can go to.

        Args:
            beside: the engine of the other role that it goes to. Those that can exchange KV with that one, if
                there are any; without it, those that can with any.
        """
        placeable = [each for each in self._minders if each.is_up and not each.is_draining]
        alike = up = [each for each in placeable if each.role == role]
        if any(each.mismatches for each in up):
            others = [beside] if beside is not None else [each for each in placeable if each.role != role]
            alike = [
                each
                for each in up
                if not each.mismatches or any(other.name not in each.mismatches for other in others)
            ]
        # Rather one that computes alone, that is paused, or that fails requests, than none.
        working = [each for each in up if not each.ejection.is_out]
        sound = [each for each in working if not each.is_paused]
        return [each for each in sound if each in (alike or up)] or sound or working or up

    def askable(self, prefill: EngineClient) -> list[Engine]:
        """The decode engines that a prefill engine can ask what they have of a prompt: those that it can read from, if
        there are any."""
        heard = [each for each in self._minders if each.role == "decode" and each.is_up and each.is_heard]
        return [each for each in heard if prefill.name not in each.mismatches] or heard

    def of_run(self, run: str) -> Engine | None:
        """The decode engine that has this id now."""
        return next((each for each in self._minders if each.run == run and each.role == "decode"), None)

    def find(self, name: str, role: Role = "decode") -> Engine | None:
        """The engine of this name."""
        found = [each for each in self._minders if each.name == name and each.role == role]
        return next((each for each in found if each.left is None), found[-1] if found else None)

    async def start(self) -> None:
        """Connect, probe each engine once, and wait a moment for those that are up to be heard."""
        self._context = zmq.Context()
        await self.apply(self._configured)
        self._resolver = asyncio.create_task(
            self._keep_on("resolve", "resolving engines' names", self._resolve_again)
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_LOST_S):
                while not all(engine.is_heard for engine in self._minders if engine.is_up):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the probes and close all connections."""
        tasks = [*self._minders.values(), *([self._resolver] if self._resolver is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def apply(self, engines: list[EngineConfig]) -> None:
        """Take these engines and no others; return when the new ones are probed.

        Those that stay keep their connections, load and what is known of them. Those that go are given
        nothing new. They are forgotten once they are idle and hold nothing, else after `drain_timeout_s`.
        """
        async with self._applying:
            self._configured = engines
            await self._place(engines)

    async def _place(self, engines: list[EngineConfig]) -> None:
        sites: dict[tuple[Role, str], Site] = {}
        for config in engines:
            for site in await self._sites(config):
                sites.setdefault((site.role, site.name), site)
        wanted = set(sites.values())
        for engine in self._minders:
            if engine.site in wanted:
                wanted.remove(engine.site)
                engine.left = None
            elif engine.left is None:
                logger.info("%s engine %s was taken out", engine.role, engine.name)
                engine.left = time.monotonic()
        new = [
            Engine(site, self._config, self._metrics, self._may_eject)
            for site in sites.values()
            if site in wanted
        ]
        for engine in new:
            probing = self._keep_on(
                "probe", f"probing {engine.role} engine {engine.name}", partial(self._mind, engine)
            )
            self._minders[engine] = asyncio.create_task(probing)
        await asyncio.gather(*(engine.probe() for engine in new))
        for engine in new:
            engine.show()

    async def _sites(self, config: EngineConfig) -> list[Site]:
        hosts: list[str | None] = [None]
        if config.dns:
            host, port = urlsplit(config.url).hostname, urlsplit(config.url).port
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could have
                logger.warning("%s engines %s: %s", config.role, config.url, error)
            else:
                self._addresses[config.url] = sorted({str(sockaddr[0]) for *_, sockaddr in found})
            # A name server that is gone takes no engine with it.
            hosts = [*self._addresses.get(config.url, [])]
        return [
            _site(config, host, rank if config.data_parallel_size > 1 else None)
            for host in hosts
            for rank in range(config.data_parallel_size)
        ]

    async def _resolve_again(self) -> None:
        while True:
            await asyncio.sleep(self._config.dns_interval_s)
            async with self._applying:
                if any(config.dns for config in self._configured):
                    await self._place(self._configured)

    def _may_eject(self, engine: Engine) -> bool:
        peers = [each for each in self._minders if each.role == engine.role and not each.is_draining]
        up = [each for each in peers if each.is_up]
        out = sum(each.ejection.is_out for each in up)
        return engine in up and out + 1 <= self._config.ejection_max_share * len(up)

    def _keep_on(
        self, task: background.Task, what: str, work: Callable[[], Awaitable[None]]
    ) -> Coroutine[Any, Any, None]:
        return background.keep_on(task, what, work, self._metrics.background_faults)

    async def _mind(self, engine: Engine) -> None:
        """Probe and hear an engine until it is done with."""
        what = f"hearing {engine.role} engine {engine.name}"
        listening = asyncio.create_task(self._keep_on("events", what, partial(self._listen, engine)))
        done = 0
        heard = time.monotonic()
        has_complained = False
        try:
            while done < PROBES_DONE:
                await asyncio.sleep(self._config.probe_interval_s)
                if await engine.probe():
                    self._on_lost(engine)
                if self.find(engine.name, engine.role) is engine:  # not one that leaves its name to another
                    engine.show()
                done = done + 1 if engine.is_done else 0
                if engine.is_heard or not engine.is_up or engine.misheard:
                    heard, has_complained = time.monotonic(), False
                elif time.monotonic() - heard >= UNHEARD_S and not has_complained:
                    has_complained = True
                    logger.error(
                        "%s engine %s: no events from %s; nothing will be reused. Check its events address, "
                        "and that engines and routers have the same events_key",
                        engine.role, engine.name, engine.site.events,
                    )  # fmt: skip
            # Before anything is waited for: it must not be configured again now.
            self._minders.pop(engine, None)
            self._compare()
            if self.find(engine.name, engine.role) is None:
                self._metrics.forget_engine(engine.role, engine.name)
            self._on_lost(engine)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            engine.close()

    async def _listen(self, engine: Engine) -> None:
        # As SUB, but that we can send too.
        with self._context.socket(zmq.XSUB) as subscriber:
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.setsockopt(zmq.IPV6, 1)
            subscriber.setsockopt(zmq.RCVHWM, 0)
            subscriber.setsockopt(zmq.SNDHWM, 0)
            subscriber.setsockopt(zmq.MAXMSGSIZE, events.MAX_FRAME_BYTES)
            subscriber.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
            subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_LOST_S * 1000))
            subscriber.setsockopt(zmq.HEARTBEAT_TTL, int(HEARTBEAT_TTL_S * 1000))
            if self._config.events_key is not None:
                public, secret = curve.key_pair(self._config.events_key.get_secret_value())
                subscriber.curve_publickey, subscriber.curve_secretkey = public, secret
                subscriber.curve_serverkey = public
            subscriber.connect(engine.site.events)
            # In this order: once a hello arrives, so does what is for us.
            for topic in (self._router_id.encode(), events.HELLO_TOPIC):
                subscriber.send(_SUBSCRIBE + topic)
            heard = _Hearing(self, engine, subscriber)
            loop = asyncio.get_running_loop()
            descriptor: int = subscriber.FD
            loop.add_reader(descriptor, heard.read)
            engine.say = heard.say
            try:
                heard.read()
                await heard.failed  # which it does not; else there is a new connection
            finally:
                engine.say = None
                loop.remove_reader(descriptor)

    def take(self, engine: Engine, event: events.Hello | events.Told) -> None:
        """An event of an engine has come."""
        about = engine.about
        if engine.hear(event):
            self._on_lost(engine)
        if engine.about is not about:
            self._compare()
        if not isinstance(event, events.Hello):
            self._on_event(engine, event)

    def _compare(self) -> None:
        """Find the engines between which nothing can be reused, and say so once."""
        for engine in self._minders:
            found: dict[str, list[Need]] = {}
            for other in self._minders:
                if other.role != engine.role and (needs := differences(engine.about, other.about)):
                    found[other.name] = needs
            for name in found if engine.role == "prefill" else ():
                for need in found[name]:
                    if need not in engine.mismatches.get(name, ()):
                        logger.warning(
                            "prefill engine %s and decode engine %s have not the same %s: nothing is reused "
                            "between them, since %s. Give all engines the same (%s)",
                            engine.name, name, need.name, need.outcome, need.set_by,
                        )  # fmt: skip
            engine.mismatches = found


class _Hearing:
    """Reads one engine's events, without a task that waits for each, and sends to it."""

    def __init__(self, pool: Pool, engine: Engine, subscriber: zmq.Socket[bytes]) -> None:
        self._pool = pool
        self._engine = engine
        self._subscriber = subscriber
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        """Take all that has come. The descriptor tells of no more until nothing is left."""
        try:
            for _ in range(EVENTS_AT_ONCE):
                self._take(self._subscriber.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            return
        asyncio.get_running_loop().call_soon(self._read_on)

    def say(self, frame: bytes) -> None:
        """Send a frame; never waits."""
        self._subscriber.send(frame, zmq.NOBLOCK)
        # Sending may take the descriptor's sign that something has come.
        asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._subscriber.closed:
            self.read()

    def _take(self, payload: bytes) -> None:
        engine = self._engine
        try:
            event = events.decode(payload)
        except Malformed as error:
            engine.mishear(str(error))
            return
        if isinstance(event, events.Leased):  # to another engine
            return
        try:
            self._pool.take(engine, event)
        except Exception:
            # One event that goes wrong must not make us deaf for the others.
            self._pool.faults.labels("events").inc()
            logger.exception("%s engine %s: an event was not handled", engine.role, engine.name)


def _site(config: EngineConfig, host: str | None, rank: int | None) -> Site:
    url = _at(config.url, host, None)
    name = config.name or urlsplit(url).netloc
    return Site(
        role=config.role,
        name=name if rank is None else f"{name}#{rank}",
        url=url,
        events=_at(config.events, host, rank),
        rank=rank,
        api_key=config.api_key,
    )


def _at(address: str, host: str | None, offset: int | None) -> str:
    """An address with another host, and so many ports on; None: as it is."""
    parts = urlsplit(address)
    if host is None and not offset:
        return address
    name = host or parts.hostname or ""
    netloc = in_url(name)
    if parts.port is not None:
        netloc += f":{parts.port + (offset or 0)}"
    return parts._replace(netloc=netloc).geturl()
