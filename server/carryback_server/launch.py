"""What starts engines, one or a pair: command lines and environment. Starts nothing itself."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from carryback_server import model, profiles
from carryback_server.address import in_url
from carryback_server.config import (
    ConfigError,
    EngineConfig,
    EngineSettings,
    LaunchConfig,
    RouterConfig,
    ServeConfig,
)
from carryback_server.profiles import Device, Profile, Role

# In an engine's environment, and never printed.
KEY = "CARRYBACK_KEY"
ENGINE_API_KEY = "VLLM_API_KEY"
EVENTS_KEY = "CARRYBACK_EVENTS_KEY"
SECRETS = (KEY, ENGINE_API_KEY, EVENTS_KEY)

# What is read back from a decode engine is what it has in its prefix cache.
PREFIX_CACHING = "--enable-prefix-caching"

_LOOPBACK = "127.0.0.1"
_EVERYWHERE = {"0.0.0.0", "::", ""}
# vLLM's own default, in tokens.
RECOMPUTE_THRESHOLD = 64
# UCX over TCP notices by nothing else that a link is cut while it reads, and the kernel tries for a quarter of an
# hour. A peer that is merely busy acknowledges all the same, unless it takes nothing for so long.
UCX_TCP_USER_TIMEOUT = "30s"
# From here on systems give ports to outgoing connections, which could take one before it is used.
_LAST_PORT = 32_000
_FIRST_PORT: dict[Role, int] = {"prefill": 8100, "decode": 8200}
# Given by carryback's own settings, so that the router and the engines agree.
_RESERVED = ("--model", "--served-model-name", "--host", "--port", "--api-key")


@dataclass(frozen=True)
class Ports:
    """An engine's three ports: HTTP, our events, NIXL's handshake."""

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
        events: ZMQ address of its event publisher, for routers.
    """

    role: Role
    name: str
    argv: list[str]
    env: dict[str, str]
    url: str
    events: str

    @property
    def warning(self) -> str:
        """What will not work with it; empty if all will."""
        if self.role == "prefill" or is_on(self.argv, PREFIX_CACHING):
            return ""
        return (
            "the decode engine is started without prefix caching: nothing can be read back from it, and each turn's whole "
            "prompt is computed; leave out --no-enable-prefix-caching for it (with --prefill-args, `serve` gives that "
            "to the prefill engine alone)"
        )

    def engine(self) -> EngineConfig:
        """The engine as the router's settings name it."""
        return EngineConfig(role=self.role, url=self.url, events=self.events, name=self.name)

    def router_words(self) -> list[str]:
        """The arguments of `carryback router` that name the engine."""
        usual = EngineConfig(role=self.role, url=self.url).events
        return [f"--{self.role}", self.url if self.events == usual else f"{self.url},{self.events}"]

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


