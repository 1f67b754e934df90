"""Goes on with a session of `test_agents_reuse`, in a process of its own; prints what its calls reused."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, Runner, SQLiteSession, function_tool, set_tracing_disabled
from carryback_agents import CarrybackProvider, reuse, run_config


@function_tool
def look(where: str) -> str:
    """Look somewhere."""
    raise AssertionError("nobody asked for it")


async def main(base_url: str, file: str, text: str) -> None:
    config = run_config(CarrybackProvider(base_url=base_url, api_key="k"), model="stub")
    agent = Agent(name="A", instructions=f"You are A. {text}", tools=[look])
    session = SQLiteSession("s", file)
    streamed = Runner.run_streamed(agent, text, session=session, run_config=config)
    async for _ in streamed.stream_events():
        pass
    whole = await Runner.run(agent, text, session=session, run_config=config)
    found = [reuse(response) for result in (streamed, whole) for response in result.raw_responses]
    print(json.dumps([each and each.outcome for each in found]))


set_tracing_disabled(True)
asyncio.run(main(*sys.argv[1:]))
