"""Graphs before the real router and engines that hold KV: what their calls reuse, and that answers stay right."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict

import pytest
from carryback_langgraph import CarrybackMiddleware, ChatCarryback, chat_node, conversation_id, reuse
from graphs import answers, every_way, run, thread
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from service import TEXT, Service
from stub_engine import CALL_MARKER, expected_text


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    """A router and its engines; none may have seen what a correct router never does."""
    async with Service() as service:
        yield service
        await service.finish()


def carryback(service: Service, **settings: Any) -> ChatCarryback:
    return ChatCarryback(model="stub", base_url=f"{service.url}/v1", api_key="none", **settings)


def plain(service: Service) -> ChatOpenAI:
    return ChatOpenAI(
        model="stub", base_url=f"{service.url}/v1", api_key="none", include_response_headers=True
    )


def assert_right(messages: list[Any]) -> None:
    """Assert that each answer is the one to its history, computed from nothing else."""
    for at, message in enumerate(messages):
        if isinstance(message, AIMessage) and not message.tool_calls:
            history = convert_to_openai_messages(messages[:at])
            assert message.content == expected_text(history)


def outcomes(messages: list[Any]) -> list[tuple[str, str]]:
    told = [reuse(message) for message in answers(messages)]
    return [(each.outcome, each.conversation) for each in told if each is not None]


@every_way
@pytest.mark.parametrize("make", [carryback, plain])
async def test_an_agent_hits_from_its_second_call_on(way: str, make: Any) -> None:
    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        return TEXT

    async with service() as running:
        graph = create_agent(
            make(running), [look], middleware=[CarrybackMiddleware()], checkpointer=InMemorySaver()
        )
        for question in (f"{TEXT}{CALL_MARKER}", "And now?", f"{TEXT}{CALL_MARKER}"):
            state = await run(graph, way, {"messages": [("user", question)]}, thread())
        main = conversation_id("thread-7")
        assert outcomes(state["messages"]) == [("miss", main)] + [("hit", main)] * 4
        seen = await running.conversation(main)
        assert (seen["turn"], seen["step"], seen["requests"]) == ("3", 2, 5)


# -- A27


class Gathered(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]
    found: Annotated[list[Any], operator.add]


@every_way
@pytest.mark.parametrize("payloads", [["one", "two", "three"], ["one", "one"]])
async def test_branches_into_a_sub_graph_reuse_their_own(way: str, payloads: list[str]) -> None:
    async with service() as running:
        model = carryback(running)
        worker: Any = StateGraph(MessagesState)
        worker.add_node("think", chat_node(model))
        worker.add_node("more", lambda state: {"messages": [HumanMessage("go on")]})
        worker.add_conditional_edges("think", lambda state: ["__end__", "more"][len(state["messages"]) < 4])
        worker.add_edge(START, "think").add_edge("more", "think")
        inner = worker.compile()

        def sync(state: Gathered) -> Any:
            return {"found": [inner.invoke({"messages": state["messages"]})["messages"]]}

        async def both(state: Gathered) -> Any:
            return {"found": [(await inner.ainvoke({"messages": state["messages"]}))["messages"]]}

        def send(state: Gathered) -> list[Send]:
            shared = state["messages"][:1]
            return [Send("worker", {"messages": [*shared, HumanMessage(TEXT + each)]}) for each in payloads]

        graph: Any = StateGraph(Gathered)
        graph.add_node("chat", chat_node(model))
        graph.add_node("worker", both if way[0] == "a" else sync)
        graph.add_edge(START, "chat").add_conditional_edges("chat", send, ["worker"])
        compiled = graph.compile(checkpointer=InMemorySaver())
        question = HumanMessage(TEXT)
        state = await run(compiled, way, {"messages": [question], "found": []}, thread())
        parent = conversation_id("thread-7", node="chat")
        for number, messages in enumerate(state["found"]):
            assert_right(messages)
            own = conversation_id("thread-7", f"worker#{number}", node="think")
            first, second = outcomes(messages)
            assert first[1] == own
            assert second == ("hit", own)
            assert (await running.conversation(own))["parent"] == parent
        # The parent goes on with what it holds itself, which no branch has used.
        state = await run(compiled, way, {"messages": [HumanMessage("And now?")]}, thread())
        assert outcomes(state["messages"])[-1] == ("hit", parent)


# -- A28


@every_way
async def test_time_travel_and_an_edited_state(way: str) -> None:
    async with service() as running:
        graph = create_agent(carryback(running), checkpointer=InMemorySaver())
        main = conversation_id("thread-7")

        async def ask(question: str, **configurable: Any) -> list[Any]:
            given = {"messages": [("user", f"{question} {TEXT}")]}
            state = await run(graph, way, given, thread(**configurable))
            assert_right(state["messages"])
            assert {conversation for _, conversation in outcomes(state["messages"])} == {main}
            messages: list[Any] = state["messages"]
            return messages

        for turn in range(3):
            messages = await ask(f"Question {turn}.")
        assert [outcome for outcome, _ in outcomes(messages)] == ["miss", "hit", "hit"]

        # Back to the end of the first turn: what both pasts share is read back, and nothing more.
        past = next(
            state
            for state in graph.get_state_history(thread())
            if len(state.values["messages"]) == 2 and not state.next
        )
        messages = await ask("Another question.", **past.config["configurable"])
        assert len(messages) == 4
        told = reuse(messages[-1])
        assert told.outcome == "partial"
        assert 0 < told.tokens < reuse(messages[1]).prompt_tokens + 64

        # Without a checkpoint's id the thread goes on from there.
        messages = await ask("And on.")
        assert len(messages) == 6
        assert reuse(messages[-1]).outcome == "hit"

        # An answer is replaced.
        edited = AIMessage("Something else.", id=messages[3].id)
        if way[0] == "a":
            await graph.aupdate_state(thread(), {"messages": [edited]})
        else:
            graph.update_state(thread(), {"messages": [edited]})
        given = {"messages": [("user", "After the edit.")]}
        state = await run(graph, way, given, thread())
        messages = state["messages"]
        assert messages[3].content == "Something else."
        assert messages[-1].content == expected_text(convert_to_openai_messages(messages[:-1]))
        told = reuse(messages[-1])
        assert (told.outcome, told.conversation) == ("partial", main)
        assert told.tokens >= reuse(messages[1]).prompt_tokens - 32

        # And the turn after it finds all of that.
        state = await run(graph, way, {"messages": [("user", "On again.")]}, thread())
        assert reuse(state["messages"][-1]).outcome == "hit"


# -- A20


@pytest.mark.parametrize("way", ["stream", "astream"])
@pytest.mark.parametrize("stream_usage", [None, True, False])
async def test_streamed_answers_report_their_usage(way: str, stream_usage: bool | None) -> None:
    async with service() as running:
        settings = {} if stream_usage is None else {"stream_usage": stream_usage}
        graph = create_agent(carryback(running, **settings), checkpointer=InMemorySaver())
        state = await run(graph, way, {"messages": [("user", TEXT)]}, thread())
        answer = state["messages"][-1]
        if stream_usage is False:
            assert answer.usage_metadata is None
        else:
            assert answer.usage_metadata["input_tokens"] == reuse(answer).prompt_tokens
            assert answer.usage_metadata["output_tokens"] > 0
