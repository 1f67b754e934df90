"""What decode engines keep from being overwritten for this router's conversations: for how long, and how much at most.

An engine unpins by itself in the end. This is about doing it earlier: by when the conversation is likely to come back,
and by how many blocks may be pinned for absent conversations at all. What is not pinned can be found until it is
overwritten.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from carryback_server.engine_client import EngineClient
from carryback_server.metrics import Metrics

# A release that an engine has not confirmed by then is no longer counted on.
RELEASE_LOST_S = 60.0

Why = Literal["retention", "budget", "tenant_share", "shutdown"]


class Rank(IntEnum):
    """How likely a conversation is to come back; the least likely one goes first."""

    PASSED = 0
    "Its conversation goes on from there, or from another place."
    FIRST = 1
    "A first request that named no conversation: it may be a one-shot."
    TURN_END = 2
    "A turn has ended; a person thinks now."
    MID_TURN = 3
    "A tool runs; it comes back in seconds."


@dataclass(eq=False)
class Pin:
    """KV blocks of one finished request that a decode engine keeps.

    Attributes:
        key: the router's key of the request.
        since: on the event loop's clock.
    """

    engine: EngineClient
    key: str
    tokens: int
    blocks: int
    tenant: str
    conversation: str
    rank: Rank
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    timer: asyncio.TimerHandle | None = None

    @property
    def time_left(self) -> float:
        """Seconds until it is given up."""
        return self.timer.when() - asyncio.get_running_loop().time() if self.timer is not None else math.inf


_Queue = OrderedDict[str, Pin]


@dataclass
class _Held:
    """What one engine holds for this router.

    Attributes:
        queues: the pins by tenant and rank, the oldest first.
        leaving: blocks of pins that the engine was told to let go of, by key.
    """

    queues: dict[str, dict[Rank, _Queue]] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)


class Pins:
    """All pins of this router. Nothing here waits.

    Args:
        budget: the share of an engine's blocks that may be held for absent conversations.

    Attributes:
        shares: the share of the budget that a tenant's may take, by tenant; 1 if it is not there.
    """

    def __init__(self, budget: float, metrics: Metrics) -> None:
        self._budget = budget
        self.shares: Mapping[str, float] = {}
        self._metrics = metrics
        self._pins: dict[str, Pin] = {}
        self._by_name: dict[tuple[str, str], dict[str, Pin]] = {}
        self._held: dict[EngineClient, _Held] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, key: str) -> Pin | None:
        """The pin of the request with this key."""
        return self._pins.get(key)

    def of(self, tenant: str, conversation: str) -> list[Pin]:
        """All pins of a conversation."""
        return [*self._by_name.get((tenant, conversation), {}).values()]

    @property
    def are_leaving(self) -> bool:
        """An engine has not confirmed yet that it has let go of what was given up."""
        return any(held.leaving for held in self._held.values())

    def add(self, pin: Pin, hold_s: float) -> None:
        """Count a pin.

        Args:
            hold_s: when to give it up, in seconds from now.
        """
        self._pins[pin.key] = pin
        self._by_name.setdefault((pin.tenant, pin.conversation), {})[pin.key] = pin
        held = self._held.setdefault(pin.engine, _Held())
        self._queue(held, pin)[pin.key] = pin
        held.blocks[pin.tenant] = held.blocks.get(pin.tenant, 0) + pin.blocks
        self._metrics.held(pin.engine.name, 1, pin.tokens, pin.blocks, pin.tenant)
        self._set_timer(pin, hold_s)

    def passed(self, pin: Pin) -> None:
        """What a pin has is in use by its conversation's next request; or the conversation's newest pin is another one."""
        held = self._held[pin.engine]
        del self._queue(held, pin)[pin.key]
        pin.rank = Rank.PASSED
        self._queue(held, pin)[pin.key] = pin

    def settle(self, key: str, rank: Rank, hold_s: float) -> Pin | None:
        """Say where in its turn a conversation stands, once that is known; its pin, if there is one.

        Args:
            hold_s: when to give it up, in seconds from now.
        """
        if (pin := self._pins.get(key)) is not None:
            held = self._held[pin.engine]
            del self._queue(held, pin)[key]
            pin.rank = rank
            self._queue(held, pin)[key] = pin
            self._set_timer(pin, hold_s)
        return pin

    def remove(self, key: str) -> Pin | None:
        """Count a pin no more."""
        if (pin := self._pins.pop(key, None)) is None:
            return None
        mine = self._by_name[pin.tenant, pin.conversation]
        del mine[key]
        if not mine:
            del self._by_name[pin.tenant, pin.conversation]
        held = self._held[pin.engine]
        del self._queue(held, pin)[key]
        held.blocks[pin.tenant] -= pin.blocks
        if pin.timer is not None:
            pin.timer.cancel()
        self._metrics.held(pin.engine.name, -1, -pin.tokens, -pin.blocks, pin.tenant)
        return pin

    def released(self, key: str, engine: EngineClient) -> Pin | None:
        """The engine says that it has let go; the pin, if it was still counted."""
        if (held := self._held.get(engine)) is not None:
            held.leaving.pop(key, None)
        return self.remove(key)

    def void(self, engine: EngineClient) -> list[Pin]:
        """The engine's KV is gone: the pins that were there."""
        held = self._held.get(engine)
        if held is None:
            return []
        keys = [key for queues in held.queues.values() for queue in queues.values() for key in queue]
        gone = [pin for key in keys if (pin := self.remove(key)) is not None]
        del self._held[engine]
        return gone

    def enforce(self, engine: EngineClient) -> None:
        """Give up what is over the budget, the least likely to return first.

        What an engine holds is known from its events, whichever router it holds it for. Each router gives
        up its part of what is too much.
        """
        held = self._held.get(engine)
        if held is None or not engine.capacity:
            return
        budget = self._budget * engine.capacity
        self._metrics.pin_budget(engine.name, budget)
        for tenant, share in self.shares.items():
            while held.blocks.get(tenant, 0) > share * budget and self._give_up(
                held, [tenant], "tenant_share"
            ):
                pass
        leaving = sum(held.leaving.values())
        own = sum(held.blocks.values())
        total = max(engine.pinned - leaving, own)
        excess = math.ceil((total - budget) * own / total) if total > budget else 0
        while excess > 0 and (blocks := self._give_up(held, list(held.queues), "budget")):
            excess -= blocks

    def give_up_all(self) -> None:
        """Give up all there is."""
        for pin in list(self._pins.values()):
            self._leave(pin, "shutdown")

    def _give_up(self, held: _Held, tenants: list[str], why: Why) -> int:
        """Give up one pin of these tenants; its blocks, 0 if there is none."""
        for rank in Rank:
            oldest = [
                next(iter(queue.values()))
                for tenant in tenants
                if (queue := held.queues.get(tenant, {}).get(rank))
            ]
            if oldest:
                pin = min(oldest, key=lambda pin: pin.since)
                self._leave(pin, why)
                return pin.blocks
        return 0

    def _leave(self, pin: Pin, why: Why) -> None:
        self.remove(pin.key)
        leaving = self._held[pin.engine].leaving
        leaving[pin.key] = pin.blocks
        asyncio.get_running_loop().call_later(RELEASE_LOST_S, leaving.pop, pin.key, None)
        self._metrics.given_up(pin.rank.name.lower(), why)
        pin.engine.release(pin.key)

    def _set_timer(self, pin: Pin, hold_s: float) -> None:
        if pin.timer is not None:
            pin.timer.cancel()
        pin.timer = asyncio.get_running_loop().call_later(max(hold_s, 0), self._leave, pin, "retention")

    @staticmethod
    def _queue(held: _Held, pin: Pin) -> _Queue:
        return held.queues.setdefault(pin.tenant, {}).setdefault(pin.rank, OrderedDict())
