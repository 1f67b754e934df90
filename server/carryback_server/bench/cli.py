"""`carryback bench`: the command line."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import aiohttp
import typer
import uvloop
from carryback import wire
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from carryback_server.bench import result as results
from carryback_server.bench import target, traces, workloads
from carryback_server.bench.client import Client, NoAnswer
from carryback_server.bench.engine_metrics import EngineMetrics
from carryback_server.bench.result import Request, Result
from carryback_server.bench.run import Arm, Run
from carryback_server.bench.target import Target
from carryback_server.bench.workloads import Conversation
from carryback_server.config import ConfigError
from carryback_server.console import err, fail, out
from carryback_server.model import ModelError
from carryback_server.supervisor import EngineFailed, Engines

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure agents with reuse, without it, and on one ordinary engine."
)

_INTERRUPTED = 130
_SERVERS = "Servers"


@dataclass(frozen=True)
class Common:
    """Options of all workloads: those of the servers, and those of the run."""

    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_ARGS]", help="vLLM arguments for all engines that are started."),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SERVERS, help="A router that runs already. (default: start one)"),
    ] = None
    admin_url: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SERVERS, help="Its operators' port. (default: the one above its port)"),
    ] = None
    aggregated_url: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SERVERS, help="An ordinary vLLM server that runs already, to compare with."
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SERVERS, envvar="OPENAI_API_KEY", help="For servers that want one."),
    ] = None
    device: Annotated[
        str | None, typer.Option(rich_help_panel=_SERVERS, help="auto, cpu or cuda. (default: auto)")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SERVERS, help="Hugging Face id or folder. (default: SmolLM2-135M-Instruct)"
        ),
    ] = None
    prefill_args: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SERVERS, help="vLLM arguments for the prefill engine alone, quoted."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(rich_help_panel=_SERVERS, help="Settings of `carryback serve`, YAML.")
    ] = None
    aggregated: Annotated[
        bool | None,
        typer.Option(
            rich_help_panel=_SERVERS,
            help="Start an ordinary engine too. (default: on a CPU, with 4 cores or more, since three engines "
            "are too much for fewer; on GPUs, with --aggregated-devices)",
        ),
    ] = None
    aggregated_devices: Annotated[
        str | None, typer.Option(rich_help_panel=_SERVERS, help="Its GPUs, e.g. 2,3.")
    ] = None
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Conversations at a time. With 1, each request is made in all ways, one right after the other; "
            "with more, each way has the servers to itself for all of the conversations.",
        ),
    ] = 1
    seed: Annotated[int, typer.Option(help="Of all texts and waits.")] = 0
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds until a request has failed.")] = 600.0
    out: Annotated[
        str | None,
        typer.Option(
            help="Where to write: OUT.json, OUT.md and OUT.html. (default: bench-WORKLOAD-TIME)",
            metavar="OUT",
        ),
    ] = None


def _command(
    make: Callable[..., list[Conversation]], prefill_args: str | None = None
) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function that only says which options there are, beside `Common`.

    Args:
        make: makes the conversations from those options and the seed.
        prefill_args: of a prefill engine that is started, unless the user gives others.
    """

    def register(options: Callable[..., None]) -> None:
        def command(**given: Any) -> None:
            common = Common(**{each.name: given.pop(each.name) for each in fields(Common)})
            with _explained():
                _check(common)
                conversations = make(**given, seed=common.seed)
                bench = _Bench(options.__name__, conversations, given, common, prefill_args)
                status = uvloop.run(bench())
            raise typer.Exit(status)

        kinds = get_type_hints(options, include_extras=True) | get_type_hints(Common, include_extras=True)
        parameters = [
            each.replace(annotation=kinds[each.name])
            for function in (options, Common)
            for each in inspect.signature(function).parameters.values()
        ]
        # What typer reads.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        bench_app.command(options.__name__, help=options.__doc__)(command)

    return register


def _sizes(text: str | list[int]) -> list[int]:
    if isinstance(text, list):
        return text
    try:
        sizes = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter("want numbers of tokens, e.g. 500,1000,2000") from error
    if sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise typer.BadParameter("want growing numbers of tokens: the conversation goes on from size to size")
    return sizes


