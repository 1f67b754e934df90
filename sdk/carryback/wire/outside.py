"""Reading what comes from outside: events, other routers' messages, Redis values, engines' answers.

Whatever is wrong with it is one error, `Malformed`, and what is read is never nested deeper than `Plain` allows:
whoever passes it on (an encoder, `pickle`, vLLM's scheduler) recurses no deeper either. Needs msgspec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
S = TypeVar("S")

Scalar: TypeAlias = bool | int | float | str | None
_One: TypeAlias = Scalar | list[Scalar] | dict[str, Scalar]
_Two: TypeAlias = Scalar | list[_One] | dict[str, _One]
_Three: TypeAlias = Scalar | list[_Two] | dict[str, _Two]
Plain: TypeAlias = Scalar | list[_Three] | dict[str, _Three]
"JSON of at most four levels: what `kv_transfer_params` need, and one more."
Fields: TypeAlias = dict[str, Plain]


class Malformed(ValueError):
    """Something from outside cannot be read; the message says what and why."""


def decode(decoder: Callable[[S], T], data: S, what: str) -> T:
    """What a decoder reads in `data`.

    Args:
        decoder: of msgspec, e.g. `msgspec.json.Decoder(Event).decode`.
        what: what it should be, for the message, e.g. `an engine's event`.

    Raises:
        Malformed: whatever is wrong: no JSON or MessagePack, no UTF-8, another type, too deep or too large.
    """
    try:
        return decoder(data)
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        # msgspec's own errors are ValueErrors, and so are those of UTF-8.
        raise Malformed(f"not {what}: {str(error) or type(error).__name__}") from error
