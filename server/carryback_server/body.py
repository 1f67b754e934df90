"""A request's JSON body: parsed once, at the top level only, and cut for each of the two hops.

Values that the router does not look at stay the bytes that the client sent, so their JSON value and the
order of keys reach the engines unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from carryback_server.errors import ApiError

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_ONE = msgspec.Raw(b"1")

# What only matters for the answer, and costs the prefill engine work or is refused beside one token.
_DECODE_ONLY = frozenset(
    {
        "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stop", "stop_token_ids",
        "logprobs", "top_logprobs", "stream", "stream_options", "response_format",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    }
)  # fmt: skip


class Body:
    """One request's body.

    Args:
        data: as it came.

    Raises:
        ApiError: 400, it is not a JSON object.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._fields = _decode(data)
        except msgspec.ValidationError as error:
            raise ApiError(400, "the body must be a JSON object", code="invalid_json") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        self.size = len(data)
        # Ours alone: what a client puts here never reaches an engine.
        self._fields.pop("kv_transfer_params", None)

    def get(self, path: str) -> Any:
        """The value of a field, or of a field within it (`a.b`); None if absent or null.

        Raises:
            ApiError: 400, the value is not valid JSON.
        """
        name, *rest = path.split(".")
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(
                400, f"{name} is not valid JSON: {error}", code="invalid_json", param=name
            ) from error
        for part in rest:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def pop(self, name: str) -> Any:
        """Take a field out; its value, or None."""
        value = self.get(name)
        self._fields.pop(name, None)
        return value

    def flag(self, name: str) -> bool:
        """Whether a field is `true`."""
        return self._fields.get(name) == b"true"

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._fields.get(name, b"null") != b"null"

    def for_prefill(self, limit: str, params: Mapping[str, Any]) -> bytes:
        """The prefill hop's body: the same prompt, one token, not streamed.

        Args:
            limit: how this endpoint spells the number of tokens to generate.
            params: the `kv_transfer_params`.
        """
        fields: dict[str, Any] = {
            name: value for name, value in self._fields.items() if name not in _DECODE_ONLY
        }
        fields[limit] = _ONE
        if self.has("tools"):
            # They still render into the prompt; a forced call would cost a grammar.
            fields["tool_choice"] = "none"
        fields["kv_transfer_params"] = params
        return _encode(fields)

    def for_decode(self, params: Mapping[str, Any]) -> bytes:
        """The decode hop's body: the client's, with these `kv_transfer_params`."""
        return _encode({**self._fields, "kv_transfer_params": params})
