"""Step 6: where a conversation is, once its decode engine has said so, and for how long its KV is pinned there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from carryback.wire import events

from carryback_server import background
from carryback_server.config import RouterConfig
from carryback_server.endpoints import Boundary
from carryback_server.engine_client import EngineClient, Engines
from carryback_server.hints import RequestIdentity
from carryback_server.metrics import Metrics
from carryback_server.pins import Pin, Pins, Rank
from carryback_server.state import Conversation, Location, State, StateDown
from carryback_server.tracing import Trace

# An event that has not come this long after its answer's end will not come.
EVENT_LOST_S = 60.0
# How long the router's stop waits for events that are on their way,
EVENT_WAIT_S = 2.0
# and for engines to let go.
STOP_S = 5.0
# Of a tip, in an event.
TIP_BYTES = 16
_POLL_S = 0.01


@dataclass(eq=False, slots=True)
class Expected:
    """A decode whose engine is going to say what it has of it.

    Attributes:
        came: when its request came, in seconds since the epoch.
        is_first: a first request that named no conversation.
        ending: where in its turn the answer ended; empty until it is over.
        is_heard: the engine has said it.
        had: where the conversation was before, if the request had all of it.
    """

    engine: EngineClient
    conversation: Conversation
    came: float
    trace: Trace
    is_first: bool
    ending: Boundary | Literal["", "broken_off"] = ""
    is_heard: bool = False
    had: Location | None = None


def hold_s(config: RouterConfig, identity: RequestIdentity) -> float:
    """How long a decode engine is to pin what a request leaves, unless it hears otherwise, in seconds."""
    if not config.pin_budget:
        return 0.0
    return config.hold_first_s if identity.is_guess else config.hold_s


class Holding:
    """Notes where conversations are, and gives up what is pinned for them in time.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        config: RouterConfig,
        state: State,
        metrics: Metrics,
        engines: Engines,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._config = config
        self._state = state
        self._metrics = metrics
        self._engines = engines
        self._decodes: dict[str, Expected] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self.pins = Pins(config.pin_budget, metrics)

    # -- decode

    def expect(self, key: str, decode: Expected) -> None:
        """A decode begins under a key."""
        self._decodes[key] = decode

    def returned(self, had: Location | None) -> None:
        """A request has begun that had all that its conversation was pinned for."""
        if had is not None and (pin := self.pins.get(had.key)) is not None:
            self.pins.passed(pin)

    def ended(self, key: str, boundary: Boundary, had: Location | None = None) -> None:
        """An answer has come to its end: where that leaves its turn.

        Args:
            had: where its conversation was before, if all of that was found.
        """
        if (decode := self._decodes.get(key)) is None:
            return
        decode.ending, decode.had = boundary, had
        if (pin := self.pins.settle(key, *self._retention(decode))) is not None:
            self._replace(decode)
            self.pins.enforce(pin.engine)
        self._over(key, decode)

    def over(self, key: str, has_run: bool) -> None:
        """A decode is over, whether its answer has ended or not.

        Args:
            has_run: its engine may have begun with it; else it has nothing of it, and will not say so.
        """
        decode = self._decodes.get(key)
        if decode is None or decode.ending:
            return
        decode.ending = "broken_off"
        if not has_run:
            del self._decodes[key]
            return
        if (pin := self.pins.remove(key)) is not None:
            pin.engine.release(key)
        self._over(key, decode)

    def _over(self, key: str, decode: Expected) -> None:
        if decode.is_heard:
            del self._decodes[key]
            return
        asyncio.get_running_loop().call_later(EVENT_LOST_S, self._decodes.pop, key, None)
        # Until its event comes, which may be never, that is where to ask.
        known, engine = decode.conversation.location, decode.engine
        if known is None or (known.engine, known.run) != (engine.name, engine.run):
            turn = decode.conversation.turn
            at = math.nextafter(decode.came, 0)  # what the event says is newer, whichever is stored first
            location = Location(engine.name, engine.run, key, 0, 0.0, turn, b"", at)
            self.spawn(self._note(decode, location, blocks=0))

    # -- hold

    def on_event(self, engine: EngineClient, event: events.Told) -> None:
        """An engine says what it did with a request of this router."""
        if isinstance(event, events.Declined):
            self._metrics.declined.labels(event.reason).inc()
        elif isinstance(event, events.Released):
            self.pins.released(event.key, engine)
            self.pins.enforce(engine)
        elif isinstance(event, events.Held):
            self._on_held(engine, event)

    def _on_held(self, engine: EngineClient, event: events.Held) -> None:
        decode = self._decodes.get(event.key)
        is_wanted = decode is not None and not decode.is_heard and decode.ending != "broken_off"
        if event.blocks and not is_wanted:
            engine.release(event.key)
        if decode is None or decode.is_heard:
            return
        decode.is_heard = True
        until, conversation = 0.0, decode.conversation
        if event.blocks and is_wanted:
            rank, hold_s = self._retention(decode)
            until = self._clock() + min(hold_s, event.hold_s)
            pin = Pin(
                engine, event.key, event.tokens, event.blocks, conversation.tenant, conversation.id, rank
            )
            for older in self.pins.of(conversation.tenant, conversation.id):
                self.pins.passed(older)
            self.pins.add(pin, min(hold_s, event.hold_s))
            self._replace(decode)
        tip = event.tip if len(event.tip) == TIP_BYTES else b""
        location = Location(
            engine.name, event.engine, event.key, max(event.tokens, 0), until, conversation.turn, tip, decode.came
        )  # fmt: skip
        self.spawn(self._note(decode, location, event.blocks))
        # Before the answer's end nobody knows whether this one is the least likely to return.
        if decode.ending:
            del self._decodes[event.key]
            self.pins.enforce(engine)

    async def _note(self, decode: Expected, location: Location, blocks: int) -> None:
        with decode.trace.step("hold") as step:
            step.set(tokens=location.tokens, blocks=blocks)
            try:
                is_known = await self._state.locate(
                    decode.conversation.tenant, decode.conversation.id, location
                )
            except StateDown:
                self._metrics.locations_lost.inc()
                return
        if is_known:
            self._metrics.locations_noted.inc()
        elif (pin := self.pins.remove(location.key)) is not None:  # it was deleted, perhaps at another router
            pin.engine.release(pin.key)

    def _retention(self, decode: Expected) -> tuple[Rank, float]:
        """How likely the conversation is to come back, and how long it is waited for, in seconds."""
        config = self._config
        if decode.ending in ("", "mid_turn", "unfinished"):
            hold_s = config.hold_mid_turn_s if decode.ending else config.hold_s
            rank = Rank.MID_TURN
        elif decode.is_first:
            hold_s, rank = config.hold_first_s, Rank.FIRST
        else:
            hold_s, rank = config.hold_s, Rank.TURN_END
        return rank, min(hold_s, config.hold_first_s) if decode.is_first else hold_s

    # -- give up

    def drop(self, tenant: str, conversation: str, location: Location | None) -> None:
        """A conversation is over: give up what is pinned for it. What is yet to be ends once the state says so."""
        if location is not None:
            self._unpin(location)
        for pin in self.pins.of(tenant, conversation):
            self.pins.remove(pin.key)
            pin.engine.release(pin.key)

    def _replace(self, decode: Expected) -> None:
        """A conversation's new pin has all that one at another engine has. (At the same engine, that one sees to it.)"""
        if decode.had is not None and decode.had.engine != decode.engine.name:
            self._unpin(decode.had)

    def _unpin(self, location: Location) -> None:
        """Give up a pin, which may be another router's."""
        self.pins.remove(location.key)
        engine = self._engines.find(location.engine)
        if location.until and engine is not None and engine.run == location.run:
            engine.release(location.key)

    async def forget(self, engine: EngineClient) -> tuple[int, bool]:
        """Void all that an engine has made, since its weights are others now.

        Returns:
            How many of this router's pins that were, and whether the engine was told. Once it is, nothing that was
            made before is read, by any router's request.
        """
        return len(self.pins.void(engine)), await engine.forget()

    def lost(self, engine: EngineClient) -> None:
        """An engine is gone or was started anew, and with it what was pinned."""
        self.pins.void(engine)

    def pinned_s(self, location: Location) -> float:
        """How long what a location says is still pinned, in seconds, as far as this router knows."""
        if (pin := self.pins.get(location.key)) is not None:
            return pin.time_left
        # Another router may have it pinned, if there are others.
        return max(location.until - self._clock(), 0.0) if self._config.is_shared else 0.0

    async def stop(self) -> None:
        """Wait for what is under way; unpin all that no other router can use."""
        await _until(lambda: not self._decodes, EVENT_WAIT_S)
        if not self._config.is_shared:
            self.pins.give_up_all()
        await _until(lambda: not (self._background or self.pins.are_leaving), STOP_S)
        for task in self._background:
            task.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run something in the background."""
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        background.watch("hold", task, self._metrics.background_faults)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
