"""A LangGraph graph with a chat node, a sub-graph, and a fan-out.

    carryback serve
    python examples/langgraph_graph.py --base-url http://127.0.0.1:8000/v1

For each question, three clerks read a chapter of the handbook each, side by side. A clerk is a sub-graph that
calls the model twice. The desk hears them and answers. It keeps its history from turn to turn, and theirs. All
of them are conversations of their own, and keep their ids in every turn.
"""

from __future__ import annotations

import argparse
import operator
import uuid
from typing import Annotated, Any, TypedDict

from carryback_langgraph import ChatCarryback, chat_node, reuse
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.types import Send
from openai_loop import SECTIONS
from report import Report

CHAPTERS = [
    "\n\n".join(f"{number} {text}" for number, text in SECTIONS.items() if number.startswith(chapter))
    for chapter in "123"
]
CHECK = "Quote the words that say so."
QUESTIONS = ("How many days off do I have in a year?", "And when does a boat stay in port?")


class Desk(MessagesState):
    """What the desk knows: its messages, the question, what was said with each clerk, and what they found."""

    question: str
    said: Annotated[dict[int, list[AnyMessage]], operator.or_]
    notes: Annotated[dict[int, str], operator.or_]


class Clerk(TypedDict):
    """What one clerk knows: its own messages, which are not the desk's, and what it found."""

    chapter: int
    reading: Annotated[list[AnyMessage], add_messages]
    said: dict[int, list[AnyMessage]]
    notes: dict[int, str]


def clerk(model: ChatCarryback) -> Any:
    """A sub-graph that answers from one chapter, and checks its answer."""

    def check(state: Clerk) -> dict[str, Any]:
        return {"reading": [HumanMessage(CHECK)]}

    def note(state: Clerk) -> dict[str, Any]:
        answer, _, quote = state["reading"][-3:]
        chapter = state["chapter"]
        return {"said": {chapter: state["reading"]}, "notes": {chapter: f"{answer.text} ({quote.text})"}}

    def is_checked(state: Clerk) -> str:
        return "note" if state["reading"][-2].text == CHECK else "check"

    graph = StateGraph(Clerk)
    system = "You are a clerk. Answer in one short sentence."
    graph.add_node("read", chat_node(model, system=system, messages_key="reading"))
    graph.add_node("check", check)
    graph.add_node("note", note)
    graph.add_edge(START, "read")
    graph.add_conditional_edges("read", is_checked, ["check", "note"])
    graph.add_edge("check", "read")
    graph.add_edge("note", END)
    return graph.compile()


def desk(model: ChatCarryback) -> Any:
    """The outer graph."""

    def fan_out(state: Desk) -> list[Send]:
        sends = []
        for chapter, text in enumerate(CHAPTERS):
            before = state.get("said", {}).get(chapter)
            asked = HumanMessage(state["question"] if before else f"{text}\n\n{state['question']}")
            sends.append(Send("clerk", {"chapter": chapter, "reading": [*(before or []), asked]}))
        return sends

    def gather(state: Desk) -> dict[str, Any]:
        found = "\n".join(f"- {note}" for _, note in sorted(state["notes"].items()))
        return {"messages": [HumanMessage(f"{state['question']}\nThe clerks found:\n{found}")]}

    graph = StateGraph(Desk)
    graph.add_node("clerk", clerk(model))
    graph.add_node("gather", gather)
    graph.add_node("answer", chat_node(model, system="You answer a ferry's crew from what clerks found."))
    graph.add_conditional_edges(START, fan_out, ["clerk"])
    graph.add_edge("clerk", "gather")
    graph.add_edge("gather", "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=InMemorySaver())


def main() -> None:
    parser = argparse.ArgumentParser(description="A LangGraph graph with sub-graphs and a fan-out.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the server's first one if not given")
    parser.add_argument("--thread", default=uuid.uuid4().hex)
    options = parser.parse_args()
    model = ChatCarryback(
        model=options.model or "", base_url=options.base_url, api_key=options.api_key, timeout=600,
        temperature=0, max_completion_tokens=24,
    )  # fmt: skip
    if not options.model:
        model = model.model_copy(update={"model_name": model.root_client.models.list().data[0].id})
    graph = desk(model)
    report = Report()
    for question in QUESTIONS:
        print(f"\n> {question}")
        for namespace, update in graph.stream(
            {"question": question}, {"configurable": {"thread_id": options.thread}},
            stream_mode="updates", subgraphs=True,
        ):  # fmt: skip
            for node, step in update.items():
                messages: list[AnyMessage] = [
                    *(step or {}).get("messages", []),
                    *(step or {}).get("reading", []),
                ]
                for message in messages:
                    if isinstance(message, AIMessage):
                        who = "clerk" if namespace else "desk"
                        print(f"{who}: {message.text}")
                        report.add(f"{who}, {node}", reuse(message))
    print()
    report.total()


if __name__ == "__main__":
    main()
