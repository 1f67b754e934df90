"""The state that several routers share, in Redis.

A conversation is a hash, its record another one, both in one slot of a cluster; what has to be atomic
is a Lua script. Everything has a time to live.

A record must not come back from the dead. A server that starts from an old snapshot, or a replica that is
promoted before it has heard everything, may have records that were taken already. So each record is
stored with the server's epoch, and one of another epoch is void. The epoch is the server's `run_id`, new
with each start, and its `master_replid`, new with each promotion; scripts read it where they run, so no
connection can be mistaken about it. https://redis.io/docs/latest/commands/info/
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from carryback_server.state import Boundary, Conversation, Cursor, Gone, Page, Record, StateDown

T = TypeVar("T")
P = ParamSpec("P")
_encode = msgspec.msgpack.encode

logger = logging.getLogger("carryback")

# After a failure, nobody waits for Redis for so long; then one request tries it.
RETRY_S = 1.0
# Operations at a time; more wait for one to end, for as long as an operation may take.
MAX_CONNECTIONS = 64
VERSION = 1
# Conversations seen at the very same time, at most, that a page can end within.
TIES = 16

# In what Redis says of a value of another type.
_WRONG_TYPE = ("WRONGTYPE", "not an integer")

# KEYS: the conversation's hash, its record's hash.
_EPOCH = """
local function epoch()
  local function id(section, name) return string.match(redis.call('INFO', section), name .. ':(%w+)') end
  return id('server', 'run_id') .. id('replication', 'master_replid')
end
local function seen()
  local record = redis.call('HMGET', KEYS[2], 'epoch', 'head')
  return record[1] == epoch() and record[2]
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
# KEYS: an index. member, now, ttl_s
_LIST = """
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2] - ARGV[3])
redis.call('EXPIRE', KEYS[1], math.ceil(ARGV[3]))
return redis.call('ZCARD', KEYS[1])
"""
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


def _observed(
    operation: Callable[Concatenate[RedisState, P], Awaitable[T]],
) -> Callable[Concatenate[RedisState, P], Coroutine[Any, Any, T]]:
    """Tell how long an operation took, and whether it worked."""

    @wraps(operation)
    async def observed(self: RedisState, /, *args: P.args, **kwargs: P.kwargs) -> T:
        started, result = time.monotonic(), "done"
        try:
            return await operation(self, *args, **kwargs)
        except StateDown:
            result = "failed"
            raise
        finally:
            self.observe(operation.__name__, result, time.monotonic() - started)

    return observed


