"""Which conversation a model call belongs to, by the place in a graph that it is made from."""

from __future__ import annotations

import asyncio
import operator
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from carryback import conversation, wire
from carryback_langgraph import CarrybackMiddleware, ChatCarryback, chat_node, conversation_id
from fake_server import FakeServer
from graphs import every_way, run, thread
from langchain.agents import create_agent
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

QUESTION: dict[str, Any] = {"messages": [("user", "hello")]}


class Both(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


def carryback(server: FakeServer) -> ChatCarryback:
    return ChatCarryback(model="default", base_url=server.base_url, api_key="none")


def plain(server: FakeServer, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", base_url=server.base_url, api_key="none", **settings)


def agent(model: Any, *args: Any, **settings: Any) -> Any:
    """An agent that marks its requests, whichever its model is."""
    return create_agent(model, *args, middleware=[CarrybackMiddleware()], **settings)


def conversations(server: FakeServer) -> list[str | None]:
    return [request.conversation for request in server.requests]


def turns(server: FakeServer) -> list[tuple[str | None, str | None]]:
    return [(request.value(wire.TURN_ID), request.value(wire.TURN_STEP)) for request in server.requests]


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return "nothing there"


models = pytest.mark.parametrize("make", [carryback, plain])


@every_way
@models
async def test_an_agents_turns_and_steps(server: FakeServer, way: str, make: Any) -> None:
    server.calls_tools = True
    graph = agent(make(server), [look], checkpointer=InMemorySaver())
    for _ in range(2):
        await run(graph, way, QUESTION, thread())
    assert conversations(server) == [conversation_id("thread-7")] * 4
    assert turns(server) == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert server.last.value(wire.CONVERSATION_PARENT) is None
    assert all(bool(request.body.get("stream")) == ("stream" in way) for request in server.requests)


@every_way
async def test_two_nodes_are_two_conversations(server: FakeServer, way: str) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("plan", chat_node(plain(server), system="You plan."))
    graph.add_node(chat_node(carryback(server), system="You answer.", name="answer"))
    graph.add_edge(START, "plan").add_edge("plan", "answer")
    compiled = graph.compile(checkpointer=InMemorySaver())
    for _ in range(2):
        await run(compiled, way, QUESTION, thread())
    both = [conversation_id("thread-7", node=node) for node in ("plan", "answer")]
    assert conversations(server) == both * 2


@every_way
@pytest.mark.parametrize("checkpointer", [None, True])
@models
async def test_a_sub_graph_is_a_conversation_of_its_own(
    server: FakeServer, way: str, checkpointer: Any, make: Any
) -> None:
    inner = agent(make(server), checkpointer=checkpointer)
    outer = StateGraph(MessagesState)
    outer.add_node("chat", chat_node(make(server)))
    outer.add_node("research", inner)
    outer.add_edge(START, "chat").add_edge("chat", "research")
    compiled = outer.compile(checkpointer=InMemorySaver())
    for _ in range(2):
        await run(compiled, way, QUESTION, thread())
    one, two = conversation_id("thread-7", node="chat"), conversation_id("thread-7", "research")
    assert conversations(server) == [one, two, one, two]
    assert [request.value(wire.CONVERSATION_PARENT) for request in server.requests] == [None, one] * 2


@every_way
@models
async def test_a_graph_that_a_node_invokes(server: FakeServer, way: str, make: Any) -> None:
    inner = agent(make(server))

    def sync(state: MessagesState) -> Any:
        for _ in range(2):
            inner.invoke({"messages": state["messages"]})
        return {}

    async def both(state: MessagesState) -> Any:
        for _ in range(2):
            await inner.ainvoke({"messages": state["messages"]})
        return {}

    graph = StateGraph(MessagesState).add_node("ask", both if way[0] == "a" else sync).add_edge(START, "ask")
    await run(graph.compile(checkpointer=InMemorySaver()), way, QUESTION, thread())
    assert conversations(server) == [conversation_id("thread-7", "ask")] * 2


@every_way
@models
async def test_agents_as_tools(server: FakeServer, way: str, make: Any) -> None:
    helper = agent(make(server), system_prompt="You help.")

    @tool
    async def ask(question: str) -> str:
        """Ask the helper."""
        return str((await helper.ainvoke({"messages": question}))["messages"][-1].content)

    @tool("ask")
    def ask_sync(question: str) -> str:
        """Ask the helper."""
        return str(helper.invoke({"messages": question})["messages"][-1].content)

    def decide(request: Any) -> list[tuple[str, dict[str, Any]]]:
        is_question = request.body.get("tools") and request.body["messages"][-1]["role"] == "user"
        return [("ask", {"question": each}) for each in ("one", "two")] if is_question else []

    server.decide = decide
    graph = agent(make(server), [ask if way[0] == "a" else ask_sync], checkpointer=InMemorySaver())
    for _ in range(2):
        await run(graph, way, QUESTION, thread())
    main = conversation_id("thread-7")
    helpers = {conversation_id("thread-7", f"tools#{number}") for number in (0, 1)}
    for turn in (server.requests[:4], server.requests[4:]):
        assert [turn[0].conversation, turn[3].conversation] == [main, main]
        assert {request.conversation for request in turn[1:3]} == helpers
        assert {request.value(wire.CONVERSATION_PARENT) for request in turn[1:3]} == {main}


# -- Send (A27)


def fan_out(node: Any, payloads: list[str], checkpointer: Any) -> Any:
    def send(state: Both) -> list[Send]:
        return [Send("worker", {"messages": [HumanMessage(payload)]}) for payload in payloads]

    graph = StateGraph(Both).add_node("worker", node).add_conditional_edges(START, send, ["worker"])
    return graph.compile(checkpointer=checkpointer)


def twice(make: Any, server: FakeServer) -> Any:
    """A sub-graph that calls the model twice, the second time with the first answer in its history."""
    graph = StateGraph(MessagesState)
    graph.add_node("think", chat_node(make(server)))
    graph.add_node("more", lambda state: {"messages": [HumanMessage("go on")]})
    graph.add_conditional_edges("think", lambda state: "more" if len(state["messages"]) < 4 else "__end__")
    graph.add_edge(START, "think").add_edge("more", "think")
    return graph.compile()


@every_way
@models
@pytest.mark.parametrize("payloads", [["one", "two", "three"], ["one", "one", "one"]])
async def test_branches_into_a_sub_graph(
    server: FakeServer, way: str, make: Any, payloads: list[str]
) -> None:
    graph = fan_out(twice(make, server), payloads, InMemorySaver())
    await run(graph, way, {"messages": []}, thread())
    ids = [conversation_id("thread-7", f"worker#{number}", node="think") for number in range(3)]
    assert sorted(map(str, conversations(server))) == sorted(ids * 2)
    asked = {request.conversation: request.body["messages"][0]["content"] for request in server.requests}
    assert [asked[each] for each in ids] == payloads  # by the order of the sends, not that of arrival
    await run(graph, way, {"messages": []}, thread())
    assert set(conversations(server)) == set(ids)


@every_way
@models
async def test_branches_to_a_node(server: FakeServer, way: str, make: Any) -> None:
    name = str(uuid.uuid4())
    graph = fan_out(chat_node(make(server)), ["one", "two", "two"], None)
    await run(graph, way, {"messages": []}, thread(name))
    asked = {request.conversation: request.body["messages"][0]["content"] for request in server.requests}
    ids = [conversation_id(name, node=f"worker#{number}") for number in range(3)]
    assert asked == dict(zip(ids, ["one", "two", "two"], strict=True))
    assert {request.value(wire.CONVERSATION_PARENT) for request in server.requests} == {None}


@every_way
async def test_the_functional_api(server: FakeServer, way: str) -> None:
    model = carryback(server)

    @task
    async def aask(messages: list[Any]) -> Any:
        return await model.ainvoke(messages)

    @task
    def ask(messages: list[Any]) -> Any:
        return model.invoke(messages)

    @entrypoint(checkpointer=InMemorySaver())
    async def aflow(messages: list[Any]) -> list[Any]:
        for _ in range(2):
            messages = [*messages, await aask(messages), HumanMessage("go on")]
        return messages

    @entrypoint(checkpointer=InMemorySaver())
    def flow(messages: list[Any]) -> list[Any]:
        for _ in range(2):
            messages = [*messages, ask(messages).result(), HumanMessage("go on")]
        return messages

    name, graph = ("aflow", aflow) if way[0] == "a" else ("flow", flow)
    await run(graph, way, QUESTION["messages"], thread())
    node = "aask" if way[0] == "a" else "ask"
    assert conversations(server) == [conversation_id("thread-7", name, node=node)] * 2
    assert turns(server) == [("1", "1"), ("2", "1")]


# -- without a graph, without a thread


@every_way
async def test_a_thread_without_a_graph(server: FakeServer, way: str) -> None:
    model = carryback(server)
    for config in (thread(), {"metadata": {"thread_id": "thread-7"}}):
        if way == "invoke":
            model.invoke("hi", config)
        elif way == "ainvoke":
            await model.ainvoke("hi", config)
        elif way == "stream":
            list(model.stream("hi", config))
        else:
            [chunk async for chunk in model.astream("hi", config)]
    assert conversations(server) == [conversation_id("thread-7", node="")] * 2


@every_way
@models
async def test_without_a_thread_the_messages_tell(server: FakeServer, way: str, make: Any) -> None:
    graph = agent(make(server))
    one, two = ([HumanMessage(f"{number} {uuid.uuid4()}")] for number in "12")
    for _ in range(2):
        for messages in (one, two):
            messages[:] = (await run(graph, way, {"messages": messages}))["messages"]
            messages.append(HumanMessage("go on"))
    first, second, *again = conversations(server)
    assert first != second
    assert again == [first, second]
    assert all(
        each and each not in (conversation_id(""), conversation_id("None")) for each in (first, second)
    )


async def test_numbers_and_uuids_are_threads(server: FakeServer) -> None:
    name = uuid.uuid4()
    graph = agent(carryback(server), checkpointer=InMemorySaver())
    for each in (7, name):
        await run(graph, "ainvoke", QUESTION, {"configurable": {"thread_id": each}})
    assert conversations(server) == [conversation_id("7"), conversation_id(str(name))]


@models
async def test_a_named_conversation_wins(server: FakeServer, make: Any) -> None:
    graph = agent(make(server), checkpointer=InMemorySaver())
    with conversation("mine") as named:
        await run(graph, "ainvoke", QUESTION, thread())
    assert conversations(server) == ["mine"]
    if make is carryback:
        await named.aend()
        assert (server.last.method, server.last.path) == ("DELETE", "/v1/conversations/mine")


async def test_many_threads_of_one_agent(server: FakeServer) -> None:
    server.calls_tools = True
    graph = agent(carryback(server), [look], checkpointer=InMemorySaver())

    async def talk(name: str) -> None:
        for _ in range(2):
            await run(graph, "ainvoke", {"messages": [("user", name)]}, thread(name))
            await asyncio.sleep(random.random() / 100)

    names = [f"thread-{number}" for number in range(50)]
    await asyncio.gather(*map(talk, names))
    asked = {(request.body["messages"][0]["content"], request.conversation) for request in server.requests}
    assert asked == {(name, conversation_id(name)) for name in names}
    assert len(server.requests) == 200


async def test_where_no_config_is_seen_the_messages_tell(server: FakeServer) -> None:
    model = carryback(server)

    def ask(state: MessagesState) -> Any:
        with ThreadPoolExecutor(1) as pool:  # its threads know nothing of the run
            return {"messages": [pool.submit(model.invoke, state["messages"]).result()]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")
    compiled = graph.compile(checkpointer=InMemorySaver())
    question = {"messages": [("user", f"{uuid.uuid4()}")]}
    for name in ("one", "two"):
        for _ in range(2):
            await run(compiled, "invoke", question, thread(name))
    one, one_again, two, _ = conversations(server)
    assert one == one_again != two
    assert conversation_id("one", node="ask") not in conversations(server)
