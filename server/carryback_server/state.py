"""What outlives a request: the conversations, and what decode engines hold for them.

A record is used once: whoever gets it out of the state, by `take`, `discard`, `put`, `delete` or an
eviction, alone may use it or have it released. `MemoryState` is one router's own, `RedisState` is shared
by several.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import heapq
import itertools
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from carryback_server.config import ConfigError, RouterConfig
from carryback_server.lru import FairLru


class Record(msgspec.Struct, frozen=True, gc=False):
    """KV that a decode engine holds for the next request of a conversation.

    Attributes:
        engine: the engine's name in the configuration.
        run: the engine's id, new with every start.
        key: the router's key of the request that left it.
        request: the engine's id of that request; a release names it.
        tokens: tokens in the full blocks held.
        blocks: KV blocks pinned.
        deadline: when the engine lets go by itself, in seconds since the epoch.
        params: the `kv_transfer_params` that let a prefill engine read the blocks, JSON, but for
            `carryback.digests`. Empty where nothing may be read: in a listing, or if it is only to be released.
        digests: those, 16 bytes a block; empty likewise.
    """

    engine: str
    run: str
    key: str
    request: str
    tokens: int
    blocks: int
    deadline: float
    params: bytes = b""
    digests: bytes = b""

    def without_params(self) -> Record:
        """A record that nothing can be read with."""
        return msgspec.structs.replace(self, params=b"", digests=b"")


# What storing anything costs beside the thing itself, about.
ENTRY_BYTES = 500
# No time is later than this, in seconds since the epoch (the year 5138).
LAST_S = 1e11

Boundary = Literal["", "mid_turn", "turn_end", "unfinished"]


class Conversation(msgspec.Struct, gc=False):
    """What is remembered of a conversation. Changes to it are kept by `State.save`.

    Attributes:
        uid: new each time it is made: one that was deleted and made again is another.
        parent: the id of the conversation that it was forked from.
        created: in seconds since the epoch.
        last_seen: the same; set by `State.open`.
        requests: how often it was opened; counted by `State.open`.
        boundary: where in its turn the last answer left it.
        reuse: the `X-Carryback-Reuse` of the last answer.
        why_none: why there is no record, when there is none.
    """

    tenant: str
    id: str
    uid: str
    parent: str | None
    created: float
    last_seen: float
    turn: str = ""
    step: int = 0
    requests: int = 0
    boundary: Boundary = ""
    reuse: str = ""
    why_none: str = "new"

    @classmethod
    def new(cls, tenant: str, id: str, parent: str | None) -> Conversation:
        """One that was never seen before."""
        now = time.time()
        return cls(tenant, id, uuid.uuid4().hex, parent, created=now, last_seen=now)


class Page(msgspec.Struct):
    """Some conversations, the most recently used first, with their records (without params).

    Attributes:
        after: where the next page starts; empty if this is the last one.
    """

    items: list[tuple[Conversation, Record | None]]
    after: str = ""


class Cursor(msgspec.Struct, array_like=True):
    """The last conversation of a page."""

    last_seen: float
    tenant: str
    id: str

    @classmethod
    def of(cls, conversation: Conversation) -> Cursor:
        """Where a page ends with this one."""
        return cls(conversation.last_seen, conversation.tenant, conversation.id)

    def encode(self) -> str:
        """As text for a client."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def decode(cls, text: str, tenant: str | None = None) -> Cursor:
        """What `encode` made.

        Args:
            tenant: whose page it was; None: anybody's.

        Raises:
            ValueError: it did not, or it is another tenant's.
        """
        try:
            cursor = msgspec.msgpack.decode(base64.b64decode(text, b"-_", validate=True), type=cls)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ValueError("not the end of a page") from error
        is_ours = tenant in (None, cursor.tenant) and is_time(cursor.last_seen) and cursor.encode() == text
        if not is_ours:
            raise ValueError("not the end of a page")
        return cursor


def is_time(value: float) -> bool:
    """Whether a number can be a time, in seconds since the epoch: NaN and the infinite cannot."""
    return 0 <= value < LAST_S


class Gone(Exception):
    """The conversation was deleted since it was opened, and perhaps made anew."""


class StateDown(Exception):
    """The state cannot be reached. Requests go on without reuse.

    Attributes:
        maybe_done: the operation may have happened all the same, or may yet happen. A record that was
            to be stored may then be in the state, so it must not be released.
    """

    def __init__(self, message: str, *, maybe_done: bool) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class StateFailed(StateDown):
    """The state can be reached, and refused or was too slow for this one operation. That says nothing of others."""


class StateBusy(Exception):
    """The tenant has too much of this under way at the state already."""


