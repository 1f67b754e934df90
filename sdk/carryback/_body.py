"""What the body of a request says of its conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from carryback import wire


def history(body: Mapping[str, Any]) -> list[Any] | None:
    """The messages of a chat's or a response's body: all of them, or None if the server has some."""
    if "input" not in body:
        messages = body.get("messages")
        return messages if isinstance(messages, list) else None
    if body.get("previous_response_id") or body.get("conversation"):
        return None
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return None
    instructions = body.get("instructions")
    return [{"role": "system", "content": instructions}, *items] if instructions else items


def named_by(body: Mapping[str, Any]) -> Iterator[str]:
    """The fields by which a body names the conversation, as the router reads them."""
    for kind, name in wire.CONVERSATION_SOURCES:
        if kind == "body":
            value: Any = body
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                yield name
