"""The headers that say where a model call belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from carryback import headers, wire
from carryback._body import history, named_by
from carryback._conversation import current
from carryback._servers import knows
from langchain_openai.chat_models.base import BaseChatOpenAI

from carryback_langgraph._lineage import lineage
from carryback_langgraph._names import place

_asked: ContextVar[list[str] | None] = ContextVar("carryback_asked", default=None)


@contextmanager
def asked() -> Iterator[list[str]]:
    """Gather the ids of the conversations that requests are made for, those that the user has named left out."""
    ids: list[str] = []
    token = _asked.set(ids)
    try:
        yield ids
    finally:
        _asked.reset(token)


def marked(model: BaseChatOpenAI, payload: Mapping[str, Any], tools: Sequence[Any] = ()) -> dict[str, Any]:
    """The headers of a request: those that it has, and ours, except for what the user has set.

    Ours only if the server is known to take them; see `carryback_langgraph._settings.ask`.

    Args:
        model: that makes the request.
        payload: arguments for the OpenAI client.
        tools: those of the request, if they are not in the payload yet.
    """
    client = model.root_client or model.root_async_client
    own = dict(payload.get("extra_headers") or {})
    if not knows(client):
        return own
    body = {**payload, **(payload.get("extra_body") or {})}
    given = {*(client.default_headers if client is not None else model.default_headers or {}), *own}
    given.update(named_by(body))
    here = place()
    parent = None if here is None else lineage.parent(here)
    ours = headers(
        history(body),
        body.get("tools") or tools,
        name=() if here is None else here.words,
        parent=parent,
        scope=str(model.openai_api_base or ""),
        group=str(body.get("prompt_cache_key") or ""),
        given=given,
    )
    conversation = ours.get(wire.CONVERSATION_ID)
    if conversation is not None and current() is None:
        if here is not None:
            lineage.asked(here, conversation, ours.get(wire.CONVERSATION_PARENT))
        if (ids := _asked.get()) is not None:
            ids.append(conversation)
    return own | ours
