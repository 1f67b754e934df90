"""Errors as OpenAI error objects: https://platform.openai.com/docs/guides/error-codes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: HTTP status.
        message: for a person; names the field or setting at fault.
        code: one word for a program.
        param: the field of the request at fault.
        headers: of the answer, e.g. `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> bytes:
        """The OpenAI error object, JSON."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        """The whole answer, with these headers and the error's own."""
        return web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers={**(headers or {}), **self.headers},
        )

    def event(self) -> bytes:
        """The same as a server-sent event, for an answer that has begun."""
        return b"data: " + self.body() + b"\n\n"


def foreign(status: int, content_type: str) -> ApiError | None:
    """The error in the place of an answer that is no engine's, such as a page of a proxy; None if it is one's.

    A 4xx keeps its status, which may be about the client's request: a mesh's own limits answer so.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if (
        kind == "application/json"
        or kind.endswith("+json")
        or (kind == "text/event-stream" and status == 200)
    ):
        return None
    message = (
        f"the engine answered with status {status} and {kind[:100]!r}, which is no answer of an engine's"
    )
    return ApiError(status if status >= 400 else 502, message, code="engine_failed")


class HideMalformed(logging.Filter):
    """For the logger `aiohttp.server`: it would print the header that it could not read, which may be a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace such a record's exception by its kind."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            record.msg, record.args = "a request that is not HTTP (%s)", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True
