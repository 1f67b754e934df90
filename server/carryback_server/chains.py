"""Chains of the Responses API: what `previous_response_id` stands for.

Engines do not remember responses for each other, so the router does: a request that continues a response
reaches both hops with the whole conversation as its `input`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from carryback.wire import check_id

from carryback_server.body import Body
from carryback_server.endpoints import final_response
from carryback_server.errors import ApiError
from carryback_server.state import State, StateBusy, StateDown

logger = logging.getLogger("carryback")

_encode = msgspec.json.Encoder().encode

NotKept = Literal["", "not_asked", "too_large", "state_unavailable", "not_complete"]


class _Stored(msgspec.Struct):
    """A response, and what led to it.

    Attributes:
        input: all input items, those of earlier responses and their output included.
        response: the response object, as it was answered.
    """

    conversation: str
    input: list[msgspec.Raw]
    response: msgspec.Raw


class _Answer(msgspec.Struct):
    id: str = ""
    status: str = ""
    output: list[msgspec.Raw] = []


class _Output(msgspec.Struct):
    type: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True)
class Chain:
    """Where a request stands.

    Attributes:
        conversation: the one that it continues; empty if it continues none.
        parent: the conversation that it is a fork of, if another request has continued it already.
        keep: its response can be continued.
        input: all input items, JSON.
    """

    tenant: str
    conversation: str = ""
    parent: str | None = None
    keep: bool = False
    input: bytes = b"[]"


class Chains:
    """Resolves and remembers responses.

    Args:
        ttl_s: how long a response can be continued, in seconds.
        max_bytes: of one response with its whole input; a larger one cannot be continued.
        on_junk: called for each value in the state that is no response, and counts as absent.
    """

    def __init__(
        self, state: State, *, ttl_s: float, max_bytes: int, on_junk: Callable[[], None] = lambda: None
    ) -> None:
        self._state = state
        self._on_junk = on_junk
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes

    async def resolve(self, tenant: str, body: Body) -> Chain:
        """Put what `previous_response_id` stands for into the body's `input`, in its place.

        The engines are told to store nothing. Instructions are not inherited.

        Raises:
            ApiError: 404, no such response of this tenant; 400, a field is of the wrong type; 429, too many at a
                time; 503, the state is unavailable.
        """
        previous = body.pop("previous_response_id")
        keep = body.starts("store") != b"false"
        body.put("store", False)
        if previous is None:
            return Chain(tenant, keep=keep, input=body.raw("input") or b"[]")
        if not isinstance(previous, str):
            raise ApiError(
                400, "previous_response_id must be a string", code="invalid_id", param="previous_response_id"
            )
        stored, answer, is_newest = await self._get(tenant, previous)
        # Together as they are, since there may be much of it.
        before, added = _encode([*stored.input, *answer.output]), _listed(body.raw("input") or b"[]")
        rest = added[1:].lstrip()
        said = added if before == b"[]" else before if rest == b"]" else before[:-1] + b"," + rest
        body.put("input", msgspec.Raw(said))
        conversation, parent = stored.conversation, None
        if not is_newest:
            conversation, parent = f"c-{uuid.uuid4().hex}", stored.conversation
        return Chain(tenant, conversation, parent, keep, said)

    async def remember(self, chain: Chain, conversation: str, data: bytes, streamed: bool) -> NotKept:
        """Remember an answer, before its last bytes are sent: the client may continue it at once.

        Args:
            chain: what `resolve` said of the request.
            conversation: the one that the request belongs to.
            data: all of the answer, or `Watch.tail` of a streamed one.

        Returns:
            Why it was not remembered; empty if it was.
        """
        if not chain.keep or not conversation:
            return "not_asked"
        response = final_response(data, streamed)
        if len(chain.input) + len(response) > self._max_bytes:
            return "too_large"
        try:
            answer = msgspec.json.decode(response, type=_Answer)
            blob = _encode(_Stored(conversation, _items(chain.input), msgspec.Raw(response)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ApiError):
            return "not_complete"
        if not answer.id or answer.status not in ("completed", "incomplete"):
            return "not_complete"
        if len(blob) > self._max_bytes:
            return "too_large"
        try:
            await self._state.put_response(chain.tenant, answer.id, blob, self._ttl_s)
            await self._state.put_response(
                chain.tenant, _newest(conversation), answer.id.encode(), self._ttl_s
            )
        except (StateDown, StateBusy):
            return "state_unavailable"
        return ""

    async def get(self, tenant: str, response_id: str) -> bytes:
        """A response that is remembered, JSON, as it was answered.

        Raises:
            ApiError: 404, no such response of this tenant; 429, too many at a time; 503, the state is unavailable.
        """
        stored, _, _ = await self._get(tenant, response_id)
        return bytes(stored.response)

    async def _get(self, tenant: str, response_id: str) -> tuple[_Stored, _Answer, bool]:
        """A stored response, what it answered, and whether it is the newest of its conversation."""
        try:
            found = None
            if response_id.isprintable():  # others are keys of ours
                found = self._read(await self._state.get_response(tenant, response_id))
            if found is None:
                raise ApiError(
                    404,
                    f"Response with id {response_id!r} not found.",
                    code="response_not_found",
                    param="previous_response_id",
                )
            stored, answer = found
            newest = await self._state.get_response(tenant, _newest(stored.conversation))
        except StateDown as error:
            raise ApiError(
                503, "earlier responses are unavailable; try again later", code="state_unavailable"
            ) from error
        except StateBusy as error:
            raise busy() from error
        return stored, answer, newest is None or newest == response_id.encode()

    def _read(self, blob: bytes | None) -> tuple[_Stored, _Answer] | None:
        """A response as it was stored, and what it answered; None if there is none, or it is not ours."""
        if blob is None:
            return None
        try:
            stored = msgspec.json.decode(blob, type=_Stored)
            check_id(stored.conversation, "conversation")
            answer = msgspec.json.decode(stored.response, type=_Answer)
            answer.output = [*filter(_is_readable, answer.output)]
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, too
            logger.warning("a stored response is not ours (%s); it counts as absent", type(error).__name__)
            self._on_junk()
            return None
        return stored, answer


def busy() -> ApiError:
    """The error for a tenant that has too much under way at the state."""
    return ApiError(
        429,
        "too many listings or responses are asked for at a time",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )


def _newest(conversation: str) -> str:
    """Where the id of a conversation's newest response is; no id of a response."""
    return f"\0{conversation}"


def _listed(data: bytes) -> bytes:
    """A request's `input`, valid JSON, as a list of items, JSON.

    Raises:
        ApiError: 400, it is neither a string nor a list.
    """
    if data.startswith(b'"'):
        return b'[{"role":"user","content":' + data + b"}]"
    if not data.startswith(b"["):
        raise ApiError(400, "input must be a string or a list of items", code="invalid_input", param="input")
    return data


def _items(data: bytes) -> list[msgspec.Raw]:
    """A request's `input` as items.

    Raises:
        ApiError: 400, it is neither a string nor a list.
    """
    if data.startswith(b'"'):
        return [msgspec.Raw(b'{"role":"user","content":' + data + b"}")]
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, "input must be a string or a list of items", code="invalid_input", param="input"
        ) from error


def _is_readable(item: msgspec.Raw) -> bool:
    """Whether an output item can be given back. An engine that says nothing gives a message without
    content, and cannot read that."""
    output = msgspec.json.decode(item, type=_Output)
    return output.type != "message" or bytes(output.content) not in (b"[]", b"null")
