"""A decode engine's answer, from its first bytes on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from carryback_server.endpoints import Endpoint
from carryback_server.errors import foreign
from carryback_server.upstream import BadAnswer, BrokeOff, Reply

# A stream that says nothing in so many bytes is passed on as an answer.
MAX_GREETING_BYTES = 2**18


@dataclass
class Answer:
    """A decode engine's answer, begun: its status and its first bytes are there.

    Attributes:
        first: the first bytes, with the first token in them; all, if it is not a stream of events.
        is_stream: more may follow.
    """

    status: int
    content_type: str
    first: bytes
    is_stream: bool
    reply: Reply
    error: bytes | None = None
    "The error object, JSON, of a stream that failed before it had a token."

    @property
    def has_failed(self) -> bool:
        """The engine failed, before it generated anything, whatever the status says."""
        return self.status >= 500 or self.error is not None

    @property
    def excerpt(self) -> str:
        """Its beginning, for a person."""
        return self.first[:500].decode(errors="replace").strip()

    def settled(self) -> Answer:
        """The same; a stream that failed before its first token is the plain error that it is."""
        if self.error is None:
            return self
        status = 500
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            code = msgspec.json.decode(self.error)["error"]["code"]
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return Answer(status, "application/json", self.error, False, self.reply)


async def begin(reply: Reply, endpoint: Endpoint) -> Answer:
    """Wait for an answer's first bytes.

    A stream's status says nothing: vLLM sends it before it knows whether the request will work.

    Raises:
        UpstreamError: it was broken off, or is no answer of an engine's.
    """
    try:
        if (problem := foreign(reply.status, reply.content_type)) is not None:
            if reply.status == 200:
                raise BadAnswer(problem.message)
            await reply.read()
            return Answer(reply.status, "application/json", endpoint.error_body(problem), False, reply)
        if not reply.content_type.startswith("text/event-stream"):
            return Answer(reply.status, reply.content_type, await reply.read(), False, reply)
        first = await reply.read_some()
        while (
            len(first) < MAX_GREETING_BYTES
            and endpoint.is_preliminary(first)
            and (more := await reply.read_some())
        ):
            first += more
    except BaseException:
        reply.close()
        raise
    if not first:
        raise BrokeOff("an empty answer")
    return Answer(reply.status, reply.content_type, first, True, reply, endpoint.stream_error(first))
