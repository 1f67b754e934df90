"""`carryback simulate`: the command line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from carryback_server import console
from carryback_server.bench import result as results
from carryback_server.bench import traces
from carryback_server.config import ConfigError, RouterConfig, RouterSettings, load
from carryback_server.console import err, fail
from carryback_server.simulate import report
from carryback_server.simulate.agents import Agent, planned, recorded
from carryback_server.simulate.engine import TooLong
from carryback_server.simulate.profile import built_in, load_profile
from carryback_server.simulate.report import Run
from carryback_server.simulate.run import Report, Simulation
from carryback_server.simulate.setup import Setup

# Of an answer whose length a trace does not say.
ANSWER_TOKENS = 128

# A sweep's table is wide; into a file or a pipe it goes whole.
out = console.out
if not out.is_terminal:
    out = Console(highlight=False, soft_wrap=True, width=240)


def simulate(
    prefill: Annotated[int | None, typer.Option(help="Prefill engines. (default: 32)")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode engines. (default: 32)")] = None,
    agents: Annotated[int | None, typer.Option(help="Agents, drawn at random. (default: 10000)")] = None,
    duration_s: Annotated[
        float | None, typer.Option(help="Virtual seconds in which requests are sent. (default: 3600)")
    ] = None,
    profile: Annotated[
        str, typer.Option(help=f"Rates of the engines: {', '.join(built_in())}, or a YAML file.")
    ] = "h200-qwen3-32b",
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay this run of `carryback bench` (JSON), or a trace that it reads."),
    ] = None,
    arm: Annotated[
        str | None, typer.Option(help="Of a run, the requests of this arm. (default: the first)")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The router's settings, YAML.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any setting of the router, number of a profile, of the agents, or of the simulation; repeatable.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,VALUE,...", help="Simulate with each of these values; repeatable: all pairs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    baseline: Annotated[bool, typer.Option(help="Also without reuse.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", metavar="FILE")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write plots, SVG, into this folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Predict hit rates and times of a cluster that you do not have, with the router's real code."""
    with _explained():
        given = {"prefill": prefill, "decode": decode, "agents": agents, "duration_s": duration_s}
        setup = Setup(load_profile(profile), router=_router(config)).but(
            **{name: value for name, value in given.items() if value is not None}, seed=seed
        )
        for text in set_ or []:
            setup = setup.but(**dict([_assignment(text)]))
        if trace is not None:
            setup = _replayed(setup, trace, arm)
        swept = [(name, values.split(",")) for name, values in map(_assignment, sweep or [])]
        names = [name for name, _ in swept]
        setups = [
            (dict(zip(names, values, strict=True)), setup.but(**dict(zip(names, values, strict=True))))
            for values in itertools.product(*(values for _, values in swept))
        ]
        runs = _run(setups, baseline)
        out.print(report.table(runs[0]) if len(runs) == 1 else report.sweep_table(runs))
        if json_file is not None:
            json_file.write_bytes(_json(setup, runs))
        if plots is not None:
            for path in report.plot(runs, plots):
                out.print(f"{path}", markup=False)


def _run(setups: list[tuple[dict[str, str], Setup]], baseline: bool) -> list[Run]:
    runs = []
    # Without reuse it is the same whatever the router holds.
    without: dict[Any, Report] = {}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:

        def simulated(setup: Setup, label: str, *, reuse: bool) -> Report:
            bar = progress.add_task(label, total=setup.scenario.duration_s)
            made = Simulation(
                setup.scenario,
                setup.profile,
                setup.router,
                setup.agents(),
                reuse=reuse,
                on_progress=lambda seconds: progress.update(bar, completed=seconds),
            ).run()
            progress.remove_task(bar)
            return made

        for values, setup in setups:
            run = Run(values=dict(values), reuse=simulated(setup, "with reuse", reuse=True))
            run.values = dict(values)
            if baseline:
                key = msgspec.json.encode((setup.profile, setup.scenario, setup.population))
                if key not in without:
                    without[key] = simulated(setup, "without reuse", reuse=False)
                run.no_reuse = without[key]
            runs.append(run)
    return runs


def _router(config: Path | None) -> RouterConfig:
    settings = load(RouterSettings, config)
    return RouterConfig(**settings.model_dump(include=set(RouterConfig.model_fields) - {"engines"}))


def _replayed(setup: Setup, trace: Path, arm: str | None) -> Setup:
    agents = _agents(trace, arm)
    last_s = max(
        agent.start_s + sum(step.gap_s for step in agent.steps) + max(step.at_s for step in agent.steps)
        for agent in agents
    )
    return Setup(
        setup.profile,
        msgspec.structs.replace(setup.scenario, duration_s=max(last_s, 1.0), warmup_share=0.0),
        setup.router,
        setup.population,
        tuple(agents),
    )


def _agents(trace: Path, arm: str | None) -> list[Agent]:
    try:
        return recorded(results.load(trace), arm)
    except ValueError as not_a_run:
        try:
            conversations = traces.load(trace, answer_tokens=ANSWER_TOKENS)
        except ValueError as not_a_trace:
            raise ValueError(f"{not_a_trace}; and {not_a_run}") from not_a_trace
        return planned(conversations)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ValueError(f"{text}: want NAME=VALUE")
    return name.strip().replace("-", "_"), value


def _json(setup: Setup, runs: list[Run]) -> bytes:
    recorded_agents = setup.recorded is not None
    data = {
        "carryback": metadata.version("carryback"),
        "profile": setup.profile,
        "scenario": setup.scenario,
        "population": None if recorded_agents else setup.population,
        "router": {
            name: getattr(setup.router, name)
            for name in ("hold_s", "hold_mid_turn_s", "hold_first_s", "pin_budget", "overload_factor",
                         "overload_slack_tokens", "kv_recompute_threshold")
        },
        "runs": runs,
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"


@contextmanager
def _explained() -> Iterator[None]:
    """Errors that the user can do something about, as a message instead of a traceback."""
    try:
        yield
    except (ValueError, ConfigError, TooLong, report.MissingPackage) as error:
        fail(str(error), status=2)
    except OSError as error:
        fail(f"{error.filename}: {os.strerror(error.errno or 0)}")
