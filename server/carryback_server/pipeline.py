"""One request, one road: identify, recall, place, prefill, decode, hold."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from carryback import wire
from carryback.identity import Identifier
from carryback.wire import Reuse, events

from carryback_server.body import Body
from carryback_server.config import RouterConfig
from carryback_server.engines import Engine, EngineDown, Pool
from carryback_server.errors import ApiError
from carryback_server.identify import Who, identify
from carryback_server.metrics import Metrics
from carryback_server.placement import decode_engine, least_loaded
from carryback_server.records import Conversation, Record, Records
from carryback_server.relay import Answer, begin, relay

logger = logging.getLogger("carryback")

# How each endpoint spells the number of tokens to generate.
ENDPOINTS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
}
# An event that has not come this long after its answer's end will not come.
EVENT_LOST_S = 60.0
# How often a prefill engine that broke off is asked for its record, a probe's interval apart.
PROBES_AFTER_FAILURE = 10
# A prefill engine that answers so has not told the decode engine to let go.
_NOT_TAKEN = ("unverified", "no_plugin", "load_failed")


@dataclass
class Trip:
    """One request on its way.

    Attributes:
        use: whether it may reuse anything, and leave anything to reuse.
        alone: why a decode engine does all of it; empty if it goes through both hops.
        hold_s: how long the decode engine is to hold its KV, in seconds.
        headers: what the answer says about it.
        started: when it came, on the monotonic clock.
        why_none: why there is no record for it.
        holder: the decode engine that had its record.
    """

    request: web.Request
    body: Body
    who: Who
    conversation: Conversation
    use: bool
    alone: str
    hold_s: float
    headers: dict[str, str]
    started: float
    why_none: str = ""
    holder: Engine | None = None


@dataclass
class Flight:
    """A decode whose `Held` event is to come."""

    conversation: Conversation
    held: bool = False
    has_landed: bool = False


@dataclass
class Prefilled:
    """What the prefill hop gave.

    Attributes:
        params: `kv_transfer_params` for the decode hop; empty if it has to compute the prompt itself.
        engine: the prefill engine, which holds the prompt's KV until it is read.
        is_over: no decode engine will read it, for certain, so it can be released.
    """

    reuse: Reuse
    params: dict[str, Any] = field(default_factory=dict)
    engine: Engine | None = None
    is_over: bool = True


class Refused(Exception):
    """An engine answered with an error that is the client's: it goes through as it is."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class Pipeline:
    """Takes requests through both hops, and keeps the records between them."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        # Keys are unique for ever: engines use them as request ids, and events come back under them.
        self._router_id = f"cb{uuid.uuid4().hex[:12]}."
        self._counter = count(1)
        self._flights: dict[str, Flight] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._identifier = Identifier(config.identity_capacity)
        self.records = Records(metrics, lambda record: self._release(record.engine, record.held.request))
        self.pool = Pool(
            config,
            metrics,
            router_id=self._router_id,
            on_event=self._on_event,
            on_lost=lambda engine, run: self.records.void(engine, keep=run),
        )

    async def start(self) -> None:
        """Connect to the engines."""
        await self.pool.start()

    async def stop(self) -> None:
        """Let go of all that is held for conversations that cannot come back, then disconnect."""
        late = [asyncio.ensure_future(each.late.wait()) for each in self.records if each.late is not None]
        if late:
            _, missing = await asyncio.wait(late, timeout=self._config.held_event_wait_s)
            for task in missing:
                task.cancel()
        held: dict[Engine, list[str]] = {}
        for conversation in list(self.records):
            if (record := self.records.delete(conversation.id)) is not None:
                held.setdefault(record.engine, []).append(record.held.request)
        for engine, request_ids in held.items():
            if engine.is_up:
                self._spawn(engine.release(request_ids))
        if self._background:
            await asyncio.wait(self._background, timeout=5)
        await self.pool.stop()

    async def delete(self, conversation_id: str) -> bool:
        """End a conversation and release what is held for it; whether it was known."""
        known = self.records.get(conversation_id) is not None
        record = self.records.delete(conversation_id)
        if record is not None:
            await record.engine.release([record.held.request])
        return known

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request to an endpoint of `ENDPOINTS`.

        Raises:
            ApiError: the request is malformed, or no engine can serve it.
        """
        trip = await self._identify(request)
        conversation = trip.conversation
        conversation.in_flight += 1
        prefilled = Prefilled(Reuse("miss", 0, trip.alone))
        try:
            if not trip.alone:
                record = await self._recall(trip)
                prefilled = await self._prefill(trip, record)
            trip.headers[wire.CARRYBACK_REUSE] = prefilled.reuse.header()
            conversation.reuse = prefilled.reuse
            return await self._decode(trip, prefilled)
        except Refused as refused:
            headers = {**trip.headers, "Content-Type": refused.content_type}
            return web.Response(status=refused.status, body=refused.body, headers=headers)
        except ApiError as error:
            return error.response(trip.headers)
        finally:
            if prefilled.engine is not None and prefilled.is_over:
                self._release(prefilled.engine, prefilled.params.get("remote_request_id"))
            conversation.in_flight -= 1
            if conversation.why_none == "in_use" and not conversation.in_flight:
                conversation.why_none = "no_record"
            if trip.who.ends:
                await self.delete(conversation.id)

    # -- identify

    async def _identify(self, request: web.Request) -> Trip:
        started = time.monotonic()
        body = Body(await _read(request, self._config.max_body_bytes))
        who = identify(request.headers, body, self._identifier)
        use = _reuse_switch(request.headers)
        alone = _decode_alone(body)
        if not who.conversation:
            # It has none: one that is gone already, so that nothing is kept of it.
            conversation = Conversation("", why_none="no_conversation", is_deleted=True)
        else:
            conversation = self.records.open(who.conversation, who.parent)
            conversation.last_seen = time.time()
            conversation.requests += 1
            conversation.turn, conversation.step = who.turn, who.step
        hold_s = self._config.hold_s
        if who.is_guess:
            hold_s = min(hold_s, self._config.hold_first_s)
        if not who.conversation or who.ends or alone or not use:
            hold_s = 0
        return Trip(request, body, who, conversation, use, alone, hold_s, _headers(request, who), started)

    # -- recall

    async def _recall(self, trip: Trip) -> Record | None:
        """Take the conversation's record; without one, `trip.why_none` says why."""
        if not trip.use:
            trip.why_none = "off"
            return None
        conversation, late = trip.conversation, trip.conversation.late
        if conversation.record is None and late is not None and not late.is_set():
            try:
                async with asyncio.timeout(self._config.held_event_wait_s):
                    await late.wait()
            except TimeoutError:
                if conversation.late is late:
                    conversation.late = None  # wait for it once
                self._metrics.held_missing.inc()
                trip.why_none = "event_missing"
                return None
        record = self.records.take(conversation)
        trip.why_none = conversation.why_none
        trip.holder = record.engine if record is not None else None
        return record

    # -- place, prefill

    async def _prefill(self, trip: Trip, record: Record | None) -> Prefilled:
        tried: list[Engine] = []
        while (engine := least_loaded(self.pool.of("prefill"), but=tried)) is not None:
            tried.append(engine)
            key = self._key()
            params: dict[str, Any] = msgspec.json.decode(record.held.record) if record else {}
            params |= {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "carryback_key": key,
                "hold_s": self._config.prefill_lease_s,
            }
            # A record is offered once: after a failure nobody knows whether it was read.
            offered, record = record, None
            is_over = False
            try:
                answer = await self._ask(engine, trip, params, key)
                prefilled = _prefilled(answer, engine, offered is not None, trip.why_none)
                is_over = prefilled.reuse.reason in _NOT_TAKEN
                if not is_over:
                    offered = None  # the prefill engine has told the decode engine to let go
                return prefilled
            except Refused:
                is_over = True
                raise
            except EngineDown as error:
                logger.warning("prefill: %s", error)
                self._metrics.retries.labels("prefill", "timeout" if error.is_timeout else "down").inc()
                trip.why_none = "prefill_failed"
                is_over = error.is_over
            finally:
                if offered is not None and is_over:
                    self._release(offered.engine, offered.held.request)
                elif offered is not None:
                    self._spawn(self._withdraw(engine, offered))
        # Without any prefill engine, a decode engine does the whole request.
        if record is not None:
            self._release(record.engine, record.held.request)
        return Prefilled(Reuse("miss", 0, "prefill_failed" if tried else "prefill_unavailable"))

    async def _ask(self, engine: Engine, trip: Trip, params: dict[str, Any], key: str) -> dict[str, Any]:
        """The prefill engine's answer, decoded.

        Raises:
            EngineDown: no usable answer.
            Refused: the engine refused the request, with a 4xx.
        """
        path, timeout_s = trip.request.path, self._config.prefill_timeout_s
        data = trip.body.for_prefill(ENDPOINTS[path], params)
        with engine.busy(trip.body.size):
            deadline = time.monotonic() + timeout_s
            response = await engine.post(path, data, request_id=key, timeout_s=timeout_s)
            async with response:
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        content = await response.read()
                except (aiohttp.ClientError, OSError) as error:
                    response.close()
                    raise EngineDown(engine, f"broke off ({type(error).__name__})") from error
        if 400 <= response.status < 500:
            raise Refused(response.status, response.headers.get("Content-Type", "application/json"), content)
        if response.status != 200:
            message = f"status {response.status}: {content[:500].decode(errors='replace')}"
            raise EngineDown(engine, message, is_over=True)
        try:
            answer = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineDown(engine, "an answer that is not JSON") from error
        return answer

    # -- decode

    async def _decode(self, trip: Trip, prefilled: Prefilled) -> web.StreamResponse:
        params, holder = prefilled.params, trip.holder
        tried: list[Engine] = []
        while True:
            engine = decode_engine(self.pool.of("decode"), holder, but=tried)
            if engine is None and tried and tried[-1].is_up:
                engine = tried[-1]
            if engine is None:
                raise ApiError(503, "no decode engine is up", code="no_engine")
            tried.append(engine)
            key = self._key()
            hold_s = trip.hold_s if engine.is_heard else 0
            data = trip.body.for_decode({**params, "carryback_key": key, "hold_s": hold_s})
            if params:
                prefilled.is_over = False
            if hold_s > 0:
                self._flights[key] = Flight(trip.conversation)
            try:
                with engine.busy(trip.body.size):
                    answer = await self._begin(engine, trip.request.path, data, key)
                    try:
                        # Nothing has been sent: once more, and without the transfer, which may be at fault.
                        if answer.has_failed and len(tried) == 1:
                            message = f"failed before the first byte: {_excerpt(answer)}"
                            raise EngineDown(engine, message, is_over=True)
                        if answer.status >= 400:
                            prefilled.is_over = True
                        elif not answer.has_failed:
                            self._metrics.ttft.labels(prefilled.reuse.outcome).observe(
                                time.monotonic() - trip.started
                            )
                            self._metrics.observe_reuse(prefilled.reuse)
                        on_end = partial(self._land, key, True)
                        response = await relay(trip.request, _settled(answer), trip.headers, on_end)
                    finally:
                        answer.close()
                return response
            except EngineDown as error:
                logger.warning("decode: %s", error)
                self._metrics.retries.labels("decode", "timeout" if error.is_timeout else "down").inc()
                if error.is_timeout:
                    raise ApiError(504, str(error), code="engine_timeout") from error
                if len(tried) > 1:
                    raise ApiError(502, str(error), code="engine_failed") from error
                if params:
                    prefilled.is_over = error.is_over
                params, holder = {}, None
            finally:
                self._land(key, False)

    async def _begin(self, engine: Engine, path: str, data: bytes, key: str) -> Answer:
        timeout_s = self._config.first_byte_timeout_s
        deadline = time.monotonic() + timeout_s
        upstream = await engine.post(path, data, request_id=key, timeout_s=timeout_s)
        return await begin(engine, upstream, max(deadline - time.monotonic(), 0.001))

    # -- hold

    def _land(self, key: str, has_ended: bool) -> None:
        """A decode is over; called again, does nothing. If it ended well, its event has come or comes in a moment."""
        flight = self._flights.get(key)
        if flight is None or flight.has_landed:
            return
        flight.has_landed = True
        if flight.held:
            del self._flights[key]
            return
        if not has_ended:
            # An answer that was broken off may still have ended in an event.
            flight.conversation = Conversation("", is_deleted=True)
        else:
            flight.conversation.late = asyncio.Event()
        asyncio.get_running_loop().call_later(EVENT_LOST_S, self._flights.pop, key, None)

    def _on_event(self, engine: Engine, event: events.Held | events.Released | events.Declined) -> None:
        if isinstance(event, events.Released):
            self.records.released(event.key)
        elif isinstance(event, events.Declined):
            self._metrics.declined.labels(event.reason).inc()
        elif (flight := self._flights.get(event.key)) is not None:
            flight.held = True
            if flight.has_landed:
                del self._flights[event.key]
            if event.blocks:
                record = Record(engine, event, time.monotonic() + event.hold_s)
                self.records.put(flight.conversation, record)
            if flight.conversation.late is not None:
                flight.conversation.late.set()

    def _release(self, engine: Engine, request_id: object) -> None:
        """Make an engine let go, in the background; it may have done so already."""
        if engine.is_up and isinstance(request_id, str):
            self._spawn(engine.release([request_id]))

    async def _withdraw(self, prefill: Engine, record: Record) -> None:
        """Take a record back from a prefill engine that has not answered for it.

        KV must not be let go of under a reader, so the prefill engine is asked. It tells the decode engine
        itself. Only once its process has ended can nobody read, and the decode engine is told from here.
        """
        for _ in range(PROBES_AFTER_FAILURE):
            if prefill.is_gone:
                self._release(record.engine, record.held.request)
                return
            if prefill.is_up and await prefill.withdraw(record.held.record):
                return
            await asyncio.sleep(self._config.probe_interval_s)
        # It hangs, or is cut off. The decode engine lets go when the record's time is over.

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _key(self) -> str:
        return f"{self._router_id}{next(self._counter)}"


