"""Which servers get ids: carryback's, and those that the user names; nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import carryback
import openai
import pytest
from agents import Agent, RunConfig, Runner, SQLiteSession, set_tracing_disabled
from carryback import _servers, wire
from carryback_agents import CarrybackProvider, run_config
from carryback_langgraph import CarrybackMiddleware, ChatCarryback, chat_node, conversation_id, release
from fake_server import FakeServer
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

set_tracing_disabled(True)

HI: list[Any] = [{"role": "user", "content": "hi"}]
THREAD: Any = {"configurable": {"thread_id": "thread-7"}}
SETTING = "CARRYBACK_SEND_IDS"


def ids(server: FakeServer) -> list[dict[str, str]]:
    """What of ours each request carried."""
    ours = ("x-conversation-", "x-turn-", "x-carryback-")
    return [
        {name.lower(): value for name, value in request.headers if name.lower().startswith(ours)}
        for request in server.requests
    ]


# Ways in. Each makes two requests or more of one conversation.


def unnamed(server: FakeServer) -> None:
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    client.chat.completions.create(model="m", messages=HI)
    client.responses.create(model="m", input=HI)


def named(server: FakeServer) -> None:
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    with carryback.conversation("thread-7") as c:
        client.chat.completions.create(model="m", messages=HI)
        client.completions.create(model="m", prompt="hi")
    c.end()


async def asyncio_named(server: FakeServer) -> None:
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        async with carryback.conversation("thread-7") as c:
            await client.chat.completions.create(model="m", messages=HI)
            await client.chat.completions.create(model="m", messages=HI, stream=True)
        await c.aend()


def chat_model(server: FakeServer) -> None:
    model = ChatCarryback(model="m", base_url=server.base_url, api_key="k")
    model.invoke("hi", THREAD)
    list(model.stream("hi", THREAD))
    release(model, conversation_id("thread-7", node=""))


async def chat_model_async(server: FakeServer) -> None:
    model = ChatCarryback(model="m", base_url=server.base_url, api_key="k")
    await model.ainvoke("hi", THREAD)
    async for _ in model.astream("hi", THREAD):
        pass


def middleware(server: FakeServer) -> None:
    model = ChatOpenAI(model="m", base_url=server.base_url, api_key="k")
    agent: Any = create_agent(model, middleware=[CarrybackMiddleware(release_on="end")])
    agent.invoke({"messages": HI}, THREAD)
    agent.invoke({"messages": HI}, THREAD)


async def middleware_async(server: FakeServer) -> None:
    model = ChatOpenAI(model="m", base_url=server.base_url, api_key="k")
    agent: Any = create_agent(model, middleware=[CarrybackMiddleware()])
    await agent.ainvoke({"messages": HI}, THREAD)
    await agent.ainvoke({"messages": HI}, THREAD)


def graph(server: FakeServer) -> Any:
    model = ChatOpenAI(model="m", base_url=server.base_url, api_key="k")
    return StateGraph(MessagesState).add_node("chat", chat_node(model)).add_edge(START, "chat").compile()


def node(server: FakeServer) -> None:
    for _ in range(2):
        graph(server).invoke({"messages": HI}, THREAD)


async def node_async(server: FakeServer) -> None:
    for _ in range(2):
        await graph(server).ainvoke({"messages": HI}, THREAD)


async def agents(server: FakeServer) -> None:
    config = run_config(CarrybackProvider(base_url=server.base_url, api_key="k"), model="m")
    for _ in range(2):
        await Runner.run(Agent(name="Clerk"), "hi", session=SQLiteSession("thread-7"), run_config=config)


async def agents_with_their_client(server: FakeServer) -> None:
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k")
    config = RunConfig(model_provider=CarrybackProvider(openai_client=client, use_responses=True), model="m")
    for _ in range(2):
        await Runner.run(Agent(name="Clerk"), "hi", session=SQLiteSession("thread-7"), run_config=config)


WAYS: list[Callable[[FakeServer], Awaitable[None] | None]] = [
    unnamed, named, asyncio_named, chat_model, chat_model_async, middleware, middleware_async, node,
    node_async, agents, agents_with_their_client,
]  # fmt: skip
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


async def go(way: Any, server: FakeServer) -> None:
    if asyncio.iscoroutinefunction(way):
        await way(server)
    else:
        await asyncio.to_thread(way, server)


@ways
async def test_another_server_gets_no_id_from_the_first_request_on(server: FakeServer, way: Any) -> None:
    server.is_carrybacks = False
    await go(way, server)
    assert len(server.requests) >= 2
    assert not any(ids(server))
    assert not [request for request in server.requests if request.method == "DELETE"]
    assert "thread-7" not in str([request.path for request in server.requests])
    (question,) = server.questions
    assert (question.method, question.path) == ("HEAD", "/v1/models")
    assert "thread-7" not in str(question)


@ways
async def test_carrybacks_gets_them_from_the_first_request_on(server: FakeServer, way: Any) -> None:
    await go(way, server)
    assert len(server.requests) >= 2
    asked = [each for each, request in zip(ids(server), server.requests, strict=True) if request.body]
    assert all(wire.CONVERSATION_ID.lower() in each for each in asked)
    assert len(server.questions) == 1


@ways
@pytest.mark.parametrize("setting", ["always", "never", "here", "elsewhere"])
async def test_what_the_user_says_goes(
    server: FakeServer, way: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.base_url.removeprefix("http://").removesuffix("/v1")
    values = {"here": f"other.example, {address}", "elsewhere": "127.0.0.1:1, other.example"}
    monkeypatch.setenv(SETTING, values.get(setting, setting))
    server.is_carrybacks = setting == "never"
    await go(way, server)
    asked = [each for each, request in zip(ids(server), server.requests, strict=True) if request.body]
    is_sent = setting in ("always", "here")
    assert all((wire.CONVERSATION_ID.lower() in each) == is_sent for each in asked)
    assert len(server.questions) == (setting == "elsewhere")


def test_hosts_may_be_given_as_urls_and_without_a_port(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.is_carrybacks = False
    for value in (server.base_url, server.base_url.upper(), "127.0.0.1"):
        monkeypatch.setenv(SETTING, value)
        unnamed(server)
    assert all(ids(server))
    assert not server.questions


@pytest.mark.parametrize("setting", ["auto", "never"])
def test_what_the_user_sets_on_a_request_is_sent(
    server: FakeServer, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, setting)
    server.is_carrybacks = False
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    client.chat.completions.create(
        model="m", messages=HI, extra_headers={wire.CONVERSATION_ID: "mine", wire.CARRYBACK_REUSE: "off"}
    )
    assert ids(server) == [{"x-conversation-id": "mine", "x-carryback-reuse": "off"}]


def test_headers_are_for_whoever_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert carryback.headers(HI, name="thread-7")[wire.CONVERSATION_ID]
    monkeypatch.setenv(SETTING, "never")
    assert carryback.headers(HI, name="thread-7") == {}


def test_a_server_that_fails_is_asked_again_later(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    server.cannot_say = True
    for _ in range(3):
        client.chat.completions.create(model="m", messages=HI)
    assert len(server.questions) == 1, "not before every request"
    server.cannot_say = False
    monkeypatch.setattr(_servers, "AGAIN_S", 0.0)
    client.chat.completions.create(model="m", messages=HI)
    assert [bool(each) for each in ids(server)] == [False, False, False, True]


def test_an_answer_that_reports_reuse_is_carrybacks(server: FakeServer) -> None:
    server.is_carrybacks = False  # what is in front of it does not pass the question on
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    server.reuse = "miss; tokens=0; reason=new"
    for _ in range(2):
        client.chat.completions.create(model="m", messages=HI)
    assert [bool(each) for each in ids(server)] == [False, True]


async def test_tasks_that_begin_together_ask_once(server: FakeServer) -> None:
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=HI) for _ in range(20)))
    assert len(server.questions) == 1
    assert all(ids(server))


def test_threads_that_begin_together_ask_once(server: FakeServer) -> None:
    client = carryback.OpenAI(base_url=server.base_url, api_key="k")
    threads = [
        threading.Thread(target=lambda: client.chat.completions.create(model="m", messages=HI))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.questions) == 1
    assert all(ids(server))


def test_a_server_that_is_not_there_costs_no_more_than_the_request() -> None:
    client = carryback.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="k", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=HI)
