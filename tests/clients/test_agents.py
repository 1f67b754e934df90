"""The OpenAI Agents SDK with our provider, against a recording server: what goes over the wire."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carryback
import openai
import pytest
from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    RunHooks,
    Runner,
    SQLiteSession,
    StopAtTools,
    UserError,
    function_tool,
    retry_policies,
    set_tracing_disabled,
)
from agents.run import CallModelData, ModelInputData
from carryback import wire
from carryback_agents import (
    CarrybackChatCompletionsModel,
    CarrybackProvider,
    CarrybackResponsesModel,
    _calls,
    _models,
    reuse,
    run_config,
)
from fake_server import FakeServer, Request, running

HIT = "hit; tokens=1024; reason=verified; recomputed=37; cached=16; found=1024"
OURS = {
    name.lower()
    for name in (wire.CONVERSATION_ID, wire.CONVERSATION_PARENT, wire.TURN_ID, wire.TURN_STEP)
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_export() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@dataclass(frozen=True)
class Mode:
    """An endpoint, and whether answers are streamed."""

    use_responses: bool
    stream: bool

    def provider(self, server: FakeServer, **options: Any) -> CarrybackProvider:
        if "openai_client" not in options:
            options = {"base_url": server.base_url, "api_key": "k", **options}
        return CarrybackProvider(use_responses=self.use_responses, **options)

    def config(self, server: FakeServer, **options: Any) -> RunConfig:
        return run_config(self.provider(server), model="m", **options)

    async def run(self, agent: Agent, said: Any, config: RunConfig, **options: Any) -> Any:
        if not self.stream:
            return await Runner.run(agent, said, run_config=config, **options)
        result = Runner.run_streamed(agent, said, run_config=config, **options)
        async for _ in result.stream_events():
            pass
        return result

    def __str__(self) -> str:
        return ("responses" if self.use_responses else "chat") + ("-streamed" if self.stream else "")


MODES = [Mode(responses, stream) for responses in (False, True) for stream in (False, True)]
PLAIN = MODES[0]


@pytest.fixture(params=MODES, ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    value: Mode = request.param
    return value


@pytest.fixture(params=[MODES[0], MODES[3]], ids=str)
def either(request: pytest.FixtureRequest) -> Mode:
    """Each endpoint, one of them streamed: for what is the same for all four."""
    value: Mode = request.param
    return value


@function_tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"a flange at {where}"


@function_tool
def stop(where: str) -> str:
    """Stop."""
    return "stopped"


def agent(name: str = "A", **options: Any) -> Agent:
    return Agent(name=name, instructions=f"You are {name}.", **{"tools": [look], **options})


def items_of(request: Request) -> list[Any]:
    """The messages or items of a request."""
    value = request.body.get("messages") or request.body["input"]
    return value if isinstance(value, list) else [{"role": "user", "content": value}]


def who(request: Request) -> str:
    """The agent that asked."""
    said = request.body.get("instructions") or request.body["messages"][0]["content"]
    return str(said).removeprefix("You are ").removesuffix(".")


def is_users(request: Request) -> bool:
    """The last word is the user's."""
    return items_of(request)[-1].get("role") == "user"


def looks(request: Request) -> list[tuple[str, dict[str, Any]]]:
    """Every user's message is answered by looking first."""
    return [("look", {"where": "here"})] if is_users(request) else []


def scripted(**steps: list[tuple[str, dict[str, Any]]]) -> Callable[[Request], list[Any]]:
    """Each agent makes its calls one after the other, then says something."""
    left = {name: list(calls) for name, calls in steps.items()}

    def decide(request: Request) -> list[Any]:
        mine = left.get(who(request))
        return [mine.pop(0)] if mine else []

    return decide


def by_agent(server: FakeServer) -> dict[str, set[str | None]]:
    ids: dict[str, set[str | None]] = {}
    for request in server.requests:
        ids.setdefault(who(request), set()).add(request.conversation)
    return ids


def ids(server: FakeServer) -> set[str]:
    """The conversations of all requests; each has one."""
    found = {request.conversation for request in server.requests}
    assert None not in found
    return {each for each in found if each}


# What is sent


