"""One engine: is it up, does it work, how busy is it, and what does it say it holds."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import msgspec
from carryback.wire import events
from carryback.wire.outside import Fields, Malformed, decode
from pydantic import SecretStr

from carryback_server.alike import Need
from carryback_server.answer import Answer, begin
from carryback_server.config import RouterConfig
from carryback_server.ejection import Ejection
from carryback_server.engine_client import Blame, EngineDown, Prompt, Refused, Role, Visit, Why
from carryback_server.errors import ApiError, foreign
from carryback_server.metrics import Metrics
from carryback_server.upstream import ConnectFailed, Reply, Upstream, UpstreamError

logger = logging.getLogger("carryback")

PROBES_FAILED = 3
HELLO_LOST_S = 5.0
# An engine says something at least this often.
HELLO_INTERVAL_S = 0.5


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class _Answer(msgspec.Struct):
    """What the router reads of a prefill engine's answer."""

    kv_transfer_params: Fields | None = None


_answers = msgspec.json.Decoder(_Answer)

State = Literal["up", "down", "ejected", "draining", "paused"]
# Not what the client's own key is about.
KEY_REFUSED = dict.fromkeys((401, 403), "it does not take the router's key (engine_api_key)")


@dataclass(frozen=True)
class Site:
    """Where one engine is: an address, and a rank of the engines behind it.

    Attributes:
        name: in logs, metrics and records: host and port, IPv6 in brackets, then `#<rank>`.
        rank: among data-parallel engines; None if there is one.
    """

    role: Role
    name: str
    url: str
    events: str
    rank: int | None = None
    api_key: SecretStr | None = None


