"""When the server is told that an agent's conversation is over, and when it is not."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from carryback import conversation
from carryback_langgraph import (
    CarrybackMiddleware,
    ChatCarryback,
    arelease,
    chat_node,
    conversation_id,
    release,
)
from fake_server import FakeServer
from graphs import every_way, run, thread
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

HELLO: dict[str, Any] = {"messages": [("user", "hello")]}


def carryback(server: FakeServer, **settings: Any) -> ChatCarryback:
    return ChatCarryback(model="default", base_url=server.base_url, api_key="none", max_retries=0, **settings)


def plain(server: FakeServer, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", base_url=server.base_url, api_key="none", max_retries=0, **settings)


@pytest.fixture
def name() -> str:
    """A thread that no other test has: what it started is remembered."""
    return f"thread-{uuid.uuid4()}"


models = pytest.mark.parametrize("make", [carryback, plain])


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return "nothing there"


def seen(server: FakeServer) -> list[str]:
    """What was asked of the server, in short."""
    return [
        "asked" if request.method == "POST" else request.path.removeprefix("/v1/conversations/")
        for request in server.requests
    ]


@every_way
@models
@pytest.mark.parametrize("tools", [[], [look]])
async def test_at_the_end_of_each_run(
    server: FakeServer, name: str, way: str, make: Any, tools: list[Any]
) -> None:
    server.calls_tools = True
    graph = create_agent(
        make(server), tools, middleware=[CarrybackMiddleware(release_on="end")], checkpointer=InMemorySaver()
    )
    for _ in range(2):
        state = await run(graph, way, HELLO, thread(name))
    once = ["asked"] * (1 + len(tools)) + [conversation_id(name)]
    assert seen(server) == once * 2
    if "invoke" in way:  # streamed values are all that there are, also what is private
        assert "carryback_conversations" not in state


@every_way
@models
async def test_never(server: FakeServer, name: str, way: str, make: Any) -> None:
    for middleware in (CarrybackMiddleware(), CarrybackMiddleware("never")):
        graph = create_agent(make(server), middleware=[middleware], checkpointer=InMemorySaver())
        assert set(graph.nodes) == {"__start__", "model"}
        await run(graph, way, HELLO, thread(name))
    assert seen(server) == ["asked"] * 2


@every_way
@models
async def test_an_interrupt_is_no_end(server: FakeServer, name: str, way: str, make: Any) -> None:
    server.calls_tools = True
    checkpointer = InMemorySaver()

    def graph() -> Any:  # each time anew, as in another process
        middleware = [
            CarrybackMiddleware(release_on="end"),
            HumanInTheLoopMiddleware(interrupt_on={"look": True}),
        ]
        return create_agent(make(server), [look], middleware=middleware, checkpointer=checkpointer)

    await run(graph(), way, HELLO, thread(name))
    assert seen(server) == ["asked"]
    await run(graph(), way, Command(resume={"decisions": [{"type": "approve"}]}), thread(name))
    assert seen(server) == ["asked", "asked", conversation_id(name)]


@every_way
@models
async def test_an_error_is_no_end(server: FakeServer, name: str, way: str, make: Any) -> None:
    graph = create_agent(
        make(server), middleware=[CarrybackMiddleware(release_on="end")], checkpointer=InMemorySaver()
    )
    server.failures = [400]
    with pytest.raises(Exception, match="as told"):
        await run(graph, way, HELLO, thread(name))
    assert seen(server) == ["asked"]
    await run(graph, way, None, thread(name))
    assert seen(server) == ["asked", "asked", conversation_id(name)]


@every_way
@models
async def test_with_what_it_started(server: FakeServer, name: str, way: str, make: Any) -> None:
    helper = create_agent(make(server), middleware=[CarrybackMiddleware()])

    @tool("look")
    async def ask(where: str) -> str:
        """Ask the helper."""
        return str((await helper.ainvoke({"messages": where}))["messages"][-1].content)

    @tool("look")
    def ask_sync(where: str) -> str:
        """Ask the helper."""
        return str(helper.invoke({"messages": where})["messages"][-1].content)

    server.calls_tools = True
    graph = create_agent(
        make(server),
        [ask if way[0] == "a" else ask_sync],
        middleware=[CarrybackMiddleware(release_on="end")],
        checkpointer=InMemorySaver(),
    )
    await run(graph, way, HELLO, thread(name))
    ids = [conversation_id(name), conversation_id(name, "tools#0")]
    assert seen(server) == ["asked"] * 3 + ids


@every_way
@models
async def test_without_a_thread(server: FakeServer, way: str, make: Any) -> None:
    graph = create_agent(make(server), middleware=[CarrybackMiddleware(release_on="end")])
    await run(graph, way, {"messages": [("user", "without a thread")]})
    assert seen(server) == ["asked", server.requests[0].conversation]


@every_way
@models
async def test_the_users_own_is_the_users(server: FakeServer, name: str, way: str, make: Any) -> None:
    model = make(server, default_headers={"x-conversation-id": "mine"})
    graph = create_agent(model, middleware=[CarrybackMiddleware(release_on="end")])
    await run(graph, way, HELLO, thread(name))
    assert seen(server) == ["asked"]
    graph = create_agent(make(server), middleware=[CarrybackMiddleware(release_on="end")])
    with conversation("mine"):
        await run(graph, way, HELLO, thread(name))
    assert seen(server) == ["asked"] * 2


@every_way
@models
async def test_a_sub_graph_ends_itself_only(server: FakeServer, name: str, way: str, make: Any) -> None:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("chat", chat_node(make(server)))
    graph.add_node("aside", create_agent(make(server), middleware=[CarrybackMiddleware(release_on="end")]))
    graph.add_edge(START, "chat").add_edge("chat", "aside")
    await run(graph.compile(checkpointer=InMemorySaver()), way, HELLO, thread(name))
    assert seen(server) == ["asked", "asked", conversation_id(name, "aside")]


@every_way
@models
async def test_servers_that_do_not_know_it(server: FakeServer, name: str, way: str, make: Any) -> None:
    server.knows_conversations = False
    graph = create_agent(make(server), middleware=[CarrybackMiddleware(release_on="end")])
    state = await run(graph, way, HELLO, thread(name))
    assert state["messages"][-1].content == "Hello."
    assert len(server.requests) == 2


@every_way
async def test_where_no_model_was_called(
    server: FakeServer, name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    @tool(return_direct=True)
    def ask_the_user(question: str) -> str:
        """Ask the user."""
        return str(interrupt(question))

    server.calls_tools = True
    checkpointer = InMemorySaver()
    for given in (HELLO, Command(resume="yes")):
        middleware = [CarrybackMiddleware(release_on="end")]
        graph = create_agent(
            carryback(server), [ask_the_user], middleware=middleware, checkpointer=checkpointer
        )
        await run(graph, way, given, thread(name))
    assert seen(server) == ["asked"]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "carryback"]
    assert warning == (
        f"conversation {conversation_id(name)} is left to expire: no model was called in this process"
    )


async def test_a_model_without_a_client(server: FakeServer, name: str) -> None:
    async def key() -> str:
        return "none"

    model = ChatCarryback(model="default", base_url=server.base_url, api_key=key)
    graph = create_agent(model, middleware=[CarrybackMiddleware(release_on="end")])
    await run(graph, "ainvoke", HELLO, thread(name))
    assert seen(server) == ["asked", conversation_id(name)]
    with pytest.raises(ValueError, match="root_client"):
        release(model, "c-1")
    with pytest.raises(ValueError, match="GenericFakeChatModel has no OpenAI client"):
        await arelease(GenericFakeChatModel(messages=iter([])), "c-1")


@models
async def test_by_hand(server: FakeServer, name: str, make: Any) -> None:
    model = make(server)
    release(model.bind(stop=["x"]), "c-1", "a/b c")
    await arelease(model, conversation_id(name))
    assert seen(server) == ["c-1", "a%2Fb%20c", conversation_id(name)]
    server.failures = [500, 500]
    release(model, "c-1")
    await arelease(model, "c-1")


def test_only_two_words() -> None:
    with pytest.raises(ValueError, match="'end' or 'never', not 'sometimes'"):
        CarrybackMiddleware(release_on="sometimes")  # type: ignore[arg-type]
