"""Configuration: of the router, of an engine, and of a pair of engines with a router. Every timeout is in seconds."""

from __future__ import annotations

import difflib
import ipaddress
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import yaml
from carryback import wire
from carryback_vllm.line import PATIENCE_S
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from carryback_server.profiles import ProfileName
from carryback_server.trust import never_passed

# What `carryback serve` keeps to explain reuse, if nobody but this machine reaches it.
EXPLAIN_BYTES = 64 * 1024 * 1024
# Of what a prefill engine holds for a decode engine: no read begins so long before its end
# (`carryback_vllm.worker.LEASE_MARGIN_S`).
LEASE_MARGIN_S = 1.0


class EngineConfig(BaseModel):
    """One vLLM engine, or several that share a name in DNS or one server, as the router reaches them.

    Attributes:
        role: `prefill` or `decode`.
        url: base URL of its OpenAI server, e.g. `http://127.0.0.1:8100` or `http://[::1]:8100`. With
            `dns+http://` it has `dns`.
        events: ZMQ address of its event publisher, e.g. `tcp://127.0.0.1:8101`; the URL's host and the port
            one above its own unless given.
        name: shown in logs and metrics; the URL's host and port unless given.
        dns: the URL's host is a name of many addresses, each of them an engine. It is resolved again every
            `dns_interval_s`. The host in `events` is replaced by the same address.
        data_parallel_size: vLLM's ranks behind this URL. Each is an engine of its own, `<name>#<rank>`, and
            publishes its events on the port in `events` plus its rank.
        api_key: sent to it as a bearer token, instead of `engine_api_key`.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode"]
    url: str
    events: str = ""
    name: str = ""
    dns: bool = False
    data_parallel_size: int = Field(default=1, gt=0)
    api_key: SecretStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_dns(cls, given: Any) -> Any:
        if isinstance(given, dict) and str(given.get("url")).startswith("dns+"):
            return {**given, "url": given["url"].removeprefix("dns+"), "dns": True}
        return given

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        _check_address(url, ("http", "https"), "http://127.0.0.1:8100")
        return url.rstrip("/")

    @field_validator("events")
    @classmethod
    def _check_events(cls, events: str) -> str:
        if events:
            _check_events_address(events)
        return events

    @model_validator(mode="after")
    def _find_events(self) -> Self:
        if not self.events:
            url = urlsplit(self.url)
            if url.port is None or url.port == 65535:
                raise ValueError(f"where are its events? {self.url} has no port that they could be one above")
            self.events = f"tcp://{url.netloc.rpartition(':')[0]}:{url.port + 1}"
        return self

    @model_validator(mode="after")
    def _check_many(self) -> Self:
        if (self.dns or self.data_parallel_size > 1) and not self.events.startswith("tcp://"):
            raise ValueError("events of several engines need a tcp:// address")
        if self.dns and self.name:
            raise ValueError("name cannot be set with dns: each address is an engine with a name of its own")
        if self.dns and self.url.startswith("https://"):
            raise ValueError(
                "dns needs http://: certificates are for names, and the engines are reached by address"
            )
        return self


def _check_address(value: str, schemes: tuple[str, ...], example: str) -> None:
    scheme, _, rest = value.rpartition("://")
    netloc = rest.partition("/")[0]
    if "@" in netloc:
        raise ValueError("no user and password may be in it; a key goes into api_key")
    if netloc.count(":") > 1 and "[" not in netloc:
        host, _, port = netloc.rpartition(":")
        fixed = f"[{host}]:{port}" if _is_ip(host) else f"[{netloc}]"
        raise ValueError(f"an IPv6 address has to be in brackets: {scheme or schemes[0]}://{fixed}")
    parts = urlsplit(value)
    if parts.scheme not in schemes or not parts.hostname or parts.port == 0:
        raise ValueError(f"want an address such as {example}")
    if parts.query or parts.fragment:
        raise ValueError("nothing but host, port and path may be in it")


def _check_events_address(value: str) -> None:
    if not value.startswith("ipc://"):
        _check_address(value, ("tcp",), "tcp://127.0.0.1:8101")
        if urlsplit(value).port is None:
            raise ValueError("the port is missing: want an address such as tcp://127.0.0.1:8101")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(*hosts: str) -> bool:
    return all(
        host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback) for host in hosts
    )


def _separated(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


# A list of words without commas or spaces; a string is split at both.
Separated = Annotated[list[str], NoDecode, BeforeValidator(_separated)]

# Settings whose values are not shown, also not where they are wrong.
SECRETS = frozenset({"engine_api_key", "api_keys", "api_key", "events_key", "state", "state_key"})


def _check_names(engines: list[EngineConfig]) -> list[EngineConfig]:
    seen = set()
    for engine in engines:
        key = (engine.role, engine.name or urlsplit(engine.url).netloc)
        if key in seen:
            raise ValueError(f"there are two {key[0]} engines {key[1]}; give one of them another name")
        seen.add(key)
    return engines


# Engines that can be told apart.
Engines = Annotated[list[EngineConfig], AfterValidator(_check_names)]


class SharedConfig(BaseModel, extra="forbid"):
    """What an engine and the routers in front of it have to be told alike."""

    engine_api_key: str | None = Field(None, repr=False)
    "Sent to the engines as a bearer token."
    events_key: SecretStr | None = None
    "The secret that engines and routers share for the events; they are open to all without one."
    hold_s: float = Field(480.0, ge=0)
    "How long a decode engine keeps a finished turn's KV from being overwritten; 0: not at all, and it is found while it lies there."
    kv_recompute_threshold: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    """Tokens below which a prefill engine computes what it could read. `auto`: fewer than it takes for a read to
    pay, as learned for each pair of engines; None: as the engines were started."""
    prefill_lease_s: float = Field(30.0, gt=0)
    "How long a prefill engine holds a prompt's KV for the decode engine, not counting its heartbeats."


class RouterConfig(SharedConfig):
    """The router's settings. Bound to loopback unless told otherwise."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    admin_host: str = "127.0.0.1"
    "Address of the operators' port: /metrics and /admin."
    admin_port: int | None = Field(None, ge=0, le=65535)
    "One above `port` unless given; 0: a free one."
    allowed_hosts: Separated = []
    """Names under which the operators' port is asked for, and the clients' where a request needs no key. Addresses,
    names without a dot and names under `.svc`, `.cluster.local`, `.internal` and `.localhost` always are; `*`: any,
    so that pages of other sites can read it by DNS rebinding."""
    engines: Engines = []
    dns_interval_s: float = Field(10.0, gt=0)
    "Between two resolutions of the engines' names that have `dns`."

    max_body_bytes: int = Field(32 * 1024 * 1024, gt=0)
    "Of a request, decoded. What is copied for both hops keeps all others waiting: some milliseconds for each MiB."
    max_body_bytes_in_all: int = Field(512 * 1024 * 1024, gt=0)
    "Of all requests that wait for their first token; where there are tenants, one may have half of it."
    max_body_values: int = Field(1_000_000, gt=0)
    "Of a body; each comma counts, those in texts too."
    max_messages: int = Field(20_000, gt=0)
    "Of a request, or input items."
    body_work_timeout_s: float = Field(20.0, gt=0)
    "For a large body to be looked at, in a process of its own."
    max_header_bytes: int = Field(16 * 1024, gt=0)
    "Of one header, and of the request line."
    max_head_bytes: int = Field(64 * 1024, gt=0)
    "Of a request's line and headers, all of them."
    max_connections: int = Field(4096, gt=0)
    """Of clients at a time; fewer if not so many files can be open. Above it, connections with nothing to do are
    closed, those first that never sent a request."""
    max_connections_per_address: int | None = Field(None, gt=0)
    "Of one address; any number unless given, since a load balancer has one address for all."
    max_admin_connections: int = Field(256, gt=0)
    "Of the operators' port."
    head_timeout_s: float = Field(15.0, gt=0)
    "For a request's head to come: from its first byte, or from the begin of a connection."
    keepalive_timeout_s: float = Field(630.0, gt=0)
    "How long a connection may be idle between requests; load balancers keep theirs for 600 s at most."
    send_timeout_s: float = Field(60.0, gt=0)
    "In which a client takes nothing of its answer, until its connection is broken off."
    body_timeout_s: float = Field(60.0, gt=0)
    "For a request's body to come."
    shutdown_wait_s: float = Field(0.0, ge=0)
    "From SIGTERM, when /ready begins to say no, until no new request is accepted."
    shutdown_timeout_s: float = Field(30.0, ge=0)
    "From then until requests that still run are broken off."
    connect_timeout_s: float = Field(5.0, gt=0)
    prefill_timeout_s: float = Field(300.0, gt=0)
    "From sending a prompt to a prefill engine until its answer."
    first_byte_timeout_s: float = Field(300.0, gt=0)
    "From sending a request to a decode engine until the first byte of its streamed answer."
    answer_timeout_s: float = Field(3600.0, gt=0)
    "From sending a request to a decode engine until its answer, if that is not streamed: all of it is generated by then."
    idle_timeout_s: float = Field(300.0, gt=0)
    "Between two bytes of an answer."
    admit_early: bool = True
    "Send a request to its decode engine while its prompt is still computed, to be taken in and wait there."
    probe_interval_s: float = Field(1.0, gt=0)
    "Between two health probes of an engine."
    probe_timeout_s: float = Field(10.0, gt=0)
    trial_timeout_s: float = Field(30.0, gt=0)
    "For an engine to answer a request of the router's own, after its ejection."
    drain_timeout_s: float = Field(600.0, ge=0)
    "How long an engine that is no longer configured is kept for what it does and holds."
    ejection_failures: int = Field(5, gt=0)
    "Requests in a row that fail (5xx, timeouts, broken connections) by an engine's fault until it is ejected."
    ejection_s: float = Field(10.0, gt=0)
    "How long for, the first time; doubled with each further one."
    ejection_max_s: float = Field(300.0, gt=0)
    "At most; an engine that works for so long starts from `ejection_s` again."
    ejection_max_share: float = Field(0.5, ge=0, lt=1)
    "Of a role's engines that are up, ejected at once; so never the last one."
    overload_factor: float = Field(2.0, ge=1)
    "Times the others' mean load, from which on a decode engine does not get the conversations it holds."
    overload_slack_tokens: int = Field(32_768, ge=0)
    "Load beyond that which overloads nobody, so that conversations stay where they are on idle engines."
    ask_engines: int = Field(8, gt=0)
    "How many decode engines a prompt's prefill engine asks for what they have of it; first where its conversation was last."

    hold_mid_turn_s: float = Field(120.0, ge=0)
    "The same while a tool runs: after an answer with tool calls, or one that did not come to its end."
    hold_first_s: float = Field(60.0, ge=0)
    "The same for a first request that names no conversation: it may be a one-shot."
    pin_budget: float = Field(0.5, ge=0, le=1)
    "The share of a decode engine's KV blocks that may be pinned for absent conversations; 0: nothing is, and there is still reuse."

    tenants_file: Path | None = None
    "Who may ask for what, YAML; everybody without it."
    api_keys: Separated = Field([], repr=False)
    "Each `tenant=key` or `tenant=sha256:<hash>`."

    pass_fields: Separated = []
    """Body fields that reach the engines although there are several tenants: those that security.md calls `alone`, those
    that it does not list, and `vllm_xargs.<key>`."""

    @field_validator("pass_fields")
    @classmethod
    def _check_pass_fields(cls, names: list[str]) -> list[str]:
        for name in names:
            if never_passed(name):
                raise ValueError(f"{name} can never be passed as it is: it is the router's")
        return names

    state: str = Field("memory", pattern=r"^(memory$|rediss?://|unix://)", repr=False)
    "Where conversations, and where they were last, are kept: `memory`, or the `redis://` URL that several routers share."
    state_prefix: str = "carryback"
    "Of all keys in Redis."
    state_key: SecretStr | None = Field(None, min_length=24)
    "The secret of the routers that share a state: they believe each other's messages with it, and none without it."
    state_timeout_s: float = Field(0.5, gt=0)
    "For Redis to answer; then the request goes on without reuse."
    conversation_ttl_s: float = Field(86_400.0, gt=0)
    "How long Redis remembers a conversation that does not come back."
    max_conversations: int = Field(100_000, gt=0)
    "How many to remember of all tenants'; past it, the tenant that has most gives up its least recently used."
    responses_max_bytes: int = Field(256 * 1024 * 1024, ge=0)
    "Of all answers of the Responses API that are kept for `previous_response_id`, likewise."
    response_ttl_s: float = Field(3600.0, gt=0)
    "How long such an answer is kept."
    max_response_bytes: int = Field(4 * 1024 * 1024, gt=0)
    "Of a response and all before it; a longer one cannot be continued by its id."
    conversation_headers: Separated = list(wire.CONVERSATION_HEADERS)
    "Headers of others that may name a conversation, besides `X-Conversation-ID`; the first one that a request has wins."
    identity_capacity: int = Field(100_000, gt=0)
    "Message histories remembered to recognise conversations of clients that send no id."

    explain_bytes: int = Field(0, ge=0)
    "Of requests and answers that are kept in memory to explain what was reused; 0: none are."

    @property
    def is_shared(self) -> bool:
        """Whether other routers share this one's state."""
        return self.state != "memory"

    log_format: Literal["json", "text", "off"] = "json"
    "Of the log on standard error; `off`: no line for each request, and the others as text."
    otlp_endpoint: str | None = None
    "Base URL of an OpenTelemetry collector (OTLP over HTTP), e.g. http://127.0.0.1:4318; no traces without one."
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    "Share of the requests to trace; of those that come with a trace context, their client has decided."


