"""Drop-in OpenAI clients that let carryback reuse an agent's KV cache from turn to turn.

    import carryback

    client = carryback.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")

Names are imported on first use: the router and the engine plug-in import `carryback.wire` and
`carryback.identity` from here and need no `openai`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carryback._client import AsyncOpenAI, OpenAI
    from carryback._conversation import Conversation
    from carryback._conversation import Conversation as conversation
    from carryback._headers import headers
    from carryback._reuse import LastReuse, last_reuse, reuse

    __version__: str

__all__ = [
    "AsyncOpenAI", "Conversation", "LastReuse", "OpenAI", "conversation", "headers", "last_reuse", "reuse",
]  # fmt: skip

_HOMES = {
    "AsyncOpenAI": ("carryback._client", "AsyncOpenAI"),
    "OpenAI": ("carryback._client", "OpenAI"),
    "Conversation": ("carryback._conversation", "Conversation"),
    "conversation": ("carryback._conversation", "Conversation"),
    "headers": ("carryback._headers", "headers"),
    "LastReuse": ("carryback._reuse", "LastReuse"),
    "last_reuse": ("carryback._reuse", "last_reuse"),
    "reuse": ("carryback._reuse", "reuse"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("carryback")
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
