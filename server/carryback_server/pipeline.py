"""One request, one road: identify, recall, place, prefill, decode, hold."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web
from carryback import wire
from carryback.identity import Identifier
from carryback.wire import Reuse, Work, events
from carryback.wire.outside import Fields, Malformed, decode

from carryback_server.access_log import AccessLog, Entry
from carryback_server.body import Body
from carryback_server.chains import Chain, Chains
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.decoding import Decoding
from carryback_server.endpoints import ENDPOINTS, Endpoint, Responses
from carryback_server.engines import Blame, Engine, EngineDown, Visit
from carryback_server.errors import ApiError, foreign
from carryback_server.explain import CannotAsk, Explanation, Explanations, Kept, explain
from carryback_server.hold import Holding, whole
from carryback_server.identify import Who, identify
from carryback_server.live import Live, Step
from carryback_server.metrics import Metrics
from carryback_server.placement import TokenEstimate, decode_engine, less_loaded
from carryback_server.pool import Pool
from carryback_server.reading import Bodies, Room, is_light
from carryback_server.relay import Answer, Relay, begin
from carryback_server.state import Conversation, Record, StateDown, make_state
from carryback_server.tenants import Tenant, Tenants
from carryback_server.tracing import Trace, make_tracer
from carryback_server.trust import Trust, check_media
from carryback_server.upstream import Reply

logger = logging.getLogger("carryback")

# Not what the client's own key is about.
KEY_REFUSED = dict.fromkeys((401, 403), "it does not take the router's key (engine_api_key)")
# A prefill engine that answers so has not told the decode engine to let go.
_NOT_TAKEN = ("unverified", "layouts_differ", "no_plugin", "load_failed", "plugin_failed")


class _Answer(msgspec.Struct):
    """What the router reads of a prefill engine's answer."""

    kv_transfer_params: Fields | None = None


_answers = msgspec.json.Decoder(_Answer)


@dataclass
class Trip:
    """One request on its way. What is said of it after `started` is known once it is identified.

    Attributes:
        entry: what the log, the metrics and the trace will say of it.
        step: what operators see of it.
        headers: what the answer says about it.
        room: what its body takes of the memory for bodies.
        body: until it is answered.
        started: when it came, on the monotonic clock.
        chain: of a request for a response, what its `previous_response_id` stands for.
        use: whether it may reuse anything, and leave anything to reuse.
        alone: why a decode engine does all of it; empty if it goes through both hops.
        hold_s: how long the decode engine is to hold its KV, in seconds.
        why_none: why there is no record for it.
        holder: the decode engine that had its record.
        kept: what is kept of it to explain its reuse, if anything is.
        blame: whose fault it is where it fails.
    """

    request: web.Request
    endpoint: Endpoint
    trace: Trace
    entry: Entry
    step: Step
    headers: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    tenant: Tenant = field(init=False)
    room: Room = field(init=False)
    body: Body = field(init=False)
    chain: Chain | None = None
    who: Who = field(init=False)
    conversation: Conversation = field(init=False)
    use: bool = True
    alone: str = ""
    hold_s: float = 0.0
    why_none: str = ""
    holder: Engine | None = None
    kept: Kept | None = None
    blame: Blame = field(default_factory=Blame)


@dataclass
class Prefilled:
    """What the prefill hop gave.

    Attributes:
        params: `kv_transfer_params` for the decode hop; empty if it has to compute the prompt itself.
        engine: the prefill engine, which holds the prompt's KV until it is read.
        work: how long it took, as the engine says.
        is_over: no decode engine will read it, for certain, so it can be released.
    """

    reuse: Reuse
    params: dict[str, Any] = field(default_factory=dict)
    engine: Engine | None = None
    work: Work | None = None
    is_over: bool = True


