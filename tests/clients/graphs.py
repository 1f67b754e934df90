"""Runs a graph in each of the ways that there are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage

WAYS = ("invoke", "stream", "ainvoke", "astream")
every_way = pytest.mark.parametrize("way", WAYS)


async def run(graph: Any, way: str, state: Any, config: dict[str, Any] | None = None) -> Any:
    """Run a graph to its end or to an interrupt, sync or async, its models streamed or not.

    Returns:
        The last state.
    """
    last: Any = None
    match way:
        case "invoke":
            return await asyncio.to_thread(graph.invoke, state, config)
        case "ainvoke":
            return await graph.ainvoke(state, config)
        case "stream":

            def stream() -> Any:
                last = None
                for mode, part in graph.stream(state, config, stream_mode=["messages", "values"]):
                    last = part if mode == "values" else last
                return last

            return await asyncio.to_thread(stream)
        case _:
            async for mode, part in graph.astream(state, config, stream_mode=["messages", "values"]):
                last = part if mode == "values" else last
            return last


def thread(name: str = "thread-7", **configurable: Any) -> dict[str, Any]:
    """The config of a run of a thread."""
    return {"configurable": {"thread_id": name, **configurable}}


def answers(messages: list[BaseMessage]) -> list[AIMessage]:
    """The model's messages."""
    return [message for message in messages if isinstance(message, AIMessage)]
