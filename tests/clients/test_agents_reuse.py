"""The OpenAI Agents SDK before a real router and stub engines: what its model calls reuse.

The engines compare what they are offered with the prompt, as real ones do, and answer wrongly if any KV is
of another prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    RunHooks,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions import handoff_filters
from carryback import LastReuse
from carryback_agents import CarrybackProvider, reuse, run_config
from service import TEXT, Service

NEXT_PROCESS = Path(__file__).with_name("agents_next_process.py")


@pytest.fixture(autouse=True)
def no_export() -> Iterator[None]:
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """Whatever is done to it, engines have seen nothing wrong, and hold nothing in the end."""
    async with Service() as service:
        yield service
        await service.finish()


@function_tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"{where}: {TEXT}"


def agent(name: str, *tools: str, **options: Any) -> Agent:
    """An agent that calls these tools, one at each call, and then says something; again in each run."""
    left: list[str] = []

    def instructions(_: object, own: Agent) -> str:
        if not left:
            left.extend((*tools, "none"))
        own.model_settings = ModelSettings(tool_choice=left.pop(0))  # it is asked for these next
        return f"You are {name}. {TEXT}"

    return Agent(name=name, instructions=instructions, tools=[look], reset_tool_choice=False, **options)


@dataclass
class Team:
    """Runs agents, and keeps what each of their calls reused."""

    url: str
    use_responses: bool = False
    stream: bool = False
    calls: list[tuple[str, LastReuse]] = field(default_factory=list)

    async def __aenter__(self) -> Team:
        self.provider = CarrybackProvider(
            base_url=f"{self.url}/v1", api_key="k", use_responses=self.use_responses
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.provider.aclose()

    def config(self, **options: Any) -> RunConfig:
        return run_config(self.provider, model="stub", **options)

    async def run(self, agent: Agent, said: Any, config: RunConfig | None = None, **options: Any) -> Any:
        """A run. Its calls are kept, also those of agents that are tools."""
        team = self

        class Hooks(RunHooks[Any]):
            async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
                found = reuse(response)
                assert found is not None
                team.calls.append((agent.name, found))

        config = config or self.config()
        if not self.stream:
            return await Runner.run(agent, said, run_config=config, hooks=Hooks(), **options)
        result = Runner.run_streamed(agent, said, run_config=config, hooks=Hooks(), **options)
        async for _ in result.stream_events():
            pass
        return result

    def take(self) -> list[tuple[str, str]]:
        """Agent and outcome of each call since the last time."""
        taken = [(name, call.outcome) for name, call in self.calls]
        self.calls.clear()
        return taken


@pytest.fixture(params=[(False, False), (False, True), (True, False), (True, True)], ids=str)
async def team(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Team]:
    use_responses, stream = request.param
    async with Team(service.url, use_responses, stream) as team:
        yield team


async def test_each_call_of_a_session_hits(team: Team) -> None:
    session = SQLiteSession("s")
    for _ in range(3):
        await team.run(agent("A", "look"), TEXT, session=session)
    calls = [call for _, call in team.calls]
    assert [call.outcome for call in calls] == ["miss"] + ["hit"] * 5
    assert len({call.conversation for call in calls}) == 1
    items = await session.get_items()
    assert sum(item.get("role") == "user" for item in items) == 3, "nothing is doubled"
    # What was said before is read back, but for one block.
    for before, after in pairwise(calls):
        assert after.tokens >= before.prompt_tokens - 16


async def test_a_loop_without_a_session_hits(team: Team) -> None:
    said: Any = TEXT
    for _ in range(3):
        result = await team.run(agent("A", "look"), said)
        said = [*result.to_input_list(), {"role": "user", "content": TEXT}]
    assert [outcome for _, outcome in team.take()] == ["miss"] + ["hit"] * 5


async def test_a_session_goes_on_in_another_process(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    async with Team(service.url) as team:
        await team.run(agent("A", "look"), TEXT, session=SQLiteSession("s", file))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(NEXT_PROCESS), f"{service.url}/v1", str(file), TEXT),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(said) == ["hit", "hit"], "streamed, then not"
    async with Team(service.url, use_responses=True) as team:
        await team.run(agent("A", "look"), TEXT, session=SQLiteSession("s", file))
        assert [outcome for _, outcome in team.take()] == ["hit", "hit"], "other words, the same prompt"


async def test_a_doubled_history_reuses_its_true_prefix(team: Team) -> None:
    session = SQLiteSession("s")
    await team.run(agent("A", "look"), TEXT, session=session)
    await session.add_items(await session.get_items())
    team.calls.clear()
    items = await session.get_items()
    result = await team.run(agent("A"), TEXT, session=session)
    # The SDK sends a call that it has twice once, at the later place; texts stay doubled.
    [(_, call)] = team.calls
    assert (call.outcome, call.reason) == ("partial", "history_changed")
    assert call.tokens > 0
    off = team.config(model_settings=ModelSettings(extra_headers={"X-Carryback-Reuse": "off"}))
    expected = await team.run(agent("A"), [*items, {"role": "user", "content": TEXT}], off)
    assert [call.reason for _, call in team.calls] == ["history_changed", "off"]
    assert result.final_output == expected.final_output


@pytest.mark.parametrize("use_responses", [True, False])
async def test_a_run_that_was_cut_off_does_no_harm(service: Service, use_responses: bool) -> None:
    session = SQLiteSession("s")
    async with Team(service.url, use_responses, stream=True) as team:
        await team.run(agent("A"), TEXT, session=session)
        cut = Runner.run_streamed(agent("A"), f"{TEXT} cut", run_config=team.config(), session=session)
        async for event in cut.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                cut.cancel()
        await service.idle()
        for _ in range(2):
            await team.run(agent("A"), TEXT, session=session)
        outcomes = [call.outcome for _, call in team.calls]
        assert outcomes[-1] == "hit"
        assert len({call.conversation for _, call in team.calls}) == 1
        items = await session.get_items()
        assert sum(item.get("content") == f"{TEXT} cut" for item in items) <= 1


# -- hand-offs


def crew(give: Callable[[Agent], Any] = handoff) -> Agent:
    """A looks twice and hands off to B, which looks and hands back; A says the last word."""
    a = agent("A", "look", "look", "transfer_to_b")
    b = agent("B", "look", "transfer_to_a")
    a.handoffs, b.handoffs = [give(b)], [give(a)]
    return a


ORDER = ["A", "A", "A", "B", "B", "A"]


async def test_hand_offs(team: Team) -> None:
    session = SQLiteSession("s")
    for run in range(2):
        await team.run(crew(), TEXT, session=session)
        ids = {name: {call.conversation for each, call in team.calls if each == name} for name in "AB"}
        assert len(ids["A"]) == len(ids["B"]) == 1
        assert ids["A"] != ids["B"]
        calls = team.take()
        assert [name for name, _ in calls] == ORDER
        first = (
            ["hit", "hit", "hit", "hit", "hit", "hit"]
            if run
            else ["miss", "hit", "hit", "miss", "hit", "hit"]
        )
        assert [outcome for _, outcome in calls] == first


async def test_hand_offs_that_rewrite_the_history(team: Team) -> None:
    session = SQLiteSession("s")
    config = team.config(nest_handoff_history=True)
    for run in range(2):
        await team.run(crew(), TEXT, config, session=session)
        calls = team.take()
        assert [name for name, _ in calls] == ORDER
        if not run:  # A is told in a summary what it said, which is another prompt
            outcomes = [outcome for _, outcome in calls]
            assert [outcomes[at] for at in (0, 1, 2, 3)] == ["miss", "hit", "hit", "miss"]
            assert outcomes[4] != "miss"
            # Its instructions are those of its first step, wherever that was.
            assert outcomes[5] != "miss"
        else:
            assert [outcome for _, outcome in calls[:3]] == ["hit"] * 3
            assert "miss" not in [outcome for _, outcome in calls[3:]], "the summary only grows"


async def test_hand_offs_that_remove_tools_from_the_history(team: Team) -> None:
    def give(to: Agent) -> Any:
        return handoff(to, input_filter=handoff_filters.remove_all_tools)

    session = SQLiteSession("s")
    for run in range(2):
        await team.run(crew(give), TEXT, session=session)
        calls = team.take()
        assert [name for name, _ in calls] == ORDER
        outcomes = [outcome for _, outcome in calls]
        assert [outcomes[at] for at in (1, 2, 4)] == ["hit"] * 3
        assert outcomes[5] != "miss", "back at A, its history is shorter"
        assert outcomes[0] == ("partial" if run else "miss")


async def test_an_agent_that_is_a_tool(service: Service, team: Team) -> None:
    boss = agent("Boss", "ask", "ask")
    boss.tools = [agent("Worker", "look").as_tool("ask", "Ask.", hooks=Keep(team)), look]
    await team.run(boss, TEXT, session=SQLiteSession("s"))
    outcomes: dict[str, list[str]] = {}
    ids = {
        name: [call.conversation for each, call in team.calls if each == name] for name in ("Boss", "Worker")
    }
    for name, outcome in team.take():
        outcomes.setdefault(name, []).append(outcome)
    assert outcomes == {"Boss": ["miss", "hit", "hit"], "Worker": ["miss", "hit", "hit", "hit"]}
    assert len(set(ids["Boss"])) == 1
    assert len(set(ids["Worker"])) == 2
    for id in ids["Worker"]:
        assert (await service.conversation(id))["parent"] == ids["Boss"][0]


class Keep(RunHooks[Any]):
    """Keeps what the calls of an agent that is a tool reused."""

    def __init__(self, team: Team) -> None:
        self.team = team

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        found = reuse(response)
        assert found is not None
        self.team.calls.append((agent.name, found))
