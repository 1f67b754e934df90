"""Looks at bodies that would hold the router's event loop: `python -m carryback_server.body_worker`.

A router starts it, sends it one body after another on standard input, and reads an answer to each on standard output; it
ends when its input does. Nothing is kept of a body.
"""

from __future__ import annotations

import signal
import sys

import msgspec

from carryback_server.body import Body
from carryback_server.endpoints import ENDPOINTS
from carryback_server.errors import ApiError
from carryback_server.hints import Looked, look
from carryback_server.trust import check_media

MAX_FIELDS = 1024
"Of a body, at its top level."
# Values that are sent back as they are; of longer ones, where they are.
_SHORT_BYTES = 4096
# Of values that are not where they are looked for, since a field is given twice.
_MAX_MISPLACED = 4


class Job(msgspec.Struct):
    """What to look for in a body.

    Attributes:
        path: of the endpoint that it is for.
        scope: the tenant.
        check_media: there are other tenants.
        max_messages: of one request.
        fields: where its fields are, too.
    """

    path: str
    scope: str
    check_media: bool
    max_messages: int
    fields: bool = True


class Field(msgspec.Struct, array_like=True):
    """A field: its value, JSON, or where in the body that is."""

    name: str
    value: bytes | None
    start: int = 0
    end: int = 0


class Answer(msgspec.Struct):
    """What there is to say of a body; an error has a status."""

    looked: Looked = msgspec.field(default_factory=Looked)
    fields: list[Field] = []
    status: int = 0
    message: str = ""
    code: str = ""
    param: str | None = None


def answer(job: Job, data: bytes) -> Answer:
    """Look at one body."""
    try:
        body = Body(data)
        names = body.names()
        if len(names) > MAX_FIELDS:
            raise ApiError(
                400, f"the body has {len(names)} fields, more than {MAX_FIELDS}", code="invalid_json"
            )
        for name in ("messages", "input"):
            _check_count(name, body, job.max_messages)
        if job.check_media:
            check_media(body)
        endpoint = ENDPOINTS.get(job.path)
        looked = Looked()
        if endpoint is not None:
            looked = look(endpoint, body, scope=job.scope)
            looked.alone = endpoint.alone(body)
        return Answer(looked, _fields(body, data) if job.fields else [])
    except ApiError as error:
        return Answer(status=error.status, message=error.message, code=error.code, param=error.param)
    except (RecursionError, MemoryError):
        return Answer(status=413, message="there is too much in the body", code="body_too_large")


def _check_count(name: str, body: Body, most: int) -> None:
    if body.starts(name, 1) != b"[":
        return
    try:
        count = len(msgspec.json.decode(body.raw(name) or b"", type=list[msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"{name} is not valid JSON: {error}", code="invalid_json", param=name) from error
    if count > most:
        raise ApiError(
            413,
            f"{name} has {count} items, more than max_messages, which is {most}",
            code="body_too_large",
            param=name,
        )


def _fields(body: Body, data: bytes) -> list[Field]:
    found = []
    after = misplaced = 0
    for name in body.names():
        value = body.raw(name) or b""
        start = data.find(value, after) if len(value) > _SHORT_BYTES and misplaced < _MAX_MISPLACED else -1
        if start < 0:
            misplaced += len(value) > _SHORT_BYTES
            found.append(Field(name, value))
        else:
            # Equal bytes are as good as the field's own.
            after = start + len(value)
            found.append(Field(name, None, start, after))
    return found


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the router's to end
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    jobs, answers = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Encoder()
    while len(sizes := source.read(16)) == 16:
        job = jobs.decode(source.read(int.from_bytes(sizes[:8], "big")))
        reply = answers.encode(answer(job, source.read(int.from_bytes(sizes[8:], "big"))))
        sink.write(len(reply).to_bytes(8, "big") + reply)
        sink.flush()


if __name__ == "__main__":
    main()
