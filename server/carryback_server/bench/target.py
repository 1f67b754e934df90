"""What is measured: servers that run already, or `carryback serve` and an ordinary vLLM engine, started for it."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from carryback_server import launch, model
from carryback_server.address import one_port_above
from carryback_server.config import ConfigError, ServeConfig, load
from carryback_server.launch import EngineCommand, Ports
from carryback_server.profiles import Device
from carryback_server.supervisor import Engines

# More than `carryback serve` needs, which waits for its engines.
_STOP_GRACE_S = 60.0
# With fewer cores, a third engine takes too much from the other two.
_CORES_FOR_THREE = 4


@dataclass(frozen=True)
class Target:
    """Where the servers are.

    Attributes:
        url: of the router, without `/v1`.
        admin_url: of its operators' port.
        aggregated_url: of an ordinary engine; empty if there is none.
        environment: what is known of them, for the result.
    """

    url: str
    admin_url: str
    aggregated_url: str
    environment: Mapping[str, object]


def running(url: str, admin_url: str | None, aggregated_url: str | None) -> Target:
    """Servers that run already. The operators' port is the one above the router's unless given.

    Raises:
        ConfigError: an address is not one.
    """
    router = _address("--url", url)
    admin = _address("--admin-url", admin_url) if admin_url else one_port_above(router)
    aggregated = _address("--aggregated-url", aggregated_url) if aggregated_url else ""
    urls = {"url": router, **({"aggregated_url": aggregated} if aggregated else {})}
    return Target(router, admin, aggregated, urls)


def _address(option: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # the port is no number
        is_good = False
    if not is_good:
        raise ConfigError(f"{option} {text}: want an address such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def started(
    on_start: Callable[[Engines], object],
    *,
    config: Path | None = None,
    device: str | None = None,
    model_name: str | None = None,
    prefill_args: str | None = None,
    engine_args: Sequence[str] = (),
    aggregated: bool | None = None,
    aggregated_devices: str | None = None,
) -> AsyncIterator[Target]:
    """`carryback serve`, and perhaps an ordinary engine, until the block ends, however it does.

    Args:
        on_start: told of the processes before they serve.
        config, device, model_name, prefill_args, engine_args: as for `carryback serve`.
        aggregated: start the ordinary engine; None: if there is room for it.
        aggregated_devices: its GPUs.

    Raises:
        ConfigError: an option is wrong.
        EngineFailed: a server did not come up; says why.
    """
    settings = load(
        ServeConfig, config, device=device, model=model_name, prefill_args=prefill_args, engine_args=list(engine_args) or None
    )  # fmt: skip
    found = launch.find_device() if settings.device == "auto" else settings.device
    if aggregated is None:
        cores = len(os.sched_getaffinity(0))
        aggregated = bool(aggregated_devices) if found == "cuda" else cores >= _CORES_FOR_THREE
    log_dir = settings.log_dir or model.cache_dir() / "logs" / time.strftime(
        f"bench-%Y%m%d-%H%M%S-{os.getpid()}"
    )
    async with AsyncExitStack() as stack:
        port, admin_port = launch.free_ports(2)
        commands = [_router(settings, config, port, admin_port, log_dir)]
        if aggregated:
            # The ports that are set are those of the `carryback serve`.
            anywhere = dict.fromkeys(("port", "admin_port", "prefill_port", "decode_port"), 0)
            ports = stack.enter_context(launch.reserved_ports(settings.model_copy(update=anywhere)))["decode"]
            commands.append(await _aggregated(settings, found, ports, aggregated_devices))
        engines = Engines(
            commands,
            log_dir=log_dir,
            start_timeout_s=settings.start_timeout_s + _STOP_GRACE_S,  # as long as its engines may take
            stop_grace_s=_STOP_GRACE_S,
        )
        await stack.enter_async_context(engines)
        on_start(engines)
        await engines.wait_ready()
        yield Target(
            url=commands[0].url,
            admin_url=f"http://127.0.0.1:{admin_port}",
            aggregated_url=commands[1].url if aggregated else "",
            environment={
                "device": found,
                "engine_args": shlex.join(settings.engine_args),
                "prefill_args": shlex.join(settings.prefill_args),
                "decode_args": shlex.join(settings.decode_args),
            },
        )


def _router(
    settings: ServeConfig, config: Path | None, port: int, admin_port: int, log_dir: Path
) -> EngineCommand:
    """`carryback serve`, a process of its own: its work is not in the client's times."""
    argv = [sys.executable, "-m", "carryback_server", "serve", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--admin-port", str(admin_port), "--log-dir", str(log_dir)]
    argv += ["--device", settings.device, "--prefill-args", shlex.join(settings.prefill_args)]
    if config is not None:
        argv += ["--config", str(config)]
    if settings.model is not None:
        argv += ["--model", settings.model]
    if settings.engine_args:
        argv += ["--", *settings.engine_args]
    return EngineCommand("decode", "carryback", argv, {}, f"http://127.0.0.1:{port}", "")


async def _aggregated(
    settings: ServeConfig, device: Device, ports: Ports, devices: str | None
) -> EngineCommand:
    """An engine like the others, but that it does all by itself: without a connector, vLLM's own defaults."""
    alike = settings.model_copy(
        update={"prefill_args": [], "decode_args": [], "decode_devices": devices or settings.decode_devices}
    )
    path = settings.model or str(await asyncio.to_thread(model.fetch_default_model))
    _, command = launch.engine_commands(
        alike, device=device, model_path=path, ports={"prefill": ports, "decode": ports}, key=None
    )
    argv = list(command.argv)
    connector = argv.index("--kv-transfer-config")
    del argv[connector : connector + 2]
    return EngineCommand("decode", "aggregated", argv, command.env, command.url, "")
