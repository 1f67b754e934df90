"""The state that several routers share, in Redis.

A conversation is a hash, its record another one, both in one slot of a cluster; what has to be atomic
is a Lua script. Everything has a time to live.

A record must not come back from the dead. A server that starts from an old snapshot, or a replica that is
promoted before it has heard everything, may have records that were taken already. So each record is
stored with the server's epoch, and one of another epoch is void. The epoch is the server's `run_id`, new
with each start, and its `master_replid`, new with each promotion; scripts read it where they run, so no
connection can be mistaken about it. https://redis.io/docs/latest/commands/info/

Redis is shared, and what one does there others must not feel. So each operation is small; listings and
responses, which may not be, have connections of their own and come a few at a time of each tenant. An error
that Redis answers is that one operation's, unless it says that the server as a whole cannot serve. And what
tenants keep there is counted there, in a ledger, by which the tenant that has most gives up its oldest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from carryback.wire import check_id
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    DataError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from carryback_server.letters import Letters
from carryback_server.state import (
    ENTRY_BYTES,
    Boundary,
    Conversation,
    Cursor,
    Gone,
    Page,
    Record,
    StateBusy,
    StateDown,
    StateFailed,
    is_time,
)

T = TypeVar("T")
P = ParamSpec("P")
_encode = msgspec.msgpack.encode

logger = logging.getLogger("carryback")

# After a failure, nobody waits for Redis for so long; then one request tries it.
RETRY_S = 1.0
# Operations at a time; more wait for one to end, for as long as an operation may take.
MAX_CONNECTIONS = 64
# The same of those that may be large, and of one tenant's.
MAX_LARGE = 16
MAX_LARGE_EACH = 2
VERSION = 1
# Conversations that a listing asks Redis for at once, and that it looks through beyond those that it shows.
LISTED_AT_ONCE = 32
MAX_PASSED_OVER = 1000
# What one addition takes out of a ledger, at most.
MAX_DROPPED = 100

# Error replies that say that the server, or a part of the cluster, serves nobody for now: LOADING and wrong
# passwords are connection errors to the client; these are replies. BUSY: a script, anybody's, has run for seconds.
_OUTAGES = (ReadOnlyError, MasterDownError, OutOfMemoryError, ClusterDownError, TryAgainError)
_OUTAGE_CODES = ("BUSY ", "MISCONF ", "NOREPLICAS ")
# In what Redis says of a value of another type.
_WRONG_TYPE = ("WRONGTYPE", "not an integer", "not a valid float")
# How deep what an engine says of its KV may be nested.
_MAX_DEPTH = 8

# KEYS: the conversation's hash, its record's hash.
_EPOCH = """
local function epoch()
  local function id(section, name) return string.match(redis.call('INFO', section), name .. ':(%w+)') end
  return id('server', 'run_id') .. id('replication', 'master_replid')
end
local function seen()
  local record = redis.call('HMGET', KEYS[2], 'epoch', 'head')
  return record[1] and record[1] == epoch() and record[2]
end
local function conversation() return redis.call('HMGET', KEYS[1], 'meta', 'uid', 'seen', 'requests', 'why') end
"""
# uid, meta, seen, ttl_ms
_OPEN = (
    _EPOCH
    + """
