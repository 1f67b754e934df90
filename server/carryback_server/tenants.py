"""Tenants: whose request it is, by its API key, and what they may do.

The file (`tenants_file`):

```yaml
tenants:
  - name: acme
    keys: ["sha256:5e88..."]
    models: [Qwen/Qwen3-32B]
    max_in_flight: 32
    requests_per_minute: 600
    pin_share: 0.5
  - name: guests
    anonymous: true
```

A key is random and long, so its plain SHA-256 is as hard to invert as the key is to guess; a slow hash is
for passwords. A request's key is looked up by its digest. Whatever a dict's lookup tells by its timing is
about that digest, which a stranger cannot steer without the key, so nothing need take constant time.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from aiohttp import web
from carryback.wire.outside import Malformed, decode
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from carryback_server.config import ConfigError
from carryback_server.connections import OWNER
from carryback_server.errors import ApiError

logger = logging.getLogger("carryback")

KEY_CHARACTERS_MIN = 24
"Of a key in plain text: 128 bits in base64 and a prefix."
REDIS_PAUSE_S = 1.0
"How long Redis is not asked after it failed."

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


def new_key() -> tuple[str, str]:
    """A new API key of 256 random bits, and its hash, which goes into the tenants' file."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """How a key is written where only its hash is to be seen: `sha256:` and 64 hex digits."""
    return f"sha256:{_digest(key).hex()}"


_listings = msgspec.json.Decoder(dict[str, Any])


