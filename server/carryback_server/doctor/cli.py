"""`carryback doctor`: the command line."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from carryback_server.address import one_port_above
from carryback_server.config import ConfigError, RouterSettings, engine_named, load
from carryback_server.console import fail, out
from carryback_server.doctor.finding import Finding, Status, failures, report
from carryback_server.doctor.run import Asked, Limits, after_start, before_start
from carryback_server.profiles import PROFILES, ProfileName

_STYLES: dict[Status, str] = {"ok": "green", "WARN": "yellow", "FAIL": "bold red", "skip": "dim"}


def doctor(
    router: Annotated[
        str | None, typer.Option(help="URL of a router that runs.", metavar="URL", show_default=False)
    ] = None,
    admin_url: Annotated[
        str | None, typer.Option(help="Its admin port. (default: one above --router's)", metavar="URL")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="A prefill engine that runs; repeatable.", metavar="URL[,EVENTS]")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="A decode engine that runs; repeatable.", metavar="URL[,EVENTS]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The router's settings, YAML. Flags and CARRYBACK_* win.")
    ] = None,
    state: Annotated[str | None, typer.Option(help="The redis:// URL that routers share.")] = None,
    model: Annotated[str | None, typer.Option(help="In requests. (default: the engines' own)")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CARRYBACK_API_KEY", help="A tenant's, for the router.", show_envvar=True),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"What the hardware should be: {', '.join(get_args(ProfileName))}.")
    ] = None,
    engine_log: Annotated[
        list[Path] | None,
        typer.Option(help="An engine's log with UCX_LOG_LEVEL=info: what UCX really took; repeatable."),
    ] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="Before the start: the address that others are told.")
    ] = None,
    host: Annotated[str, typer.Option(help="Before the start: the address to listen on.")] = "0.0.0.0",
    port: Annotated[
        list[int] | None, typer.Option(help="Before the start: a port that must be free; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout_s: Annotated[float, typer.Option(help="For a small answer or a connection.", min=0.1)] = 5.0,
    conversation_timeout_s: Annotated[float, typer.Option(help="For a turn.", min=0.1)] = 120.0,
    probe_timeout_s: Annotated[
        float, typer.Option(help="For vLLM and NIXL to be loaded, and a read over NIXL.", min=0.1)
    ] = 90.0,
    max_clock_offset_s: Annotated[float, typer.Option(help="Between two clocks.", min=0)] = 2.0,
) -> None:
    """Check that everything fits together, and say what to change.

    Without --router, --prefill and --decode: this machine, before an engine is started on it. With one of
    them: engines and routers that run. Exit status: 0 nothing failed, 1 something failed, 2 wrong usage.
    """
    if profile is not None and profile not in PROFILES:
        fail(f"--profile {profile}: want one of {', '.join(PROFILES)}", status=2)
    limits = Limits(timeout_s, conversation_timeout_s, probe_timeout_s, max_clock_offset_s)
    found = PROFILES.get(profile or "")
    try:
        engines = [engine_named("prefill", each) for each in prefill or ()]
        engines += [engine_named("decode", each) for each in decode or ()]
        settings = load(RouterSettings, config, engines=engines or None, state=state)
    except ConfigError as error:
        fail(str(error), status=2)
    if router or admin_url or settings.engines:
        checks = after_start(
            Asked(
                settings,
                router=(router or "").rstrip("/").removesuffix("/v1"),
                admin=(admin_url or (one_port_above(router) if router else "")).rstrip("/"),
                model=model or "",
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                profile_name=profile or "",
                profile=found,
                logs=engine_log or (),
                limits=limits,
            )
        )
    else:
        checks = before_start(
            profile or "", found, advertise_host=advertise_host, ports=port or (), bind=host, limits=limits
        )
    # What our own router says of engines that fail is among the findings.
    logging.getLogger("carryback").addHandler(logging.NullHandler())
    logging.getLogger("carryback").propagate = False
    raise typer.Exit(1 if failures(asyncio.run(_show(checks, as_json))) else 0)


async def _show(checks: AsyncIterator[Finding], as_json: bool) -> list[Finding]:
    findings = []
    async for each in checks:
        findings.append(each)
        if not as_json:
            out.print(each.line(), style=_STYLES[each.status], markup=False)
    if as_json:
        print(json.dumps(report(findings), indent=2, ensure_ascii=False))  # noqa: T201
    else:
        counts = {status: sum(each.status == status for each in findings) for status in _STYLES}
        out.print(", ".join(f"{count} {status}" for status, count in counts.items()), markup=False)
    return findings
