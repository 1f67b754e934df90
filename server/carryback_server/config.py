"""Configuration: of the router, and of a pair of engines started with it. Every timeout is in seconds."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)


class EngineConfig(BaseModel):
    """One vLLM engine, as the router reaches it.

    Attributes:
        role: `prefill` or `decode`.
        url: base URL of its OpenAI server, e.g. `http://127.0.0.1:8100`.
        events: ZMQ address of its event publisher, e.g. `tcp://127.0.0.1:8101`.
        name: shown in logs and metrics; the URL's host and port unless given.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode"]
    url: str
    events: str
    name: str = ""


class RouterConfig(BaseModel, extra="forbid"):
    """The router's settings. Bound to loopback unless told otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000
    engines: list[EngineConfig] = []
    engine_api_key: str | None = None
    "Sent to the engines as a bearer token."

    max_body_bytes: int = Field(64 * 1024 * 1024, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)
    prefill_timeout_s: float = Field(300.0, gt=0)
    "From sending a prompt to a prefill engine until its answer."
    first_byte_timeout_s: float = Field(300.0, gt=0)
    "From sending a request to a decode engine until the first byte of its answer."
    idle_timeout_s: float = Field(300.0, gt=0)
    "Between two bytes of an answer."
    probe_interval_s: float = Field(1.0, gt=0)
    "Between two health probes of an engine."
    held_event_wait_s: float = Field(2.0, ge=0)
    "How long the next turn waits for the event that says where the last turn's KV is, if it is late."

    hold_s: float = Field(480.0, ge=0)
    "How long a decode engine holds a finished turn's KV; 0 turns reuse off."
    hold_first_s: float = Field(60.0, ge=0)
    "The same for a first request that names no conversation: it may be a one-shot."
    prefill_lease_s: float = Field(30.0, gt=0)
    "How long a prefill engine holds a prompt's KV for the decode engine, not counting its heartbeats."
    identity_capacity: int = Field(100_000, gt=0)
    "Message histories remembered to recognise conversations of clients that send no id."


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


class RouterSettings(_Settings, RouterConfig):
    """`carryback router`: the router's settings, from all sources."""


class ServeConfig(_Settings, RouterConfig):
    """`carryback serve`: the router's settings, and those of the two engines it starts.

    `engines` stays empty: the engines are the two that are started.
    """

    model: str | None = None
    "A Hugging Face id or a folder, as vLLM takes it; the small default model unless given."
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    prefill_devices: str = "0"
    "GPUs of the prefill engine, as in `CUDA_VISIBLE_DEVICES`."
    decode_devices: str = "1"
    prefill_port: int = Field(0, ge=0, le=65535)
    "HTTP port of the prefill engine on loopback; 0: a free one."
    decode_port: int = Field(0, ge=0, le=65535)
    engine_args: Words = []
    "vLLM arguments for both engines; they win over the ones that carryback would give."
    prefill_args: Words = []
    decode_args: Words = []

    kv_recompute_threshold: int = Field(64, ge=0)
    "Tokens below which a prefill engine recomputes rather than reads."
    kv_backend: str = "UCX"
    "NIXL's transport; LIBFABRIC for EFA."
    cpu_kv_cache_gib: int = Field(1, gt=0)
    "KV cache of each engine on a CPU, GiB."
    insecure_dev: bool = False
    "Run without a key for the proofs that engines give each other."

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
        return RouterConfig(**mine, engines=engines)


class ConfigError(Exception):
    """A setting is wrong; the message names it and where it came from."""


SettingsT = TypeVar("SettingsT", bound=_Settings)


def load(settings: type[SettingsT], file: Path | None = None, **flags: object) -> SettingsT:
    """The settings from flags, environment and file, in this order.

    Args:
        settings: `ServeConfig` or `RouterSettings`.
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
    except (SettingsError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file or 'settings'}: {error}") from error
    return loaded


def _explain(error: ErrorDetails, settings: type[BaseModel], file: Path | None) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, settings.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{file or 'settings'}: unknown setting {name!r}{hint}"
    return f"setting {name!r}: {error['msg']} (got {error['input']!r})"
