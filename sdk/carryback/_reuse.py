"""What the latest answer said it reused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from carryback import wire

log = logging.getLogger("carryback")


@dataclass(frozen=True)
class LastReuse(wire.Reuse):
    """`carryback.wire.Reuse`, with where the server counted the answer.

    Attributes:
        conversation: the conversation's id; empty if the server did not say.
        turn: the turn's id; empty if the server did not say.
    """

    conversation: str = ""
    turn: str = ""


class _HasHeaders(Protocol):
    @property
    def headers(self) -> Mapping[str, str]: ...


_last: ContextVar[LastReuse | None] = ContextVar("carryback_last_reuse", default=None)


def last_reuse() -> LastReuse | None:
    """What the latest request of this thread or task reused.

    A streamed answer's is known as soon as the stream is open. None: no request yet, the latest one
    failed, or the server is not carryback's. A task's requests are seen in that task only, also not
    by whoever awaits the task; there, `reuse` reads it from a raw response.
    """
    return _last.get()


def reuse(response: _HasHeaders | Mapping[str, str]) -> LastReuse | None:
    """What a response reused, by its headers; None if it has none of carryback's.

    Args:
        response: a response of `with_raw_response` or `with_streaming_response`, a stream's
            `.response`, or headers alone.
    """
    headers = response if isinstance(response, Mapping) else response.headers
    lower = {name.lower(): value for name, value in headers.items()}
    value = lower.get(wire.CARRYBACK_REUSE.lower())
    if value is None:
        return None
    try:
        parsed = LastReuse.parse(value)
    except ValueError as error:
        log.debug("%s", error)
        return None
    return replace(
        parsed,
        conversation=_id(lower, wire.CARRYBACK_CONVERSATION),
        turn=_id(lower, wire.CARRYBACK_TURN),
    )


def _id(lower: Mapping[str, str], name: str) -> str:
    """An id of a response; empty if what the server sent is none."""
    try:
        return wire.check_id(lower.get(name.lower(), ""), name)
    except ValueError:
        return ""


def set_last(value: LastReuse | None) -> None:
    _last.set(value)