class RedisState:
    """See `State` for all methods.

    Args:
        url: `redis://`, `rediss://` or `unix://`; a server, or any node of a cluster.
        prefix: of all keys and the channel.
        timeout_s: for one operation.
        conversation_ttl_s: how long a conversation is remembered after its last request.
        max_conversations: of one tenant; past it, the least recently used is forgotten.
        on_evicted: called with the record of a conversation that was forgotten so, to release it.
        on_message: called with each message that is broadcast; must not raise.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        timeout_s: float,
        conversation_ttl_s: float,
        max_conversations: int,
        on_evicted: Callable[[Record], None],
        on_message: Callable[[bytes], None],
        observe: Callable[[str, str, float], None] = lambda operation, result, seconds: None,
    ) -> None:
        parts = urlsplit(url)
        self._name = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
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
        self._redis = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url, retry_on_error=[], max_connections=MAX_CONNECTIONS, timeout=None, **self._options
            )
        )
        self._commands: Redis | RedisCluster | None = None
        # Routers of another version do not see these keys.
        self._prefix = f"{prefix}:{VERSION}"
        self._channel = f"{self._prefix}:messages"
        self._timeout_s = timeout_s
        self._ttl_s = conversation_ttl_s
        self._max_conversations = max_conversations
        self._on_evicted = on_evicted
        self._on_message = on_message
        self.observe = observe
        self._listener: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self.is_up = False
        self.failures = 0

    async def start(self) -> None:
        """See `State.start`."""
        with suppress(StateDown):
            async with self._client() as client:
                await client.ping()
        self._listener = asyncio.create_task(self._listen())

    async def stop(self) -> None:
        """See `State.stop`."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if self._commands is not None:
            await self._commands.aclose()
        await self._redis.aclose()

    @_observed
    async def open(self, tenant: str, id: str, parent: str | None = None) -> Conversation:
        """See `State.open`."""
        new = Conversation.new(tenant, id, parent)
        args = new.uid, _encode(_Meta.of(new)), repr(new.last_seen), _ms(self._ttl_s)
        conversation = await self._eval(_OPEN, self._keys(tenant, id), *args, decode=_conversation)
        indexes = self._indexes(tenant)
        try:
            async with self._client() as client:
                pipe = client.pipeline(transaction=False)
                for index in indexes:
                    now = repr(new.last_seen)
                    pipe.execute_command("EVAL", _LIST, 1, index, _member(tenant, id), now, self._ttl_s)
                counts = await pipe.execute(raise_on_error=False)
                for error in counts:
                    if isinstance(error, Exception):
                        raise error
        except _Foreign as error:
            await self._forget(error, indexes)
        else:
            if counts[0] > self._max_conversations:
                await self._evict(indexes[0])
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
        return await self._eval(_GET, self._keys(tenant, id), decode=_seen)

    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """See `State.page`."""
        index = self._indexes(tenant or "")[0 if tenant is not None else 1]
        cursor = Cursor.decode(after) if after else None
        found: list[tuple[Conversation, Record | None]] = []
        try:
            async with aclosing(self._newest(index, cursor, limit + 1 + TIES)) as newest:
                async for each in newest:
                    found.append(each)
                    if len(found) > limit:  # one more, to know whether there is more
                        return Page(found[:limit], Cursor.of(found[limit - 1][0]).encode())
        except _Foreign as error:
            await self._forget(error, [index])
        return Page(found)

    async def _newest(
        self, index: str, cursor: Cursor | None, step: int
    ) -> AsyncGenerator[tuple[Conversation, Record | None], None]:
        """What an index names, from after the cursor on, asked for in steps of so many."""
        score, end = float("inf"), None
        if cursor is not None:
            score = cursor.last_seen
            end = score, _member(cursor.tenant, cursor.id).encode()
        while True:
            async with self._client() as client:
                rows = await client.zrevrangebyscore(index, score, "-inf", start=0, num=step, withscores=True)
                further = [(at, member) for member, at in rows if end is None or (at, member) < end]
                pipe = client.pipeline(transaction=False)
                for _, member in further:
                    tenant, _, id = _text(member).partition("\0")
                    pipe.execute_command("EVAL", _GET, 2, *self._keys(tenant, id))
                replies = await pipe.execute(raise_on_error=False)
            for reply in replies:
                # What is not ours is left out; the next request of that conversation clears it away.
                with suppress(_Foreign):
                    if not isinstance(reply, Exception) and (seen := _seen(reply)) is not None:
                        yield seen
            if len(rows) < step or not further:
                return
            end = further[-1]
            score = end[0]

    @_observed
    async def delete(self, tenant: str, id: str) -> tuple[bool, Record | None]:
        """See `State.delete`."""
        known, record = await self._eval(
            _DELETE, self._keys(tenant, id), decode=lambda reply: (bool(reply[0]), _record(reply[1]))
        )
        with suppress(StateDown, _Foreign):  # it is deleted; a listing leaves it out
            async with self._client() as client:
                for index in self._indexes(tenant):
                    await client.zrem(index, _member(tenant, id))
        return known, record

    @_observed
    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """See `State.put_response`."""
        async with self._client() as client:
            await client.set(self._response(tenant, id), blob, px=_ms(ttl_s))

    @_observed
    async def get_response(self, tenant: str, id: str) -> bytes | None:
        """See `State.get_response`."""
        key = self._response(tenant, id)
        try:
            async with self._client() as client:
                blob: bytes | None = await client.get(key)
                return blob
        except _Foreign as error:
            await self._forget(error, [key])
            return None

    async def broadcast(self, message: bytes) -> None:
        """See `State.broadcast`."""
        async with self._client():
            await self._redis.publish(self._channel, message)  # a cluster passes it on to all its nodes

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._channel)
                    async for message in pubsub.listen():
                        self._on_message(message["data"])
            except (RedisError, OSError) as error:
                logger.debug("Redis at %s: no messages: %s", self._name, error)
            await asyncio.sleep(RETRY_S)

    async def _evict(self, index: str) -> None:
        """Forget a tenant's least recently used conversation."""
        async with self._client() as client:
            popped = await client.zpopmin(index)
        for member, _ in popped:
            tenant, _, id = _text(member).partition("\0")
            _, record = await self.delete(tenant, id)
            if record is not None:
                self._on_evicted(record)

    async def _eval(self, script: str, keys: list[str], *args: Any, decode: Callable[[Any], T]) -> T:
        """Run a script on a conversation; what is there and not ours is deleted.

        Raises:
            StateDown: see `State`.
        """
        for _ in range(2):
            try:
                async with self._client() as client:
                    reply = await client.execute_command("EVAL", script, len(keys), *keys, *args)
                return decode(reply)
            except _Foreign as error:
                await self._forget(error, keys)
        raise StateDown(f"Redis at {self._name}: somebody else writes our keys", maybe_done=True)

    async def _forget(self, error: _Foreign, keys: list[str]) -> None:
        logger.warning("Redis at %s: deleting %s, which is not ours: %s", self._name, keys, error)
        async with self._client() as client:
            for key in keys:
                await client.delete(key)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """The client, for one operation.

        Raises:
            StateDown: it failed, took too long, or something failed a moment ago.
            _Foreign: a key holds another type of value.
        """
        now = time.monotonic()
        if now < self._retry_at:
            raise StateDown(f"Redis at {self._name} is down", maybe_done=False)
        if not self.is_up:  # this one tries; the others do not wait for what it finds
            self._retry_at = now + self._timeout_s + RETRY_S
        foreign: ResponseError | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                yield await self._connected()
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, ResponseError) and any(each in str(error) for each in _WRONG_TYPE):
                foreign = error
            else:
                raise self._failed(error) from error
        if not self.is_up:
            logger.info("Redis at %s is up", self._name)
            self.is_up = True
        self._retry_at = 0.0
        if foreign is not None:
            raise _Foreign(foreign) from foreign

    def _failed(self, error: Exception) -> StateDown:
        self.failures += 1
        self._retry_at = time.monotonic() + RETRY_S
        message = f"Redis at {self._name}: {str(error) or 'no answer in time'}"
        if self.is_up or self.failures == 1:
            logger.warning("%s; nothing is reused until it is back", message)
        self.is_up = False
        return StateDown(message, maybe_done=True)

    async def _connected(self) -> Redis | RedisCluster:
        if self._commands is None:
            info = await self._redis.info("cluster")
            is_cluster = bool(info.get("cluster_enabled"))
            self._commands = RedisCluster.from_url(self._url, **self._options) if is_cluster else self._redis
        return self._commands

    def _keys(self, tenant: str, id: str) -> list[str]:
        name = _digest(tenant, id)
        return [f"{self._prefix}:{{{name}}}:conversation", f"{self._prefix}:{{{name}}}:record"]

    def _indexes(self, tenant: str) -> list[str]:
        """The tenant's, and everyone's."""
        return [f"{self._prefix}:{{{_digest(tenant)}}}:conversations", f"{self._prefix}:conversations"]

    def _response(self, tenant: str, id: str) -> str:
        return f"{self._prefix}:{{{_digest(tenant, id)}}}:response"


