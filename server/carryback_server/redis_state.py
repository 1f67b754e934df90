"""The state that several routers share, in Redis.

A conversation is a hash; what has to be atomic is a Lua script. Everything has a time to live.

A server that starts from an old snapshot, or a replica that is promoted before it has heard everything, says where
an older request left its KV. That is where engines are asked first, and no more: so nothing here guards against it.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
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
    Location,
    Page,
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
# Of the keys and what is in them: other versions' are neither seen nor touched.
VERSION = 2
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

_FIELDS = ("created", "meta", "seen", "requests", "at", "location")
_HMGET = f"redis.call('HMGET', KEYS[1], {str(_FIELDS)[1:-1]})"
# KEYS: the conversation.
# created, meta, seen, ttl_ms
_OPEN = f"""
if redis.call('HSETNX', KEYS[1], 'created', ARGV[1]) == 1 then
  redis.call('HSET', KEYS[1], 'meta', ARGV[2], 'requests', 0)
  redis.call('HDEL', KEYS[1], 'at', 'location')
end
redis.call('HINCRBY', KEYS[1], 'requests', 1)
redis.call('HSET', KEYS[1], 'seen', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {_HMGET}
"""
# at, location
_LOCATE = """
local created, at = unpack(redis.call('HMGET', KEYS[1], 'created', 'at'))
if not created then return 0 end
if (tonumber(at) or 0) <= tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'at', ARGV[1], 'location', ARGV[2]) end
return 1
"""
# created, meta
_SAVE = """
if redis.call('HGET', KEYS[1], 'created') == ARGV[1] then redis.call('HSET', KEYS[1], 'meta', ARGV[2]) end
"""
_GET = f"return {_HMGET}"
_DELETE = f"""
local known = {_HMGET}
redis.call('DEL', KEYS[1])
return known
"""
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


class _Meta(msgspec.Struct, array_like=True):
    """What a script need not read of a conversation."""

    tenant: str
    id: str
    parent: str | None
    turn: str
    step: int
    boundary: Boundary
    reuse: str

    @classmethod
    def of(cls, conversation: Conversation) -> _Meta:
        return cls(*(getattr(conversation, name) for name in cls.__struct_fields__))


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
        on_message: Callable[[bytes], None],
        observe: Callable[[str, str, float], None] = lambda operation, result, seconds: None,
        on_junk: Callable[[], None] = lambda: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        parts = urlsplit(url)
        self._server = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
        self._url = url
        # A command that may have been carried out is not sent again: it would count twice.
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
        self._prefix = f"{prefix}:{VERSION}"
        self._channel = f"{self._prefix}:messages"
        self._timeout_s = timeout_s
        self._ttl_s = conversation_ttl_s
        self._max_conversations = max_conversations
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
        now = new.last_seen
        args = repr(new.created), _encode(_Meta.of(new)), repr(now), _ms(self._ttl_s)
        conversation = await self._eval(_OPEN, tenant, id, *args, decode=_conversation)
        order = now, now - self._ttl_s, self._ttl_s
        gone = await self._add("conversations", _member(tenant, id), 1, *order, self._max_conversations)
        await self._remove([self._key(*_name(member)) for member in gone])
        return conversation

    @_observed
    async def locate(self, tenant: str, id: str, location: Location) -> bool:
        """See `State.locate`."""
        args = repr(location.at), _encode(location)
        return await self._eval(_LOCATE, tenant, id, *args, decode=lambda *reply: reply[-1] == 1)

    @_observed
    async def save(self, conversation: Conversation) -> None:
        """See `State.save`."""
        args = repr(conversation.created), _encode(_Meta.of(conversation))
        await self._eval(_SAVE, conversation.tenant, conversation.id, *args, decode=lambda *_: None)

    @_observed
    async def get(self, tenant: str, id: str) -> Conversation | None:
        """See `State.get`."""
        return await self._eval(_GET, tenant, id, decode=_known)

    @_observed
    async def page(self, tenant: str | None, limit: int, after: str = "") -> Page:
        """See `State.page`."""
        index = self._ledger("conversations")[0] + (f":{tenant}" if tenant is not None else "")
        cursor = Cursor.decode(after, tenant) if after else None
        found: list[Conversation] = []
        try:
            async with self._turn(tenant or ""):
                for _ in range((limit + MAX_PASSED_OVER) // LISTED_AT_ONCE + 1):
                    seen, cursor = await self._newest(index, cursor)
                    found += seen
                    if len(found) > limit:  # one more, to know whether there is more
                        return Page(found[:limit], Cursor.of(found[limit - 1]).encode())
                    if cursor is None:
                        break
        except _Foreign as error:
            await self._forget(error, index)
            return Page(found)
        return Page(found, cursor.encode() if cursor is not None else "")

    async def _newest(self, index: str, after: Cursor | None) -> tuple[list[Conversation], Cursor | None]:
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
                pipe.hmget(self._key(*_name(member)), _FIELDS)
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
                if (seen := self._decoded(reply, partial(_known, *_name(member)))) is not None:
                    found.append(seen)
        if len(rows) < LISTED_AT_ONCE or not further:
            return found, None
        at, member = further[-1]
        return found, Cursor(at, *_name(member))

    @_observed
    async def delete(self, tenant: str, id: str) -> Conversation | None:
        """See `State.delete`."""
        known = await self._eval(_DELETE, tenant, id, decode=_known)
        with suppress(StateDown, _Foreign):  # it is deleted; a listing leaves it out
            keys = self._ledger("conversations")
            async with self._client() as client:
                await client.execute_command("EVAL", _DROP, len(keys), *keys, _member(tenant, id))
        return known

    @_observed
    async def put_response(self, tenant: str, id: str, blob: bytes, ttl_s: float) -> None:
        """See `State.put_response`."""
        name, now, weight = _digest(tenant, id), time.time(), len(blob) + ENTRY_BYTES
        gone = await self._add(
            "responses", _member(tenant, name), weight, now + ttl_s, now, ttl_s, self._responses_max_bytes
        )
        await self._remove([self._response(_name(member)[1]) for member in gone])
        if _member(tenant, name).encode() not in gone:  # it is larger than all that there may be
            async with self._turn(tenant), self._client(self._large) as client:
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
            await self._forget(error, key)
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
                await self._forget(error, *keys, f"{keys[0]}:{_name(member.encode())[0]}")
        raise StateFailed(f"Redis at {self._server}: somebody else writes our keys")

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

    async def _eval(
        self, script: str, tenant: str, id: str, *args: Any, decode: Callable[[str, str, Any], T]
    ) -> T:
        """Run a script on a conversation; what is there and not ours is deleted.

        Raises:
            StateDown: see `State`.
        """
        key = self._key(tenant, id)
        for _ in range(2):
            try:
                async with self._client() as client:
                    reply = await client.execute_command("EVAL", script, 1, key, *args)
                return self._decoded(reply, partial(decode, tenant, id))
            except _Foreign as error:
                await self._forget(error, key)
        raise StateFailed(f"Redis at {self._server}: somebody else writes our keys")

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

    async def _forget(self, error: _Foreign, *keys: str) -> None:
        logger.warning("Redis at %s: deleting %s, which is not ours: %s", self._server, keys, error)
        await self._remove(keys)

    async def _remove(self, keys: Sequence[str]) -> None:
        if keys:
            async with self._client() as client:
                pipe = client.pipeline(transaction=False)
                for key in keys:  # each may be in another slot
                    pipe.delete(key)
                await pipe.execute()

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
            raise StateDown(f"Redis at {self._server} is down")
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
        return StateFailed(message)

    def _failed(self, error: Exception) -> StateDown:
        self.failures += 1
        self._retry_at = time.monotonic() + RETRY_S
        message = f"Redis at {self._server}: {str(error) or 'no answer in time'}"
        if self.is_up or self.failures == 1:
            logger.warning("%s; nothing is remembered until it is back", message)
        self.is_up = False
        return StateDown(message)

    async def _connected(self, connections: Redis) -> Redis | RedisCluster:
        if (client := self._commands.get(connections)) is None:
            info = await connections.info("cluster")
            is_cluster = bool(info.get("cluster_enabled"))
            client = RedisCluster.from_url(self._url, **self._options) if is_cluster else connections
            client = self._commands.setdefault(connections, client)
        return client

    def _key(self, tenant: str, id: str) -> str:
        return f"{self._prefix}:{{{_digest(tenant, id)}}}:conversation"

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


def _conversation(tenant: str, id: str, reply: Any) -> Conversation:
    created, meta, seen, requests, at, location = reply
    kept = msgspec.msgpack.decode(meta, type=_Meta)
    found = Conversation(
        **msgspec.structs.asdict(kept),
        created=float(created),
        last_seen=float(seen),
        requests=int(requests),
        location=msgspec.msgpack.decode(location, type=Location) if location is not None else None,
    )
    if (found.tenant, found.id) != (tenant, id):
        raise ValueError("another conversation's")
    if not (is_time(found.created) and is_time(found.last_seen)):
        raise ValueError("a time that is none")
    if found.parent is not None:
        check_id(found.parent, "parent")
    if (where := found.location) is not None and not (
        is_time(where.until) and is_time(where.at) and where.at == float(at)
    ):
        raise ValueError("a location that is none")
    return found


def _known(tenant: str, id: str, reply: Any) -> Conversation | None:
    return _conversation(tenant, id, reply) if reply[0] is not None else None
