"""What an answer reused, kept with the message."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import carryback
from carryback import LastReuse
from langchain_core.messages import BaseMessage

KEY = "carryback"
_FIELDS = frozenset(field.name for field in fields(LastReuse))


def reuse(message: BaseMessage) -> LastReuse | None:
    """What the answer that this message is reused; None if the server did not say, or it was not kept.

    `ChatCarryback` keeps it in `response_metadata["carryback"]`. Of other models' answers it is read from the
    response headers, if the model has `include_response_headers=True`.
    """
    said: Any = message.response_metadata.get(KEY)
    if isinstance(said, dict) and said.keys() >= _FIELDS:
        return LastReuse(**{name: said[name] for name in _FIELDS})
    headers: Any = message.response_metadata.get("headers")
    return carryback.reuse(headers) if isinstance(headers, dict) else None


def report() -> dict[str, Any] | None:
    """What the latest request of this thread or task reused, as messages keep it."""
    last = carryback.last_reuse()
    return None if last is None else asdict(last)