async def _read(request: web.Request, limit: int) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            413,
            f"the body is larger than {limit} bytes, the router's max_body_bytes",
            code="body_too_large",
        ) from error


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


def _decode_alone(body: Body) -> str:
    """Why a request goes to a decode engine alone, if it does: what is asked needs the whole prompt
    computed there, or several answers that one transfer cannot feed."""
    if (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1 or body.flag("use_beam_search"):
        return "several_answers"
    if body.flag("echo") or body.has("prompt_logprobs"):
        return "prompt_logprobs"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return "several_prompts"
    return ""


def _prefilled(answer: dict[str, Any], engine: Engine, had_record: bool, why_none: str) -> Prefilled:
    params = answer.get("kv_transfer_params")
    report = params.pop("carryback_reuse", None) if isinstance(params, dict) else None
    if not isinstance(params, dict) or not isinstance(report, dict):
        logger.error(
            "prefill engine %s runs without carryback's plug-in: nothing is transferred", engine.name
        )
        return Prefilled(Reuse("miss", 0, "no_plugin"))
    if report["reason"] == "no_record" and not had_record:
        report["reason"] = why_none
    return Prefilled(Reuse(**report), params if params.get("remote_block_ids") else {}, engine)


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
    return Answer(status, "application/json", answer.error, None, answer.upstream)