if redis.call('HSETNX', KEYS[1], 'uid', ARGV[1]) == 1 then
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[1], 'meta', ARGV[2], 'requests', 0, 'why', 'new')
end
redis.call('HINCRBY', KEYS[1], 'requests', 1)
redis.call('HSET', KEYS[1], 'seen', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return conversation()
"""
)
# uid
_TAKE = (
    _EPOCH
    + """
local uid, why = unpack(redis.call('HMGET', KEYS[1], 'uid', 'why'))
if uid ~= ARGV[1] then return {'deleted'} end
local record = redis.call('HMGET', KEYS[2], 'epoch', 'head', 'params', 'digests')
if not record[1] then return {why or 'state_lost'} end
redis.call('DEL', KEYS[2])
local is_alive = record[1] == epoch()
redis.call('HSET', KEYS[1], 'why', is_alive and 'in_use' or 'state_lost')
if not is_alive then return {'state_lost'} end
return {'in_use', record[2], record[3], record[4]}
"""
)
# uid, key, head, params, digests, record ttl_ms, conversation ttl_ms
_PUT = (
    _EPOCH
    + """
if redis.call('HGET', KEYS[1], 'uid') ~= ARGV[1] then return {0, false} end
local older = seen()
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'epoch', epoch(), 'key', ARGV[2], 'head', ARGV[3], 'params', ARGV[4], 'digests', ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('HSET', KEYS[1], 'why', 'expired')
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return {1, older}
"""
)
# key, why
_DISCARD = (
    _EPOCH
    + """
if redis.call('HGET', KEYS[2], 'key') ~= ARGV[1] then return 0 end
local is_alive = seen()
redis.call('DEL', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'why', ARGV[2]) end
return is_alive and 1 or 0
"""
)
# What tenants keep, by weight. KEYS: all members (`tenant NUL id`) in the order of use, their weights (under the
# empty member: of all), and the tenants by their weights. A tenant's own members are under the first key and its name.
_LEDGER = """
local all, weights, tenants = unpack(KEYS)
local function own(tenant) return all .. ':' .. tenant end
local function drop(member)
  local tenant = string.match(member, '^[^%z]*')
  redis.call('ZREM', all, member)
  redis.call('ZREM', own(tenant), member)
  local weight = redis.call('HGET', weights, member)
  if not weight then return end
  redis.call('HDEL', weights, member)
  redis.call('HINCRBY', weights, '', -weight)
  if tonumber(redis.call('ZINCRBY', tenants, -weight, tenant)) <= 0 then redis.call('ZREM', tenants, tenant) end
end
"""
# member, weight, order, order up to which members have expired, ttl_ms, capacity, how many to drop at most;
# gives what had to go to make room
_ADD = (
    _LEDGER
    + """
local member, weight, order, expired, ttl, capacity, most = unpack(ARGV)
for _, each in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', expired, 'LIMIT', 0, most)) do drop(each) end
drop(member)
local tenant = string.match(member, '^[^%z]*')
redis.call('ZADD', all, order, member)
redis.call('ZADD', own(tenant), order, member)
redis.call('HSET', weights, member, weight)
redis.call('HINCRBY', weights, '', weight)
redis.call('ZINCRBY', tenants, weight, tenant)
for _, key in ipairs({all, own(tenant), weights, tenants}) do redis.call('PEXPIRE', key, ttl) end
local gone = {}
for _ = 1, most do
  if tonumber(redis.call('HGET', weights, '')) <= tonumber(capacity) then break end
  local biggest = redis.call('ZREVRANGE', tenants, 0, 0)[1]
  if not biggest then break end
  local oldest = redis.call('ZRANGE', own(biggest), 0, 0)[1]
  if oldest then
    drop(oldest)
    table.insert(gone, oldest)
  else
    redis.call('ZREM', tenants, biggest)
  end
end
return gone
"""
)
# members
_DROP = _LEDGER + "for _, member in ipairs(ARGV) do drop(member) end"
# uid, meta, why
_SAVE = """
if redis.call('HGET', KEYS[1], 'uid') ~= ARGV[1] then return end
redis.call('HSET', KEYS[1], 'meta', ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('HSET', KEYS[1], 'why', ARGV[3]) end
"""
_GET = _EPOCH + "return {conversation(), seen()}"
_DELETE = (
    _EPOCH
    + """
local record = seen()
redis.call('DEL', KEYS[2])
return {redis.call('DEL', KEYS[1]), record}
"""
)


class _Meta(msgspec.Struct, array_like=True):
    """What a script need not read of a conversation."""

    tenant: str
    id: str
    parent: str | None
    created: float
    turn: str
    step: int
    boundary: Boundary
    reuse: str

    @classmethod
    def of(cls, conversation: Conversation) -> _Meta:
        return cls(*(getattr(conversation, name) for name in cls.__struct_fields__))


class _Stored(msgspec.Struct, array_like=True):
    """A record, and until when it may be taken, in seconds since the epoch.

    Redis's own time to live starts when a `put` arrives there, which may be late.
    """

    record: Record
    expires: float


class _Foreign(Exception):
    """What is under one of our keys is not ours, or of another version."""


def is_outage(error: Exception) -> bool:
    """Whether an error says that Redis serves nobody for now; any other is of one command alone."""
    if isinstance(error, _OUTAGES) or str(error).startswith(_OUTAGE_CODES):
        return True
    return not isinstance(error, ResponseError | DataError)


def _observed(
    operation: Callable[Concatenate[RedisState, P], Awaitable[T]],
) -> Callable[Concatenate[RedisState, P], Coroutine[Any, Any, T]]:
    """Tell how long an operation took, and whether it worked."""

    @wraps(operation)
    async def observed(self: RedisState, /, *args: P.args, **kwargs: P.kwargs) -> T:
        started, result = time.monotonic(), "done"
        try:
            return await operation(self, *args, **kwargs)
        except (StateDown, StateBusy) as error:
            result = "refused" if isinstance(error, StateFailed | StateBusy) else "failed"
            raise
        finally:
            self.observe(operation.__name__, result, time.monotonic() - started)

    return observed


class RedisState:
    """See `State` for all methods.

    Args:
        url: `redis://`, `rediss://` or `unix://`; a server, or any node of a cluster.
        prefix: of all keys and the channel.
        key: the routers' secret, for messages; without one, none are sent, and none are believed.
        timeout_s: for one operation.
        conversation_ttl_s: how long a conversation is remembered after its last request.
        max_conversations: how many to remember of all tenants'.
        responses_max_bytes: of all stored responses.
        on_evicted: called with the record of a conversation that was forgotten to make room, to release it.
        on_message: called with each message that a router broadcast; must not raise.
        on_refused: called for each message that none did, or that came before.
        observe: called with each operation: its name, `done`, `failed` or `refused`, and its seconds.
        on_junk: called for each value that is not ours, and counts as absent.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        key: str | None,
        timeout_s: float,
        conversation_ttl_s: float,
        max_conversations: int,
        responses_max_bytes: int,
        on_evicted: Callable[[Record], None],
        on_message: Callable[[bytes], None],
        observe: Callable[[str, str, float], None] = lambda operation, result, seconds: None,
        on_junk: Callable[[], None] = lambda: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        parts = urlsplit(url)
        self._server = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        self._url = url
        # A command that may have been carried out is not sent again: a take would lose the record, a
        # put would bring one back.
        self._options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": timeout_s,
        }
        # Waiting for a connection is part of an operation, and ends with it.
        self._small, self._large = (
            Redis.from_pool(
                BlockingConnectionPool.from_url(
                    url, retry_on_error=[], max_connections=most, timeout=None, **self._options
                )
            )
            for most in (MAX_CONNECTIONS, MAX_LARGE)
        )
        # Those that take commands: these, or clients of their cluster.
        self._commands: dict[Redis, Redis | RedisCluster] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # Routers of another version do not see these keys.
        self._prefix = f"{prefix}:{VERSION}"
        self._channel = f"{self._prefix}:messages"
        self._timeout_s = timeout_s
        self._ttl_s = conversation_ttl_s
        self._max_conversations = max_conversations
        self._on_evicted = on_evicted
        self._responses_max_bytes = responses_max_bytes
        self._on_message = on_message
        self.observe = observe
        self._on_junk = on_junk
        self._on_refused = on_refused
        self._letters = Letters(key, self._channel) if key is not None else None
        self._listener: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self.is_up = False
        self.failures = 0

    async def start(self) -> None:
        """See `State.start`."""
        with suppress(StateDown):
            async with self._client() as client:
                await client.ping()
        if self._letters is not None:
            self._listener = asyncio.create_task(self._listen(self._letters))

    async def stop(self) -> None:
        """See `State.stop`."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        for client in {*self._commands.values(), self._small, self._large}:
            await client.aclose()

    @_observed
    async def open(self, tenant: str, id: str, parent: str | None = None) -> Conversation:
        """See `State.open`."""
        new = Conversation.new(tenant, id, parent)
        args = new.uid, _encode(_Meta.of(new)), repr(new.last_seen), _ms(self._ttl_s)
        keys = self._keys(tenant, id)
        conversation = await self._eval(_OPEN, keys, *args, decode=partial(_conversation, tenant, id))
        now = new.last_seen
        for member in await self._add(
            "conversations",
            _member(tenant, id),
            1,
            now,
            now - self._ttl_s,
            self._ttl_s,
            self._max_conversations,
        ):
            _, record = await self.delete(*_name(member))
            if record is not None:
                self._on_evicted(record)
        return conversation

    @_observed
    async def take(self, conversation: Conversation) -> Record | None:
        """See `State.take`."""
        keys = self._keys(conversation.tenant, conversation.id)
        conversation.why_none, stored = await self._eval(_TAKE, keys, conversation.uid, decode=_taken)
        if stored is None:
            return None
        if stored.expires <= time.time():
            conversation.why_none = "expired"
            return None
        return stored.record

    @_observed
    async def put(self, conversation: Conversation, record: Record, ttl_s: float) -> Record | None:
        """See `State.put`."""
        is_done, older = await self._eval(
            _PUT,
            self._keys(conversation.tenant, conversation.id),
            conversation.uid,
            record.key,
            _encode(_Stored(record.without_params(), time.time() + ttl_s)),
            record.params,
            record.digests,
            _ms(ttl_s),
            _ms(max(ttl_s, self._ttl_s)),
            decode=lambda reply: (reply[0], _record(reply[1])),
        )
        if not is_done:
            raise Gone(conversation.id)
        return older

    @_observed
    async def discard(self, tenant: str, id: str, key: str, why: str) -> bool:
        """See `State.discard`."""
        return await self._eval(_DISCARD, self._keys(tenant, id), key, why, decode=bool)

    @_observed
    async def save(self, conversation: Conversation) -> None:
        """See `State.save`."""
        keys = self._keys(conversation.tenant, conversation.id)
        args = conversation.uid, _encode(_Meta.of(conversation)), conversation.why_none
        await self._eval(_SAVE, keys, *args, decode=bool)

    @_observed
    async def get(self, tenant: str, id: str) -> tuple[Conversation, Record | None] | None:
        """See `State.get`."""
        return await self._eval(_GET, self._keys(tenant, id), decode=partial(_seen, tenant, id))

    @_observed
    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """See `State.page`."""
        index = self._ledger("conversations")[0] + (f":{tenant}" if tenant is not None else "")
        cursor = Cursor.decode(after, tenant) if after else None
        found: list[tuple[Conversation, Record | None]] = []
        try:
            async with self._turn(tenant or ""):
                for _ in range((limit + MAX_PASSED_OVER) // LISTED_AT_ONCE + 1):
                    seen, cursor = await self._newest(index, cursor)
                    found += seen
                    if len(found) > limit:  # one more, to know whether there is more
                        return Page(found[:limit], Cursor.of(found[limit - 1][0]).encode())
                    if cursor is None:
                        break
        except _Foreign as error:
            await self._forget(error, [index])
            return Page(found)
        return Page(found, cursor.encode() if cursor is not None else "")

    async def _newest(
        self, index: str, after: Cursor | None
    ) -> tuple[list[tuple[Conversation, Record | None]], Cursor | None]:
        """Some of what an index names, and after which of it to go on; None at its end."""
        most, end = "+inf", None
        if after is not None:
            most, end = repr(after.last_seen), (after.last_seen, _member(after.tenant, after.id).encode())
        async with self._client(self._large) as client:
            # Those of the very same time as the last one come again: as many more are asked for.
            ties = 0 if end is None else await client.zcount(index, most, most)
            rows: list[tuple[bytes, float]] = await client.zrevrangebyscore(
                index, most, "-inf", start=0, num=LISTED_AT_ONCE + min(ties, MAX_PASSED_OVER), withscores=True
            )
            further = [(at, member) for member, at in rows if end is None or (at, member) < end]
            pipe = client.pipeline(transaction=False)
            for _, member in further:
                pipe.execute_command("EVAL", _GET, 2, *self._keys(*_name(member)))
            replies = await pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and not _is_wrong_type(reply):
                    raise reply
        found = []
        for (_, member), reply in zip(further, replies, strict=True):
            # What is not ours is left out; the next request of that conversation clears it away.
            with suppress(_Foreign):
                if isinstance(reply, Exception):
                    raise self._foreign(reply)
                if (seen := self._decoded(reply, partial(_seen, *_name(member)))) is not None:
                    found.append(seen)
        if len(rows) < LISTED_AT_ONCE or not further:
            return found, None
        at, member = further[-1]
        return found, Cursor(at, *_name(member))

    @_observed
    async def delete(self, tenant: str, id: str) -> tuple[bool, Record | None]:
        """See `State.delete`."""
        known, record = await self._eval(
            _DELETE, self._keys(tenant, id), decode=lambda reply: (bool(reply[0]), _record(reply[1]))
        )
        with suppress(StateDown, _Foreign):  # it is deleted; a listing leaves it out
            keys = self._ledger("conversations")
            async with self._client() as client:
                await client.execute_command("EVAL", _DROP, len(keys), *keys, _member(tenant, id))
        return known, record

    @_observed
    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """See `State.put_response`."""
        name, now, weight = _digest(tenant, id), time.time(), len(blob) + ENTRY_BYTES
        gone = await self._add(
            "responses", _member(tenant, name), weight, now + ttl_s, now, ttl_s, self._responses_max_bytes
        )
        async with self._turn(tenant), self._client(self._large) as client:
            for member in gone:
                await client.delete(self._response(_name(member)[1]))
            if _member(tenant, name).encode() not in gone:  # larger than all that there may be
                await client.set(self._response(name), blob, px=_ms(ttl_s))

    @_observed
    async def get_response(self, tenant: str, id: str) -> bytes | None:
        """See `State.get_response`."""
        key = self._response(_digest(tenant, id))
        try:
            async with self._turn(tenant), self._client(self._large) as client:
                blob: bytes | None = await client.get(key)
                return blob
        except _Foreign as error:
            await self._forget(error, [key])
            return None

    async def broadcast(self, message: bytes) -> None:
        """See `State.broadcast`."""
        if self._letters is None:
            raise RuntimeError("no state_key")
        async with self._client():
            await self._small.publish(
                self._channel, self._letters.seal(message)
            )  # a cluster passes it on to all its nodes

    async def _listen(self, letters: Letters) -> None:
        while True:
            try:
                async with self._small.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._channel)
                    async for message in pubsub.listen():
                        self._hear(letters, message["data"])
            except (RedisError, OSError) as error:
                logger.debug("Redis at %s: no messages: %s", self._server, error)
            except Exception:
                # A message that goes wrong must not make us deaf for the others.
                self.observe("messages", "failed", 0.0)
                logger.exception("Redis at %s: a message was not handled", self._server)
            await asyncio.sleep(RETRY_S)

    def _hear(self, letters: Letters, token: bytes) -> None:
        try:
            message = letters.open(token)
        except ValueError as error:
            logger.error("Redis at %s: a message was not believed: %s", self._server, error)
            self._on_refused()
            return
        self._on_message(message)

    async def _add(
        self, ledger: str, member: str, weight: int, order: float, expired: float, ttl_s: float, capacity: int
    ) -> list[bytes]:
        """Count what a tenant keeps; the members that had to go to make room.

        Args:
            order: oldest first, a number.
            expired: the order up to which members have expired.
            ttl_s: of the ledger, from now.
        """
        keys = self._ledger(ledger)
        args = member, weight, repr(order), repr(expired), _ms(ttl_s), capacity, MAX_DROPPED
        for is_again in (False, True):
            try:
                async with self._client() as client:
                    gone: list[bytes] = await client.execute_command("EVAL", _ADD, len(keys), *keys, *args)
                    return gone
            except _Foreign as error:
                if is_again:
                    break
                await self._forget(error, [*keys, f"{keys[0]}:{_name(member.encode())[0]}"])
        raise StateFailed(f"Redis at {self._server}: somebody else writes our keys", maybe_done=True)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """A tenant's turn to do something that may be large.

        Raises:
            StateBusy: it did not come in the time of an operation.
        """
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(MAX_LARGE_EACH))
        try:
            async with asyncio.timeout(self._timeout_s):
                await turns.acquire()
        except TimeoutError as error:
            raise StateBusy(tenant) from error
        try:
            yield
        finally:
            turns.release()

    async def _eval(self, script: str, keys: list[str], *args: Any, decode: Callable[[Any], T]) -> T:
        """Run a script on a conversation; what is there and not ours is deleted.

        Raises:
            StateDown: see `State`.
        """
        for _ in range(2):
            try:
                async with self._client() as client:
                    reply = await client.execute_command("EVAL", script, len(keys), *keys, *args)
                return self._decoded(reply, decode)
            except _Foreign as error:
                await self._forget(error, keys)
        raise StateFailed(f"Redis at {self._server}: somebody else writes our keys", maybe_done=True)

    def _decoded(self, reply: Any, decode: Callable[[Any], T]) -> T:
        """What Redis says; all that is read there goes through here.

        Raises:
            _Foreign: it is not ours, in whichever way.
        """
        try:
            return decode(reply)
        except (
            msgspec.MsgspecError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
        ) as error:  # fmt: skip
            raise self._foreign(error) from error

    def _foreign(self, error: Exception) -> _Foreign:
        self._on_junk()
        return _Foreign(error)

    async def _forget(self, error: _Foreign, keys: list[str]) -> None:
        logger.warning("Redis at %s: deleting %s, which is not ours: %s", self._server, keys, error)
        async with self._client() as client:
            for key in keys:
                await client.delete(key)

    @asynccontextmanager
    async def _client(self, connections: Redis | None = None) -> AsyncIterator[Any]:
        """The client, for one operation.

        Args:
            connections: those for large operations, if it is one. That one of these takes long is its own fault.

        Raises:
            StateDown: Redis is down: the connection failed, it took too long, or something failed a moment ago.
            StateFailed: Redis refused this operation.
            _Foreign: a key holds another type of value.
        """
        now = time.monotonic()
        if now < self._retry_at:
            raise StateDown(f"Redis at {self._server} is down", maybe_done=False)
        if not self.is_up:  # this one tries; the others do not wait for what it finds
            self._retry_at = now + self._timeout_s + RETRY_S
        refused: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                yield await self._connected(connections or self._small)
        except (RedisError, RedisClusterException, OSError) as error:
            is_slow = isinstance(error, TimeoutError) and connections is self._large and self.is_up
            if is_slow:
                raise self._refused(error) from error
            if is_outage(error):
                raise self._failed(error) from error
            refused = error
        if not self.is_up:
            logger.info("Redis at %s is up", self._server)
            self.is_up = True
        self._retry_at = 0.0
        if refused is not None:
            raise self._foreign(refused) if _is_wrong_type(refused) else self._refused(refused) from refused

    def _refused(self, error: Exception) -> StateFailed:
        message = f"Redis at {self._server}: {str(error) or 'no answer in time'}"
        logger.error("%s; this operation alone failed", message)
        return StateFailed(message, maybe_done=True)

    def _failed(self, error: Exception) -> StateDown:
        self.failures += 1
        self._retry_at = time.monotonic() + RETRY_S
        message = f"Redis at {self._server}: {str(error) or 'no answer in time'}"
        if self.is_up or self.failures == 1:
            logger.warning("%s; nothing is reused until it is back", message)
        self.is_up = False
        return StateDown(message, maybe_done=True)

    async def _connected(self, connections: Redis) -> Redis | RedisCluster:
        if (client := self._commands.get(connections)) is None:
            info = await connections.info("cluster")
            is_cluster = bool(info.get("cluster_enabled"))
            client = RedisCluster.from_url(self._url, **self._options) if is_cluster else connections
            client = self._commands.setdefault(connections, client)
        return client

    def _keys(self, tenant: str, id: str) -> list[str]:
        name = _digest(tenant, id)
        return [f"{self._prefix}:{{{name}}}:conversation", f"{self._prefix}:{{{name}}}:record"]

    def _ledger(self, name: str) -> list[str]:
        """The keys of a ledger, all in one slot."""
        slot = f"{self._prefix}:{{{_digest(self._prefix, name)}}}:{name}"
        return [slot, f"{slot}-weights", f"{slot}-tenants"]

    def _response(self, name: str) -> str:
        return f"{self._prefix}:{{{name}}}:response"


def _digest(*parts: str) -> str:
    """Names are digests, so that no id can be written to mean another key."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


def _member(tenant: str, id: str) -> str:
    return f"{tenant}\0{id}"


def _name(member: bytes) -> tuple[str, str]:
    """The tenant and the id of a member."""
    tenant, _, id = _text(member).partition("\0")
    return tenant, id


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, ResponseError) and any(each in str(error) for each in _WRONG_TYPE)