def _words(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


# A list of command-line words; a string is split as a shell does.
Words = Annotated[list[str], NoDecode, BeforeValidator(_words)]


class _Settings(BaseSettings):
    """Flags, else environment variables (`CARRYBACK_` and the name), else the file, else defaults."""

    model_config = SettingsConfigDict(env_prefix="CARRYBACK_", extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for problem in _impossible(given, self):
            raise ValueError(problem)
        return self


# The greater one, which must not be the smaller: setting, setting, and why.
_ORDERED = (
    ("ejection_max_s", "ejection_s", "the longest ejection cannot be shorter than the first"),
    ("restart_wait_max_s", "restart_wait_s", "the longest wait cannot be shorter than the first"),
    ("responses_max_bytes", "max_response_bytes", "a response of that size could never be kept"),
    ("hold_s", "hold_mid_turn_s", "a decode engine holds nothing for longer than hold_s"),
    ("conversation_ttl_s", "hold_s", "Redis would forget a conversation sooner than its KV is let go of"),
)


def _impossible(given: Mapping[str, Any], settings: BaseSettings) -> Iterator[str]:
    """What cannot work of the settings that were given: a sentence each."""
    if given.get("prefill_lease_s", math.inf) <= LEASE_MARGIN_S:
        yield (
            f"prefill_lease_s is {given['prefill_lease_s']:g}: no prompt's KV could be read, since no read begins in the "
            f"last {LEASE_MARGIN_S:g} s"
        )
    for greater, smaller, why in _ORDERED:
        # 0 turns something off; Redis, and its times, may not be there.
        if greater == "conversation_ttl_s" and getattr(settings, "state", "memory") == "memory":
            continue
        if greater in given and given.get(smaller, 0) > given[greater] > 0:
            yield f"{smaller} ({given[smaller]:g}) is above {greater} ({given[greater]:g}): {why}"


class RouterSettings(_Settings, RouterConfig):
    """`carryback router`: the router's settings, from all sources."""

    workers: int = Field(1, gt=0)
    "Processes that share the ports; more than one need a `redis://` state."


class LaunchConfig(SharedConfig):
    """What an engine is started with."""

    model: str | None = None
    "A Hugging Face id or a folder, as vLLM takes it; the small default model unless given."
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: ProfileName | None = None
    "Hardware and network, as `profiles.PROFILES` describes them."
    engine_args: Words = []
    "More vLLM arguments; they win over the ones that carryback would give."
    kv_backend: str | None = None
    "NIXL's transport; the profile's unless given, which is UCX without one."
    prefill_patience_s: float = Field(PATIENCE_S, ge=0, allow_inf_nan=False)
    """How much longer than first come, first served a prompt may wait at a prefill engine for those that have less to
    compute; 0: not at all."""
    cpu_kv_cache_gib: int = Field(1, gt=0)
    "KV cache of an engine on a CPU, GiB."
    insecure_dev: bool = False
    "Run without a key for the proofs that engines give each other."


class EngineSettings(_Settings, LaunchConfig):
    """`carryback engine`: one engine on this machine, for routers and engines on any."""

    devices: str | None = None
    "Its GPUs, as in `CUDA_VISIBLE_DEVICES`; those that it sees unless given."
    advertise_host: str | None = None
    "This machine's address for routers and other engines; the one of its default route unless given."
    host: str | None = None
    "Address that it listens on for requests, and publishes its events on; the advertised one unless given."
    port: int | None = Field(None, gt=0, le=65535)
    "HTTP port; 8100 for prefill and 8200 for decode unless given."
    events_port: int | None = Field(None, gt=0, le=65535)
    "Of its events; one above `port` unless given."
    side_channel_port: int | None = Field(None, gt=0, le=65535)
    "Of NIXL's handshake; two above `port` unless given, or after the ranks' events where there are several."
    decode_peers: Separated = []
    """Addresses of decode engines' events. A prefill engine asks all of them what they have of a prompt, where the
    router does not say whom to ask: behind routers other than carryback's."""

    @field_validator("decode_peers")
    @classmethod
    def _check_decode_peers(cls, addresses: list[str]) -> list[str]:
        for each in addresses:
            try:
                _check_events_address(each)
            except ValueError as error:
                raise ValueError(f"{each}: {error}") from error
        return addresses


class ServeConfig(_Settings, RouterConfig, LaunchConfig):
    """`carryback serve`: the router's settings, and those of the two engines it starts.

    `engines` stays empty: the engines are the two that are started.
    """

    prefill_devices: str | None = None
    "GPUs of the prefill engine, as in `CUDA_VISIBLE_DEVICES`; the first unless given, as many as a recipe says."
    decode_devices: str | None = None
    "The same for the decode engine; the next."
    prefill_port: int = Field(0, ge=0, le=65535)
    "HTTP port of the prefill engine on loopback; 0: a free one."
    decode_port: int = Field(0, ge=0, le=65535)
    prefill_args: Words = []
    "As `engine_args`, for the prefill engine alone."
    decode_args: Words = []

    log_dir: Path | None = None
    "Engine logs; a folder for each run in the cache folder unless given."
    start_timeout_s: float = Field(600.0, gt=0)
    "From starting the engines until both answer."
    stop_grace_s: float = Field(20.0, ge=0)
    "From asking an engine to stop until it is killed."
    restart_wait_s: float = Field(1.0, ge=0)
    "Before the first restart of an engine that died; doubled with each further one."
    restart_wait_max_s: float = Field(60.0, gt=0)
    restart_reset_s: float = Field(300.0, gt=0)
    "Up for so long, and an engine's restarts are counted from zero again."

    def router(self, engines: list[EngineConfig]) -> RouterConfig:
        """The router's part, with these engines."""
        mine = self.model_dump(include=set(RouterConfig.model_fields) - {"engines"})
        if "explain_bytes" not in self.model_fields_set and _is_loopback(self.host, self.admin_host):
            mine["explain_bytes"] = EXPLAIN_BYTES
        return RouterConfig(**mine, engines=engines)


class ConfigError(Exception):
    """A setting is wrong; the message names it and where it came from."""


def engine_named(role: Literal["prefill", "decode"], text: str) -> EngineConfig:
    """The engine that a flag `--prefill` or `--decode` names: `URL` or `URL,EVENTS`.

    Raises:
        ConfigError: it names none.
    """
    url, _, events = text.partition(",")
    try:
        return EngineConfig(role=role, url=url, events=events)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"--{role} {shlex.quote(text)}: {first['msg']}; "
            "want URL or URL,EVENTS, e.g. http://10.0.0.5:8100 or http://10.0.0.5:8100,tcp://10.0.0.5:8101"
        ) from error


SettingsT = TypeVar("SettingsT", bound=_Settings)


def load(settings: type[SettingsT], file: Path | None = None, **flags: object) -> SettingsT:
    """The settings from flags, environment and file, in this order.

    Args:
        settings: `ServeConfig`, `RouterSettings` or `EngineSettings`.
        file: YAML, a mapping from setting to value.
        flags: values that were given on the command line; None counts as not given.

    Raises:
        ConfigError: an unknown setting or a value that is not allowed.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"{file}: no such configuration file")
    # pydantic-settings takes the file's name from the class.
    from_file = type(settings.__name__, (settings,), {"model_config": SettingsConfigDict(yaml_file=file)})
    try:
        loaded: SettingsT = from_file(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(each, settings, file) for each in error.errors())) from error
    except RecursionError as error:
        raise ConfigError(f"{file or 'settings'}: nested too deeply") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (SettingsError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file or 'settings'}: {error}") from error
    return loaded


def _explain(error: ErrorDetails, settings: type[BaseModel], file: Path | None) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if not name:
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, settings.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{file or 'settings'}: unknown setting {name!r}{hint}"
    # Of a group of settings, one may be a secret.
    is_hidden = isinstance(error["input"], dict | list | BaseModel) or not SECRETS.isdisjoint(error["loc"])
    got = "" if is_hidden else f" (got {error['input']!r})"
    return f"setting {name!r}: {error['msg']}{got}"
