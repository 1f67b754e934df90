"""What outlives a request: the conversations, and where decode engines have something of them.

A location is a hint, which says whom to ask first. What is reused depends on what engines find, so one that is old,
wrong or lost costs a question and never an answer. `MemoryState` is one router's own, `RedisState` is shared by several.
"""

from __future__ import annotations

import base64
import copy
import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
from carryback.wire.events import Key

from carryback_server.config import ConfigError, RouterConfig
from carryback_server.lru import FairLru


class Location(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where the answer to a conversation's newest request left its KV.

    Attributes:
        engine: the decode engine's name in the configuration.
        run: the engine's id, new with every start.
        key: the router's key of the request that left it, which names its pin.
        tokens: tokens in the full blocks that the engine had at the answer's end.
        until: when the pin on them ends, in seconds since the epoch; 0: there is none. They can be found for
            as long as nothing overwrites them, pinned or not.
        turn: the turn that the request was of.
        tip: a keyed digest of the last of those blocks, by which an engine knows whether a prompt goes on from there;
            empty if it is not known.
        at: when the request came, in seconds since the epoch. The newest wins.
    """

    engine: str
    run: str
    key: Key
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    until: float
    turn: str
    tip: bytes
    at: float


# What storing anything costs beside the thing itself, about.
ENTRY_BYTES = 500
# No time is later than this, in seconds since the epoch (the year 5138).
LAST_S = 1e11

Boundary = Literal["", "mid_turn", "turn_end", "unfinished"]


class Conversation(msgspec.Struct, gc=False):
    """What is remembered of a conversation. Changes to it are kept by `State.save`.

    Attributes:
        parent: the id of the conversation that it was forked from.
        created: in seconds since the epoch; one that was deleted and made again is another.
        last_seen: the same; set by `State.open`.
        requests: how often it was opened; counted by `State.open`.
        boundary: where in its turn the last answer left it.
        reuse: the `X-Carryback-Reuse` of the last answer.
        location: where the newest request left its KV; kept by `State.locate`.
    """

    tenant: str
    id: str
    parent: str | None
    created: float
    last_seen: float
    turn: str = ""
    step: int = 0
    requests: int = 0
    boundary: Boundary = ""
    reuse: str = ""
    location: Location | None = None

    @classmethod
    def new(cls, tenant: str, id: str, parent: str | None) -> Conversation:
        """One that was never seen before."""
        now = time.time()
        return cls(tenant, id, parent, created=now, last_seen=now)


class Page(msgspec.Struct):
    """Some conversations, the most recently used first.

    Attributes:
        after: where the next page starts; empty if this is the last one.
    """

    items: list[Conversation]
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


class StateDown(Exception):
    """The state cannot be reached. Requests go on without it, and engines are asked in any order."""


class StateFailed(StateDown):
    """The state can be reached, and refused or was too slow for this one operation. That says nothing of others."""


class StateBusy(Exception):
    """The tenant has too much of this under way at the state already."""


class State(Protocol):
    """Conversations by tenant and id, and stored responses.

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

    async def locate(self, tenant: str, id: str, location: Location) -> bool:
        """Keep where a request left its KV, unless that of a newer one is known; whether the conversation is, still."""

    async def save(self, conversation: Conversation) -> None:
        """Keep turn, step, boundary and reuse. Of a deleted one, nothing."""

    async def get(self, tenant: str, id: str) -> Conversation | None:
        """A conversation that is known."""

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

    async def delete(self, tenant: str, id: str) -> Conversation | None:
        """Forget a conversation; what was known of it."""

    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """Store a response (of the Responses API) for a while, in seconds; it may have to go earlier."""

    async def get_response(self, tenant: str, id: str) -> bytes | None:
        """What `put_response` stored."""

    async def broadcast(self, message: bytes) -> None:
        """Send a message to all routers that share this state, this one included. One that is cut off misses it.

        With a shared state, only for routers that have a `state_key`.
        """


class MemoryState:
    """One router's own state. Nothing here waits, so each operation is atomic on the event loop.

    Args:
        max_conversations: how many to remember. Past it, the tenant that has most forgets its least recently used.
        responses_max_bytes: of all stored responses, likewise.
        on_message: called with each message that is broadcast.
    """

    def __init__(
        self,
        *,
        max_conversations: int,
        responses_max_bytes: int,
        on_message: Callable[[bytes], None],
    ) -> None:
        self._on_message = on_message
        self._conversations: FairLru[Conversation] = FairLru(max_conversations)
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
        conversation = self._conversations.use(tenant, id)
        if conversation is None:
            conversation = Conversation.new(tenant, id, parent)
            self._conversations.add(tenant, id, conversation)
        # Always increasing, so that it says the order of use, whatever the clock does.
        self._now = max(time.time(), math.nextafter(self._now, math.inf))
        conversation.last_seen = self._now
        conversation.requests += 1
        return copy.copy(conversation)

    async def locate(self, tenant: str, id: str, location: Location) -> bool:
        """See `State.locate`."""
        if (mine := self._conversations.get(tenant, id)) is None:
            return False
        if mine.location is None or mine.location.at <= location.at:
            mine.location = location
        return True

    async def save(self, conversation: Conversation) -> None:
        """See `State.save`."""
        mine = self._conversations.get(conversation.tenant, conversation.id)
        if mine is not None and mine.created == conversation.created:
            mine.turn, mine.step = conversation.turn, conversation.step
            mine.boundary, mine.reuse = conversation.boundary, conversation.reuse

    async def get(self, tenant: str, id: str) -> Conversation | None:
        """See `State.get`."""
        return copy.copy(self._conversations.get(tenant, id))

    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """See `State.page`."""
        before = Cursor.decode(after, tenant).last_seen if after else math.inf
        tenants = [tenant] if tenant is not None else self._conversations.tenants()
        every = heapq.merge(
            *(self._conversations.newest(each) for each in tenants),
            key=lambda each: each.last_seen,
            reverse=True,
        )
        older = (each for each in every if each.last_seen < before)
        items = [copy.copy(each) for each in itertools.islice(older, limit)]
        return Page(items, Cursor.of(items[-1]).encode() if next(older, None) is not None else "")

    async def delete(self, tenant: str, id: str) -> Conversation | None:
        """See `State.delete`."""
        return self._conversations.pop(tenant, id)

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


def make_state(
    config: RouterConfig,
    *,
    on_message: Callable[[bytes], None],
    observe: Callable[[str, str, float], None],
    on_junk: Callable[[], None],
    on_refused: Callable[[], None],
) -> State:
    """The state that the setting `state` names.

    Args:
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
        on_message=on_message,
        observe=observe,
        on_junk=on_junk,
        on_refused=on_refused,
    )
