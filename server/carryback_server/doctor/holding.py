"""For how long KV is held between two turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from carryback_server.doctor.asking import Asker
from carryback_server.doctor.engines import Seen
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn
from carryback_server.hold import EXPIRY_MARGIN_S

# For the engine's event, which may come a moment after its answer.
_TRIES = 20
_WAIT_S = 0.1


def engine_hold(seen: Seen) -> Finding:
    """A decode engine's own time, for requests that do not bring one; a router's do."""
    hold_s = seen.about.get("hold_s")
    if hold_s is None:
        return skip("hold", f"{seen.name} does not say how long it holds")
    if hold_s <= EXPIRY_MARGIN_S:
        found = f"{seen.name} holds for {hold_s:g} s what comes without a time, and the last {EXPIRY_MARGIN_S:g} s are not used"
        fix = "decoder_kv_blocks_ttl in its kv_connector_extra_config (carryback engine --hold-s)"
        return warn("hold", found, fix)
    return ok("hold", f"{seen.name} holds for {hold_s:g} s, unless a router says")


async def after_turn(url: str, headers: Mapping[str, str], asker: Asker, prefix: str) -> Finding:
    """What is held after a turn, and for how long it can still be used.

    Args:
        url: of the conversation, at the router.
        prefix: of what is found.
    """
    held = None
    for _ in range(_TRIES):
        reply = await asker.ask(url, headers=headers)
        view = reply.json if isinstance(reply.json, dict) else {}
        if held := view.get("held"):
            break
        await asyncio.sleep(_WAIT_S)
    if not held:
        fix = (
            f"hold_s and hold_mid_turn_s of the router, above {EXPIRY_MARGIN_S:g} s; or see why the decode engine is "
            "not heard (events, above)"
        )
        return fail("hold", f"{prefix}nothing is held after the first turn", fix)
    left, tokens = held["expires_in_s"], held["tokens"]
    if left <= 0:
        found = (
            f"{prefix}{tokens} tokens are held, and expire before they can be read: the last "
            f"{EXPIRY_MARGIN_S:g} s are not used"
        )
        return fail("hold", found, "a longer hold_mid_turn_s and hold_s in the router's settings")
    return ok("hold", f"{prefix}{tokens} tokens are held for the next turn, for {left:g} s")
