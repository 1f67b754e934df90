"""Call arguments for models that do not mark their requests themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carryback._servers import atakes_ids, takes_ids
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableBinding
from langchain_openai.chat_models.base import BaseChatOpenAI

from carryback_langgraph._chat_model import ChatCarryback
from carryback_langgraph._mark import marked


def unwrap(model: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """A model without what is bound to it, and the arguments that are."""
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBinding):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def ask(model: Runnable[Any, Any]) -> None:
    """Learn whether a model's server takes ids, before its request is marked."""
    base, _ = unwrap(model)
    if isinstance(base, BaseChatOpenAI) and base.root_client is not None:
        takes_ids(base.root_client)


async def aask(model: Runnable[Any, Any]) -> None:
    """`ask`, for asyncio."""
    base, _ = unwrap(model)
    if isinstance(base, BaseChatOpenAI) and base.root_async_client is not None:
        await atakes_ids(base.root_async_client)


def settings_for(
    model: Runnable[Any, Any],
    messages: Sequence[BaseMessage],
    tools: Sequence[Any],
    settings: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Call arguments with which a model's request is marked; None if it cannot be.

    Headers that are bound to the model are among them: `bind_tools` drops what was bound before.

    Args:
        model: with or without bound arguments.
        messages: all of the request's.
        tools: the request's.
        settings: the call arguments so far.
    """
    base, bound = unwrap(model)
    if not isinstance(base, BaseChatOpenAI):
        return None
    own = {**(bound.get("extra_headers") or {}), **(settings.get("extra_headers") or {})}
    if isinstance(base, ChatCarryback):  # marks them when it makes the request
        return {**settings, "extra_headers": own} if own else dict(settings)
    payload = base._get_request_payload(list(messages), **{**bound, **settings})
    payload["extra_headers"] = {**(payload.get("extra_headers") or {}), **own}
    names = [{"name": getattr(tool, "name", None) or str(tool)} for tool in tools]
    return {**settings, "extra_headers": marked(base, payload, names)}
