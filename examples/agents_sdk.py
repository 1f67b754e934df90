"""A team of the OpenAI Agents SDK: one agent takes the questions and hands them off, another answers them.

    carryback serve
    python examples/agents_sdk.py --base-url http://127.0.0.1:8000/v1

The provider is the one line that is ours. Each agent is a conversation of its own, named by the session, so
each finds its KV where it left it when it is its turn again. Everything is streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from typing import Any

import carryback
from agents import (
    Agent,
    AgentHooks,
    FunctionTool,
    ModelSettings,
    RunConfig,
    RunHooks,
    Runner,
    SQLiteSession,
    set_tracing_disabled,
)
from agents.tool_context import ToolContext
from carryback_agents import CarrybackProvider, reuse, run_config
from openai_loop import QUESTIONS, SYSTEM, TOOLS, call_tool
from report import Report


async def invoke(context: ToolContext[Any], arguments: str) -> str:
    """What a tool answers."""
    return call_tool(context.tool_name, arguments)


class ToolFirst(AgentHooks[str]):
    """Makes an agent call the tool that the run's context names, and then answer.

    A model of this size calls tools only when it must; a larger one needs none of this.
    """

    async def on_start(self, context: Any, agent: Agent[str]) -> None:
        agent.model_settings.tool_choice = context.context

    async def on_tool_end(self, context: Any, agent: Agent[str], *_: Any) -> None:
        agent.model_settings.tool_choice = "none"


class Count(RunHooks[str]):
    """Says after each model call what it reused."""

    def __init__(self, report: Report) -> None:
        self.report = report

    async def on_llm_end(self, context: Any, agent: Agent[str], response: Any) -> None:
        found = reuse(response)
        print()
        self.report.add(f"{agent.name} {found.conversation[:8]}" if found else agent.name, found)


def team() -> Agent[str]:
    """The agent that takes the questions."""
    specialist = Agent[str](
        name="handbook",
        handoff_description="Knows the handbook.",
        instructions=SYSTEM,
        tools=[
            FunctionTool(
                name=function["name"],
                description=function["description"],
                params_json_schema=function["parameters"],
                on_invoke_tool=invoke,
            )
            for function in (tool["function"] for tool in TOOLS)
        ],
        model_settings=ModelSettings(temperature=0, max_tokens=64),
        hooks=ToolFirst(),
        reset_tool_choice=False,
    )
    return Agent[str](
        name="triage",
        instructions="You take the questions of a ferry's crew and hand each to the one who can answer it.",
        handoffs=[specialist],
        model_settings=ModelSettings(temperature=0, max_tokens=64, tool_choice="transfer_to_handbook"),
        reset_tool_choice=False,
    )


async def ask(
    question: str, tool: str, session: SQLiteSession, config: RunConfig, hooks: RunHooks[str]
) -> None:
    """One turn of the team, shown as it comes."""
    print(f"\n> {question}")
    result = Runner.run_streamed(
        team(), question, context=tool, session=session, run_config=config, hooks=hooks
    )
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type.endswith(".delta"):
            print(getattr(event.data, "delta", ""), end="", flush=True)
        elif event.type == "run_item_stream_event" and event.item.type == "tool_call_output_item":
            print(f"  -> {event.item.output}")
        elif event.type == "run_item_stream_event" and event.item.type == "handoff_output_item":
            print(f"  {event.item.source_agent.name} -> {event.item.target_agent.name}")


async def main() -> None:
    parser = argparse.ArgumentParser(description="A team of the OpenAI Agents SDK.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the server's first one if not given")
    parser.add_argument("--responses", action="store_true", help="ask /responses, not /chat/completions")
    options = parser.parse_args()

    set_tracing_disabled(True)  # it would go to OpenAI
    client = carryback.AsyncOpenAI(base_url=options.base_url, api_key=options.api_key, timeout=600)
    model = options.model or (await client.models.list()).data[0].id
    provider = CarrybackProvider(openai_client=client, use_responses=options.responses)
    config = run_config(provider, model=model, workflow_name="Handbook")

    report = Report()
    session = SQLiteSession(f"crew-{uuid.uuid4().hex}")
    for question, tool in QUESTIONS:
        await ask(question, tool, session, config, Count(report))
    report.total()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
