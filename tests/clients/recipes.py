"""What the recipes' tests share: what a client saw of each of its requests, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import carryback
from carryback import wire

CALL = "[call] "  # the stub engine calls a tool
TEXT = "Tell me about the sea, the wind, the boats and all the people who go there in winter. " * 4
INSTRUCTIONS = "You are the clerk of a harbour. " * 8
KEPT = "A rim for strength, and what is in it. " * 8
# Two turns: in the first one the model calls a tool.
STEPS = [("1", "1"), ("1", "2"), ("2", "1")]

Seen = dict[str, Any]


def seen(sent: Mapping[str, str], reuse: carryback.LastReuse | None) -> Seen:
    """A request: the ids that were sent, and what the router says."""
    assert reuse is not None
    lower = {name.lower(): value for name, value in sent.items()}
    return {
        "sent": lower.get(wire.CONVERSATION_ID.lower()),
        "step": (lower.get(wire.TURN_ID.lower()), lower.get(wire.TURN_STEP.lower())),
        "counted": reuse.conversation,
        "outcome": reuse.outcome,
        "reason": reuse.reason,
        "tokens": reuse.tokens,
    }


def hook(requests: list[Seen]) -> Callable[[Any], None]:
    """Notes each request of an httpx client, but for the question whose server it is."""

    def note(response: Any) -> None:
        if response.request.method != "HEAD":
            requests.append(seen(response.request.headers, carryback.reuse(response)))

    return note


def async_hook(requests: list[Seen]) -> Callable[[Any], Any]:
    """The same for an async client."""

    async def note(response: Any) -> None:
        hook(requests)(response)

    return note


def check(requests: list[Seen], steps: list[tuple[str | None, str | None]] = STEPS) -> list[str]:
    """Two conversations, each with one id, which read back what they left; gives the ids."""
    of: dict[str, list[Seen]] = {}
    for each in requests:
        of.setdefault(each["sent"], []).append(each)
    assert len(of) == 2, of
    for conversation in of.values():
        assert [tuple(each["step"]) for each in conversation] == steps
        assert all(each["counted"] == each["sent"] for each in conversation)
        first, *rest = conversation
        assert first["reason"] in ("new", "verified")  # it may begin as another does
        assert {(each["outcome"], each["reason"]) for each in rest} == {("hit", "verified")}
        tokens = [each["tokens"] for each in conversation]
        assert all(more > less for less, more in pairwise(tokens))
    return list(of)
