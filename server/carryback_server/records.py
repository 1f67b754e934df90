"""The records: what decode engines hold for which conversation. A record is used once.

Everything here runs on the event loop and never waits, so taking a record is atomic.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from carryback.wire import Reuse
from carryback.wire.events import Held

from carryback_server.engines import Engine
from carryback_server.metrics import Metrics

# A prefill engine does not begin a read within 5 s of the deadline (vLLM's own margin).
EXPIRY_MARGIN_S = 5.5
MAX_CONVERSATIONS = 100_000


@dataclass
class Record:
    """KV that a decode engine holds for the next request of a conversation."""

    engine: Engine
    held: Held
    expires: float
    "On the monotonic clock; the engine's own deadline."

    @property
    def is_usable(self) -> bool:
        """There is still time to read it."""
        return time.monotonic() < self.expires - EXPIRY_MARGIN_S


@dataclass
class Conversation:
    """What the router remembers of a conversation."""

    id: str
    parent: str | None = None
    created: float = field(default_factory=time.time)
    last_seen: float = field(default_factory=time.time)
    turn: str = ""
    step: int = 0
    requests: int = 0
    in_flight: int = 0
    reuse: Reuse | None = None
    record: Record | None = None
    why_none: str = "new"
    "The reason there is no record, when there is none."
    late: asyncio.Event | None = None
    "Set when the event about the last answer's KV, which has not come yet, comes."
    is_deleted: bool = False


class Records:
    """Conversations and their records, in memory.

    Args:
        release: called with each record that is dropped while an engine may still hold it.
    """

    def __init__(self, metrics: Metrics, release: Callable[[Record], None]) -> None:
        self._metrics = metrics
        self._release = release
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._by_key: dict[str, Conversation] = {}

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations.values())

    def get(self, conversation_id: str) -> Conversation | None:
        """A conversation that is known."""
        return self._conversations.get(conversation_id)

    def open(self, conversation_id: str, parent: str | None) -> Conversation:
        """The conversation with this id, made if need be, as the most recently used."""
        conversation = self._conversations.get(conversation_id)
        if conversation is None:
            conversation = self._conversations[conversation_id] = Conversation(conversation_id, parent)
            if len(self._conversations) > MAX_CONVERSATIONS:
                oldest = self.delete(next(iter(self._conversations)))
                if oldest is not None:
                    self._release(oldest)
        self._conversations.move_to_end(conversation_id)
        return conversation

    def take(self, conversation: Conversation) -> Record | None:
        """Take the conversation's record, if it can still be read. Nobody else gets it again."""
        record = self._drop(conversation, "in_use")
        if record is not None and not record.is_usable:
            conversation.why_none = "expired"
            self._metrics.records_lost.labels("expired").inc()
            self._release(record)
            return None
        return record

    def put(self, conversation: Conversation, record: Record) -> None:
        """Store what an engine holds for a conversation, in place of what it held before."""
        if conversation.is_deleted:
            self._release(record)
            return
        if (older := self._drop(conversation, "replaced")) is not None:
            self._metrics.records_lost.labels("replaced").inc()
            self._release(older)
        conversation.record = record
        self._by_key[record.held.key] = conversation
        self._metrics.held(record.engine.name, 1, record.held.tokens, record.held.blocks)

    def delete(self, conversation_id: str) -> Record | None:
        """Forget a conversation; its record, which the caller releases."""
        conversation = self._conversations.pop(conversation_id, None)
        if conversation is None:
            return None
        conversation.is_deleted = True
        return self._drop(conversation, "deleted")

    def released(self, key: str) -> None:
        """An engine let go of the KV that it announced under this key."""
        if (conversation := self._by_key.get(key)) is not None:
            self._drop(conversation, "expired")
            self._metrics.records_lost.labels("released").inc()

    def void(self, engine: Engine, *, keep: str | None = None) -> None:
        """An engine is gone or was started anew: forget its records.

        Args:
            keep: the id of the engine's present run, whose records stay.
        """
        for conversation in list(self._by_key.values()):
            record = conversation.record
            if record is not None and record.engine is engine and record.held.engine != keep:
                self._drop(conversation, "engine_lost")
                self._metrics.records_lost.labels("engine_lost").inc()

    def _drop(self, conversation: Conversation, why: str) -> Record | None:
        record, conversation.record = conversation.record, None
        if record is not None:
            conversation.why_none = why
            del self._by_key[record.held.key]
            self._metrics.held(record.engine.name, -1, -record.held.tokens, -record.held.blocks)
        return record
