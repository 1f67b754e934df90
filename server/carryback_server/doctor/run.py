"""All checks, in the order in which one reads them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from carryback_server import launch
from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.doctor import agreement, conversation, engines, holding, host, network, state, transport
from carryback_server.doctor.asking import Asker, NoAnswer
from carryback_server.doctor.conversation import Place
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip
from carryback_server.doctor.probe import probe
from carryback_server.engines import Engine
from carryback_server.profiles import Profile


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and how far clocks may be apart."""

    answer_s: float = 5.0
    conversation_s: float = 120.0
    probe_s: float = 90.0
    clock_offset_s: float = 2.0


@dataclass(frozen=True)
class Asked:
    """What is to be checked.

    Attributes:
        config: as a router would have it: engines, keys, state.
        router: its URL for clients; empty to check with a router of our own.
        admin: its URL for operators.
        model: in requests; the engines' own unless given.
        headers: with a tenant's key, for the router.
        profile: the hardware profile, and its name.
        logs: of engines on this machine.
    """

    config: RouterConfig
    router: str = ""
    admin: str = ""
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    profile_name: str = ""
    profile: Profile | None = None
    logs: Sequence[Path] = ()
    limits: Limits = Limits()


async def before_start(
    profile_name: str,
    profile: Profile | None,
    *,
    advertise_host: str | None,
    ports: Sequence[int],
    bind: str,
    limits: Limits,
) -> AsyncIterator[Finding]:
    """The checks on a machine where an engine is to be started.

    Args:
        advertise_host: the address to be told to others; None: the one on the default route.
        ports: to be free; empty: those that engines and routers take by default.
        bind: on this address.
    """
    device = "cuda" if profile is not None and profile.device == "cuda" else "cpu"
    variables = {**_ucx(os.environ), **(_ucx(profile.env) if profile is not None else {})}
    probing = asyncio.create_task(probe("versions", timeout_s=limits.probe_s))
    moving = asyncio.create_task(
        transport.transport(
            profile_name, profile, variables=variables, device=device, whose="this environment",
            backends=profile.backends if profile is not None else ("UCX",), timeout_s=limits.probe_s,
        )
    )  # fmt: skip
    try:
        yield host.vllm()
        for each in host.keys(os.environ):
            yield each
        yield host.address(advertise_host)
        yield host.ports(bind, ports or DEFAULT_PORTS, not ports)
        if profile is not None:
            for each in host.profile(profile_name, profile):
                yield each
        facts = (await probing).facts
        yield host.plugin(facts)
        yield host.torch(facts)
        yield host.driver(facts, device == "cuda")
        yield host.nixl(facts)
        yield host.ucx(facts)
        yield await moving
    finally:
        probing.cancel()
        moving.cancel()
        await asyncio.gather(probing, moving, return_exceptions=True)


# Of a router, and of `carryback engine`.
DEFAULT_PORTS = (
    8000,
    8001,
    *astuple(launch.usual_ports("prefill")),
    *astuple(launch.usual_ports("decode")),
)


async def after_start(asked: Asked) -> AsyncIterator[Finding]:
    """The checks of engines, and of a router if one is named."""
    limits = asked.limits
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(Asker(limits.answer_s))
        theirs: list[dict[str, Any]] | None = None
        if asked.router:
            yield await _ready(asked, asker)
        if asked.admin:
            try:
                theirs = await _engines_of(asked.admin, asker)
            except NoAnswer as error:
                fix = "--admin-url, by default one port above the router's; it is on loopback unless admin_host says otherwise"
                yield fail("admin", f"{asked.admin} does not say which engines there are: {error}", fix)
            else:
                yield ok("admin", f"the router has {len(theirs)} engines")
        configs = asked.config.engines or [_config(each) for each in theirs or ()]
        if not configs:
            yield skip("engines", "no engines are known: give --prefill and --decode, or --admin-url")
            return
        moving: list[asyncio.Task[Finding]] = []
        redis = asyncio.create_task(state.shared_state(asked.config, limits.answer_s, limits.clock_offset_s))
        own = await stack.enter_async_context(conversation.own_router(configs, asked.config))
        seens = _seen(own.pipeline.pool.engines, theirs, asked.config)
        try:
            async for found in _checks(asked, asker, seens):
                yield found
            yield await redis
            moving = [asyncio.create_task(each) for each in _transports(asked, seens)]
            yield transport.backend(asked.profile_name, seens, asked.profile)
            async for found in _conversations(asked, asker, seens, own.url):
                yield found
            for each in moving:
                yield await each
        finally:
            for task in (redis, *moving):
                task.cancel()
            await asyncio.gather(redis, *moving, return_exceptions=True)


