"""The headers that say where a model call belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from carryback import headers, wire
from carryback._client import _CHAT, _RESPONSES, _messages, _named_by
from carryback._conversation import current
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableBinding
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


def unwrap(model: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """A model without what is bound to it, and the arguments that are."""
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBinding):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def marked(model: BaseChatOpenAI, payload: Mapping[str, Any], tools: Sequence[Any] = ()) -> dict[str, Any]:
    """The headers of a request: those that it has, and ours, except for what the user has set.

    Args:
        model: that makes the request.
        payload: arguments for the OpenAI client.
        tools: those of the request, if they are not in the payload yet.
    """
    client = model.root_client or model.root_async_client
    own = dict(payload.get("extra_headers") or {})
    body = {**payload, **(payload.get("extra_body") or {})}
    given = {*(client.default_headers if client is not None else model.default_headers or {}), *own}
    given.update(_named_by(body))
    here = place()
    parent = None if here is None else lineage.parent(here)
    ours = headers(
        _messages(_RESPONSES if "input" in body else _CHAT, body),
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


def settings_for(
    model: Runnable[Any, Any],
    messages: Sequence[BaseMessage],
    tools: Sequence[Any],
    settings: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Call arguments that mark a request of a model that does not do so itself; None if it cannot be.

    Args:
        model: with or without bound arguments.
        messages: all of the request's.
        tools: the request's.
        settings: the call arguments so far.
    """
    base, bound = unwrap(model)
    if not isinstance(base, BaseChatOpenAI):
        return None
    payload = base._get_request_payload(list(messages), **{**bound, **settings})
    names = [{"name": getattr(tool, "name", None) or str(tool)} for tool in tools]
    return {**settings, "extra_headers": marked(base, payload, names)}