def _digest(*parts: str) -> str:
    """Names are digests, so that no id can be written to mean another key."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


def _member(tenant: str, id: str) -> str:
    return f"{tenant}\0{id}"


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _decode(value: Any, type: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(value, type=type)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise _Foreign(error) from error


def _conversation(reply: Any) -> Conversation:
    meta, uid, seen, requests, why = reply
    kept = _decode(meta, _Meta)
    try:
        return Conversation(
            **msgspec.structs.asdict(kept),
            uid=_text(uid),
            last_seen=float(seen),
            requests=int(requests),
            why_none=_text(why),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise _Foreign(error) from error


def _record(head: bytes | None) -> Record | None:
    return _decode(head, _Stored).record if head is not None else None


def _seen(reply: Any) -> tuple[Conversation, Record | None] | None:
    conversation, head = reply
    return (_conversation(conversation), _record(head)) if conversation[0] is not None else None


def _taken(reply: Any) -> tuple[str, _Stored | None]:
    why, *found = reply
    if not found:
        return _text(why), None
    head, params, digests = found
    if params is None or digests is None:
        raise _Foreign("a record without params")
    stored = _decode(head, _Stored)
    stored.record = msgspec.structs.replace(stored.record, params=params, digests=digests)
    return _text(why), stored