class State(Protocol):
    """Conversations by tenant and id, their records, and stored responses.

    All tenants have one capacity; past it, the tenant that has most gives up its least recently used.
    Every method but `start` and `stop` may raise `StateDown`.

    Attributes:
        is_up: it can be reached, as far as is known.
        failures: how often it could not be.
    """

    is_up: bool
    failures: int

    async def start(self) -> None:
        """Connect; if that fails, go on trying."""

    async def stop(self) -> None:
        """Disconnect."""

    async def open(self, tenant: str, id: str, parent: str | None = None) -> Conversation:
        """The conversation with this id, made if need be, as the most recently used; count a request of it.

        Args:
            parent: of a new one, the id of the conversation that it was forked from.
        """

    async def take(self, conversation: Conversation) -> Record | None:
        """Take the conversation's record. Nobody else gets it again, wherever they ask.

        `conversation.why_none` says why there is none. If the answer is lost, so is the record.
        """

    async def put(self, conversation: Conversation, record: Record, ttl_s: float) -> Record | None:
        """Store what an engine holds for a conversation.

        Args:
            ttl_s: for how many seconds from now it may be taken.

        Returns:
            The record that was there before, which the caller releases.

        Raises:
            Gone: there is no such conversation any more; nothing was stored.
        """

    async def discard(self, tenant: str, id: str, key: str, why: str) -> bool:
        """Take the record with this key out; whether it was still there, so that the caller may release it.

        Args:
            why: becomes the conversation's `why_none`.
        """

    async def save(self, conversation: Conversation) -> None:
        """Keep turn, step, boundary and reuse, and `why_none` if there is no record. Of a deleted one, nothing."""

    async def get(self, tenant: str, id: str) -> tuple[Conversation, Record | None] | None:
        """A conversation that is known, and its record (without params), which stays."""

    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """Conversations, the most recently used first.

        Args:
            tenant: whose; None for everyone's.
            limit: how many at most.
            after: the `after` of the page before.

        Returns:
            Fewer than `limit`, though there are more, if much of what it looked through is gone.

        Raises:
            ValueError: `after` is not of a page of this tenant's.
            StateBusy: the tenant has several listings under way.
        """

    async def delete(self, tenant: str, id: str) -> tuple[bool, Record | None]:
        """Forget a conversation; whether it was known, and its record, which the caller releases."""

    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """Store a response (of the Responses API) for a while, in seconds; it may have to go earlier."""

    async def get_response(self, tenant: str, id: str) -> bytes | None:
        """What `put_response` stored."""

    async def broadcast(self, message: bytes) -> None:
        """Send a message to all routers that share this state, this one included. One that is cut off misses it.

        With a shared state, only for routers that have a `state_key`.
        """