def device_of(config: LaunchConfig) -> Device:
    """What engines are to run on.

    Raises:
        ConfigError: the profile is for another device.
    """
    if config.profile is None:
        return find_device() if config.device == "auto" else config.device
    wanted = profiles.PROFILES[config.profile].device
    if config.device not in ("auto", wanted):
        raise ConfigError(f"profile {config.profile} is for device {wanted}; leave device to it")
    return wanted


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now, chosen at random."""
    found: list[int] = []
    for port in random.sample(range(20_000, _LAST_PORT), k=12_000):
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


@dataclass(frozen=True)
class Listener:
    """What is going to be listened on.

    Attributes:
        flag: sets the port.
        host: the address.
        port: the first of them.
        count: of ports, one after the other: each data-parallel rank has its own.
    """

    flag: str
    host: str
    port: int
    count: int = 1

    @property
    def ports(self) -> range:
        """All of them."""
        return range(self.port, self.port + self.count)

    def meets(self, other: Listener) -> bool:
        """Whether both cannot be listened on at once."""
        mine, theirs = ({"localhost": _LOOPBACK}.get(each.host, each.host) for each in (self, other))
        is_one_host = mine == theirs or not _EVERYWHERE.isdisjoint((mine, theirs))
        return is_one_host and max(self.port, other.port) < min(self.ports.stop, other.ports.stop)


def check_listeners(listeners: Sequence[Listener], *, are_here: bool = True) -> None:
    """Check that all ports can be listened on, and that no two are one.

    Args:
        are_here: on this machine; else whether they are free is not looked at.

    Raises:
        ConfigError: names the flag to change.
    """
    for index, listener in enumerate(listeners):
        if listener.ports.stop > 65_536:
            raise ConfigError(f"{listener.flag}: {listener.ports[-1]} is no port; the last one is 65535")
        for other in listeners[:index]:
            if listener.meets(other):
                port = max(listener.port, other.port)
                raise ConfigError(
                    f"{other.flag} and {listener.flag} both mean port {port}; give another {listener.flag}"
                )
        if not are_here:
            continue
        for port in listener.ports:
            if not is_free(listener.host, port):
                raise ConfigError(
                    f"cannot listen on {listener.host} port {port}: it is in use, or the address is not this "
                    f"machine's; give another {listener.flag} or address"
                )


def router_listeners(config: RouterConfig) -> list[Listener]:
    """Where a router listens; without the ports that are to be free ones."""
    admin_port = config.admin_port
    if admin_port is None:
        admin_port = config.port + 1 if config.port else 0
    found = [("--port", config.host, config.port), ("--admin-port", config.admin_host, admin_port)]
    return [Listener(*each) for each in found if each[2]]


def usual_ports(role: Role, http: int | None = None, ranks: int = 1) -> Ports:
    """Ports of an engine that others have to find: the given one, else 8100 or 8200, and those after it.

    Args:
        ranks: data-parallel ranks. Each takes a port for its events and one for the handshake, the first one's and
            its number; tensor-parallel ranks share theirs.
    """
    first = http or _FIRST_PORT[role]
    return Ports(http=first, events=first + 1, side_channel=first + 1 + ranks)


def engine_ports(config: EngineSettings, role: Role) -> Ports:
    """Ports of an engine on a machine of its own."""
    usual = usual_ports(role, config.port, data_parallel_size(config.engine_args))
    return Ports(
        usual.http, config.events_port or usual.events, config.side_channel_port or usual.side_channel
    )


def engine_listeners(config: EngineSettings, role: Role, address: str) -> list[Listener]:
    """Where an engine on a machine of its own listens."""
    ports, host = engine_ports(config, role), config.host or address
    ranks = data_parallel_size(config.engine_args)
    return [
        Listener("--port", host, ports.http),
        Listener("--events-port", host, ports.events, ranks),
        Listener("--side-channel-port", address, ports.side_channel, ranks),
    ]


def data_parallel_size(args: Sequence[str]) -> int:
    """The data-parallel ranks that vLLM's arguments ask for."""
    size = 1
    for word, following in zip(args, [*args[1:], ""], strict=False):
        name, is_one_word, value = word.partition("=")
        if name.replace("_", "-") in ("--data-parallel-size", "-dp"):
            text = value if is_one_word else following
            size = int(text) if text.isdigit() else 1  # vLLM will say what is wrong with it
    return max(1, size)


def choose_ports(config: ServeConfig, is_free: Callable[[int], bool] = lambda _: True) -> dict[Role, Ports]:
    """Ports for both engines: the configured ones, and others that nothing here uses.

    The same in each run, if they are free: vLLM compiles a model anew when NIXL's port is another.

    Args:
        is_free: whether a port may be taken.

    Raises:
        ConfigError: two configured ports are one, or a configured one is not free.
    """
    given: dict[Role, int] = {"prefill": config.prefill_port, "decode": config.decode_port}
    listeners = router_listeners(config)
    for role, port in given.items():
        if port:
            listeners.append(Listener(f"--{role}-port", _LOOPBACK, port))
    check_listeners(listeners, are_here=False)
    for role, port in given.items():
        if port and not is_free(port):
            raise ConfigError(f"port {port} is in use; leave --{role}-port to be chosen, or give another")
    used = {port for listener in listeners for port in listener.ports}

    def take(first: int, count: int = 1) -> int:
        for port in range(first, _LAST_PORT):
            block = range(port, port + count)
            if used.isdisjoint(block) and all(map(is_free, block)):
                used.update(block)
                return port
        raise ConfigError(f"no free port from {first} on")

    def chosen(role: Role) -> Ports:
        args = {"prefill": config.prefill_args, "decode": config.decode_args}[role]
        ranks = data_parallel_size([*config.engine_args, *args])
        # Beside the given one, unless that is where outgoing connections are.
        usual = usual_ports(role, given[role] if given[role] < _LAST_PORT else None)
        http = given[role] or take(usual.http)
        return Ports(http, take(usual.events, ranks), take(usual.side_channel, ranks))

    return {role: chosen(role) for role in given}