def _traced(
    *, file: Path, conversations: int | None, answer_tokens: int, block_tokens: int, speed: float, seed: int
) -> list[Conversation]:
    try:
        loaded = traces.load(file, answer_tokens=answer_tokens, block_tokens=block_tokens, speed=speed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return loaded[:conversations]


Conversations = Annotated[int, typer.Option(min=1, help="How many of them.")]
Turns = Annotated[int, typer.Option(min=1, help="Of each conversation.")]
MessageTokens = Annotated[int, typer.Option(min=1, help="Of each message of the user, about.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Of each answer.")]


@_command(workloads.agent)
def agent(
    conversations: Conversations = 1,
    turns: Turns = 3,
    steps: Annotated[int, typer.Option(min=1, help="Model calls a turn; all but the last call a tool.")] = 4,
    system_tokens: Annotated[int, typer.Option(min=1, help="Of the system prompt, about.")] = 512,
    result_tokens: Annotated[int, typer.Option(min=1, help="Of each tool's result, about.")] = 48,
    answer_tokens: AnswerTokens = 16,
    tool_s: Annotated[float, typer.Option(min=0, help="Seconds that a tool runs, median.")] = 0.0,
) -> None:
    """Tool loops: a long history, and short tool results that each come with a model call."""


@_command(workloads.chat)
def chat(
    conversations: Conversations = 1,
    turns: Turns = 6,
    message_tokens: MessageTokens = 128,
    answer_tokens: AnswerTokens = 32,
    think_s: Annotated[float, typer.Option(min=0, help="Seconds that a person thinks, median.")] = 2.0,
) -> None:
    """People who think before each of their messages."""


@_command(workloads.paper, prefill_args="--no-enable-prefix-caching")
def paper(
    sizes: Annotated[
        Any, typer.Option(parser=_sizes, metavar="N,N,...", help="Tokens of the prompts.")
    ] = "512,1000,2000,4000",
    repeats: Annotated[int, typer.Option(min=1, help="Measured turns at each size.")] = 6,
    message_tokens: MessageTokens = 32,
    answer_tokens: AnswerTokens = 8,
) -> None:
    """The published measurement: one conversation whose prompt grows, and short turns at each size.

    The prefill engine that it starts has no prefix caching.
    """


@_command(workloads.branching)
def branching(
    conversations: Conversations = 1,
    turns: Annotated[int, typer.Option(min=1, help="Until they branch.")] = 3,
    branches: Annotated[int, typer.Option(min=1, help="Ways in which each goes on from there.")] = 3,
    branch_turns: Annotated[int, typer.Option(min=1, help="Of each of these.")] = 2,
    edits: Annotated[int, typer.Option(min=0, help="Then, how often the last message is said anew.")] = 2,
    message_tokens: MessageTokens = 256,
    answer_tokens: AnswerTokens = 16,
) -> None:
    """Conversations that go on in several ways from one state, and messages that are changed."""


@_command(_traced)
def trace(
    file: Annotated[
        Path,
        typer.Argument(help="Of vLLM's multi-turn benchmark (JSON), AIPerf or Mooncake (JSONL)."),
    ],
    conversations: Annotated[
        int | None, typer.Option(min=1, help="Only the first of them. (default: all)")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Recorded times are divided by it.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of answers whose length was not recorded.")] = 64,
    block_tokens: Annotated[int, typer.Option(min=1, help="That each of the hash_ids stands for.")] = 512,
) -> None:
    """Recorded conversations."""


@bench_app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="An earlier run.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="A later one.")],
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables there.")] = None,
) -> None:
    """What changed between two runs."""
    with _explained():
        from carryback_server.bench import compare as comparing

        try:
            comparison = comparing.compare(results.load(first), results.load(second))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        comparing.terminal(comparison, out)
        if markdown is not None:
            markdown.write_text(comparing.markdown(comparison))


class _Bench:
    """One run, from starting what is measured to its report.

    Args:
        given: the workload's own options.
        prefill_args: unless `common` has others.
    """

    def __init__(
        self,
        workload: str,
        conversations: Sequence[Conversation],
        given: Mapping[str, Any],
        common: Common,
        prefill_args: str | None,
    ) -> None:
        self._workload = workload
        self._conversations = conversations
        self._given = given
        self._common = common
        self._prefill_args = common.prefill_args or prefill_args
        self._engines: Engines | None = None
        self._may_end_early = True
        self._is_interrupted = False
        stem = common.out or f"bench-{workload}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._stem = stem.removesuffix(".json")

    async def __call__(self) -> int:
        """Do it; gives the exit status."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, lambda: self._stop(task))
        started = datetime.now(UTC)
        begin = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                where = await self._target(stack)
                timeout = aiohttp.ClientTimeout(total=self._common.timeout_s)
                connector = aiohttp.TCPConnector(limit=0)
                session = await stack.enter_async_context(
                    aiohttp.ClientSession(timeout=timeout, connector=connector)
                )
                arms = await self._arms(session, where)
                metrics = await _metrics(session, where)
                run = Run(
                    arms,
                    self._conversations,
                    seed=self._common.seed,
                    concurrency=self._common.concurrency,
                    metrics=metrics,
                )
                await self._measure(run)
                result = Result(
                    carryback=metadata.version("carryback"),
                    workload=self._workload,
                    settings=self._settings(run),
                    environment=_environment(where, arms, metrics),
                    started=started.isoformat(timespec="seconds"),
                    duration_s=time.monotonic() - begin,
                    block_size=metrics.block_size if metrics else 0,
                    requests=run.requests,
                    transfers=metrics.transfers() if metrics else [],
                    costs=await _costs(metrics),
                )
                # Before the servers are stopped, which takes its time.
                self._write(result)
                if self._engines is not None:
                    err.print("stopping what was started; Ctrl-C stops it at once")
        except asyncio.CancelledError:
            return _INTERRUPTED
        return _INTERRUPTED if self._is_interrupted else int(any(_problems(result)))

    def _stop(self, task: asyncio.Task[Any]) -> None:
        """The first time what is under way ends, and what was measured is kept; then nothing is waited for."""
        if self._may_end_early:
            self._may_end_early, self._is_interrupted = False, True
            task.cancel()
        elif self._engines is not None:
            self._engines.hurry()

    async def _target(self, stack: AsyncExitStack) -> Target:
        common = self._common
        if common.url is not None:
            return target.running(common.url, common.admin_url, common.aggregated_url)

        def on_start(engines: Engines) -> None:
            self._engines = engines
            names = " and ".join(engines.states())
            err.print(f"starting {names}; logs in {engines.log('carryback').parent}")

        with err.status("Starting vLLM engines ..."):
            return await stack.enter_async_context(
                target.started(
                    on_start,
                    config=common.config,
                    device=common.device,
                    model_name=common.model,
                    prefill_args=self._prefill_args,
                    engine_args=common.engine_args or [],
                    aggregated=common.aggregated,
                    aggregated_devices=common.aggregated_devices,
                )
            )

    async def _arms(self, session: aiohttp.ClientSession, where: Target) -> list[Arm]:
        """The ways to be served, the reference first: without reuse, all is computed."""
        router = Client(session, where.url, self._common.api_key)
        await router.connect()
        needed = max(map(_tokens, self._conversations))
        if router.max_model_len is not None and needed > router.max_model_len:
            raise ConfigError(
                f"the prompts grow to about {needed} tokens, and the model's context has {router.max_model_len}: "
                "ask for less, or start the engines with a longer one (-- --max-model-len)"
            )
        arms = [Arm("no_reuse", router, {wire.CARRYBACK_REUSE: "off"}), Arm("reuse", router)]
        if where.aggregated_url:
            engine = Client(session, where.aggregated_url, self._common.api_key)
            await engine.connect()
            arms.append(Arm("aggregated", engine, is_router=False))
        return arms

    async def _measure(self, run: Run) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with Progress(*columns, console=err) as progress:
            bar = progress.add_task(self._workload, total=run.total, last="")

            def show(request: Request) -> None:
                progress.update(bar, advance=1, last=_line(request))
                if not err.is_terminal:  # where nothing can be redrawn
                    progress.print(_line(request))

            try:
                await run(show)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
        self._may_end_early = False
        if self._is_interrupted:
            err.print("interrupted; this is what was measured until then")

    def _settings(self, run: Run) -> dict[str, Any]:
        shown = {
            name: str(value) if isinstance(value, Path) else value for name, value in self._given.items()
        }
        return {
            **shown,
            "concurrency": self._common.concurrency,
            "arms": "alternate" if run.is_interleaved else "follow each other",
            "seed": self._common.seed,
        }

    def _write(self, result: Result) -> None:
        """Save the run first, since the report can be made again from it; then print and write that."""
        from carryback_server.bench import page, report

        results.save(result, Path(f"{self._stem}.json"))
        report.terminal(result, out)
        Path(f"{self._stem}.md").write_text(report.markdown(result))
        written = [f"{self._stem}.json", f"{self._stem}.md"]
        try:
            Path(f"{self._stem}.html").write_text(page.html(result))
            written.append(f"{self._stem}.html")
        except page.MissingPackage as error:
            err.print(str(error))
        out.print(f"written: {', '.join(written)}")
        for problem in _problems(result):
            err.print(f"error: {problem}", markup=False)


def _line(request: Request) -> str:
    """A request in a few words."""
    if request.error:
        return f"{request.arm}: {request.error[:100]}"
    reused = f", {request.reused_tokens} reused" if request.reused_tokens else ""
    return f"{request.arm}: {request.prompt_tokens} tokens{reused}, first token after {request.ttft_s:.2f} s"


def _tokens(conversation: Conversation) -> int:
    """About how long its prompts get, with the answers; nothing unless a size is aimed at."""
    total = longest = 0
    for _, _, step in conversation.steps():
        said = sum(len(str(each["content"]).split()) for each in step.messages)
        total = (step.fill_to or total + said) + step.max_tokens
        longest = max(longest, total) if step.fill_to or longest else 0
    return longest


async def _metrics(session: aiohttp.ClientSession, where: Target) -> EngineMetrics | None:
    metrics = EngineMetrics(session, where.admin_url)
    try:
        await metrics.connect()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        err.print(
            f"without the engines' own metrics: {error} (the router's operators' port is --admin-url)",
            markup=False,
        )
        return None
    return metrics


async def _costs(metrics: EngineMetrics | None) -> list[dict[str, Any]]:
    if metrics is None:
        return []
    try:
        return await metrics.costs()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return []  # an older router, or one that is gone


def _environment(where: Target, arms: Sequence[Arm], metrics: EngineMetrics | None) -> dict[str, Any]:
    return {
        "model": arms[0].client.model,
        **where.environment,
        "vllm": ", ".join(sorted(metrics.versions)) if metrics else "",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _problems(result: Result) -> Iterator[str]:
    """Why a run's exit status is not 0."""
    failed = [each for each in result.requests if each.error]
    if failed:
        first = failed[0]
        yield (
            f"{len(failed)} requests failed; the first of them, {first.arm} {first.conversation} "
            f"turn {first.turn} step {first.step}: {first.error}"
        )
    differ = [each for each in result.requests if each.is_measured and each.is_identical is False]
    if differ:
        first = differ[0]
        yield (
            f"{len(differ)} outputs are not those of the reference; the first of them, {first.arm} "
            f"{first.conversation} turn {first.turn} step {first.step}"
        )


def _check(common: Common) -> None:
    """Options that do not go together, and what is not installed.

    Raises:
        ConfigError: says which.
    """
    if find_spec("numpy") is None:  # before anything is measured that could not be reported
        raise ConfigError("carryback bench needs numpy: pip install 'carryback[bench]'")
    for word in (common.engine_args or [])[:1]:
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; vLLM's arguments go after --")
    of_started = (
        "device",
        "model",
        "prefill_args",
        "config",
        "aggregated",
        "aggregated_devices",
        "engine_args",
    )
    of_running = ("admin_url", "aggregated_url")
    for name in of_started if common.url else of_running:
        if getattr(common, name):
            option = "--" + name.replace("_", "-") if name != "engine_args" else "what follows --"
            raise ConfigError(
                f"{option} is for servers that are started, and --url names one that runs already"
                if common.url
                else f"{option} needs --url: it is for servers that run already"
            )
    folder = Path(common.out or ".").absolute().parent
    if common.out and not folder.is_dir():
        raise ConfigError(f"--out {common.out}: there is no folder {folder}")


@contextmanager
def _explained() -> Iterator[None]:
    """What a user can do something about, as a message instead of a traceback: 2 for options, else 1."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), status=2)
    except (ModelError, EngineFailed, NoAnswer) as error:
        fail(str(error))
