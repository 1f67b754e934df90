"""Steps 2 and 6: what decode engines hold, from their events to the conversation's next request."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from carryback.wire import events
from carryback.wire.outside import Fields, Malformed, decode

from carryback_server import background
from carryback_server.config import EXPIRY_MARGIN_S as EXPIRY_MARGIN_S
from carryback_server.config import RouterConfig
from carryback_server.endpoints import Boundary
from carryback_server.engines import Engine
from carryback_server.metrics import Metrics
from carryback_server.pins import Pin, Pins, Rank, Why
from carryback_server.state import Conversation, Gone, Record, State, StateDown
from carryback_server.tracing import Trace

logger = logging.getLogger("carryback")

# An event that has not come this long after its answer's end will not come.
EVENT_LOST_S = 60.0
# How long the end of an answer waits until other replicas can see its record.
STORE_WAIT_S = 0.25
# How often a prefill engine that broke off is asked for its record, a probe's interval apart.
PROBES_AFTER_FAILURE = 10
# How long the router's stop waits for engines to let go.
STOP_S = 5.0
# Releases at one engine within so long are sent together.
_RELEASE_DELAY_S = 0.01

_params = msgspec.json.Decoder(Fields)

Name = tuple[str, str]
"A conversation: its tenant and its id."


def whole(record: Record) -> dict[str, Any]:
    """The `kv_transfer_params` with which a prefill engine can read what a record stands for.

    In a wrapping that only the plug-in opens: an engine without it would read without verifying.

    Raises:
        Malformed: what the engine said, or Redis kept, is no record.
    """
    params = decode(_params.decode, record.params, "a record")
    seal = params.get("carryback")
    if not isinstance(seal, dict):
        raise Malformed("not a record: it has no seal")
    digests = base64.b64encode(record.digests).decode()
    return {"carryback_record": {**params, "carryback": {**seal, "digests": digests}}}


@dataclass(eq=False)
class Flight:
    """A decode whose KV is to be held.

    Attributes:
        conversation: None once the answer was broken off: nothing of it is to be kept.
        is_first: a first request that named no conversation.
        boundary: where in its turn the answer ended; None until it has.
        stored: set once the engine has said what it holds, and the record can be taken.
    """

    conversation: Conversation | None
    trace: Trace
    is_first: bool
    boundary: Boundary | None = None
    is_held: bool = False
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class Holding:
    """Keeps the records between a conversation's requests, and gives KV up for real.

    Args:
        engine: finds an engine by its name.
        clock: seconds since the epoch, which deadlines are in.
    """

    def __init__(
        self,
        config: RouterConfig,
        state: State,
        metrics: Metrics,
        engine: Callable[[str], Engine | None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._state = state
        self._metrics = metrics
        self._engine = engine
        self._clock = clock
        self._flights: dict[str, Flight] = {}
        self._late: dict[Name, Flight] = {}
        self._to_release: dict[Engine, list[str]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self.pins = Pins(config.pin_budget, metrics, self._let_go)

    # -- recall

    async def take(self, conversation: Conversation) -> Record | None:
        """Take the conversation's record: nobody else gets it again. `conversation.why_none` says why there
        is none."""
        name = conversation.tenant, conversation.id
        if (flight := self._late.get(name)) is not None:
            try:
                async with asyncio.timeout(self._config.held_event_wait_s):
                    await flight.stored.wait()
            except TimeoutError:
                if self._late.get(name) is flight:
                    del self._late[name]  # wait for it once
                # What comes later is older than what this request will leave, and must not replace it.
                flight.conversation = None
                self._metrics.held_missing.inc()
                conversation.why_none = "event_missing"
                return None
        try:
            record = await self._taken(conversation)
        except StateDown:
            conversation.why_none = "state_unavailable"
            return None
        if record is not None:
            self.pins.remove(record.key)
            self._metrics.records_taken.inc()
        return record

    async def _taken(self, conversation: Conversation) -> Record | None:
        if not self._config.is_shared:
            return await self._state.take(conversation)
        taking = asyncio.create_task(self._state.take(conversation))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self.spawn(self._give_back(taking))
            raise

    async def _give_back(self, taking: asyncio.Task[Record | None]) -> None:
        """The client left while its record was being taken: nobody will read it."""
        with suppress(StateDown):
            if (record := await taking) is not None:
                self.drop(record)

    # -- decode

    def expect(self, key: str, conversation: Conversation, trace: Trace, *, is_first: bool) -> None:
        """A decode begins, and its engine was asked to hold its KV."""
        self._flights[key] = Flight(conversation, trace, is_first)

    def land(self, key: str, boundary: Boundary | None) -> None:
        """A decode is over; called again, does nothing.

        Args:
            boundary: where in its turn the answer ended; None if it did not come to its end.
        """
        flight = self._flights.get(key)
        if flight is None or flight.boundary is not None or flight.conversation is None:
            return
        conversation = flight.conversation
        if boundary is None:
            # It may still have ended in an event.
            flight.conversation = None
            if (pin := self.pins.remove(key)) is not None:
                self.spawn(self._let_go_of(pin, "no_record"))
        else:
            flight.boundary = boundary
            if (pin := self.pins.settle(key, *self._retention(flight))) is not None:
                self.pins.enforce(pin.engine)
        if flight.stored.is_set():
            del self._flights[key]
            return
        if boundary is not None:
            self._late[conversation.tenant, conversation.id] = flight
        asyncio.get_running_loop().call_later(EVENT_LOST_S, self._forget, key)

    def call_off(self, key: str) -> None:
        """A decode ended where it waited for its prompt: its engine holds nothing of it, and will not say so."""
        if (flight := self._flights.get(key)) is not None:
            flight.stored.set()
            self._forget(key)

    async def stored(self, key: str) -> None:
        """Wait a moment until other replicas can take the record of a decode that has ended."""
        flight = self._flights.get(key)
        if self._config.is_shared and flight is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STORE_WAIT_S):
                    await flight.stored.wait()

    def _forget(self, key: str) -> None:
        flight = self._flights.pop(key, None)
        if flight is not None and (conversation := flight.conversation) is not None:
            name = conversation.tenant, conversation.id
            if self._late.get(name) is flight:
                del self._late[name]

    # -- hold

    def on_event(self, engine: Engine, event: events.Told) -> None:
        """An engine says what it did with a request of this router."""
        if isinstance(event, events.Declined):
            self._metrics.declined.labels(event.reason).inc()
        elif isinstance(event, events.Released):
            if (pin := self.pins.released(event.key, engine)) is not None:
                self._give_up(pin, "expired" if event.reason == "expired" else "released")
            self.pins.enforce(engine)
        elif isinstance(event, events.Held):
            flight = self._flights.get(event.key)
            if flight is None or flight.is_held:
                self.release(engine, event.request)
                return
            flight.is_held = True
            if event.blocks:
                self.spawn(self._store(flight, engine, event))
            else:
                self._settled(event.key, flight)

    async def _store(self, flight: Flight, engine: Engine, event: events.Held) -> None:
        conversation = flight.conversation
        step = flight.trace.step("hold")
        try:
            if conversation is None:
                self.release(engine, event.request)
                return
            rank, hold_s = self._retention(flight)
            pin = Pin(
                engine, event.key, event.request, event.tokens, event.blocks,
                conversation.tenant, conversation.id, rank,
            )  # fmt: skip
            self.pins.add(pin, min(hold_s, event.hold_s))
            record = Record(
                engine.name, event.engine, event.key, event.request, event.tokens, event.blocks,
                self._clock() + event.hold_s, event.record, event.digests,
            )  # fmt: skip
            try:
                # It stays for longer than its pin: whoever gives that up has to find it, to have it released.
                older = await self._state.put(conversation, record, event.hold_s + EXPIRY_MARGIN_S)
            except Gone:
                self._metrics.records_lost.labels("deleted").inc()
                self.pins.remove(event.key)
                self.release(engine, event.request)
                return
            except StateDown as error:
                self._metrics.records_lost.labels("state_unavailable").inc()
                # It may be there all the same: then it is taken out again when the pin's time is over.
                if not error.maybe_done:
                    self.pins.remove(event.key)
                    self.release(engine, event.request)
                return
            self._metrics.records_put.inc()
            if older is not None:
                self._metrics.records_lost.labels("replaced").inc()
                self.drop(older)
            step.set(tokens=event.tokens, blocks=event.blocks)
        finally:
            step.end()
            self._settled(event.key, flight)
        # Before the answer's end nobody knows whether this one is the least likely to return.
        if flight.boundary is not None:
            self.pins.enforce(engine)

    def _settled(self, key: str, flight: Flight) -> None:
        flight.stored.set()
        if flight.boundary is not None or flight.conversation is None:
            self._forget(key)

    def _retention(self, flight: Flight) -> tuple[Rank, float]:
        """How likely the conversation is to come back, and how long it is waited for, in seconds."""
        config = self._config
        if flight.boundary in (None, "mid_turn", "unfinished"):
            hold_s = config.hold_s if flight.boundary is None else config.hold_mid_turn_s
            rank = Rank.MID_TURN
        elif flight.is_first:
            hold_s, rank = config.hold_first_s, Rank.FIRST
        else:
            hold_s, rank = config.hold_s, Rank.TURN_END
        return rank, min(hold_s, config.hold_first_s) if flight.is_first else hold_s

    # -- give up

    def _let_go(self, pin: Pin, why: Why) -> None:
        self.spawn(self._let_go_of(pin, "expired" if why == "retention" else "evicted"))

    async def _let_go_of(self, pin: Pin, reason: str) -> None:
        if (flight := self._flights.get(pin.key)) is not None:
            await flight.stored.wait()
        if await self._give_up_record(pin, reason):
            self.release(pin.engine, pin.request)

    def _give_up(self, pin: Pin, reason: str) -> None:
        self.spawn(self._give_up_record(pin, reason))

    async def _give_up_record(self, pin: Pin, reason: str) -> bool:
        """Take a pin's record out of the state; false if somebody else has taken it, or may have."""
        try:
            if not await self._state.discard(pin.tenant, pin.conversation, pin.key, reason):
                return False
        except StateDown:
            return False  # the engine lets go when its time is over
        self._metrics.records_lost.labels(reason).inc()
        return True

    async def forget(self, engine: Engine) -> tuple[int, bool]:
        """Void all that an engine holds, since its weights are others now.

        Returns:
            How many of this router's records are given up, and whether the engine was told. Once it is, nothing that
            was made before is read, by any router's request.
        """
        pins = self.pins.void(engine)
        for pin in pins:
            self._give_up(pin, "released")
        return len(pins), await engine.forget()

    def lost(self, engine: Engine, run: str | None) -> None:
        """An engine is gone or was started anew (as `run`), and with it what it held."""
        for pin in self.pins.void(engine):
            self._give_up(pin, "engine_lost")

    def drop(self, record: Record) -> None:
        """Release what a record stands for; it is out of the state already."""
        self.pins.remove(record.key)
        engine = self._engine(record.engine)
        if engine is not None and engine.run == record.run:
            self.release(engine, record.request)

    def release(self, engine: Engine, request_id: object) -> None:
        """Make an engine let go, in a moment; it may have done so already."""
        if not engine.is_up or not isinstance(request_id, str):
            return
        waiting = self._to_release.setdefault(engine, [])
        waiting.append(request_id)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_later(_RELEASE_DELAY_S, self._send_releases, engine)

    def _send_releases(self, engine: Engine) -> None:
        if request_ids := self._to_release.pop(engine, None):
            self.spawn(engine.release(request_ids))

    async def withdraw(self, prefill: Engine, holder: Engine | None, record: Record) -> None:
        """Take a record back from a prefill engine that has not answered for it.

        KV must not be let go of under a reader, so the prefill engine is asked. It tells the decode engine
        itself. Only once its process has ended can nobody read, and the decode engine is told from here.
        """
        for _ in range(PROBES_AFTER_FAILURE):
            if prefill.is_gone:
                if holder is not None:
                    self.release(holder, record.request)
                return
            if prefill.is_up and await prefill.withdraw(whole(record)):
                return
            await asyncio.sleep(self._config.probe_interval_s)
        # It hangs, or is cut off. The decode engine lets go when the record's time is over.

    def time_left(self, record: Record) -> float:
        """How long a record can still be used, in seconds, as far as this router knows."""
        pin = self.pins.get(record.key)
        left = record.deadline - EXPIRY_MARGIN_S - self._clock()
        return max(min(left, pin.time_left) if pin is not None else left, 0.0)

    async def stop(self) -> None:
        """Wait for what is under way; let go of all that no other router can use."""
        # What broke off too: what its engine holds has to be let go of.
        late = [asyncio.ensure_future(flight.stored.wait()) for flight in self._flights.values()]
        if late:
            _, missing = await asyncio.wait(late, timeout=self._config.held_event_wait_s)
            for task in missing:
                task.cancel()
        if not self._config.is_shared:
            self.pins.give_up_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._background or self._to_release:  # noqa: ASYNC110
                    await asyncio.sleep(_RELEASE_DELAY_S)
        for task in self._background:
            task.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something in the background."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        background.watch("hold", task, self._metrics.background_faults)