@contextmanager
def reserved_ports(config: ServeConfig) -> Iterator[dict[Role, Ports]]:
    """`choose_ports`, of those that are free, kept from every other `carryback serve`; the router's as well.

    Raises:
        ConfigError: a configured port, or one of the router's, is in use.
    """
    with ExitStack() as held:

        def claim(port: int) -> bool:
            # An engine binds its ports seconds from now, and the router its own after that. Until they end, a
            # socket with the port's name, in Linux's abstract namespace, tells others of us.
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0carryback-port-{port}")
            except OSError:
                name.close()
                return False
            held.enter_context(name)
            return True

        listeners = router_listeners(config)
        check_listeners(listeners)
        for port, listener in {listener.port: listener for listener in listeners}.items():
            if not claim(port):
                raise ConfigError(
                    f"cannot listen on {listener.host} port {port}: it is in use by another carryback "
                    f"serve; give another {listener.flag}"
                )
        yield choose_ports(config, lambda port: claim(port) and is_free(_LOOPBACK, port))


def served_name(config: LaunchConfig) -> str:
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
    size = int(profiles.recipe_args(config.profile, config.model).get("--tensor-parallel-size", 1))
    first_events = ports["decode"].events
    ranks = data_parallel_size([*config.engine_args, *config.decode_args])
    peers = [f"tcp://{_LOOPBACK}:{port}" for port in range(first_events, first_events + ranks)]
    devices = [",".join(map(str, range(first, first + size))) for first in (0, size)]
    per_role: dict[Role, tuple[str, list[str]]] = {
        "prefill": (config.prefill_devices or devices[0], config.prefill_args),
        "decode": (config.decode_devices or devices[1], config.decode_args),
    }
    return [
        _command(
            config,
            role,
            args,
            device=device,
            devices=own,
            model_path=model_path,
            ports=ports[role],
            key=key,
            peers=peers,
            # The router has a core, too.
            threads=(_cores() - 1) // 2,
            environ=environ,
        )
        for role, (own, args) in per_role.items()
    ]


def engine_command(
    config: EngineSettings,
    role: Role,
    *,
    model_path: str,
    address: str,
    key: str | None,
    environ: Mapping[str, str] = os.environ,
) -> EngineCommand:
    """The command of one engine that others find at an address; arguments as for `engine_commands`.

    Args:
        address: IP address of this machine for routers and other engines.

    Raises:
        ConfigError: as `engine_commands`; or two of its ports are one.
    """
    ports = engine_ports(config, role)
    check_listeners(engine_listeners(config, role, address), are_here=False)
    return _command(
        config,
        role,
        [],
        device=device_of(config),
        devices=config.devices,
        model_path=model_path,
        ports=ports,
        key=key,
        peers=config.decode_peers,
        address=address,
        bind=config.host or address,
        threads=_cores() - 1,
        environ=environ,
    )


