"""What starts a prefill and a decode engine: command lines and environment. Starts nothing itself."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carryback_server import model
from carryback_server.config import ConfigError, EngineConfig, ServeConfig

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "cuda"]

# In an engine's environment, and never printed.
KEY = "CARRYBACK_KEY"
ENGINE_API_KEY = "VLLM_API_KEY"
EVENTS_KEY = "CARRYBACK_EVENTS_KEY"
SECRETS = (KEY, ENGINE_API_KEY, EVENTS_KEY)

_LOOPBACK = "127.0.0.1"
# vLLM's own default, in tokens.
RECOMPUTE_THRESHOLD = 64
_FIRST_PORT: dict[Role, int] = {"prefill": 8100, "decode": 8200}
# Given by carryback's own settings, so that the router and the engines agree.
_RESERVED = ("--model", "--served-model-name", "--host", "--port", "--api-key")


@dataclass(frozen=True)
class Ports:
    """An engine's three ports on loopback: HTTP, our events, NIXL's handshake."""

    http: int
    events: int
    side_channel: int


@dataclass(frozen=True)
class EngineCommand:
    """How to start one engine.

    Attributes:
        role: `prefill` or `decode`.
        name: for logs; unique among the engines of one run.
        argv: the command line.
        env: variables to set on top of the environment; some are secret (`SECRETS`).
        url: base URL of its OpenAI server, once it runs.
        events: ZMQ address of its event publisher.
    """

    role: Role
    name: str
    argv: list[str]
    env: dict[str, str]
    url: str
    events: str

    def engine(self) -> EngineConfig:
        """The engine as the router's settings name it."""
        return EngineConfig(role=self.role, url=self.url, events=self.events, name=self.name)

    def shell(self) -> str:
        """The command as lines for a shell, without the secrets: those are to be exported before."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items() if name not in SECRETS]
        return " \\\n  ".join([*env, *by_option(self.argv)])


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def find_device(environ: Mapping[str, str] = os.environ) -> Device:
    """`cuda` on a machine with a GPU that this process may see, else `cpu`."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if has_gpu() and not hidden else "cpu"


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now, chosen at random.

    Below the range that systems give to outgoing connections, which could take one before it is used.
    """
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), k=12_000):
        if is_free(_LOOPBACK, port):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} free ports between 20000 and 32000")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port; always for port 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def fixed_ports(config: ServeConfig) -> dict[Role, Ports]:
    """Ports for commands that somebody starts by hand: the configured ones, else 8100 and 8200, and the two after."""
    first = {role: given or _FIRST_PORT[role] for role, given in _given_ports(config).items()}
    return {role: Ports(http=port, events=port + 1, side_channel=port + 2) for role, port in first.items()}


@contextmanager
def reserved_ports(config: ServeConfig) -> Iterator[dict[Role, Ports]]:
    """Ports for both engines: the configured ones, else free ones, kept from every other `carryback serve`.

    The same in each run, if they are free: vLLM compiles a model anew when NIXL's port is another.

    Raises:
        ConfigError: a configured port is in use.
    """
    with ExitStack() as held:

        def claim(port: int) -> bool:
            # An engine binds its ports seconds from now. Until it ends, a socket with the port's name, in
            # Linux's abstract namespace, tells others of us.
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0carryback-port-{port}")
            except OSError:
                name.close()
                return False
            held.enter_context(name)
            return is_free(_LOOPBACK, port)

        def take(first: int) -> int:
            for port in range(first, 32_000):
                if port != config.port and claim(port):
                    return port
            raise ConfigError(f"no free port from {first} on")

        given = _given_ports(config)
        for role, port in given.items():
            if port and not claim(port):
                raise ConfigError(f"port {port} is in use; leave {role}_port to be chosen, or give another")
        yield {
            role: Ports(http=given[role] or take(first), events=take(first), side_channel=take(first))
            for role, first in _FIRST_PORT.items()
        }


def _given_ports(config: ServeConfig) -> dict[Role, int]:
    return {"prefill": config.prefill_port, "decode": config.decode_port}


def served_name(config: ServeConfig) -> str:
    """The model's name in requests."""
    return config.served_model_name or config.model or model.NAME


