"""Errors as OpenAI error objects: https://platform.openai.com/docs/guides/error-codes."""

from __future__ import annotations

import msgspec
from aiohttp import web

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: HTTP status.
        message: for a person; names the field or setting at fault.
        code: one word for a program.
        param: the field of the request at fault.
    """

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

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

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )

    def event(self) -> bytes:
        """The same as a server-sent event, for an answer that has begun."""
        return b"data: " + self.body() + b"\n\n"
