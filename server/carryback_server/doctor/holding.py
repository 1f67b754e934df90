"""For how long KV is held between two turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from carryback_server.doctor.asking import Asker
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn

# For the engine's event, which may come a moment after its answer.
_TRIES = 20
_WAIT_S = 0.1


def engine_hold(seen: Seen) -> Finding:
    """A decode engine's own time, for requests that do not bring one; a router's do."""
    hold_s = seen.about.get("hold_s")
    if hold_s is None:
        return skip("hold", f"{seen.name} does not say how long it holds")
    return ok("hold", f"{seen.name} holds for {hold_s:g} s, unless a router says")


def prefix_caching(seen: Seen) -> Finding:
    """What is read back from a decode engine is what it has in its prefix cache."""
    is_on = seen.about.get("prefix_caching")
    if is_on is None:
        return skip("prefix-caching", f"{seen.name} does not say whether it has a prefix cache")
    if not is_on:
        found = f"{seen.name} has no prefix cache: nothing is read back from it"
        return warn(
            "prefix-caching", found, "start it with --enable-prefix-caching, as `carryback engine` does"
        )
    return ok("prefix-caching", f"{seen.name} has a prefix cache")


async def after_turn(url: str, headers: Mapping[str, str], asker: Asker, prefix: str) -> Finding:
    """Where the router says that a conversation is after a turn, and for how long its KV is pinned there.

    Args:
        url: of the conversation, at the router.
        prefix: of what is found.
    """
    location: dict[str, Any] = {}
    for _ in range(_TRIES):
        reply = await asker.ask(url, headers=headers)
        view = reply.json if isinstance(reply.json, dict) else {}
        if (location := view.get("location") or {}).get("tokens"):
            break
        await asyncio.sleep(_WAIT_S)
    tokens, pinned_s = location.get("tokens", 0), location.get("pinned_s", 0)
    if not tokens:
        found = f"{prefix}no decode engine has said what it has of the first turn"
        return fail("hold", found, "see why the decode engine is not heard (events, above)")
    if not pinned_s:
        found = f"{prefix}{tokens} tokens can be found until they are overwritten: nothing is pinned"
        return warn("hold", found, "hold_s, hold_mid_turn_s and pin_budget in the router's settings, above 0")
    return ok("hold", f"{prefix}{tokens} tokens are pinned for the next turn, for {pinned_s:g} s")
