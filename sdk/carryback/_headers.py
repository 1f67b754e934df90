"""The headers that say where a request belongs: what the clients send, for any other client to send too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from carryback import wire
from carryback._conversation import Conversation, current
from carryback.identity import Identifier, derived_id, turn_of

_SOURCES = frozenset(name.lower() for _, name in wire.CONVERSATION_SOURCES)
_shared = Identifier()


def send_ids() -> str:
    """Which servers get ids, as the user says: `auto`, `always`, `never`, or hosts with commas between them."""
    return os.environ.get("CARRYBACK_SEND_IDS", "").strip().lower() or "auto"


def headers(
    messages: Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    name: str | Sequence[str] = (),
    parent: str | None = None,
    turn: str | None = None,
    scope: str = "",
    group: str = "",
    given: Iterable[str] = (),
    identifier: Identifier | None = None,
) -> dict[str, str]:
    """Headers for one request, to be called once for each. Nothing asks which server they are for.

    The conversation is, first one that there is: the one whose `with carryback.conversation(...)` block
    this is; the one of `name`; the one that the messages continue. None of them if `given` names one.

    Args:
        messages: all of the request's: chat, Responses items, or Anthropic's with the system prompt put in
            front. None or empty: they are not known, and tell nothing.
        tools: the request's tools.
        name: what a framework calls the conversation, in one word or several (thread, agent). The id
            derives from it and is the same in every process. Prompts of one name that begin differently
            are told apart.
        parent: the conversation that it shares its history with, or works for.
        turn: id of the turn; counted from the messages if not given.
        scope, group: conversations of different ones never meet.
        given: names of the headers that the request has already; they are left alone. Body fields that name
            a conversation may be among them, see `wire.CONVERSATION_SOURCES`.
        identifier: remembers the histories; one for the whole process if not given.
    """
    if send_ids() == "never":
        return {}
    words = (name,) if isinstance(name, str) and name else tuple(name)
    taken = {each.lower() for each in given}
    counted: str | None = None
    step: int | None = None
    ours: dict[str, str | int | None] = {}
    entered: Conversation | None = current()
    if entered is not None:
        if wire.CONVERSATION_ID.lower() not in taken:
            ours[wire.CONVERSATION_ID] = entered.id
            ours[wire.CONVERSATION_PARENT] = entered.parent
        turn = entered.turn or turn
    elif not _SOURCES.isdisjoint(taken):
        pass  # the caller names it
    elif messages:
        if identifier is None:
            identifier = _shared
        identity = identifier.identify(
            messages, tools, scope=scope, group=group, name=derived_id(*words) if words else ""
        )
        ours[wire.CONVERSATION_ID] = identity.conversation
        ours[wire.CONVERSATION_PARENT] = identity.parent or parent
        counted, step = identity.turn, identity.step
    elif words:
        ours[wire.CONVERSATION_ID] = derived_id(*words)
        ours[wire.CONVERSATION_PARENT] = parent
    if messages and step is None:
        counted, step = turn_of(messages)
    ours[wire.TURN_ID] = turn or counted
    ours[wire.TURN_STEP] = step
    return {
        header: str(value)
        for header, value in ours.items()
        if value is not None and header.lower() not in taken
    }
