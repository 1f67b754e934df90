"""A node for a `StateGraph` that calls a chat model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, SystemMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool

from carryback_langgraph._settings import aask, ask, settings_for


def chat_node(
    model: Runnable[Any, Any],
    *,
    tools: Sequence[BaseTool | Callable[..., Any] | dict[str, Any]] = (),
    system: str | SystemMessage | None = None,
    messages_key: str = "messages",
    name: str = "chat",
) -> RunnableLambda[Any, dict[str, list[BaseMessage]]]:
    """A node that answers the state's messages: `graph.add_node("chat", chat_node(model))`.

    Args:
        model: `ChatCarryback`, or any other chat model; requests of OpenAI's are marked as its are.
        tools: bound to the model. Calling them is another node's work (`ToolNode`).
        system: put in front of the messages, and not kept in the state.
        messages_key: the state's field with the messages; the answer is added to it.
        name: of the node, where the graph gives it none.
    """
    bound = model.bind_tools(tools) if tools else model  # type: ignore[attr-defined]
    first = [] if system is None else [SystemMessage(system) if isinstance(system, str) else system]

    def prompt(state: Any) -> list[BaseMessage]:
        kept = state[messages_key] if isinstance(state, Mapping) else getattr(state, messages_key)
        return [*first, *convert_to_messages(kept)]

    def settings(messages: list[BaseMessage]) -> dict[str, Any]:
        return settings_for(model, messages, tools, {}) or {}

    def call(state: Any, config: RunnableConfig) -> dict[str, list[BaseMessage]]:
        messages = prompt(state)
        ask(model)
        return {messages_key: [bound.invoke(messages, config, **settings(messages))]}

    async def acall(state: Any, config: RunnableConfig) -> dict[str, list[BaseMessage]]:
        messages = prompt(state)
        await aask(model)
        return {messages_key: [await bound.ainvoke(messages, config, **settings(messages))]}

    return RunnableLambda(call, acall, name=name)