async def test_only_headers_are_added(mode: Mode) -> None:
    sent = []
    for ours in (True, False):
        with running() as server:
            server.decide = looks
            client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k")
            provider: Any = OpenAIProvider(openai_client=client, use_responses=mode.use_responses)
            if ours:
                provider = mode.provider(server, openai_client=client)
            config = run_config(provider, model="m")
            session = SQLiteSession("s")
            for said in ("one", "two"):
                await mode.run(agent(), said, config, session=session)
            await client.close()
            sent.append(
                [
                    (r.path, r.body, sorted((k.lower(), v) for k, v in r.headers if k.lower() not in OURS))
                    for r in server.requests
                ]
            )
            assert all(r.conversation for r in server.requests) == ours
    with_ours, without = sent
    assert len(without) == 4
    for (path, body, headers), (path_, body_, headers_) in zip(with_ours, without, strict=True):
        assert (path, body) == (path_, body_)
        assert [h for h in headers if h[0] not in ("host", "content-length", "idempotency-key")] == [
            h for h in headers_ if h[0] not in ("host", "content-length", "idempotency-key")
        ]


async def test_a_session_is_one_conversation(server: FakeServer, mode: Mode) -> None:
    server.decide = looks
    config = mode.config(server)
    session = SQLiteSession("s")
    for said in ("one", "two"):
        await mode.run(agent(), said, config, session=session)
    assert len(ids(server)) == 1
    turns = [(r.value(wire.TURN_ID), r.value(wire.TURN_STEP)) for r in server.requests]
    assert turns == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert {r.value(wire.CONVERSATION_PARENT) for r in server.requests} == {None}