def _command(
    config: LaunchConfig,
    role: Role,
    args: Sequence[str],
    *,
    device: Device,
    devices: str | None,
    model_path: str,
    ports: Ports,
    key: str | None,
    peers: Sequence[str],
    threads: int,
    environ: Mapping[str, str],
    address: str = _LOOPBACK,
    bind: str = _LOOPBACK,
) -> EngineCommand:
    extra = [*config.engine_args, *args]
    for flag in _RESERVED:
        if has_flag(extra, flag):
            raise ConfigError(f"{flag} among the engine arguments: it is a setting of carryback itself")
    profile = profiles.find(config.profile, device)
    env = {"PYTHONHASHSEED": "0"}  # equal block hashes in all engines
    if key is not None:
        env[KEY] = key
    elif config.insecure_dev:
        env["CARRYBACK_INSECURE_DEV"] = "1"
    if config.engine_api_key is not None:
        env[ENGINE_API_KEY] = config.engine_api_key
    if config.events_key is not None:
        env[EVENTS_KEY] = config.events_key.get_secret_value()
    env |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel),
        "UCX_TCP_USER_TIMEOUT": environ.get("UCX_TCP_USER_TIMEOUT", UCX_TCP_USER_TIMEOUT),
    }
    if config.model is None:
        env["HF_HUB_OFFLINE"] = "1"  # the default model is on disk
    if profile.devices_variable and devices is not None:
        env[profile.devices_variable] = devices
    for name, value in profile.env.items():
        if name == "VLLM_CPU_KVCACHE_SPACE" and has_flag(extra, "--kv-cache-memory-bytes"):
            continue
        filled = value.format(threads=max(1, threads), kv_cache_gib=config.cpu_kv_cache_gib)
        env[name] = environ.get(name, filled)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model_path, "--served-model-name", served_name(config)]
    argv += ["--host", bind, "--port", str(ports.http)]
    kv_transfer = _kv_transfer(config, role, profile, f"tcp://{in_url(bind)}:{ports.events}", peers)
    for option, text in (_options(config, role, profile) | {"--kv-transfer-config": kv_transfer}).items():
        if not has_flag(extra, option):
            argv += [option, text] if text else [option]
    return EngineCommand(
        role=role,
        name=role,
        argv=argv + extra,
        env=env,
        url=f"http://{in_url(address)}:{ports.http}",
        events=f"tcp://{in_url(address)}:{ports.events}",
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def has_flag(args: Sequence[str], flag: str) -> bool:
    """Whether `args` set an option: `--flag value`, `--flag=value`, `--no-flag`, or any of these with
    underscores, which vLLM takes too."""
    return bool(_forms(args, flag))


def is_on(args: Sequence[str], flag: str) -> bool:
    """Whether `args` set an option that is on or off, and the last one of its forms says on."""
    return _forms(args, flag)[-1:] == [flag]


def _forms(args: Sequence[str], flag: str) -> list[str]:
    names = [arg.split("=", 1)[0].replace("_", "-") for arg in args]
    return [name for name in names if name in (flag, "--no-" + flag.removeprefix("--"))]


def _options(config: LaunchConfig, role: Role, profile: Profile) -> dict[str, str]:
    options = {
        # One algorithm whose hashes do not depend on the process.
        "--prefix-caching-hash-algo": "sha256_cbor",
        # `cached_tokens` in usage: what was reused, for clients that look there.
        "--enable-prompt-tokens-details": "",
    }
    if role == "decode":
        options[PREFIX_CACHING] = ""
    if config.model is None:
        options |= {
            "--chat-template": str(model.CHAT_TEMPLATE),
            "--enable-auto-tool-choice": "",
            "--tool-call-parser": "hermes",
        }
        if profile.device == "cpu":
            options |= {"--max-model-len": "8192", "--max-num-batched-tokens": "2048", "--max-num-seqs": "32"}
    recipe = profiles.recipe_args(config.profile, config.model)
    return {**options, **profile.role_args(role), **recipe}


def _kv_transfer(
    config: LaunchConfig, role: Role, profile: Profile, events: str, peers: Sequence[str]
) -> str:
    threshold = config.kv_recompute_threshold
    return json.dumps(
        {
            "kv_connector": "CarrybackConnector",
            "kv_connector_module_path": "carryback_vllm.connector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_buffer_device": profile.kv_buffer_device,
            # Prefill can always compute a prompt. Decode reports the failure, and the router tries once more.
            "kv_load_failure_policy": "recompute" if role == "prefill" else "fail",
            "kv_connector_extra_config": {
                "bidirectional_kv_xfer": True,
                # With `auto`, until something was learned.
                "kv_recompute_threshold": threshold if isinstance(threshold, int) else RECOMPUTE_THRESHOLD,
                # Whole seconds, and vLLM sends heartbeats at a sixth of the lease.
                "decoder_kv_blocks_ttl": max(1, math.ceil(config.hold_s)),
                "kv_lease_duration": max(6, math.ceil(config.prefill_lease_s)),
                "backends": [config.kv_backend] if config.kv_backend else list(profile.backends),
                "carryback_events": events,
                "carryback_patience_s": config.prefill_patience_s,
                **({"carryback_peers": list(peers)} if role == "prefill" and peers else {}),
            },
        }
    )


def by_option(argv: Sequence[str]) -> list[str]:
    """An argument vector as quoted lines: the program, then each option with its values."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]
