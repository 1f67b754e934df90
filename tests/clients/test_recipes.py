"""The recipes with the real packages, through the real router before stub engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches a list from the internet otherwise

import carryback
import litellm
import openai
import pytest
from fake_server import FakeServer
from live_router import LiveRouter
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from recipes import CALL, INSTRUCTIONS, KEPT, TEXT, Seen, async_hook, check, hook, seen

ROOT = Path(__file__).parents[2]
# LiteLLM's own models have them.
pytestmark = pytest.mark.filterwarnings("ignore:Item:UserWarning", "ignore:Accessing the:DeprecationWarning")
LLAMA_INDEX = ROOT / ".venv/llama-index/bin/python"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """For the whole file; at the end nothing may have gone wrong."""
    with LiveRouter(tmp_path_factory.mktemp("router")) as router:
        yield router
        router.stop()
        router.check_log()


# LiteLLM

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}

Ask = Callable[..., Awaitable[Any]]


async def converse(ask: Ask, question: str, is_stream: bool) -> None:
    """Two turns by LiteLLM, the first one with a tool call."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    for text in (CALL + TEXT, TEXT):
        messages.append({"role": "user", "content": text + question})
        while True:
            answer = await ask(messages=messages, tools=[LOOK_UP], stream=is_stream)
            if is_stream:
                chunks = [each async for each in answer] if hasattr(answer, "__aiter__") else list(answer)
                answer = litellm.stream_chunk_builder(chunks)
            message = answer.choices[0].message
            messages.append(message)
            calls = message.tool_calls or ()
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": KEPT})
            if not calls:
                break


async def converse_twice(ask: Ask, is_stream: bool) -> None:
    """At the same time, with the same system prompt."""
    await asyncio.gather(
        *(converse(ask, question, is_stream) for question in ("And the pier?", "And the tide?"))
    )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_litellm_with_our_client(router: LiveRouter, is_stream: bool) -> None:
    requests: list[Seen] = []
    http = openai.DefaultHttpxClient(event_hooks={"response": [hook(requests)]})
    client = carryback.OpenAI(base_url=f"{router.url}/v1", api_key="none", http_client=http)

    async def ask(**fields: Any) -> Any:
        answer = litellm.completion(model="openai/stub", client=client, **fields)
        assert carryback.reuse(answer._response_headers) == carryback.last_reuse()
        return answer

    await converse_twice(ask, is_stream)
    check(requests)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_litellm_with_our_async_client(router: LiveRouter, is_stream: bool) -> None:
    requests: list[Seen] = []
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [async_hook(requests)]})
    async with carryback.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", http_client=http) as client:

        async def ask(**fields: Any) -> Any:
            answer = await litellm.acompletion(model="openai/stub", client=client, **fields)
            assert carryback.reuse(answer._response_headers) == carryback.last_reuse()
            return answer

        await converse_twice(ask, is_stream)
    check(requests)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_litellm_with_our_headers(router: LiveRouter, is_stream: bool) -> None:
    requests: list[Seen] = []
    server = {"model": "hosted_vllm/stub", "api_base": f"{router.url}/v1", "api_key": "none"}
    deployments = litellm.Router(model_list=[{"model_name": "small", "litellm_params": server}])

    async def ask(*, messages: list[Any], **fields: Any) -> Any:
        history = [each if isinstance(each, dict) else each.model_dump() for each in messages]
        headers = carryback.headers(history, name=("litellm", str(is_stream), history[1]["content"]))
        answer = await deployments.acompletion(
            model="small", messages=messages, extra_headers=headers, **fields
        )
        requests.append(seen(headers, carryback.reuse(answer._response_headers)))
        return answer

    await converse_twice(ask, is_stream)
    check(requests)


async def test_litellm_in_a_block(router: LiveRouter) -> None:
    async with carryback.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        for outcome in ("miss", "hit"):
            async with carryback.conversation("litellm-thread"):
                await litellm.acompletion(
                    model="openai/stub", client=client, messages=[{"role": "user", "content": TEXT}]
                )
            last = carryback.last_reuse()
            assert last is not None
            assert (last.conversation, last.outcome) == ("litellm-thread", outcome)


@pytest.mark.parametrize("own", ["client", "headers"])
def test_litellm_repeats_a_request_with_its_ids(server: FakeServer, own: str) -> None:
    server.failures = [500]
    messages = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"client": carryback.OpenAI(base_url=server.base_url, api_key="none")}
    if own == "headers":
        options = {
            "api_base": server.base_url,
            "api_key": "none",
            "extra_headers": carryback.headers(messages),
        }
    litellm.completion(model="openai/default", messages=messages, num_retries=2, **options)
    first, second = server.requests
    assert first.conversation == second.conversation is not None


