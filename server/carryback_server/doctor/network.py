"""What has to reach what: NIXL's side channels, addresses, clocks."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from time import time

from carryback_server.address import host_and_port
from carryback_server.doctor.asking import Asker, NoAnswer, connects
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn

# An HTTP date has whole seconds.
DATE_RESOLUTION_S = 1.0


async def side_channel(seen: Seen, asker: Asker) -> Finding:
    """Where other engines ask it before they read: from here. Between engines, the round trip shows it."""
    host, port = seen.about.get("side_channel_host"), seen.about.get("side_channel_port")
    if not host or not port:
        return skip("side-channel", f"{seen.name} does not say where its side channel is")
    if problem := await connects(host, port, asker.timeout_s):
        fix = (
            "VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT (carryback engine --advertise-host, "
            "--side-channel-port), and the firewall between all engines"
        )
        return fail("side-channel", f"{seen.name}: {host} port {port}: {problem}", fix)
    return ok("side-channel", f"{seen.name} takes connections at {host} port {port}")


async def nat(seen: Seen, seens: Sequence[Seen], asker: Asker) -> Finding:
    """The address that it tells other engines is the one at which it is reached."""
    said = seen.about.get("side_channel_host")
    if not said:
        return skip("address", f"{seen.name} does not say its address")
    host, _ = host_and_port(seen.url)
    reached, named = await asyncio.gather(_addresses(host, asker), _addresses(said, asker))
    fix = (
        "VLLM_NIXL_SIDE_CHANNEL_HOST (carryback engine --advertise-host): an address of the engine's own "
        "machine that all other engines reach, without NAT"
    )
    if not named:
        return fail("address", f"{seen.name} tells others that it is at {said}, which has no address", fix)
    if not reached:
        return skip("address", f"{seen.name}: {host} has no address here")
    loopback = all(ipaddress.ip_address(each).is_loopback for each in named)
    alone = all(ipaddress.ip_address(each).is_loopback for each in reached)
    if loopback and not alone:
        found = f"{seen.name} is reached at {host}, and tells others that it is at {said}"
        others = {host_and_port(each.url)[0] for each in seens}
        if len(others) == 1:
            return warn("address", f"{found}; that works on one machine alone", fix)
        return fail("address", f"{found}, which nobody else reaches", fix)
    if not reached & named and not (loopback and alone):
        found = (
            f"{seen.name} is reached at {host}, and tells others that it is at {said}: NAT, or two networks"
        )
        return warn("address", found, fix)
    return ok("address", f"{seen.name} is reached at the address that it tells others: {said}")


async def _addresses(host: str, asker: Asker) -> set[str]:
    """All addresses of a name; none if it has none."""
    try:
        async with asyncio.timeout(asker.timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return set()
    return {str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found}


def clock(seen: Seen, max_offset_s: float) -> Finding:
    """An engine's clock."""
    offset = seen.view["clock_offset_s"]
    if offset is None and seen.theirs is not None:
        offset = seen.theirs["clock_offset_s"]
    if offset is None:
        return skip("clock", f"{seen.name} does not say its time")
    return _clock(seen.name, float(offset), max_offset_s)


async def router_clock(admin_url: str, asker: Asker, max_offset_s: float) -> Finding:
    """The router's clock, by the date of its answers."""
    try:
        reply = await asker.ask(admin_url + "/health")
        offset = parsedate_to_datetime(reply.headers["date"]).timestamp() - time()
    except (NoAnswer, KeyError, ValueError) as error:
        return skip("clock", f"the router does not say its time: {error}")
    # A date is cut to its second.
    offset = min(max(offset, 0.0), offset + DATE_RESOLUTION_S, key=abs)
    return _clock("the router", offset, max_offset_s)


def _clock(name: str, offset_s: float, max_offset_s: float) -> Finding:
    if abs(offset_s) > max_offset_s:
        found = (
            f"the clock of {name} is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} ours"
        )
        fix = "synchronise the machines' clocks (NTP, e.g. chrony); --max-clock-offset-s is the limit"
        return fail("clock", f"{found}; routers that share Redis go by theirs, logs and traces too", fix)
    return ok("clock", f"the clock of {name} is within {max(abs(offset_s), 0.1):.1f} s of ours")