# What is read in Redis, by `RedisState._decoded` alone.


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _why(value: bytes) -> str:
    why = _text(value)
    if not why.isidentifier():  # it goes into a header
        raise ValueError("a reason that is not a word")
    return why


def _conversation(tenant: str, id: str, reply: Any) -> Conversation:
    meta, uid, seen, requests, why = reply
    kept = msgspec.msgpack.decode(meta, type=_Meta)
    found = Conversation(
        **msgspec.structs.asdict(kept),
        uid=_text(uid),
        last_seen=float(seen),
        requests=int(requests),
        why_none=_why(why),
    )
    if (found.tenant, found.id) != (tenant, id):
        raise ValueError("another conversation's")
    if not (is_time(found.created) and is_time(found.last_seen)):
        raise ValueError("a time that is none")
    if found.parent is not None:
        check_id(found.parent, "parent")
    return found


def _stored(head: bytes) -> _Stored:
    stored = msgspec.msgpack.decode(head, type=_Stored)
    if not (is_time(stored.expires) and is_time(stored.record.deadline)):
        raise ValueError("a time that is none")
    return stored


def _record(head: bytes | None) -> Record | None:
    return _stored(head).record if head is not None else None


def _seen(tenant: str, id: str, reply: Any) -> tuple[Conversation, Record | None] | None:
    conversation, head = reply
    return (_conversation(tenant, id, conversation), _record(head)) if conversation[0] is not None else None


def _taken(reply: Any) -> tuple[str, _Stored | None]:
    why, *found = reply
    if not found:
        return _why(why), None
    head, params, digests = found
    stored = _stored(head)
    read = msgspec.json.decode(params, type=dict[str, Any])
    if not (
        isinstance(read["carryback"], dict) and _is_flat(read, _MAX_DEPTH) and isinstance(digests, bytes)
    ):
        raise ValueError("params that are none")
    stored.record = msgspec.structs.replace(stored.record, params=params, digests=digests)
    return _why(why), stored


def _is_flat(value: object, depth: int) -> bool:
    """Whether a value is nested no deeper than this: what is can be written into a request."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_flat(each, depth - 1) for each in inner if isinstance(each, dict | list))