NEXT_TURNS = """
import asyncio, sys
from agents import Agent, RunConfig, Runner, SQLiteSession, set_tracing_disabled
from carryback_agents import CarrybackProvider, run_config

async def main(base_url, file):
    agent = Agent(name="A", instructions="You are A.")
    for use_responses in (False, True):
        provider = CarrybackProvider(base_url=base_url, api_key="k", use_responses=use_responses)
        for config in (run_config(provider, model="m"), RunConfig(model_provider=provider, model="m")):
            await Runner.run(agent, "more", session=SQLiteSession("s", file), run_config=config)
            await Runner.run(agent, "more", session=SQLiteSession("t", file), run_config=config)

set_tracing_disabled(True)
asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_continues_the_session(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    for mode in MODES:
        await mode.run(agent(tools=[]), "hi", mode.config(server), session=SQLiteSession("s", file))
    here = ids(server)
    argv = [sys.executable, "-c", NEXT_TURNS, server.base_url, str(file)]
    await asyncio.to_thread(subprocess.run, argv, check=True)
    there = server.requests[len(MODES) :]
    assert len(items_of(there[-2])) > 2 * len(MODES), "it goes on where this process was"
    assert len(here) == 1
    assert {request.conversation for request in there[0::2]} == here
    other = {request.conversation for request in there[1::2]}
    assert len(other) == 1
    assert other != here


async def test_a_group_is_one_conversation(server: FakeServer, either: Mode) -> None:
    for said in ("one", "two", "one"):
        await either.run(agent(), said, either.config(server, group_id="thread-7"))
    first, other, again = server.requests
    assert first.conversation == again.conversation
    # A prompt that begins differently can reuse nothing of it.
    assert other.conversation != first.conversation
    assert other.value(wire.CONVERSATION_PARENT) == first.conversation
    await either.run(agent(), "one", either.config(server, group_id="thread-8"))
    assert server.last.conversation not in {r.conversation for r in server.requests[:3]}


async def test_without_a_name_the_messages_tell(server: FakeServer, mode: Mode) -> None:
    server.decide = looks
    config = mode.config(server)
    items: Any = "hi"
    for _ in range(3):
        result = await mode.run(agent(), items, config)
        items = [*result.to_input_list(), {"role": "user", "content": "more"}]
    assert len(server.requests) == 6
    assert len(ids(server)) == 1
    await mode.run(agent(), "hi", config)
    assert len(ids(server)) == 2, "another run, no matter how it begins"


async def test_runs_at_once_without_a_name_share_nothing(server: FakeServer, either: Mode) -> None:
    server.decide = looks
    config = either.config(server)
    await asyncio.gather(*[either.run(agent(), f"task {n}", config) for n in range(20)])
    of_task: dict[str, set[str | None]] = {}
    for request in server.requests:
        said = next(each["content"] for each in items_of(request) if each.get("role") == "user")
        of_task.setdefault(str(said), set()).add(request.conversation)
    assert all(len(each) == 1 for each in of_task.values())
    assert len(set().union(*of_task.values())) == 20


# Hand-offs


def team() -> Agent:
    a, b = agent("A"), agent("B")
    a.handoffs = [b]
    b.handoffs = [a]
    return a


STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "A": [("look", {"where": "1"}), ("look", {"where": "2"}), ("transfer_to_b", {})],
    "B": [("look", {"where": "3"}), ("transfer_to_a", {})],
}


@pytest.mark.parametrize("named", [True, False])
async def test_each_agent_has_a_conversation(server: FakeServer, mode: Mode, named: bool) -> None:
    config = mode.config(server)
    session = SQLiteSession("s") if named else None
    said: Any = "hi"
    for _ in range(2):
        server.decide = scripted(**STEPS)
        result = await mode.run(team(), said, config, session=session)
        said = "more" if named else [*result.to_input_list(), {"role": "user", "content": "more"}]
    assert [who(request) for request in server.requests] == ["A", "A", "A", "B", "B", "A"] * 2
    found = by_agent(server)
    assert len(found["A"]) == len(found["B"]) == 1
    assert found["A"] != found["B"]
    assert {r.value(wire.CONVERSATION_PARENT) for r in server.requests} == {None}


async def test_summaries_of_a_history_are_a_conversation_beside_it(server: FakeServer, mode: Mode) -> None:
    config = mode.config(server, nest_handoff_history=True)
    session = SQLiteSession("s")
    for said in ("hi", "more"):
        server.decide = scripted(**STEPS)
        await mode.run(team(), said, config, session=session)
    assert [who(request) for request in server.requests] == ["A", "A", "A", "B", "B", "A"] * 2
    first, second = server.requests[:6], server.requests[6:]
    assert [r.conversation for r in first] == [r.conversation for r in second]
    assert len({r.conversation for r in first[:3]}) == 1
    assert len({r.conversation for r in first[3:5]}) == 1
    assert len(ids(server)) == 3


async def test_agents_without_instructions_are_told_apart(server: FakeServer, either: Mode) -> None:
    b = Agent(name="B")
    a = Agent(name="A", handoffs=[b])
    server.decide = lambda request: [("transfer_to_b", {})] if request.body.get("tools") else []
    await either.run(a, "hi", either.config(server))
    assert len(server.requests) == len(ids(server)) == 2


# Agents as tools


def boss(**options: Any) -> Agent:
    worker = agent("Worker")
    return agent("Boss", tools=[worker.as_tool("ask", "Ask a worker.", **options), look])


def asks_twice(request: Request) -> list[tuple[str, dict[str, Any]]]:
    """The boss asks two workers the same, at once; each of them looks first."""
    if who(request) == "Boss":
        return [("ask", {"input": "see"})] * 2 if is_users(request) else []
    return looks(request)


@pytest.mark.parametrize("named", ["session", "group", "nothing"])
async def test_agents_that_are_tools_are_children(server: FakeServer, mode: Mode, named: str) -> None:
    server.decide = asks_twice
    config = mode.config(server, group_id="g" if named == "group" else None)
    session = SQLiteSession("s") if named == "session" else None
    for said in ("one", "two"):
        server.requests.clear()
        await mode.run(boss(), said, config, session=session)
        found = by_agent(server)
        assert len(found["Boss"]) == 1
        workers = [request for request in server.requests if who(request) == "Worker"]
        assert len(workers) == 4
        assert len(found["Worker"]) == 2
        assert found["Worker"].isdisjoint(found["Boss"])
        steps = sorted((r.conversation, r.value(wire.TURN_STEP)) for r in workers)
        assert [step for _, step in steps] == ["1", "2", "1", "2"]
        assert {r.value(wire.CONVERSATION_PARENT) for r in workers} == found["Boss"]
        bosses = [request for request in server.requests if who(request) == "Boss"]
        assert {r.value(wire.CONVERSATION_PARENT) for r in bosses} <= {None, *_ancestors(server, named)}


def _ancestors(server: FakeServer, named: str) -> set[str | None]:
    """A group's second run has nothing in common with the first, and names it."""
    return {r.value(wire.CONVERSATION_PARENT) for r in server.requests} if named == "group" else set()


async def test_children_are_known_where_calls_have_a_time_limit(server: FakeServer, either: Mode) -> None:
    server.decide = asks_twice
    config = either.config(server, model_settings=ModelSettings(timeout=60))
    await either.run(boss(), "hi", config)
    workers = [request for request in server.requests if who(request) == "Worker"]
    assert {r.value(wire.CONVERSATION_PARENT) for r in workers} == by_agent(server)["Boss"]
    assert len(by_agent(server)["Worker"]) == 2