async def _checks(asked: Asked, asker: Asker, seens: list[Seen]) -> AsyncIterator[Finding]:
    """What needs no conversation."""
    has_key, most = asked.config.events_key is not None, asked.limits.clock_offset_s
    each_engine = [
        check
        for seen in seens
        for check in (
            engines.health(seen, asker),
            engines.vllm(seen, asker),
            engines.plugin(seen, asker),
            engines.events(seen, has_key, asker),
            network.side_channel(seen, asker),
            network.nat(seen, seens, asker),
        )
    ]
    for found in await asyncio.gather(*each_engine):
        yield found
    for seen in seens:
        yield network.clock(seen, most)
    if asked.admin:
        yield await network.router_clock(asked.admin, asker, most)
    for found in agreement.agreements(seens):
        yield found
    for seen in seens:
        if seen.role == "decode":
            yield holding.prefix_caching(seen)
            yield holding.engine_hold(seen)


async def _conversations(
    asked: Asked, asker: Asker, seens: list[Seen], own_url: str
) -> AsyncIterator[Finding]:
    """Through the router, and, where there are several engines of a role, between each two."""
    prefills = [each for each in seens if each.role == "prefill"]
    decodes = [each for each in seens if each.role == "decode"]
    model = asked.model or next((str(each.view["models"][0]) for each in seens if each.view["models"]), "")
    if not model:
        yield skip("conversation", "no engine answers")
        return
    limit_s = asked.limits.conversation_s
    url, headers = (asked.router, asked.headers) if asked.router else (own_url, {})
    for found in await conversation.converse(Place(url, prefills, model, headers, limit_s), asker):
        yield found
    if len(prefills) * len(decodes) <= 1:
        return
    for prefill, decode in product(prefills, decodes):
        pair = f"{prefill.name}, {decode.name}"
        both = [each.config for each in (prefill, decode)]
        async with conversation.own_router(both, asked.config) as router:
            place = Place(router.url, [prefill], model, {}, limit_s, pair)
            for found in await conversation.converse(place, asker):
                if found.check in ("reuse", "pull") or found.status == "FAIL":
                    yield found


def _transports(asked: Asked, seens: Sequence[Seen]) -> Iterable[Any]:
    """What UCX takes with the variables of the engines on this machine; once for those that have the same."""
    for log in asked.logs:
        yield _done(transport.logged(asked.profile_name, asked.profile, log))
    if asked.logs:
        return
    here = [each for each in seens if "ucx" in each.about and transport.is_here(each)]
    if not here:
        yield _done(skip("transport", "no engine runs on this machine: run doctor there, too"))
    seen_before = set()
    for each in here:
        about = each.about
        key = (*sorted(about["ucx"].items()), *about["backends"], about["kv_buffer_device"])
        if key in seen_before:
            continue
        seen_before.add(key)
        yield transport.transport(
            asked.profile_name, asked.profile, variables=about["ucx"], backends=about["backends"],
            device="cuda" if about["kv_buffer_device"] == "cuda" else "cpu",
            whose=f"{each.name}'s variables", timeout_s=asked.limits.probe_s,
        )  # fmt: skip


async def _done(found: Finding) -> Finding:
    return found


async def _ready(asked: Asked, asker: Asker) -> Finding:
    fix = "start it, or correct --router"
    try:
        reply = await asker.ask(asked.router + "/ready", headers=asked.headers)
    except NoAnswer as error:
        return fail("router", f"{asked.router} does not answer: {error}", fix)
    status = reply.json.get("status", "") if isinstance(reply.json, dict) else ""
    if reply.status != 200:
        return fail(
            "router", f"{asked.router} is not ready: {status or reply.problem}", "start what it misses"
        )
    return ok("router", f"{asked.router} is ready")


async def _engines_of(admin: str, asker: Asker) -> list[dict[str, Any]]:
    """What a router says of its engines.

    Raises:
        NoAnswer: nothing that can be read.
    """
    reply = await asker.ask(admin + "/admin/engines")
    if reply.status != 200 or not isinstance(reply.json, dict) or "data" not in reply.json:
        raise NoAnswer(reply.problem)
    views: list[dict[str, Any]] = reply.json["data"]
    if any("events_address" not in each for each in views):
        raise NoAnswer("it is of another release; give --prefill and --decode")
    return views


def _config(view: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig(role=view["role"], url=view["url"], events=view["events_address"], name=view["name"])


def _seen(pool: Iterable[Engine], theirs: list[dict[str, Any]] | None, config: RouterConfig) -> list[Seen]:
    by_place = {(each["role"], each["url"], each["events_address"]): each for each in theirs or ()}
    seens = []
    for engine in pool:
        site = engine.site
        key = site.api_key.get_secret_value() if site.api_key is not None else config.engine_api_key
        place = EngineConfig(
            role=site.role, url=site.url, events=site.events, name=site.name, api_key=site.api_key
        )
        view = by_place.get((site.role, site.url, site.events))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        seens.append(Seen(engine.view(), view, place, headers))
    return seens


def _ucx(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("UCX_")}