async def test_litellm_responses_with_our_headers(server: FakeServer) -> None:
    headers = carryback.headers([{"role": "user", "content": "hi"}], name="thread-7")
    await litellm.aresponses(
        model="openai/default", input="hi", api_base=server.base_url, api_key="none", extra_headers=headers
    )
    assert server.last.path == "/v1/responses"
    assert server.last.conversation == headers["X-Conversation-ID"]


def test_litellm_sends_no_session_of_its_own(server: FakeServer) -> None:
    litellm.completion(
        model="openai/default",
        messages=[{"role": "user", "content": "hi"}],
        api_base=server.base_url,
        api_key="none",
        litellm_session_id="s-1",
        metadata={"session_id": "s-2"},
    )
    assert not [value for _, value in server.last.headers if value in ("s-1", "s-2")]
    assert "s-1" not in str(server.last.body)
    assert "s-2" not in str(server.last.body)


# Pydantic AI


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(router: LiveRouter, model: Any, is_stream: bool, is_named: bool) -> None:
    requests: list[Seen] = []
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [async_hook(requests)]})
    async with carryback.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", http_client=http) as client:
        agent = Agent(model("stub", provider=OpenAIProvider(openai_client=client)), instructions=INSTRUCTIONS)

        @agent.tool_plain
        def look_up(word: str) -> str:
            """Looks a word up."""
            return KEPT

        async def turn(text: str, history: list[Any]) -> list[Any]:
            if not is_stream:
                return (await agent.run(text, message_history=history)).all_messages()
            async with agent.run_stream(text, message_history=history) as answer:
                assert [each async for each in answer.stream_text(delta=True)]
            return answer.all_messages()

        async def converse(name: str) -> None:
            history: list[Any] = []
            for text in (CALL + TEXT, TEXT):
                if is_named:
                    async with carryback.conversation(name):
                        history = await turn(text + name, history)
                else:
                    history = await turn(text + name, history)

        names = [f"{model.__name__}-{is_stream}-{each}" for each in ("a", "b")]
        await asyncio.gather(*(converse(name) for name in names))
    ids = check(requests)
    if is_named:
        assert sorted(ids) == names


def test_pydantic_ai_sync(server: FakeServer) -> None:
    server.calls_tools = True
    client = carryback.AsyncOpenAI(base_url=server.base_url, api_key="none")
    agent = Agent(OpenAIChatModel("default", provider=OpenAIProvider(openai_client=client)))

    @agent.tool_plain
    def look_up(word: str) -> str:
        """Looks a word up."""
        return KEPT

    result = agent.run_sync("What is a flange?")
    agent.run_sync("And a gasket?", message_history=result.all_messages())
    assert len({request.conversation for request in server.requests}) == 1
    steps = [(request.value("X-Turn-ID"), request.value("X-Turn-Step")) for request in server.requests]
    assert steps == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]


async def test_pydantic_ai_sends_a_given_id_alone(server: FakeServer) -> None:
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        agent = Agent(OpenAIChatModel("default", provider=OpenAIProvider(openai_client=client)))
        await agent.run("hi", model_settings={"extra_headers": {"X-Conversation-ID": "thread-7"}})
    assert server.last.conversation == "thread-7"


async def test_pydantic_ai_delegates_to_a_conversation_of_its_own(server: FakeServer) -> None:
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        provider = OpenAIProvider(openai_client=client)
        reader = Agent(OpenAIChatModel("default", provider=provider), instructions="You read.")
        planner = Agent(OpenAIChatModel("default", provider=provider), instructions="You plan.")

        @planner.tool_plain
        async def read(page: str) -> str:
            """Has a page read."""
            async with carryback.conversation():
                return (await reader.run(page)).output

        server.calls_tools = True
        async with carryback.conversation("plan"):
            await planner.run("Read the page.")
    first, inner, last = server.requests
    assert first.conversation == last.conversation == "plan"
    assert inner.conversation not in ("plan", None)
    assert inner.value("X-Conversation-Parent") == "plan"


# LlamaIndex


def test_llamaindex(router: LiveRouter) -> None:
    assert LLAMA_INDEX.exists(), "scripts/test-tools.sh installs it"
    script = Path(__file__).with_name("llamaindex_agent.py")
    done = subprocess.run(
        [str(LLAMA_INDEX), str(script), f"{router.url}/v1"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)
    assert list(ways) == ["chat", "achat", "stream_chat", "astream_chat", "agent", "agent in a block"]
    ids = {way: check(requests) for way, requests in ways.items()}
    assert sorted(ids["agent in a block"]) == ["thread-a", "thread-b"]