@dataclass(slots=True, eq=False)
class _Entry:
    conversation: Conversation
    record: Record | None = None
    timer: asyncio.TimerHandle | None = None

    def set(self, record: Record | None, why_none: str, ttl_s: float = 0.0) -> Record | None:
        """Replace the record; the one before."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        older, self.record = self.record, record
        self.conversation.why_none = why_none
        if record is not None:
            self.timer = asyncio.get_running_loop().call_later(ttl_s, self.set, None, "expired")
        return older

    def seen(self) -> tuple[Conversation, Record | None]:
        """A copy for others, without params."""
        return copy.copy(self.conversation), self.record and self.record.without_params()


class MemoryState:
    """One router's own state. Nothing here waits, so each operation is atomic on the event loop.

    Args:
        max_conversations: how many to remember. Past it, the tenant that has most forgets its least recently used.
        responses_max_bytes: of all stored responses, likewise.
        on_evicted: called with the record of a conversation that was forgotten so, to release it.
        on_message: called with each message that is broadcast.
    """

    def __init__(
        self,
        *,
        max_conversations: int,
        responses_max_bytes: int,
        on_evicted: Callable[[Record], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        self._on_evicted = on_evicted
        self._on_message = on_message
        self._conversations: FairLru[_Entry] = FairLru(max_conversations)
        self._responses: FairLru[tuple[float, bytes]] = FairLru(responses_max_bytes)
        self._now = 0.0
        self.is_up = True
        self.failures = 0

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def open(self, tenant: str, id: str, parent: str | None = None) -> Conversation:
        """See `State.open`."""
        entry = self._conversations.use(tenant, id)
        if entry is None:
            entry = _Entry(Conversation.new(tenant, id, parent))
            for evicted in self._conversations.add(tenant, id, entry):
                if (record := evicted.set(None, "evicted")) is not None:
                    self._on_evicted(record)
        # Always increasing, so that it says the order of use, whatever the clock does.
        self._now = max(time.time(), math.nextafter(self._now, math.inf))
        entry.conversation.last_seen = self._now
        entry.conversation.requests += 1
        return copy.copy(entry.conversation)

    async def take(self, conversation: Conversation) -> Record | None:
        """See `State.take`."""
        entry = self._entry(conversation)
        if entry is None:
            conversation.why_none = "deleted"
            return None
        record = entry.set(None, "in_use") if entry.record is not None else None
        conversation.why_none = entry.conversation.why_none
        return record

    async def put(self, conversation: Conversation, record: Record, ttl_s: float) -> Record | None:
        """See `State.put`."""
        if (entry := self._entry(conversation)) is None:
            raise Gone(conversation.id)
        return entry.set(record, "expired", ttl_s)

    async def discard(self, tenant: str, id: str, key: str, why: str) -> bool:
        """See `State.discard`."""
        entry = self._conversations.get(tenant, id)
        if entry is None or entry.record is None or entry.record.key != key:
            return False
        entry.set(None, why)
        return True

    async def save(self, conversation: Conversation) -> None:
        """See `State.save`."""
        if (entry := self._entry(conversation)) is not None:
            mine = entry.conversation
            mine.turn, mine.step = conversation.turn, conversation.step
            mine.boundary, mine.reuse = conversation.boundary, conversation.reuse
            if entry.record is None:
                mine.why_none = conversation.why_none

    async def get(self, tenant: str, id: str) -> tuple[Conversation, Record | None] | None:
        """See `State.get`."""
        entry = self._conversations.get(tenant, id)
        return entry.seen() if entry is not None else None

    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """See `State.page`."""
        before = Cursor.decode(after, tenant).last_seen if after else math.inf
        tenants = [tenant] if tenant is not None else self._conversations.tenants()
        every = heapq.merge(
            *(self._conversations.newest(each) for each in tenants),
            key=lambda entry: entry.conversation.last_seen,
            reverse=True,
        )
        older = (entry for entry in every if entry.conversation.last_seen < before)
        items = [entry.seen() for entry in itertools.islice(older, limit)]
        return Page(items, Cursor.of(items[-1][0]).encode() if next(older, None) is not None else "")

    async def delete(self, tenant: str, id: str) -> tuple[bool, Record | None]:
        """See `State.delete`."""
        entry = self._conversations.pop(tenant, id)
        return (True, entry.set(None, "deleted")) if entry is not None else (False, None)

    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """See `State.put_response`."""
        self._responses.add(tenant, id, (time.monotonic() + ttl_s, blob), weight=len(blob) + ENTRY_BYTES)

    async def get_response(self, tenant: str, id: str) -> bytes | None:
        """See `State.get_response`."""
        expires, blob = self._responses.use(tenant, id) or (math.inf, None)
        if time.monotonic() >= expires:
            self._responses.pop(tenant, id)
            return None
        return blob

    async def broadcast(self, message: bytes) -> None:
        """See `State.broadcast`."""
        self._on_message(message)

    def _entry(self, conversation: Conversation) -> _Entry | None:
        entry = self._conversations.get(conversation.tenant, conversation.id)
        return entry if entry is not None and entry.conversation.uid == conversation.uid else None


def make_state(
    config: RouterConfig,
    *,
    on_evicted: Callable[[Record], None],
    on_message: Callable[[bytes], None],
    observe: Callable[[str, str, float], None],
    on_junk: Callable[[], None],
    on_refused: Callable[[], None],
) -> State:
    """The state that the setting `state` names.

    Args:
        on_evicted: called with the record of a conversation that had to be forgotten, to release it.
        on_message: called with each message that is broadcast; must not raise.
        observe: called with each operation on Redis: its name, `done`, `failed` or `refused`, and its seconds.
        on_junk: called for each value in Redis that is not ours, and counts as absent.
        on_refused: called for each message in Redis that no router sent, or that came before.

    Raises:
        ConfigError: Redis is named and its client is not installed.
    """
    if not config.is_shared:
        return MemoryState(
            max_conversations=config.max_conversations,
            responses_max_bytes=config.responses_max_bytes,
            on_evicted=on_evicted,
            on_message=on_message,
        )
    try:
        from carryback_server.redis_state import RedisState
    except ModuleNotFoundError as error:
        raise ConfigError(
            "setting 'state': Redis needs its client: pip install 'carryback[redis]'"
        ) from error
    return RedisState(
        config.state,
        prefix=config.state_prefix,
        key=config.state_key.get_secret_value() if config.state_key is not None else None,
        timeout_s=config.state_timeout_s,
        conversation_ttl_s=config.conversation_ttl_s,
        max_conversations=config.max_conversations,
        responses_max_bytes=config.responses_max_bytes,
        on_evicted=on_evicted,
        on_message=on_message,
        observe=observe,
        on_junk=on_junk,
        on_refused=on_refused,
    )