async def test_a_tool_with_a_session_of_its_own_keeps_it(server: FakeServer, either: Mode) -> None:
    server.decide = lambda r: [("ask", {"input": "see"})] if who(r) == "Boss" and is_users(r) else []
    leader = boss(session=SQLiteSession("workers"))
    for _ in range(2):
        await either.run(leader, "hi", either.config(server))
    workers = [request for request in server.requests if who(request) == "Worker"]
    assert len(workers) == 2
    assert len({request.conversation for request in workers}) == 1
    assert workers[0].value(wire.CONVERSATION_PARENT) in by_agent(server)["Boss"]


async def test_a_run_after_another_is_no_child_of_it(server: FakeServer, either: Mode) -> None:
    # It ends in a tool, so its last answer still waits for that, by the looks of it.
    server.decide = scripted(A=[("look", {"where": "1"}), ("look", {"where": "2"}), ("stop", {"where": "3"})])
    config = either.config(server)
    await either.run(
        agent(tools=[look, stop], tool_use_behavior=StopAtTools(stop_at_tool_names=["stop"])), "hi", config
    )
    gc.collect()
    await asyncio.create_task(either.run(agent("B"), "hi", config))
    assert who(server.last) == "B"
    assert server.last.value(wire.CONVERSATION_PARENT) is None


async def test_without_the_runners_name_for_a_run_messages_tell(
    server: FakeServer, either: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "get_model_run_owner", lambda: None)  # as before 0.20
    server.decide = asks_twice
    await either.run(boss(), "hi", either.config(server))
    found = by_agent(server)
    assert len(found["Boss"]) == 1
    assert len(found["Worker"]) >= 2
    assert found["Worker"].isdisjoint(found["Boss"])


# Whose word counts


@pytest.mark.parametrize("name", ["X-Conversation-ID", "x-conversation-id"])
@pytest.mark.parametrize("where", ["call", "client"])
async def test_a_header_that_the_user_set_wins(
    server: FakeServer, either: Mode, name: str, where: str
) -> None:
    theirs = {name: "mine", "X-Org": "a"}
    client = carryback.AsyncOpenAI(
        base_url=server.base_url, api_key="k", default_headers=theirs if where == "client" else None
    )
    settings = ModelSettings(extra_headers=theirs if where == "call" else None)
    config = run_config(either.provider(server, openai_client=client), model="m")
    server.decide = asks_twice
    await either.run(boss(), "hi", config, session=SQLiteSession("s"))
    worker = agent("Worker")
    own = agent("Boss", tools=[worker.as_tool("ask", "Ask.")], model_settings=settings)
    server.requests.clear()
    await either.run(own, "hi", config, session=SQLiteSession("s"))
    for request in server.requests:
        if who(request) == "Boss" or where == "client":
            assert (request.conversation, request.value("X-Org")) == ("mine", "a")
        else:
            assert request.value(wire.CONVERSATION_PARENT) == "mine"
        assert request.value(wire.TURN_STEP) in ("1", "2")
    await client.close()


async def test_a_conversation_named_in_the_body_is_not_named_again(server: FakeServer, either: Mode) -> None:
    named = ModelSettings(extra_body={"session_params": {"session_id": "mine"}})
    await either.run(agent(), "hi", either.config(server, model_settings=named), session=SQLiteSession("s"))
    assert server.last.conversation is None
    assert server.last.body["session_params"] == {"session_id": "mine"}


async def test_a_block_names_all_that_is_in_it(server: FakeServer, either: Mode) -> None:
    async with carryback.conversation("thread-7"):
        await either.run(agent(), "hi", either.config(server), session=SQLiteSession("s"))
    assert ids(server) == {"thread-7"}


async def test_a_cache_key_of_the_users_stays(server: FakeServer, either: Mode) -> None:
    keyed = ModelSettings(extra_args={"prompt_cache_key": "mine"})
    await either.run(agent(), "hi", either.config(server, model_settings=keyed))
    assert server.last.body["prompt_cache_key"] == "mine"
    assert server.last.conversation