class Refused(Exception):
    """An engine answered with an error that is the client's: it goes through as it is."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class Pipeline:
    """Takes requests through both hops.

    Args:
        tenants: who may ask for what.
        on_message: called with each message that a router broadcast to those that share its state.

    Raises:
        ConfigError: the state cannot be what the settings say.
    """

    def __init__(
        self, config: RouterConfig, metrics: Metrics, tenants: Tenants, on_message: Callable[[bytes], None]
    ) -> None:
        self._config = config
        self._metrics = metrics
        # Keys are unique for ever: engines use them as request ids, and events come back under them.
        self._router_id = f"cb{uuid.uuid4().hex[:12]}."
        self.in_flight: Counter[tuple[str, str]] = Counter()
        self._identifier = Identifier(config.identity_capacity)
        self._estimate = TokenEstimate()
        self.costs = Costs()
        # What prefill engines are to say in events, by the requests' keys.
        self._told: dict[str, asyncio.Future[bytes]] = {}
        self.live = Live(self.costs.saved_s)
        self.tenants = tenants
        self._bodies = Bodies(config, metrics.body_workers_lost.inc)
        self._trust = Trust(config.pass_fields, lambda name: metrics.fields_dropped.labels(name).inc())
        self._tracer = make_tracer(config, metrics)
        self._access_log = AccessLog(config.log_format, metrics.log_lines_dropped)
        self.state = make_state(
            config,
            on_evicted=lambda record: self.holding.drop(record),
            on_message=on_message,
            observe=metrics.observe_state,
            on_junk=metrics.state_junk.inc,
            on_refused=metrics.messages_refused.inc,
        )
        self._explanations = Explanations(config.explain_bytes)
        self._chains = Chains(
            self.state,
            ttl_s=config.response_ttl_s,
            max_bytes=config.max_response_bytes,
            on_junk=metrics.state_junk.inc,
        )
        self.holding = Holding(config, self.state, metrics, lambda name: self.pool.find(name))
        self.pool = Pool(
            config,
            metrics,
            router_id=self._router_id,
            on_event=self._on_event,
            on_lost=self.holding.lost,
        )

    async def start(self) -> None:
        """Connect to the state and the engines."""
        await self.state.start()
        await self.pool.start()

    async def stop(self) -> None:
        """Let go of all that is held for conversations that cannot come back, then disconnect."""
        await self.holding.stop()
        await self.pool.stop()
        await self.state.stop()
        await self._bodies.stop()
        await self._tracer.stop()
        self._access_log.stop()

    async def delete(self, tenant: str, conversation_id: str) -> bool:
        """End a conversation and release what is held for it; whether it was known.

        Raises:
            StateDown: nobody knows.
        """
        self._explanations.forget(tenant, conversation_id)
        known, record = await self.state.delete(tenant, conversation_id)
        if record is not None:
            self.holding.drop(record)
        return known

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request to an endpoint of `ENDPOINTS`."""
        endpoint, path = ENDPOINTS[request.path], request.path
        trace = self._tracer.request(request.headers, path)
        request_id = request.headers.get("X-Request-Id", "")
        entry = Entry(endpoint=path, request_id=request_id, trace_id=trace.trace_id)
        trip = Trip(request, endpoint, trace, entry, Step(entry))
        self._metrics.in_flight.inc()
        try:
            response = await self._travel(trip)
            entry.status = response.status
        except ApiError as error:
            entry.status, entry.error = error.status, error.code
            response = endpoint.error(error, trip.headers)
        except (asyncio.CancelledError, ConnectionResetError):
            entry.client_gone = True
            raise
        except Exception:
            entry.status, entry.error = 500, "router_failed"
            raise
        finally:
            self._metrics.in_flight.dec()
            trip.blame.settle()
            entry.duration_s = time.monotonic() - trip.started
            self._metrics.observe_request(entry)
            self.live.end(trip.step)
            self._access_log.write(entry)
            trace.end(entry)
        return response

    async def _travel(self, trip: Trip) -> web.StreamResponse:
        """The six steps.

        Raises:
            ApiError: the request is malformed or not allowed, or no engine can serve it.
        """
        trip.tenant = tenant = self.tenants.sender(trip.request)
        trip.entry.tenant = tenant.name
        async with tenant.admit(), self._bodies.room(tenant) as trip.room:
            with trip.trace.step("identify"):
                await self._identify(trip)
            self.live.begin(trip.step)
            name = tenant.name, trip.conversation.id
            self.in_flight[name] += 1
            of_tenant = self._metrics.in_flight_of(tenant.name)
            of_tenant.inc()
            prefilled = Prefilled(Reuse("miss", 0, trip.alone))
            record = decoding = None
            try:
                if not trip.alone:
                    with trip.trace.step("recall") as step:
                        record = await self._recall(trip)
                        step.set(found=record is not None)
                    decoding = self._admit_early(trip)
                    beside = decoding.engine if decoding is not None else trip.holder
                    prefilled = await self._prefill(trip, record, beside)
                trip.entry.reuse = prefilled.reuse
                trip.headers[wire.CARRYBACK_REUSE] = trip.conversation.reuse = prefilled.reuse.header()
                trip.step.holder = trip.holder.name if trip.holder is not None else ""
                self.live.changed(trip.step)
                if self._explanations.is_on and trip.conversation.id and trip.body.is_light:
                    self._keep(trip, record, prefilled.reuse)
                return await self._decode(trip, prefilled, decoding)
            except Refused as refused:
                headers = {**trip.headers, "Content-Type": refused.content_type}
                return web.Response(status=refused.status, body=refused.body, headers=headers)
            finally:
                if decoding is not None:
                    decoding.leave()
                if prefilled.engine is not None and prefilled.is_over:
                    self.holding.release(prefilled.engine, prefilled.params.get("remote_request_id"))
                of_tenant.dec()
                self.in_flight[name] -= 1
                if not self.in_flight[name]:
                    del self.in_flight[name]
                if trip.kept is not None:
                    self._explanations.settle(trip.kept)
                if trip.conversation.id:
                    await self._close(trip)

    async def response(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/responses/{id}`: a response that can be continued.

        Raises:
            ApiError: 404, there is none with this id.
        """
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            found = await self._chains.get(tenant.name, request.match_info["id"])
        return web.Response(body=found, content_type="application/json")

    async def pass_on(self, request: web.Request) -> web.Response:
        """Answer a request that a single engine answers at once, as it is: `/tokenize`, `/detokenize`.

        Raises:
            ApiError: it is malformed or not allowed, or no engine is up.
        """
        tenant = self.tenants.sender(request)
        async with tenant.admit(), self._bodies.room(tenant) as room:
            read = await self._bodies.read(request, room)
            body, looked = await self._bodies.parse(read, request.path, tenant)
            tenant.check_model(body.get("model"))
            if not tenant.is_alone and looked is None:
                check_media(body)
            self._trust.apply(body, None if tenant.is_alone else tenant.own)
            reply, content = await self._ask_any(request.path, body.encode({}))
        return web.Response(status=reply.status, body=content, headers={"Content-Type": reply.content_type})

    async def explain(self, tenant: str, conversation: str) -> Explanation:
        """Why a conversation's last request reused what it reused.

        Raises:
            ApiError: 404, nothing of it is kept here.
        """
        if not self._explanations.is_on:
            message = "explanations are off: set explain_bytes, e.g. to 67108864, and start the router again"
            raise ApiError(404, message, code="explain_off", param="explain_bytes")
        if not (requests := self._explanations.get(tenant, conversation)):
            raise ApiError(
                404,
                f"no request of conversation {conversation!r} of tenant {tenant!r} is kept here: it was never "
                "sent, was deleted, or had to make room (explain_bytes); of several routers or workers, each "
                "knows only what it served itself",
                code="conversation_not_found",
                param="id",
            )

        async def ask(path: str, data: bytes) -> bytes:
            try:
                reply, content = await self._ask_any(path, data)
            except ApiError as error:
                raise CannotAsk(f"{path}: {error.message}") from error
            if reply.status != 200:
                raise CannotAsk(f"{path}: the engine answered with status {reply.status}")
            return content

        return await explain(requests, ask, self._explanations.newest(tenant))

    async def _ask_any(self, path: str, data: bytes) -> tuple[Reply, bytes]:
        """What an engine, any, answers at once.

        Raises:
            ApiError: none is up, or it did not answer.
        """
        engine = less_loaded(self.pool.of("prefill")) or less_loaded(self.pool.of("decode"))
        if engine is None:
            raise ApiError(503, "no engine is up", code="no_engine")
        try:
            async with engine.within(self._config.prefill_timeout_s):
                reply = await engine.post(path, data, request_id=self._key())
                content = await reply.read()
            if (problem := foreign(reply.status, reply.content_type)) is not None:
                raise problem
            return reply, content
        except EngineDown as error:
            raise ApiError(502, "the engine did not answer", code="engine_failed") from error

    # -- identify

    async def _identify(self, trip: Trip) -> None:
        headers, endpoint, tenant, entry = trip.request.headers, trip.endpoint, trip.tenant, trip.entry
        path = trip.request.path
        read = await self._bodies.read(trip.request, trip.room)
        trip.body, looked = await self._bodies.parse(read, path, tenant)
        body = trip.body
        entry.bytes_in = body.size
        model = body.get("model")
        tenant.check_model(model)
        entry.model = model if isinstance(model, str) else ""
        if (salt := tenant.salt(body.get("cache_salt"))) is not None:
            body.put("cache_salt", salt)
        if not tenant.is_alone and looked is None:
            check_media(body)
        if isinstance(endpoint, Responses):
            trip.chain = await self._chains.resolve(tenant.name, body)
            if trip.chain.conversation and not (looked is None and is_light(trip.chain.input)):
                looked = await self._bodies.look(body, path, tenant)
        trip.who = who = identify(
            headers,
            body,
            endpoint,
            self._identifier,
            tenant=tenant.name,
            chain=trip.chain,
            hints=self._config.conversation_headers,
            looked=looked,
        )
        self._trust.apply(body, None if tenant.is_alone else tenant.own)
        entry.conversation, entry.turn, entry.step = who.conversation, who.turn, who.step
        trip.headers.update(_headers(trip.request, who))
        trip.use = _reuse_switch(headers)
        trip.alone = endpoint.alone(body) if looked is None else looked.alone
        if not who.conversation:
            # It has none: one that nothing is kept of.
            trip.conversation = Conversation.new(tenant.name, "", None)
            return
        trip.conversation = await self._open(tenant, who)
        trip.conversation.turn, trip.conversation.step = who.turn, who.step
        if trip.use and not trip.alone and not who.ends:
            trip.hold_s = self._config.hold_first_s if who.is_guess else self._config.hold_s

    async def _open(self, tenant: Tenant, who: Who) -> Conversation:
        try:
            return await self.state.open(tenant.name, who.conversation, who.parent)
        except StateDown:
            return Conversation.new(tenant.name, who.conversation, who.parent)

    async def _close(self, trip: Trip) -> None:
        """After a request: keep what is known of its conversation, or forget it if it has ended."""
        if trip.who.ends:
            work = self._forget(trip)
        else:
            name = trip.tenant.name, trip.conversation.id
            trip.conversation.why_none = "in_use" if name in self.in_flight else "no_record"
            work = self._save(trip)
        if self._config.is_shared:
            self.holding.spawn(work)
        else:
            await work

    async def _forget(self, trip: Trip) -> None:
        with suppress(StateDown):
            await self.delete(trip.tenant.name, trip.conversation.id)

    async def _save(self, trip: Trip) -> None:
        with suppress(StateDown):
            await self.state.save(trip.conversation)

    # -- recall

    async def _recall(self, trip: Trip) -> Record | None:
        """Take the conversation's record; without one, `trip.why_none` says why."""
        conversation = trip.conversation
        if not trip.use:
            trip.why_none = "off"
            return None
        if not conversation.id:
            trip.why_none = "no_conversation"
            return None
        record = await self.holding.take(conversation)
        trip.why_none = conversation.why_none
        if record is None:
            return None
        trip.holder = self.pool.find(record.engine)
        # A router that has just started has not heard the engine yet.
        if trip.holder is None or not trip.holder.is_up or trip.holder.run not in (record.run, ""):
            trip.why_none, trip.holder = "engine_lost", None
        elif not self.holding.time_left(record):
            trip.why_none = "expired"
            self.holding.release(trip.holder, record.request)
        else:
            return record
        self._metrics.records_lost.labels(trip.why_none).inc()
        return None

    # -- place, prefill

    async def _prefill(self, trip: Trip, record: Record | None, beside: Engine | None) -> Prefilled:
        """The prefill hop.

        Args:
            beside: the decode engine that will read the prompt's KV, if that is known.
        """
        tried: list[Engine] = []
        expected = record.tokens if record is not None else 0
        while True:
            with trip.trace.step("place") as step:
                engine = less_loaded(self.pool.of("prefill", beside), but=tried)
                if engine is None:
                    break
                step.engine(engine.name, engine.site.url)
            tried.append(engine)
            key = self._key()
            mine = {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "carryback_key": key,
                "carryback_tell": engine.is_heard,
                "hold_s": self._config.prefill_lease_s,
            }
            # A record is offered once: after a failure nobody knows whether it was read.
            offered, record = record, None
            params = mine
            if offered is not None:
                try:
                    params = {**whole(offered), **mine, **self._threshold(engine, offered)}
                except Malformed as error:
                    logger.error("what decode engine %s holds cannot be read: %s", offered.engine, error)
                    self._metrics.records_lost.labels("unverified").inc()
                    self.holding.drop(offered)
                    offered, trip.why_none = None, "unverified"
            is_over = False
            try:
                with trip.trace.step("prefill") as step:
                    step.engine(engine.name, engine.site.url)
                    given = await self._ask(engine, trip, params, key, expected, step.headers())
                trip.blame.worked(engine)
                prefilled = _prefilled(given, engine, offered is not None, trip.why_none)
                self._estimate.learn(trip.body.size, prefilled.reuse.prompt_tokens)
                self._learn(trip, prefilled)
                is_over = prefilled.reuse.reason in _NOT_TAKEN
                if not is_over:
                    offered = None  # the prefill engine has told the decode engine to let go
                return prefilled
            except Refused:
                is_over = True
                if not trip.endpoint.changes_tools(trip.body):
                    raise
                # Without a tool parser, an engine takes no free choice of tools. The decode engine knows.
                return Prefilled(Reuse("miss", 0, "prefill_refused"))
            except EngineDown as error:
                logger.warning("prefill: %s", error)
                self._metrics.retries.labels("prefill", "timeout" if error.is_timeout else "down").inc()
                trip.entry.retries += 1
                step.event("retry", reason="timeout" if error.is_timeout else "down")
                trip.why_none = "prefill_failed"
                is_over = error.is_over
            finally:
                if offered is not None and trip.holder is not None and is_over:
                    self.holding.release(trip.holder, offered.request)
                elif offered is not None:
                    self.holding.spawn(self.holding.withdraw(engine, trip.holder, offered))
        # Without any prefill engine, a decode engine does the whole request.
        if record is not None and trip.holder is not None:
            self.holding.release(trip.holder, record.request)
        return Prefilled(Reuse("miss", 0, "prefill_failed" if tried else "prefill_unavailable"))

    def _threshold(self, prefill: Engine, record: Record) -> dict[str, int]:
        """What a prefill engine is told of when to read a record, if anything is."""
        threshold = self._config.kv_recompute_threshold
        if threshold == "auto":
            threshold = self.costs.threshold(prefill.name, record.engine)
        return {} if threshold is None else {"carryback_threshold": threshold}

    def _learn(self, trip: Trip, prefilled: Prefilled) -> None:
        engine, reuse, work = prefilled.engine, prefilled.reuse, prefilled.work
        if engine is None or work is None:
            return
        trip.entry.compute_s = work.compute_s
        if reuse.tokens:
            trip.entry.read_s = work.read_s
        holder = trip.holder.name if trip.holder is not None and reuse.tokens else None
        self.costs.learn(engine.name, holder, reuse, work)
        if holder is not None:
            self._metrics.break_even(engine.name, holder, self.costs.break_even(engine.name, holder))

    async def _ask(
        self,
        engine: Engine,
        trip: Trip,
        params: dict[str, Any],
        key: str,
        expected: int,
        headers: Mapping[str, str],
    ) -> Fields:
        """The `kv_transfer_params` of the prefill engine's answer.

        Args:
            expected: tokens that it will likely not have to compute.

        Raises:
            EngineDown: no usable answer.
            Refused: the engine refused the request, with a 4xx.
        """
        path, timeout_s = trip.request.path, self._config.prefill_timeout_s
        trip.entry.prefill_engine = engine.name
        sent = time.monotonic()
        data = trip.endpoint.for_prefill(trip.body, params)
        tokens = max(self._estimate.tokens(trip.body.size) - expected, 1)
        with engine.busy(tokens, trip.blame) as visit:
            try:
                async with engine.within(timeout_s):
                    status, content_type, content = await self._first_word(engine, path, data, key, headers)
            finally:
                trip.entry.prefill_s += time.monotonic() - sent
            if status in KEY_REFUSED:
                raise EngineDown(engine, KEY_REFUSED[status], is_over=True)
            if status != 200 and not 400 <= status < 500:
                said = content[:500].decode(errors="replace")
                raise EngineDown(engine, f"status {status}", is_over=True, said=said)
            if status != 200:
                visit.pass_over()
        if status != 200:
            if (problem := foreign(status, content_type)) is not None:
                content_type, content = "application/json", trip.endpoint.error_body(problem)
            raise Refused(status, content_type, content)
        try:
            answer = decode(_answers.decode, content, "an answer with kv_transfer_params")
        except Malformed as error:
            raise EngineDown(engine, "an answer that cannot be read") from error
        return answer.kv_transfer_params or {}

    async def _first_word(
        self, engine: Engine, path: str, data: bytes, key: str, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """A prefill engine's answer, or what its event says of it, if that is sooner: status, type, body.

        Raises:
            UpstreamError: it broke off.
        """

        async def exchange() -> tuple[int, str, bytes]:
            reply = await engine.post(path, data, request_id=key, headers=headers)
            return reply.status, reply.content_type, await reply.read()

        answered = asyncio.create_task(exchange())
        told = self._told[key] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((answered, told), return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                return answered.result()
            # Its answer says the same, and comes now; then the connection can be used again.
            self.holding.spawn(_finished(answered, self._config.probe_timeout_s))
            return 200, "application/json", b'{"kv_transfer_params":%b}' % told.result()
        finally:
            del self._told[key]
            if not told.done():
                answered.cancel()

    def _on_event(self, engine: Engine, event: events.Told) -> None:
        if isinstance(event, events.Prefilled):
            if (told := self._told.get(event.key)) is not None and not told.done():
                told.set_result(event.params)
            return
        if isinstance(event, events.Held):
            self.live.generated(event.key, event.generated)
        self.holding.on_event(engine, event)

    # -- decode

    def _admit_early(self, trip: Trip) -> Decoding | None:
        """Send a request to its decode engine while its prompt is yet to be computed, if both can do that."""
        prefills = self.pool.of("prefill")
        if not self._config.admit_early or not prefills:
            return None
        engine = self._decode_engine(trip.holder)
        if engine is None or not (engine.takes_go and engine.is_heard):
            return None
        # Each prefill engine may be tried, one after the other.
        wait = {"carryback_await": self._config.prefill_timeout_s * len(prefills)}
        return self._admit(trip, engine, wait, self._estimate.tokens(trip.body.size), is_waiting=True)

    def _admit(
        self, trip: Trip, engine: Engine, params: Mapping[str, Any], tokens: int, *, is_waiting: bool = False
    ) -> Decoding:
        key = self._key()
        hold_s = trip.hold_s if engine.is_heard else 0
        if hold_s > 0:
            self.holding.expect(key, trip.conversation, trip.trace, is_first=trip.who.is_guess)
        step = trip.trace.step("decode")
        step.engine(engine.name, engine.site.url)
        params = {**params, "carryback_key": key, "hold_s": hold_s}
        return Decoding(
            engine,
            key,
            step,
            self._begin(engine, trip, params, key, step.headers()),
            tokens=tokens,
            blame=trip.blame,
            is_waiting=is_waiting,
            over=lambda has_run: self.holding.land(key, None) if has_run else self.holding.call_off(key),
        )

    def _decode_engine(
        self, holder: Engine | None, but: Collection[Engine] = (), beside: Engine | None = None
    ) -> Engine | None:
        return decode_engine(
            self.pool.of("decode", beside),
            holder,
            overload_factor=self._config.overload_factor,
            slack_tokens=self._config.overload_slack_tokens,
            but=but,
        )

    async def _decode(
        self, trip: Trip, prefilled: Prefilled, decoding: Decoding | None
    ) -> web.StreamResponse:
        """The decode hop.

        Args:
            decoding: the request where it waits for this, if it does.
        """
        params, holder, entry = prefilled.params, trip.holder, trip.entry
        tokens = prefilled.reuse.prompt_tokens or self._estimate.tokens(trip.body.size)
        # Usage says what the header says, whichever engine ends up with the request and with or without the transfer.
        bill = {"carryback_cached": prefilled.reuse.tokens + prefilled.reuse.cached}
        tried: list[Engine] = []
        while True:
            if decoding is None:
                engine = self._decode_engine(holder, tried, prefilled.engine)
                if engine is None and tried and tried[-1].is_up:
                    engine = tried[-1]
                if engine is None:
                    raise ApiError(503, "no decode engine is up", code="no_engine")
                decoding = self._admit(trip, engine, {**params, **bill}, tokens)
            engine, key = decoding.engine, decoding.key
            tried.append(engine)
            entry.decode_engine = engine.name
            self.live.decoding(trip.step, key)
            if trip.kept is not None:
                trip.kept.key, trip.kept.decode_engine = key, engine.name
            # One that broke off while it waited has not seen the transfer: it is still there to be read.
            is_unseen = decoding.is_waiting and decoding.has_begun
            if decoding.is_waiting and not is_unseen:
                decoding.visit.update(tokens)
                decoding.go({**params, **bill})
            if params and not is_unseen:
                prefilled.is_over = False
            try:
                with decoding:
                    answer = await self._answer(decoding, trip)
                    if answer.status in KEY_REFUSED:
                        raise EngineDown(engine, KEY_REFUSED[answer.status], is_over=True)
                    # Nothing has been sent: once more, and without the transfer, which may be at fault.
                    if answer.has_failed and len(tried) == 1:
                        message = f"failed before its first token (status {answer.status})"
                        raise EngineDown(engine, message, is_over=True, said=_excerpt(answer))
                    if answer.status >= 400:
                        prefilled.is_over = True
                        decoding.visit.pass_over()
                    elif not answer.has_failed:
                        trip.blame.worked(engine)
                        entry.ttft_s = time.monotonic() - trip.started
                        self._metrics.observe_first_byte(entry)
                        self.live.changed(trip.step)
                        # It is not sent again: a long answer does not keep it in memory.
                        del trip.body
                        trip.room.free()
                    return await self._relay(trip, key, answer, decoding.visit)
            except EngineDown as error:
                logger.warning("decode: %s", error)
                entry.retries += 1
                self._metrics.retries.labels("decode", "timeout" if error.is_timeout else "down").inc()
                decoding.step.event("retry", reason="timeout" if error.is_timeout else "down")
                if params and not is_unseen:
                    prefilled.is_over = error.is_over
                if error.is_timeout:
                    raise ApiError(504, error.reason, code="engine_timeout") from error
                if len(tried) > 1:
                    raise ApiError(502, error.reason, code="engine_failed") from error
                if not is_unseen:
                    params = {}
                holder = None
            decoding = None

    def _keep(self, trip: Trip, record: Record | None, reuse: Reuse) -> None:
        trip.kept = Kept(
            trip.tenant.name,
            trip.conversation.id,
            trip.who.turn,
            trip.who.step,
            trip.endpoint,
            trip.body,
            reuse,
            prefill_engine=trip.entry.prefill_engine,
            named_by=trip.who.named_by,
        )
        self._explanations.begin(trip.kept, record)

    async def _begin(
        self, engine: Engine, trip: Trip, params: Mapping[str, Any], key: str, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request to a decode engine; its answer, begun.

        Raises:
            UpstreamError: it broke off.
        """
        data = trip.endpoint.for_decode(trip.body, params)
        reply = await engine.post(trip.request.path, data, request_id=key, headers=headers)
        return await begin(reply, trip.endpoint)

    async def _answer(self, decoding: Decoding, trip: Trip) -> Answer:
        sent = time.monotonic()
        try:
            if trip.body.flag("stream"):
                return await decoding.answer(self._config.first_byte_timeout_s)
            # It has no first byte until all of it is generated.
            return await decoding.answer(self._config.answer_timeout_s)
        finally:
            trip.entry.decode_wait_s += time.monotonic() - sent

    async def _relay(self, trip: Trip, key: str, answer: Answer, visit: Visit) -> web.StreamResponse:
        def on_end(data: bytes) -> None:
            boundary = trip.endpoint.boundary(data, streamed=answer.is_stream)
            trip.conversation.boundary = boundary
            self.holding.land(key, boundary)

        async def before_end(data: bytes) -> None:
            if trip.chain is not None:
                await self._chains.remember(
                    trip.chain, trip.who.conversation, data, streamed=answer.is_stream
                )
            await self.holding.stored(key)

        relay = Relay(
            trip.request,
            trip.endpoint,
            trip.headers,
            on_end=on_end,
            before_end=before_end,
            idle_timeout_s=self._config.idle_timeout_s,
        )
        if answer.status < 400 and answer.error is None:
            trip.conversation.boundary = "unfinished"  # until its end is there
            if trip.kept is not None:
                trip.kept.is_streamed, relay.keep = answer.is_stream, trip.kept.keep
        trip.entry.streamed = answer.is_stream
        self._metrics.streams.inc(answer.is_stream)
        try:
            response = await relay.send(_settled(answer))
        finally:
            self._metrics.streams.dec(answer.is_stream)
            trip.entry.bytes_out, trip.entry.error = relay.bytes_out, relay.error_code
        if answer.status >= 500 or relay.error_code:
            visit.fail()
        return response

    def _key(self) -> str:
        """A request's name at an engine. Who can guess it could tell the request how it goes on."""
        return f"{self._router_id}{secrets.token_hex(8)}"


def _reuse_switch(headers: Mapping[str, str]) -> bool:
    value = headers.get(wire.CARRYBACK_REUSE, "on").strip().lower()
    if value not in ("on", "off"):
        raise ApiError(
            400,
            f"{wire.CARRYBACK_REUSE} must be 'on' or 'off'",
            code="invalid_header",
            param=wire.CARRYBACK_REUSE,
        )
    return value == "on"


def _headers(request: web.Request, who: Who) -> dict[str, str]:
    headers = {}
    if who.conversation:
        headers[wire.CARRYBACK_CONVERSATION] = who.conversation
    if who.turn:
        headers[wire.CARRYBACK_TURN] = who.turn
    with suppress(ValueError):  # one that cannot be sent back is left out
        headers["X-Request-Id"] = wire.check_id(request.headers.get("X-Request-Id", ""), "X-Request-Id")
    return headers


def _prefilled(params: Fields, engine: Engine, had_record: bool, why_none: str) -> Prefilled:
    reuse, work = None, None
    with suppress(msgspec.ValidationError):
        reuse = msgspec.convert(params.pop("carryback_reuse", None), Reuse)
        work = msgspec.convert(params.pop("carryback_work", None), Work | None)
    if reuse is None or not reuse.reason.isidentifier():
        logger.error(
            "prefill engine %s runs without carryback's plug-in, or with one of a release that this router cannot "
            "read: nothing is transferred",
            engine.name,
        )
        return Prefilled(Reuse("miss", 0, "no_plugin"))
    if reuse.reason == "no_record" and not had_record:
        reuse = replace(reuse, reason=why_none)
    return Prefilled(reuse, params if params.get("remote_block_ids") else {}, engine, work)


async def _finished(answered: asyncio.Task[Any], timeout_s: float) -> None:
    """Wait for an exchange that nobody needs any more."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            await answered


def _excerpt(answer: Answer) -> str:
    return answer.first[:500].decode(errors="replace").strip()


def _settled(answer: Answer) -> Answer:
    """A stream that failed before its first token, as the plain error that it is."""
    if answer.error is None:
        return answer
    status = 500
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        code = msgspec.json.decode(answer.error)["error"]["code"]
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return Answer(status, "application/json", answer.error, False, answer.reply)