class Within:
    """An exchange with an engine, from `Engine.within`, as an asynchronous context."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            message = f"no answer within {self._timeout_s:g} s"
            raise EngineDown(self._engine, message, is_timeout=True) from late
        if isinstance(error, ConnectFailed):
            self._engine.mark_down(error)
            raise EngineDown(self._engine, str(error), is_over=True) from error
        if isinstance(error, UpstreamError):
            raise EngineDown(self._engine, str(error)) from error


class Engine:
    """One vLLM engine, or one rank of a data-parallel one.

    Args:
        may_eject: asked before this engine is ejected for the failures of its requests.

    Attributes:
        run: the engine's id for its connector, new with every start; empty until it said one.
        is_up: it answered the last probe, and no request failed to connect since.
        is_gone: nothing listens at its address: its process has ended.
        is_drained: an operator wants nothing new to be placed here.
        left: when it was taken out of the configuration, on the monotonic clock; None if it is in it.
        load: tokens of the prompts at the engine now, the measure of how busy it is.
        in_flight: requests at the engine now.
        pinned: KV blocks that it holds for absent readers, for all routers, as it says.
        capacity: KV blocks that it has; 0 until it said so.
        takes_go: requests can be sent to it to wait for a `Go`.
        is_paused: it is well, and computes nothing until somebody has it go on; requests wait there meanwhile.
        about: what it says that it is (`carryback.wire.events.about_of`); empty until it said so.
        clock_offset_s: by how much its wall clock is ahead of this machine's, as its last event came; None
            until it said so.
        mismatches: why no engine can read its KV, or it none of theirs, by the other's name.
        misheard: what was wrong with the latest event that could not be read; empty if there was none.
        say: sends a frame to it over the connection on which its events come, if there is one.
    """

    def __init__(
        self, site: Site, config: RouterConfig, metrics: Metrics, may_eject: Callable[[Engine], bool]
    ) -> None:
        self.site = site
        self.role = site.role
        self.name = site.name
        self.run = ""
        self.models: list[str] = []
        self.is_up = False
        self.is_gone = False
        self.is_drained = False
        self.left: float | None = None
        self.load = 0
        self.in_flight = 0
        self.pinned = 0
        self.capacity = 0
        self.ejection = Ejection(
            failures=config.ejection_failures, first_s=config.ejection_s, max_s=config.ejection_max_s
        )
        self._config = config
        self._metrics = metrics
        self._gauges = metrics.engine(site.role, site.name)
        self._may_eject = may_eject
        self.takes_go = False
        self.is_paused = False
        self.about: dict[str, Any] = {}
        self._about = b""
        self.clock_offset_s: float | None = None
        self.mismatches: dict[str, list[Need]] = {}
        self.misheard = ""
        self._faults = 0
        self.say: Callable[[bytes], None] | None = None
        self._last_event = -math.inf
        self._seq = 0
        self._failed_probes = 0
        self._why_doubted: Why = "failure"
        self._why_down = ""
        self._run_of_models = ""
        # What `Prefilled` events say, by their keys, for those who wait for them.
        self._told: dict[str, asyncio.Future[bytes]] = {}
        self._finishing: set[asyncio.Task[Any]] = set()
        self._upstream = Upstream(
            site.url, connect_timeout_s=config.connect_timeout_s, headers=_headers(site, config)
        )

    @property
    def is_heard(self) -> bool:
        """Its events arrive. What it holds is of no use otherwise, so it is not asked to hold anything."""
        return time.monotonic() - self._last_event < HELLO_LOST_S

    @property
    def block_size(self) -> int:
        """In tokens; 0 until it said so."""
        size = self.about.get("block_size")
        return size if isinstance(size, int) else 0

    @property
    def url(self) -> str:
        """Where it is."""
        return self.site.url

    @property
    def events_address(self) -> str:
        """Where other engines reach its events; as the router does, unless it says otherwise."""
        address = self.about.get("events")
        return address if isinstance(address, str) and address else self.site.events

    @property
    def is_draining(self) -> bool:
        """Nothing new is placed here; what is here ends, and what it holds can be read."""
        return self.is_drained or self.left is not None

    @property
    def state(self) -> State:
        """In one word; requests are placed on an engine that is `up`."""
        if self.is_draining:
            return "draining"
        if not self.is_up:
            return "down"
        if self.ejection.is_out:
            return "ejected"
        return "paused" if self.is_paused else "up"

    @property
    def is_done(self) -> bool:
        """It was taken out of the configuration, and nothing is left to be done for it."""
        if self.left is None or self.in_flight:
            return False
        is_late = time.monotonic() - self.left >= self._config.drain_timeout_s
        return is_late or not self.is_up or (self.is_heard and not self.pinned)

    def view(self) -> dict[str, Any]:
        """What an operator is shown; no secret is in it."""
        return {
            "role": self.role,
            "name": self.name,
            "url": self.site.url,
            "state": self.state,
            "load_tokens": self.load,
            "in_flight": self.in_flight,
            "pinned_blocks": self.pinned,
            "capacity_blocks": self.capacity,
            "models": self.models,
            "events": self.is_heard,
            "events_address": self.site.events,
            "ejections": self.ejection.count,
            "about": self.about,
            "clock_offset_s": self.clock_offset_s,
            "mismatches": {
                name: [f"{need.name} ({need.set_by}): {need.outcome}" for need in needs]
                for name, needs in self.mismatches.items()
            },
        }

    def show(self) -> None:
        """Bring its metrics up to date."""
        self._gauges.up.set(self.is_up)
        self._gauges.ejected.set(self.ejection.is_out)
        self._gauges.draining.set(self.is_draining)
        self._gauges.in_flight.set(self.in_flight)
        self._gauges.load_tokens.set(self.load)
        self._gauges.pinned_blocks.set(self.pinned)
        self._gauges.capacity_blocks.set(self.capacity)
        self._gauges.mismatched.set(len(self.mismatches))

    def busy(self, tokens: int, blame: Blame | None = None) -> Visit:
        """See `EngineClient.busy`."""
        return Visit(self, tokens, blame)

    def succeeded(self) -> None:
        """See `EngineClient.succeeded`."""
        self.ejection.succeeded()

    def failed(self, why: Why) -> None:
        """A request failed by this engine's fault; what takes too long in a pause does not."""
        if self.is_paused:
            return
        if self.ejection.failed(lambda: self._may_eject(self)):
            self._ejected(why)

    def doubt(self, why: Why) -> None:
        """A request failed here, which may have been its own fault. After several in a row the next probe tries it."""
        if self.is_paused:
            return
        self.ejection.doubted()
        self._why_doubted = why

    def _ejected(self, why: Why) -> None:
        self._metrics.engine_ejections.labels(self.role, self.name, why).inc()
        logger.warning(
            "%s engine %s: %d requests in a row failed; nothing is sent to it for %g s",
            self.role, self.name, self._config.ejection_failures, self.ejection.wait_s,
        )  # fmt: skip

    async def prefill(
        self,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        key: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Fields:
        """See `EngineClient.prefill`."""
        data = prompt.for_prefill(params)
        async with self.within(timeout_s):
            status, content_type, content = await self._first_word(prompt.path, data, key, headers)
        if status in KEY_REFUSED:
            raise EngineDown(self, KEY_REFUSED[status], is_over=True)
        if 400 <= status < 500:
            raise Refused(status, content_type, content)
        if status != 200:
            said = content[:500].decode(errors="replace")
            raise EngineDown(self, f"status {status}", is_over=True, said=said)
        try:
            answer = decode(_answers.decode, content, "an answer with kv_transfer_params")
        except Malformed as error:
            raise EngineDown(self, "an answer that cannot be read") from error
        return answer.kv_transfer_params or {}

    async def _first_word(
        self, path: str, data: bytes, key: str, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """A prefill engine's answer, or what its event says of it, if that is sooner: status, type, body.

        Raises:
            UpstreamError: it broke off.
        """

        async def exchange() -> tuple[int, str, bytes]:
            reply = await self.post(path, data, request_id=key, headers=headers)
            return reply.status, reply.content_type, await reply.read()

        answered = asyncio.create_task(exchange())
        told = self._told[key] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((answered, told), return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                return answered.result()
            # Its answer says the same, and comes now; then the connection can be used again.
            self._finishing.add(task := asyncio.create_task(_finish(answered, self._config.probe_timeout_s)))
            task.add_done_callback(self._finishing.discard)
            return 200, "application/json", b'{"kv_transfer_params":%b}' % told.result()
        finally:
            self._told.pop(key, None)
            if not told.done():
                answered.cancel()

    async def decode(
        self, prompt: Prompt, params: dict[str, Any], *, key: str, headers: Mapping[str, str]
    ) -> Answer:
        """See `EngineClient.decode`."""
        reply = await self.post(prompt.path, prompt.for_decode(params), request_id=key, headers=headers)
        answer = await begin(reply, prompt.endpoint)
        if answer.status in KEY_REFUSED:
            reply.close()
            raise EngineDown(self, KEY_REFUSED[answer.status], is_over=True)
        return answer

    async def post(
        self, path: str, body: bytes, *, request_id: str, headers: Mapping[str, str] = {}
    ) -> Reply:
        """Send a request; return when the answer's status and headers are there. To be called `within`.

        Args:
            headers: besides those that every request has.

        Raises:
            UpstreamError: no connection, or broken off.
        """
        own = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return await self._upstream.request("POST", path, body, {**own, **headers} if headers else own)

    def within(self, timeout_s: float) -> Within:
        """See `EngineClient.within`."""
        return Within(self, timeout_s)

    async def get(self, path: str) -> tuple[int, str, bytes]:
        """A small GET: status, content type, body.

        Raises:
            ApiError: 502, the engine did not answer.
        """
        try:
            reply, content = await self._ask("GET", path, timeout_s=self._config.probe_timeout_s)
        except OSError as error:
            raise ApiError(502, "the engine did not answer", code="engine_failed") from error
        if (problem := foreign(reply.status, reply.content_type)) is not None:
            raise problem
        return reply.status, reply.content_type, content

    def go(self, key: str, params: Mapping[str, Any]) -> None:
        """See `EngineClient.go`."""
        self._command(events.Go(key, msgspec.json.encode(params)))

    def release(self, *keys: str) -> None:
        """See `EngineClient.release`."""
        if self._command(events.Release(list(keys))):
            self._metrics.releases.labels(self.role).inc(len(keys))

    async def forget(self) -> bool:
        """See `EngineClient.forget`."""
        told = time.monotonic()
        if not self._command(events.Forget()):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_LOST_S):
                # What arrives at once may have been on its way before.
                while self._last_event < told + HELLO_INTERVAL_S:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                return True
        return False

    def _command(self, command: events.Command) -> bool:
        """Tell the engine something over the link of its events; whether there is one."""
        if self.say is None or not self.is_heard:  # what cannot be sent would pile up
            return False
        self.say(events.encode_command(command))
        return True

    async def _complete(self) -> None:
        """A completion of one token, of which nothing is held.

        Raises:
            OSError: it did not work.
        """
        body = msgspec.json.encode(
            {
                "model": self.models[0] if self.models else "",
                "prompt": [0],
                "max_tokens": 1,
                "kv_transfer_params": {"hold_s": 0},
            }
        )
        self.in_flight += 1  # an engine that was taken out is not forgotten meanwhile
        try:
            reply, content = await self._ask(
                "POST", "/v1/completions", body, timeout_s=self._config.trial_timeout_s
            )
        finally:
            self.in_flight -= 1
        if reply.status != 200:
            raise OSError(f"status {reply.status}: {content[:200].decode(errors='replace')}")

    async def probe(self) -> bool:
        """Ask the engine whether it is well, and try it if it was ejected for long enough.

        Returns:
            Whether nothing listens there any more.
        """
        try:
            await self._check("/health")
            if not self.is_up or self._run_of_models != self.run:
                run = self.run
                listing = decode(_models.decode, await self._check("/v1/models"), "a list of models")
                self.models = [model.id for model in listing.data]
                self._run_of_models = run
        except ConnectFailed as error:
            self.mark_down(error)
            return self.is_gone
        except (OSError, Malformed) as error:
            self._failed_probes += 1
            if self._failed_probes >= PROBES_FAILED:
                self.mark_down(error)
            return False
        self._failed_probes = 0
        self.is_gone = False
        if not self.is_up:
            logger.info("%s engine %s is up", self.role, self.name)
            self.is_up = True
            self._why_down = ""
        if self.ejection.is_due:
            await self._try()
        return False

    def mark_down(self, why: Exception) -> None:
        """Place nothing here until a probe succeeds."""
        self.is_gone = isinstance(why, ConnectFailed) and why.is_refused
        said = _said(why)
        if self.is_up or said != self._why_down:  # one that never was up says why as well
            logger.warning("%s engine %s is down: %s", self.role, self.name, said)
        self._why_down = said
        self.is_up = False

    def hear(self, event: events.Hello | events.Told) -> bool:
        """Take in what an event says of the engine; whether the engine is a new run."""
        now = time.monotonic()
        is_new = event.engine != self.run
        if is_new:
            self.run = event.engine
            self.pinned = self._faults = 0
            self.takes_go = False
            self.is_paused = False
            self.clock_offset_s = None
            self.ejection.reset()
        elif now - self._last_event >= HELLO_LOST_S:
            # Between two events that arrive, other routers' are published, whose number says nothing.
            # While none arrived at all, not even a hello, some may have been for this router.
            published = event.seq - self._seq - (not isinstance(event, events.Hello))
            self._metrics.engine_events_missed.labels(self.role, self.name).inc(max(published, 0))
        self._last_event = now
        self._seq = event.seq
        if isinstance(event, events.Hello | events.Held | events.Released):
            self.pinned = event.pinned
        if isinstance(event, events.Prefilled) and (told := self._told.pop(event.key, None)) is not None:
            told.set_result(event.params)
        if isinstance(event, events.Hello):
            self.capacity = event.capacity
            self.takes_go = event.takes_go
            self.is_paused = event.is_paused
            self._know(event)
        return is_new

    def _know(self, hello: events.Hello) -> None:
        if hello.faults > self._faults:
            self._metrics.engine_plugin_faults.labels(self.role, self.name).inc(hello.faults - self._faults)
            self._faults = hello.faults
        if hello.time_ns:
            self.clock_offset_s = (hello.time_ns - time.time_ns()) / 1e9
        if (about := bytes(hello.about)) != self._about:
            self._about = about
            self.about = events.about_of(hello)

    def mishear(self, why: str) -> None:
        """An event came that cannot be read. The engine serves, and what it says that can be read counts."""
        self._metrics.engine_events_refused.labels(self.role, self.name).inc()
        if why != self.misheard:
            self.misheard = why
            logger.error("%s engine %s: %s; nothing of that is reused", self.role, self.name, why)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._upstream.close()

    async def _try(self) -> None:
        was_out = self.ejection.is_out
        try:
            await self._complete()
        except OSError as error:
            if self.ejection.tried(False, lambda: self._may_eject(self)):
                self._ejected(self._why_doubted)
            if not was_out:
                return
            logger.warning(
                "%s engine %s still fails (%s); nothing is sent to it for %g s",
                self.role, self.name, _said(error), self.ejection.wait_s,
            )  # fmt: skip
        else:
            self.ejection.tried(True)
            if not was_out:
                return  # what failed was not its fault
            logger.info("%s engine %s works again", self.role, self.name)

    async def _check(self, path: str) -> bytes:
        reply, content = await self._ask("GET", path, timeout_s=self._config.probe_timeout_s)
        if reply.status != 200:
            raise OSError(f"{path}: status {reply.status}")
        return content

    async def _ask(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float
    ) -> tuple[Reply, bytes]:
        """One small exchange.

        Raises:
            OSError: no answer, or none in time.
        """
        headers = {"Content-Type": "application/json"} if body else {}
        async with asyncio.timeout(timeout_s):
            reply = await self._upstream.request(method, path, body, headers)
            try:
                return reply, await reply.read()
            finally:
                reply.close()


def _headers(site: Site, config: RouterConfig) -> dict[str, str]:
    key = site.api_key.get_secret_value() if site.api_key is not None else config.engine_api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if site.rank is not None:
        headers["X-data-parallel-rank"] = str(site.rank)
    return headers


async def _finish(answered: asyncio.Task[Any], timeout_s: float) -> None:
    """Wait for an exchange that nobody needs any more."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            await answered


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