class _Entry(BaseModel):
    """One tenant in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]
    keys: list[str] = Field(default=[], repr=False)
    anonymous: bool = False
    models: Annotated[list[str], Field(min_length=1)] | None = None
    max_in_flight: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    pin_share: float = Field(default=1.0, ge=0, le=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    # An empty file, as one that is being written, must not open the router to everybody.
    tenants: list[_Entry] = Field(min_length=1)


class Tenant:
    """Somebody who sends requests; the same object over reloads.

    Attributes:
        name: 1 to 64 of `A-Z a-z 0-9 . _ -`.
        models: names of the models that it may use; None: all.
        max_in_flight: requests at this router at a time; None: any number.
        requests_per_minute: of all routers that share a Redis, else of this one; None: any number.
        pin_share: 0 to 1, the share of the pin budget that its held KV may take.
        in_flight: its requests at this router now.
        is_alone: there are no tenants but this one.
    """

    def __init__(self, name: str, rate: _Rate, *, is_alone: bool = False) -> None:
        self.name = name
        self.models: frozenset[str] | None = None
        self.max_in_flight: int | None = None
        self.requests_per_minute: int | None = None
        self.pin_share = 1.0
        self.in_flight = 0
        self._rate = rate
        self.is_alone = is_alone
        self._salt = _salt(name, None)

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"

    def set(self, entry: _Entry) -> None:
        """Take over what the file says; requests under way are not touched."""
        self.models = None if entry.models is None else frozenset(entry.models)
        self.max_in_flight = entry.max_in_flight
        self.requests_per_minute = entry.requests_per_minute
        self.pin_share = entry.pin_share

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Count a request as in flight while it runs.

        Raises:
            ApiError: 429, too many in flight or in a minute; with `Retry-After`.
        """
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            raise ApiError(
                429,
                f"{self.in_flight} requests are in flight, and max_in_flight is {self.max_in_flight}",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self.in_flight += 1
        try:
            if self.requests_per_minute is not None:
                wait_s = await self._rate.wait_s(self.name, self.requests_per_minute)
                if wait_s > 0:
                    raise ApiError(
                        429,
                        f"more than {self.requests_per_minute} requests in a minute (requests_per_minute)",
                        code="rate_limit_exceeded",
                        headers={"Retry-After": str(wait_s)},
                    )
            yield
        finally:
            self.in_flight -= 1

    def check_model(self, model: object) -> None:
        """Whether the tenant may use the model that a request names, if it names one.

        Raises:
            ApiError: 404, as for a model that there is not; 400, none is named, and not all are allowed.
        """
        if self.models is None:
            return
        if model is None:  # an engine would take its own
            raise ApiError(400, "model is missing", code="missing_field", param="model")
        if not isinstance(model, str):
            raise ApiError(400, "model must be a string", code="invalid_field", param="model")
        if model not in self.models:
            raise ApiError(
                404,
                f"the model {model!r} does not exist, or you have no access to it",
                code="model_not_found",
                param="model",
            )

    def visible(self, listing: bytes) -> bytes:
        """An engine's answer to `GET /v1/models`, with the tenant's models only.

        Raises:
            ApiError: 502, it is no such answer.
        """
        if self.models is None:
            return listing
        try:
            answer = decode(_listings.decode, listing, "a list of models")
            answer["data"] = [model for model in answer["data"] if model["id"] in self.models]
            return msgspec.json.encode(answer)
        except (Malformed, KeyError, TypeError, RecursionError) as error:
            raise ApiError(502, "the engine's list of models is none", code="engine_failed") from error

    def salt(self, client_salt: object) -> str | None:
        """The `cache_salt` for both hops, or None for none.

        Equal prompts with different salts share no block of an engine's prefix cache, so the time that a
        prompt takes tells nothing of another tenant's. A client's own salt parts its requests further, and
        can never make them share with another's. The same in all routers, and over restarts.

        Args:
            client_salt: `cache_salt` of the client's body; None if absent.

        Raises:
            ApiError: 400, it is no string, or empty.
        """
        if client_salt is not None and not (isinstance(client_salt, str) and client_salt):
            raise ApiError(
                400, "cache_salt must be a string that is not empty", code="invalid_field", param="cache_salt"
            )
        if self.is_alone:
            return client_salt
        return self._salt if client_salt is None else _salt(self.name, client_salt)

    def own(self, value: str) -> str:
        """A client's value that no other tenant can have, in the same way at all routers and over restarts."""
        return _salt(self.name, value)


class Tenants:
    """All tenants, and whose request is whose.

    Args:
        file: YAML, as above; None: there is none.
        api_keys: each `tenant=key` or `tenant=sha256:<hash>`: further keys of the file's tenants, or
            tenants without limits.
        redis_url: `redis://`, `rediss://` or `unix://`: where all routers together count requests per minute.
        redis_prefix: of its keys.
        redis_timeout_s: for one such count.
        on_uncounted: called for each request that Redis did not count since it is gone; its router did.

    Raises:
        ConfigError: names the file or setting, the tenant and the field; never a key.
    """

    def __init__(
        self,
        file: Path | None = None,
        api_keys: list[str] | None = None,
        *,
        redis_url: str | None = None,
        redis_prefix: str = "carryback",
        redis_timeout_s: float = 0.5,
        on_uncounted: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = file
        self._api_keys = api_keys or []
        self._rate = _Rate(redis_url, redis_prefix, redis_timeout_s, on_uncounted)
        self._names: dict[str, Tenant] = {}
        self._keys: dict[bytes, Tenant] = {}
        self._anonymous: Tenant | None = None
        # Everybody, where there are no keys.
        self._default: Tenant | None = None
        if file is None and not self._api_keys:
            self._default = self._names["default"] = Tenant("default", self._rate, is_alone=True)
        else:
            self._load()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._names.values())

    @property
    def are_open(self) -> bool:
        """Requests without a key are somebody's."""
        return self._default is not None or self._anonymous is not None

    def of(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant that sent a request.

        Its key is the bearer token of `Authorization`; without one, `x-api-key`.

        Args:
            headers: looked up without regard to case.

        Raises:
            ApiError: 401, there is no key, or nobody has it.
        """
        if self._default is not None:
            return self._default
        key = _key(headers)
        if key is None:
            if self._anonymous is not None:
                return self._anonymous
            raise _refusal("there is no API key")
        tenant = self._keys.get(_digest(key))
        if tenant is None:
            raise _refusal("the API key is not known")
        return tenant

    def sender(self, request: web.Request) -> Tenant:
        """`of` a request, whose connection is the tenant's from then on."""
        tenant = self.of(request.headers)
        request[OWNER] = tenant.name
        return tenant

    def reload(self) -> bool:
        """Read the file again; if it is wrong, log that and keep the tenants as they are.

        A key that is no longer there is refused from now on; requests under way go on.
        """
        if self._default is not None:
            return True
        try:
            self._load()
        except ConfigError as error:
            logger.error("tenants are as before: %s", error)
            return False
        logger.info("%d tenants, %d API keys", len(self._names), len(self._keys))
        return True

    async def stop(self) -> None:
        """Disconnect from Redis."""
        await self._rate.stop()

    def _load(self) -> None:
        entries, keys = _read(self._file, self._api_keys)
        names = {name: self._names.get(name) or Tenant(name, self._rate) for name in entries}
        for name, entry in entries.items():
            names[name].set(entry)
        self._names = names
        self._keys = {digest: names[name] for digest, name in keys.items()}
        self._anonymous = next((names[name] for name, entry in entries.items() if entry.anonymous), None)


class _Rate:
    """Requests per minute, counted over a sliding minute: in Redis, or here while Redis is gone.

    All requests of a minute may come at once. The share of the last whole minute that still counts is
    taken to be even, so that two counters do for any rate.
    """

    def __init__(
        self, redis_url: str | None, redis_prefix: str, timeout_s: float, on_uncounted: Callable[[], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._on_uncounted = on_uncounted
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._redis: RedisStorage | None = None
        if redis_url is not None:
            # As limits spells it: async+redis://, async+rediss://, async+redis+unix://.
            self._redis = RedisStorage(
                "async+" + redis_url.replace("unix://", "redis+unix://"),
                wrap_exceptions=True,
                implementation="redispy",
                key_prefix=f"{redis_prefix}:rate",
            )
            self._shared = SlidingWindowCounterRateLimiter(self._redis)
        self._ask_after = -math.inf
        self._is_gone = False

    async def wait_s(self, name: str, per_minute: int) -> int:
        """Count a request; 0, or the seconds after which to try again, and it was not counted."""
        item = RateLimitItemPerMinute(per_minute)
        if self._redis is not None:
            if time.monotonic() >= self._ask_after:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        wait_s = await _hit(self._shared, item, name)
                except (StorageError, OSError) as error:
                    self._ask_after = time.monotonic() + REDIS_PAUSE_S
                    if not self._is_gone:
                        logger.warning("Redis is gone (%s): this router counts alone", type(error).__name__)
                        self._is_gone = True
                else:
                    if self._is_gone:
                        logger.info("Redis is back: it counts requests again")
                        self._is_gone = False
                    return wait_s
            self._on_uncounted()
        return await _hit(self._own, item, name)

    async def stop(self) -> None:
        if self._redis is not None:
            # limits itself closes nothing.
            await self._redis.bridge.get_connection().aclose()  # type: ignore[attr-defined]


async def _hit(limiter: SlidingWindowCounterRateLimiter, item: RateLimitItemPerMinute, name: str) -> int:
    if await limiter.hit(item, name):
        return 0
    window = await limiter.get_window_stats(item, name)
    return max(1, math.ceil(window.reset_time - time.time()))


def _read(file: Path | None, api_keys: list[str]) -> tuple[dict[str, _Entry], dict[bytes, str]]:
    """Tenants by name, and names by the digest of each key."""
    entries: dict[str, _Entry] = {}
    keys: dict[bytes, str] = {}

    def add(text: str, name: str, where: str) -> None:
        if _HASH.fullmatch(text):
            digest = bytes.fromhex(text.removeprefix("sha256:"))
        elif text.startswith("sha256:"):
            raise ConfigError(f"{where}: want sha256: and 64 hex digits")
        elif len(text) < KEY_CHARACTERS_MIN:
            raise ConfigError(f"{where}: a key has at least {KEY_CHARACTERS_MIN} characters")
        elif not (text.isascii() and text.isprintable()) or " " in text:
            raise ConfigError(f"{where}: a key is of printable ASCII characters without spaces")
        else:
            digest = _digest(text)
        if keys.setdefault(digest, name) != name:
            raise ConfigError(f"{where}: another tenant has this key")

    for entry in _parse(file) if file is not None else []:
        if entry.name in entries:
            raise ConfigError(f"{file}: there are two tenants {entry.name!r}")
        if entry.anonymous and any(other.anonymous for other in entries.values()):
            raise ConfigError(f"{file}: tenant {entry.name!r}: 'anonymous': another tenant is that already")
        entries[entry.name] = entry
        for index, text in enumerate(entry.keys):
            where = f"{file}: tenant {entry.name!r}: 'keys', entry {index + 1}"
            add(text, entry.name, where)
            if not text.startswith("sha256:"):
                logger.warning("%s is in plain text; put its hash there: sha256:<hex>", where)
    for index, text in enumerate(api_keys):
        # The name is not shown either: what is wrong may well be a key.
        where = f"setting 'api_keys', entry {index + 1}"
        name, _, key = text.partition("=")
        if not key or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: want tenant=key or tenant=sha256:<hash>")
        add(key, name, where)
        entries.setdefault(name, _Entry(name=name))
    return entries, keys


def _parse(file: Path) -> list[_Entry]:
    # Errors are raised from None: theirs show what is in the file.
    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file}: not YAML{at}") from None
    try:
        return _File.model_validate(content).tenants
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{file}: {_explain(each, content)}" for each in error.errors(include_input=False))
        ) from None


def _explain(error: ErrorDetails, content: Any) -> str:
    where, fields = "", list(error["loc"])
    model: type[BaseModel] = _File
    if len(fields) > 2 and isinstance(fields[1], int):
        model, tenant = _Entry, content["tenants"][fields[1]]
        name = tenant.get("name") if isinstance(tenant, dict) else None
        is_name = isinstance(name, str) and _NAME.fullmatch(name)
        where = f"tenant {name!r}: " if is_name else f"tenant {fields[1] + 1}: "
        fields = fields[2:]
    field = str(fields[0]) if fields else ""
    if error["type"] == "extra_forbidden":
        if len(field) >= KEY_CHARACTERS_MIN:
            return f"{where}a field with an unknown name, not shown since it may be a key"
        near = difflib.get_close_matches(field, model.model_fields, n=1)
        return f"{where}unknown field {field!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if not field:
        return "want a mapping with the field 'tenants'"
    why = "want a mapping" if error["type"] == "model_type" else error["msg"]
    entry = "".join(f", entry {part + 1}" for part in fields[1:] if isinstance(part, int))
    return f"{where}field {field!r}{entry}: {why}"


def _key(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("Authorization", "").strip().partition(" ")
    if scheme and scheme.lower() != "bearer":
        raise _refusal("Authorization has another scheme than Bearer")
    return token.strip() or headers.get("x-api-key", "").strip() or None


def _refusal(why: str) -> ApiError:
    return ApiError(
        401,
        f"{why}; send yours as 'Authorization: Bearer <key>' or 'x-api-key: <key>'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: str) -> bytes:
    # Header bytes that are not UTF-8 are surrogates in aiohttp's strings.
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _salt(name: str, client_salt: str | None) -> str:
    # A name has no NUL, so no two pairs have one text. 64 hex digits; vLLM takes up to 128 characters.
    text = name if client_salt is None else f"{name}\0{client_salt}"
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=32, person=b"carryback salt").hexdigest()
