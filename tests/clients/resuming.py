"""One part of a run, in a process of its own: `resuming.py GRAPH WAY URL DATABASE start|resume`."""

from __future__ import annotations

import asyncio
import operator
import sys
from typing import Annotated, Any, TypedDict

from carryback_langgraph import CarrybackMiddleware, ChatCarryback, chat_node
from graphs import run, thread
from langchain.agents import create_agent
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

URL = sys.argv[3]


class Gathered(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


@tool
def ask_the_user(question: str) -> str:
    """Ask the user."""
    return str(interrupt(question))


def agent(checkpointer: Any) -> Any:
    """An agent whose tool waits for an answer, and which lets go at its end."""
    model = ChatOpenAI(model="default", base_url=URL, api_key="none")
    middleware = [CarrybackMiddleware(release_on="end")]
    return create_agent(model, [ask_the_user], middleware=middleware, checkpointer=checkpointer)


def branches(checkpointer: Any) -> Any:
    """Branches that call the model, wait for an answer, and call it again."""
    model = ChatCarryback(model="default", base_url=URL, api_key="none")
    worker = StateGraph(MessagesState)
    worker.add_node("think", chat_node(model))
    worker.add_node("wait", lambda state: {"messages": [HumanMessage(interrupt("?"))]})
    worker.add_node("think_on", chat_node(model))
    worker.add_edge(START, "think").add_edge("think", "wait").add_edge("wait", "think_on")

    def send(state: Gathered) -> list[Send]:
        return [Send("worker", {"messages": [HumanMessage(each)]}) for each in ("one", "two", "three")]

    graph = StateGraph(Gathered).add_node("worker", worker.compile())
    return graph.add_conditional_edges(START, send, ["worker"]).compile(checkpointer=checkpointer)


async def part(graph: Any, way: str, action: str) -> None:
    given: Any = {"messages": [HumanMessage("hello")]}
    if action == "resume":
        state = await graph.aget_state(thread()) if way[0] == "a" else graph.get_state(thread())
        given = Command(resume={each.id: "go on" for each in state.interrupts})
    await run(graph, way, given, thread())


async def main(make: Any, way: str, database: str, action: str) -> None:
    if way[0] == "a":
        async with AsyncSqliteSaver.from_conn_string(database) as saver:
            await part(make(saver), way, action)
    else:
        with SqliteSaver.from_conn_string(database) as sync_saver:
            await part(make(sync_saver), way, action)


if __name__ == "__main__":
    _, graph, way, _, database, action = sys.argv
    asyncio.run(main({"agent": agent, "branches": branches}[graph], way, database, action))