@pytest.mark.parametrize("known", ["previous_response_id", "conversation_id"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_chain_is_the_servers(server: FakeServer, known: str, stream: bool) -> None:
    mode = Mode(use_responses=True, stream=stream)
    await mode.run(agent(), "hi", mode.config(server), **{known: "x_1"})
    assert server.last.body["previous_response_id" if known[0] == "p" else "conversation"] == "x_1"
    assert not OURS & {name.lower() for name, _ in server.last.headers}


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_users_own_filter_is_called(server: FakeServer, either: Mode, is_async: bool) -> None:
    def shout(data: CallModelData[Any]) -> ModelInputData:
        assert data.agent.name == "A"
        items: Any = [*data.model_data.input, {"role": "user", "content": "LOUDER"}]
        return ModelInputData(input=items, instructions=data.model_data.instructions)

    async def shout_later(data: CallModelData[Any]) -> ModelInputData:
        await asyncio.sleep(0)
        return shout(data)

    own = shout_later if is_async else shout
    await either.run(agent(), "hi", either.config(server, call_model_input_filter=own))
    assert items_of(server.last)[-1]["content"] == "LOUDER"


# Retries


async def test_the_clients_retries_keep_the_ids(server: FakeServer, either: Mode) -> None:
    server.failures = [500, 503]
    await either.run(agent(), "hi", either.config(server))
    assert len(server.requests) == 3
    assert len(ids(server)) == 1
    assert {r.value(wire.CONVERSATION_PARENT) for r in server.requests} == {None}


@pytest.mark.parametrize(
    ("with_filter", "limit_s"),
    [(True, None), (True, 60), (False, None)],  # with a time limit, each attempt is a task of its own
)
async def test_the_runners_retries_keep_the_ids(
    server: FakeServer, mode: Mode, with_filter: bool, limit_s: float | None
) -> None:
    retries = ModelRetrySettings(
        max_retries=2, backoff={"initial_delay": 0.01}, policy=retry_policies.http_status([400])
    )
    settings = ModelSettings(retry=retries, timeout=limit_s)
    provider = mode.provider(server)
    config = RunConfig(model_provider=provider, model="m", model_settings=settings)
    if with_filter:
        config = run_config(provider, model="m", model_settings=settings)
    server.failures = [400, 400]
    server.decide = looks
    await mode.run(agent(), "hi", config)
    assert len(server.requests) == 4
    assert len(ids(server)) == 1
    assert {r.value(wire.CONVERSATION_PARENT) for r in server.requests} == {None}


# What was reused


async def test_each_response_says_what_was_reused(server: FakeServer, mode: Mode) -> None:
    server.reuse, server.decide = HIT, looks
    seen: list[Any] = []

    class Hooks(RunHooks[Any]):
        async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
            seen.append(reuse(response))

    result = await mode.run(agent(), "hi", mode.config(server), hooks=Hooks(), session=SQLiteSession("s"))
    found = [reuse(response) for response in result.raw_responses]
    assert found == seen
    for one, request in zip(found, server.requests, strict=True):
        assert one is not None
        assert (one.tokens, one.recomputed, one.conversation) == (1024, 37, request.conversation)
    del result, found
    seen.clear()
    gc.collect()
    assert not _models._reports


async def test_no_word_of_reuse(server: FakeServer, either: Mode) -> None:
    result = await either.run(agent(), "hi", either.config(server))
    assert [reuse(each) for each in result.raw_responses] == [None]
    server.reuse = HIT
    await either.run(agent(), "hi", either.config(server))
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        config = run_config(either.provider(server, openai_client=client), model="m")
        result = await either.run(agent(), "hi", config)
    assert [reuse(each) for each in result.raw_responses] == [None], "another client does not note it"


# How it is made


async def test_a_model_needs_no_provider(server: FakeServer, either: Mode) -> None:
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        kind = CarrybackResponsesModel if either.use_responses else CarrybackChatCompletionsModel
        session = SQLiteSession("s")
        for said in ("one", "two"):
            await either.run(agent(model=kind("m", client)), said, RunConfig(), session=session)
    assert len(ids(server)) == 1


async def test_a_model_must_be_named(server: FakeServer) -> None:
    config = run_config(PLAIN.provider(server))
    with pytest.raises(UserError, match="name the server's model"):
        await PLAIN.run(agent(), "hi", config)


async def test_a_provider_closes_what_it_made(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="openai_client"):
        CarrybackProvider(base_url="http://x", openai_client=openai.AsyncOpenAI(api_key="k"))
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
        given = PLAIN.provider(server, openai_client=client)
        await PLAIN.run(agent(), "hi", run_config(given, model="m"))
        await given.aclose()
        await PLAIN.run(agent(), "hi", run_config(given, model="m"))
    own = PLAIN.provider(server)
    await own.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await PLAIN.run(agent(), "hi", run_config(own, model="m"))
