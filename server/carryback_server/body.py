"""A request's JSON body: parsed once, at the top level only, and changed field by field.

Values that the router does not look at stay the bytes that the client sent, so their JSON value and the
order of keys reach the engines unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import msgspec

from carryback_server.errors import ApiError

if TYPE_CHECKING:
    from carryback_server.body_worker import Field

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode

# Of a field of a large body that is looked at on the event loop, in bytes: some milliseconds' work at worst.
_LONGEST = 2**18


class Body:
    """One request's body.

    Args:
        data: as it came.

    Attributes:
        size: in bytes.
        is_light: all of it can be looked at on the event loop; else its long values must not be (`reading`).

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
        self.is_light = True

    @classmethod
    def of(cls, data: bytes, fields: Iterable[Field]) -> Body:
        """A large body whose fields another process has found."""
        body = cls.__new__(cls)
        view = memoryview(data)
        body._fields = {
            each.name: msgspec.Raw(view[each.start : each.end] if each.value is None else each.value)
            for each in fields
        }
        body.size = len(data)
        body.is_light = False
        return body

    def names(self) -> list[str]:
        """Its fields."""
        return list(self._fields)

    def raw(self, name: str) -> bytes | None:
        """The bytes of a field's value; None if it is absent."""
        raw = self._fields.get(name)
        return None if raw is None else bytes(raw)

    def starts(self, name: str, length: int = 16) -> bytes:
        """The first bytes of a field's value, which may be long; empty if it is absent."""
        raw = self._fields.get(name)
        return b"" if raw is None else bytes(memoryview(raw)[:length])

    def get(self, path: str) -> Any:
        """The value of a field, or of a field within it (`a.b`); None if absent or null.

        Raises:
            ApiError: 400, the value is not valid JSON, or too long.
        """
        name, *rest = path.split(".")
        raw = self._fields.get(name)
        if raw is None:
            return None
        if not self.is_light and len(raw) > _LONGEST:
            raise ApiError(400, f"{name} is too long", code="invalid_field", param=name)
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(
                400, f"{name} is not valid JSON: {error}", code="invalid_json", param=name
            ) from error
        for part in rest:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def pop(self, name: str) -> Any:
        """Take a field out; its value, or None."""
        value = self.get(name)
        self.size -= len(self._fields.pop(name, b""))
        return value

    def put(self, name: str, value: Any) -> None:
        """Set a field, where it is or at the end."""
        before = self._fields.get(name, b"")
        after = self._fields[name] = msgspec.Raw(_encode(value))
        self.size += len(after) - len(before)

    def flag(self, name: str) -> bool:
        """Whether a field is `true`."""
        return self.starts(name) == b"true"

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.starts(name) not in (b"", b"null")

    def encode(self, changes: Mapping[str, Any], without: Set[str] = frozenset()) -> bytes:
        """The body as JSON.

        Args:
            changes: fields to set, where they are or at the end.
            without: fields to leave out.
        """
        fields: dict[str, Any] = {
            name: value for name, value in self._fields.items() if name not in without or name in changes
        }
        fields.update(changes)
        return _encode(fields)