def engine_commands(
    config: ServeConfig,
    *,
    device: Device,
    model_path: str,
    ports: Mapping[Role, Ports],
    key: str | None,
    environ: Mapping[str, str] = os.environ,
) -> list[EngineCommand]:
    """The commands of the prefill and the decode engine, in this order.

    Args:
        config: all settings.
        device: what the engines run on.
        model_path: what vLLM is to load, a folder or a Hugging Face id.
        ports: of each engine.
        key: the secret with which engines seal records; None only with `insecure_dev`.
        environ: the operator's environment. What it says about the CPU engine is left as it is.

    Raises:
        ConfigError: the engine arguments hold one that carryback sets by a setting of its own.
    """
    shared_env = {"PYTHONHASHSEED": "0"}  # equal block hashes in both engines
    if key is not None:
        shared_env[KEY] = key
    elif config.insecure_dev:
        shared_env["CARRYBACK_INSECURE_DEV"] = "1"
    if config.engine_api_key is not None:
        shared_env[ENGINE_API_KEY] = config.engine_api_key
    if config.events_key is not None:
        shared_env[EVENTS_KEY] = config.events_key.get_secret_value()
    shared_env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_NIXL_SIDE_CHANNEL_HOST": _LOOPBACK}
    if config.model is None:
        shared_env["HF_HUB_OFFLINE"] = "1"  # the default model is on disk

    commands = []
    for role in ("prefill", "decode"):
        mine = ports[role]
        extra = [*config.engine_args, *(config.prefill_args if role == "prefill" else config.decode_args)]
        for flag in _RESERVED:
            if has_flag(extra, flag):
                raise ConfigError(f"{flag} among the engine arguments; give it to carryback serve itself")
        env = shared_env | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(mine.side_channel)}
        if device == "cpu":
            env |= _cpu_environment(config, extra, environ)
        else:
            env["CUDA_VISIBLE_DEVICES"] = (
                config.prefill_devices if role == "prefill" else config.decode_devices
            )
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", model_path, "--served-model-name", served_name(config)]
        argv += ["--host", _LOOPBACK, "--port", str(mine.http)]
        events = f"tcp://{_LOOPBACK}:{mine.events}"
        for option in _options(config, role, device, events):
            if not has_flag(extra, option[0]):
                argv += option
        commands.append(
            EngineCommand(
                role=role,
                name=role,
                argv=argv + extra,
                env=env,
                url=f"http://{_LOOPBACK}:{mine.http}",
                events=events,
            )
        )
    return commands


def has_flag(args: Sequence[str], flag: str) -> bool:
    """Whether `args` set an option: `--flag value`, `--flag=value`, `--no-flag`, or any of these with
    underscores, which vLLM takes too."""
    for arg in args:
        name = arg.split("=", 1)[0].replace("_", "-")
        if name in (flag, "--no-" + flag.removeprefix("--")):
            return True
    return False


def _options(config: ServeConfig, role: Role, device: Device, events: str) -> list[list[str]]:
    options = [
        ["--kv-transfer-config", json.dumps(_kv_transfer(config, role, events))],
        # One algorithm whose hashes do not depend on the process.
        ["--prefix-caching-hash-algo", "sha256_cbor"],
    ]
    if config.model is None:
        options += [
            ["--chat-template", str(model.CHAT_TEMPLATE)],
            ["--enable-auto-tool-choice"],
            ["--tool-call-parser", "hermes"],
        ]
    if device == "cpu":
        options += [
            ["--dtype", "float32"],  # bfloat16 is many times slower without AVX-512
            ["--block-size", "32"],  # the CPU's attention wants a multiple of 32
            ["--enforce-eager"],  # compiling takes a minute a start, and gains little here
        ]
        if config.model is None:
            options += [
                ["--max-model-len", "8192"],
                ["--max-num-batched-tokens", "2048"],
                ["--max-num-seqs", "32"],
            ]
    return options


def _kv_transfer(config: ServeConfig, role: Role, events: str) -> dict[str, object]:
    threshold = config.kv_recompute_threshold
    return {
        "kv_connector": "CarrybackConnector",
        "kv_connector_module_path": "carryback_vllm.connector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        # Prefill can always compute a prompt. Decode reports the failure, and the router tries once more.
        "kv_load_failure_policy": "recompute" if role == "prefill" else "fail",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            # With `auto`, until something was learned.
            "kv_recompute_threshold": threshold if isinstance(threshold, int) else RECOMPUTE_THRESHOLD,
            # Whole seconds, and vLLM sends heartbeats at a sixth of the lease.
            "decoder_kv_blocks_ttl": max(1, math.ceil(config.hold_s)),
            "kv_lease_duration": max(6, math.ceil(config.prefill_lease_s)),
            "backends": [config.kv_backend],
            "carryback_events": events,
        },
    }


def _cpu_environment(config: ServeConfig, extra: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    # Two engines, each with a NIXL thread, and the router share the cores; threads bound to the same
    # core or spinning for each other make them many times slower.
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // 2)
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    if not has_flag(extra, "--kv-cache-memory-bytes"):
        env["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gib)
    return {name: environ.get(name, value) for name, value in env.items()}


def by_option(argv: Sequence[str]) -> list[str]:
    """An argument vector as quoted lines: the program, then each option with its values."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]
