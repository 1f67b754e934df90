"""`ChatCarryback` in all the ways that LangChain wraps a model, and whose header wins."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import carryback
import openai
import pytest
from carryback import LastReuse, wire
from carryback_langgraph import CarrybackMiddleware, ChatCarryback, chat_node, conversation_id, reuse
from fake_server import FakeServer
from graphs import every_way, run, thread
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, Field

REUSE = "hit; tokens=1024; reason=verified; recomputed=37; cached=0; found=1024"


class City(BaseModel):
    """A city."""

    city: str = Field(description="its name")


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return "nothing there"


def make(server: FakeServer, **settings: Any) -> ChatCarryback:
    return ChatCarryback(model="default", base_url=server.base_url, api_key="none", **settings)


def plain(server: FakeServer, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", base_url=server.base_url, api_key="none", **settings)


async def call(model: Any, way: str, messages: Any, config: Any = None) -> Any:
    """Call a model or a chain of it; chunks are added up."""
    if way == "invoke":
        return model.invoke(messages, config)
    if way == "ainvoke":
        return await model.ainvoke(messages, config)
    if way == "stream":
        chunks = list(model.stream(messages, config))
    else:
        chunks = [chunk async for chunk in model.astream(messages, config)]
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk if isinstance(chunk, AIMessageChunk) else chunk
    return total


# -- nothing is lost by wrapping (A29)

WRAPPED: dict[str, Callable[[ChatCarryback], Any]] = {
    "bare": lambda model: model,
    "bind_tools": lambda model: model.bind_tools([look]),
    "bind_tools twice": lambda model: model.bind(temperature=0).bind_tools([look]).bind(top_p=0.5),
    "json_schema": lambda model: model.with_structured_output(City, method="json_schema"),
    "json_mode": lambda model: model.with_structured_output(City, method="json_mode"),
    "with_config": lambda model: model.with_config(tags=["mine"], configurable={"other": 1}),
    "with_retry": lambda model: model.with_retry(),
    "with_fallbacks": lambda model: model.with_fallbacks([model.bind(temperature=1)]),
    "configurable_fields": lambda model: model.configurable_fields(
        temperature=ConfigurableField(id="temperature")
    ).with_config(configurable={"temperature": 0.5}),
    "configurable_alternatives": lambda model: model.configurable_alternatives(
        ConfigurableField(id="which"), default_key="this"
    ),
    "bind": lambda model: model.bind(extra_headers={"X-Org": "a"}),
    "model_copy": lambda model: model.model_copy(update={"temperature": 0.1}),
    "chain": lambda model: RunnableLambda(lambda messages: messages) | model,
}


wrapped = pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)


@every_way
@wrapped
async def test_every_request_carries_its_own_thread(
    server: FakeServer, way: str, wrap: Callable[[ChatCarryback], Any]
) -> None:
    model = wrap(make(server))
    for name in ("one", "two", "one"):
        await call(model, way, [("user", "hello")], thread(name))
    expected = [conversation_id(name, node="") for name in ("one", "two", "one")]
    assert [request.conversation for request in server.requests] == expected
    assert {request.value(wire.TURN_STEP) for request in server.requests} == {"1"}


@every_way
@wrapped
async def test_in_a_node_that_hands_its_config_on_or_not(
    server: FakeServer, way: str, wrap: Callable[[ChatCarryback], Any]
) -> None:
    model = wrap(make(server))

    def sync(state: MessagesState, config: RunnableConfig) -> Any:
        model.invoke(state["messages"])
        model.invoke(state["messages"], config)
        return {}

    async def both(state: MessagesState, config: RunnableConfig) -> Any:
        await model.ainvoke(state["messages"])
        await model.ainvoke(state["messages"], config)
        return {}

    graph = StateGraph(MessagesState).add_node("ask", both if way[0] == "a" else sync).add_edge(START, "ask")
    await run(graph.compile(), way, {"messages": [("user", "hello")]}, thread())
    ids = [request.conversation for request in server.requests]
    assert ids == [conversation_id("thread-7", node="ask")] * 2


@pytest.mark.parametrize("way", ["batch", "abatch"])
@wrapped
async def test_batches(server: FakeServer, way: str, wrap: Callable[[ChatCarryback], Any]) -> None:
    model = wrap(make(server))
    names = [f"thread-{number}" for number in range(8)]
    inputs, configs = [[("user", f"hello {name}")] for name in names], [thread(name) for name in names]
    if way == "batch":
        model.batch(inputs, configs)
    else:
        await model.abatch(inputs, configs)
    asked = {request.body["messages"][-1]["content"]: request.conversation for request in server.requests}
    assert asked == {f"hello {name}": conversation_id(name, node="") for name in names}


@every_way
async def test_a_retry_is_the_same_conversation(server: FakeServer, way: str) -> None:
    model = make(server, max_retries=1).with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
    server.failures = [500, 500] if "stream" not in way else [500]
    await call(model, way, "hi", thread())
    assert len(server.requests) == (3 if "stream" not in way else 2)
    assert {request.conversation for request in server.requests} == {conversation_id("thread-7", node="")}


@every_way
async def test_a_fallback_is_the_same_conversation(server: FakeServer, way: str) -> None:
    model = make(server, max_retries=0).with_fallbacks([make(server, max_retries=0)])
    server.failures = [500]
    await call(model, way, "hi", thread())
    assert [request.conversation for request in server.requests] == [conversation_id("thread-7", node="")] * 2


@every_way
@pytest.mark.parametrize("settings", [{}, {"use_previous_response_id": True}])
async def test_the_responses_api(server: FakeServer, way: str, settings: dict[str, Any]) -> None:
    server.reuse = REUSE
    model = make(server, use_responses_api=True, **settings)
    messages: list[Any] = [HumanMessage("hello")]
    for turn in (1, 2):
        answer = await call(model, way, messages, thread())
        assert server.last.path == "/v1/responses"
        assert server.last.conversation == conversation_id("thread-7", node="")
        if not settings:
            assert server.last.value(wire.TURN_ID) == str(turn)
        assert reuse(answer).tokens == 1024
        messages += [answer, HumanMessage("go on")]


# -- explicit headers (A30)

SPELLINGS = ["x-conversation-id", "X-Conversation-ID", "X-CONVERSATION-ID", "X-Session-ID", "session_id"]


@every_way
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("make", [make, plain])
async def test_the_users_id_wins_from_wherever_it_comes(
    server: FakeServer, way: str, spelling: str, make: Any
) -> None:
    own = {spelling: "mine", "X-Org": "a"}
    for model, node in [
        (make(server, default_headers=own), None),
        (make(server).bind(extra_headers=own), None),
        (make(server, model_kwargs={"extra_headers": own}), None),
        (make(server, default_headers={"X-Org": "a"}).bind(extra_headers={spelling: "mine"}), None),
        (make(server, default_headers=own), "chat"),
        (make(server).bind(extra_headers=own), "chat"),
    ]:
        if node:
            nodes = StateGraph(MessagesState).add_node("chat", chat_node(model)).add_edge(START, "chat")
            graph: Any = nodes.compile(checkpointer=InMemorySaver())
        else:
            middleware = [CarrybackMiddleware()]
            graph = create_agent(model, middleware=middleware, checkpointer=InMemorySaver())
        await run(graph, way, {"messages": [("user", "hello")]}, thread())
        assert server.last.value(spelling) == "mine"
        assert server.last.value("X-Org") == "a"
        assert server.last.value(wire.TURN_ID) == "1"
        if spelling.lower() != "x-conversation-id":
            assert server.last.conversation is None


@every_way
@pytest.mark.parametrize("make", [make, plain])
async def test_tools_do_not_lose_what_is_bound(server: FakeServer, way: str, make: Any) -> None:
    model = make(server).bind(extra_headers={"x-conversation-id": "mine"})
    middleware = [CarrybackMiddleware()]
    # `bind_tools` of a bound model drops what was bound; the middleware brings it back.
    graph = create_agent(model, [look], middleware=middleware)
    await run(graph, way, {"messages": [("user", "hello")]}, thread())
    assert server.last.conversation == "mine"
    nodes = StateGraph(MessagesState).add_node("chat", chat_node(model, tools=[look])).add_edge(START, "chat")
    await run(nodes.compile(), way, {"messages": [("user", "hello")]}, thread())
    assert server.last.conversation == "mine"
    assert server.last.body["tools"]


@every_way
@pytest.mark.parametrize("make", [make, plain])
async def test_headers_of_another_middleware_are_kept(server: FakeServer, way: str, make: Any) -> None:
    class Another(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(model_settings={"extra_headers": {"X-Org": "a"}}))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(model_settings={"extra_headers": {"X-Org": "a"}}))

    model = make(server).bind(extra_headers={"x-conversation-id": "mine"})
    graph = create_agent(model, [look], middleware=[Another(), CarrybackMiddleware()])
    await run(graph, way, {"messages": [("user", "hello")]}, thread())
    assert server.last.conversation == "mine"
    assert server.last.value("X-Org") == "a"


@every_way
@pytest.mark.parametrize("make", [make, plain])
async def test_an_id_in_the_body_wins(server: FakeServer, way: str, make: Any) -> None:
    model = make(server, extra_body={"conversation_id": "mine"})
    graph = create_agent(model, middleware=[CarrybackMiddleware()])
    await run(graph, way, {"messages": [("user", "hello")]}, thread())
    assert server.last.conversation is None
    assert server.last.body["conversation_id"] == "mine"


@every_way
@pytest.mark.parametrize("make", [make, plain])
async def test_a_request_is_marked_once(server: FakeServer, way: str, make: Any) -> None:
    graph = create_agent(make(server), middleware=[CarrybackMiddleware()], checkpointer=InMemorySaver())
    await run(graph, way, {"messages": [("user", "hello")]}, thread())
    ours = {
        wire.CONVERSATION_ID, wire.CONVERSATION_PARENT, wire.CONVERSATION_END, wire.TURN_ID, wire.TURN_STEP,
    }  # fmt: skip
    names = Counter(name.lower() for name, _ in server.last.headers)
    assert {name for name in names if name in {each.lower() for each in ours}} == {
        wire.CONVERSATION_ID.lower(), wire.TURN_ID.lower(), wire.TURN_STEP.lower(),
    }  # fmt: skip
    assert max(names.values()) == 1


async def test_other_models_are_passed_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("one"), AIMessage("two")]))
    graph = create_agent(model, middleware=[CarrybackMiddleware()])
    with caplog.at_level(logging.WARNING, "carryback"):
        for text in ("one", "two"):
            state = await run(graph, "ainvoke", {"messages": [("user", "hello")]}, thread())
            assert state["messages"][-1].content == text
    assert [record.getMessage() for record in caplog.records] == [
        "GenericFakeChatModel is no OpenAI chat model: its requests are not marked"
    ]


# -- what was reused


@every_way
@pytest.mark.parametrize(
    "settings",
    [{}, {"bound": {"response_format": {"type": "json_object"}}}, {"bound": {"response_format": City}}],
)
async def test_an_answer_says_what_it_reused(server: FakeServer, way: str, settings: dict[str, Any]) -> None:
    server.reuse = REUSE
    model = make(server).bind(**settings.get("bound", {}))
    answer = await call(model, way, "hi", thread())
    said = LastReuse("hit", 1024, "verified", 37, 0, 1024, conversation_id("thread-7", node=""), "1")
    assert reuse(answer) == said
    assert answer.response_metadata["carryback"]["tokens"] == 1024
    assert "headers" not in answer.response_metadata
    server.reuse = None
    assert reuse(await call(model, way, "hi", thread())) is None


@every_way
async def test_the_state_keeps_what_was_reused(server: FakeServer, way: str) -> None:
    server.reuse = REUSE
    graph = create_agent(make(server), checkpointer=InMemorySaver())
    await run(graph, way, {"messages": [("user", "hello")]}, thread())
    state = await run(graph, way, {"messages": [("user", "go on")]}, thread())
    assert [reuse(message).turn for message in state["messages"] if message.type == "ai"] == ["1", "2"]


async def test_other_models_report_by_their_headers(server: FakeServer) -> None:
    server.reuse = REUSE
    graph = create_agent(
        plain(server, include_response_headers=True),
        middleware=[CarrybackMiddleware()],
        checkpointer=InMemorySaver(),
    )
    state = await run(graph, "ainvoke", {"messages": [("user", "hello")]}, thread())
    assert reuse(state["messages"][-1]).conversation == conversation_id("thread-7")


async def test_a_client_of_the_users_is_left_as_it_is(server: FakeServer) -> None:
    server.reuse = REUSE
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    model = make(server, root_client=client, client=client.chat.completions)
    model.invoke("hi", thread())
    assert server.last.conversation == conversation_id("thread-7", node="")
    assert type(client) is openai.OpenAI
    with carryback.conversation("mine"):
        model.invoke("hi", thread())
    assert server.last.conversation == "mine"


# -- LangChain's own stream of events


@pytest.mark.parametrize("make", [make, plain])
async def test_event_streams(server: FakeServer, make: Any) -> None:
    graph = create_agent(make(server), middleware=[CarrybackMiddleware()], checkpointer=InMemorySaver())
    [event async for event in graph.astream_events({"messages": [("user", "hello")]}, thread(), version="v2")]
    assert server.last.body["stream"] is True
    assert server.last.conversation == conversation_id("thread-7")
