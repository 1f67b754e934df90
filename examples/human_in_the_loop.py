"""An agent that asks a person before it acts, and goes on in another process once it may.

    carryback serve
    python examples/human_in_the_loop.py --base-url http://127.0.0.1:8000/v1

The first process ends at the question; its graph is kept in SQLite. The second one has the thread's id and the
answer, nothing else. The conversation's id follows from the thread's, so the server finds what it holds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from carryback_langgraph import ChatCarryback, reuse
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command
from langgraph_agent import HANDBOOK_TOOLS, one_tool_a_turn
from openai_loop import QUESTIONS, SYSTEM
from report import Report

THREAD = {"configurable": {"thread_id": "leave-request"}}


def agent(options: argparse.Namespace, saver: SqliteSaver) -> Any:
    """The agent, the same in both processes."""
    model = ChatCarryback(
        model=options.model, base_url=options.base_url, api_key=options.api_key, timeout=600, temperature=0,
        max_completion_tokens=48,
    )  # fmt: skip
    ask_first = HumanInTheLoopMiddleware(interrupt_on={"search_document": True, "read_section": True})
    return create_agent(
        model,
        HANDBOOK_TOOLS,
        system_prompt=SYSTEM,
        middleware=[one_tool_a_turn, ask_first],
        checkpointer=saver,
    )


def go_on(options: argparse.Namespace, given: Any, report: Report) -> None:
    """Run the graph until it ends or asks, and say what its model calls reused."""
    with SqliteSaver.from_conn_string(options.file) as saver:
        for update in agent(options, saver).stream(given, THREAD, stream_mode="updates"):
            for node, step in update.items():
                if node == "__interrupt__":
                    request = step[0].value["action_requests"][0]
                    print(f"may I? {request['name']}({request['args']})")
                    continue
                for message in (step or {}).get("messages", ()):
                    if isinstance(message, AIMessage) and node == "model":
                        print(f"ai: {message.text or [call['args'] for call in message.tool_calls]}")
                        report.add(f"process {options.process}", reuse(message))


def main() -> None:
    parser = argparse.ArgumentParser(description="Interrupt, restart, resume.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="", help="the server's first one if not given")
    parser.add_argument("--process", choices=("1", "2"), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is None:
        if not options.model:
            model = ChatCarryback(model="", base_url=options.base_url, api_key=options.api_key)
            options.model = model.root_client.models.list().data[0].id
        with tempfile.TemporaryDirectory() as folder:
            for process in "12":
                print(f"\nProcess {process}", flush=True)
                passed = [
                    f"--{name}={value}"
                    for name, value in (
                        ("base-url", options.base_url), ("api-key", options.api_key), ("model", options.model),
                        ("process", process), ("file", Path(folder, "threads.sqlite")),
                    )
                ]  # fmt: skip
                subprocess.run([sys.executable, __file__, *passed], check=True)
        return
    report = Report()
    question = QUESTIONS[int(options.process) - 1][0]
    if options.process == "1":
        print(f"> {question}")
        go_on(options, {"messages": [HumanMessage(question)]}, report)
    else:
        go_on(options, Command(resume={"decisions": [{"type": "approve"}]}), report)
        print(f"> {question}")
        go_on(options, {"messages": [HumanMessage(question)]}, report)
        go_on(options, Command(resume={"decisions": [{"type": "approve"}]}), report)
    report.total()


if __name__ == "__main__":
    main()
