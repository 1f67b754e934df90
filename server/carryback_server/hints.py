"""Which conversation and turn a request belongs to. Hints only; engines prove the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from carryback import wire
from carryback.identity import History, Identifier, digest, turn_of

from carryback_server.body import Body
from carryback_server.chains import Chain
from carryback_server.endpoints import Endpoint
from carryback_server.errors import ApiError


@dataclass(frozen=True)
class RequestIdentity:
    """Where a request belongs.

    Attributes:
        conversation: its id; empty if the request names none and none can be inferred.
        parent: the conversation that it was forked from.
        turn: id of the turn; empty if unknown.
        step: model calls in the turn up to and with this one; 0 if unknown.
        is_guess: the id was inferred, and was not seen before: a one-shot, or an agent's first step.
        ends: the conversation ends with this request.
        named_by: the header or field of others that named the conversation; empty if none did.
    """

    conversation: str
    parent: str | None = None
    turn: str = ""
    step: int = 0
    is_guess: bool = False
    ends: bool = False
    named_by: str = ""


class Looked(msgspec.Struct):
    """What there is to know of a request's messages without the messages.

    Attributes:
        alone: see `Endpoint.alone`, of a body that was looked at elsewhere.
        turn, step: of its last message; none without messages.
        history: for the identifier; None without messages.
    """

    alone: str = ""
    turn: str = ""
    step: int = 0
    history: History | None = None


def look(endpoint: Endpoint, body: Body, *, scope: str, with_history: bool = True) -> Looked:
    """Look at a request's messages: work that grows with their size, and needs nothing else.

    Args:
        scope: the tenant.
        with_history: its conversation has to be recognised.

    Raises:
        ApiError: 400, the body is malformed.
    """
    if (said := endpoint.messages(body)) is None:
        return Looked()
    messages, tools = said
    history = None
    if with_history:
        group = body.get("prompt_cache_key")
        history = digest(messages, tools, scope=scope, group=group if isinstance(group, str) else "")
    turn, step = turn_of(messages)
    return Looked(turn=turn, step=step, history=history)


def identify(
    headers: Mapping[str, str],
    body: Body,
    endpoint: Endpoint,
    identifier: Identifier,
    *,
    tenant: str,
    chain: Chain | None = None,
    hints: Sequence[str] = wire.CONVERSATION_HEADERS,
    looked: Looked | None = None,
) -> RequestIdentity:
    """Read a request's hints, else its chain of responses, else infer from its messages. Takes
    `conversation_id` out of the body.

    Args:
        headers: looked up without regard to case.
        tenant: whose conversations it may continue.
        chain: what its `previous_response_id` stands for.
        hints: headers of others that may name a conversation, the first one that does wins. What they and fields of
            others say is ignored if it is no id.
        looked: what its messages say, if they have been looked at.

    Raises:
        ApiError: 400, an id in a header or field of carryback's own is not one; names it.
    """
    conversation = _id(headers.get(wire.CONVERSATION_ID), wire.CONVERSATION_ID)
    conversation = conversation or _id(body.get("conversation_id"), "conversation_id")
    body.pop("conversation_id")
    named_by = ""
    if not conversation:
        conversation, named_by = _hinted(headers, body, hints)
    parent = _id(headers.get(wire.CONVERSATION_PARENT), wire.CONVERSATION_PARENT) or None
    turn = _id(headers.get(wire.TURN_ID), wire.TURN_ID)
    step = _step(headers.get(wire.TURN_STEP))
    ends = headers.get(wire.CONVERSATION_END, "").strip().lower() == "true"
    if not conversation and chain is not None and chain.conversation:
        conversation, parent = chain.conversation, parent or chain.parent
    if conversation and turn and step:
        # All is said, and the messages, the bulk of the body, need not be parsed.
        return RequestIdentity(conversation, parent, turn, step, ends=ends, named_by=named_by)
    if looked is None:
        looked = look(endpoint, body, scope=tenant, with_history=not conversation)
    if conversation or looked.history is None:
        return RequestIdentity(
            conversation, parent, turn or looked.turn, step or looked.step, ends=ends, named_by=named_by
        )
    identity = identifier.recognise(looked.history)
    return RequestIdentity(
        identity.conversation,
        parent or identity.parent,
        turn or identity.turn,
        step or identity.step,
        is_guess=identity.is_new,
        ends=ends,
    )


def _hinted(headers: Mapping[str, str], body: Body, hints: Sequence[str]) -> tuple[str, str]:
    """What a hint of others' names, and which hint."""
    for name in hints:
        if _is_id(value := headers.get(name)):
            return str(value), name
    for kind, name in wire.CONVERSATION_SOURCES[2:]:
        if kind == "body" and _is_id(value := body.get(name)):
            return str(value), name
    return "", ""


def _is_id(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(wire.check_id(value, ""))
    except ValueError:
        return False


def _id(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be a string", code="invalid_id", param=name)
    try:
        return wire.check_id(value, name)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_id", param=name) from error


def _step(value: str | None) -> int:
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and 0 < len(value) < 10):
        raise ApiError(
            400, f"{wire.TURN_STEP} must be a whole number", code="invalid_id", param=wire.TURN_STEP
        )
    return int(value)
