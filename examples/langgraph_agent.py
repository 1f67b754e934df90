"""A LangChain agent: `create_agent`, a chat model that is in use already, and one middleware.

    carryback serve
    python examples/langgraph_agent.py --base-url http://127.0.0.1:8000/v1

Every model call of the agent then says which conversation and turn it belongs to, by the thread's id.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Callable
from typing import Any

import openai
from carryback_langgraph import CarrybackMiddleware, reuse
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from openai_loop import QUESTIONS, SYSTEM, TOOLS, call_tool
from report import Report


def handbook_tool(function: dict[str, Any]) -> StructuredTool:
    """A tool as LangChain has it. It answers also if the model's arguments make no sense."""
    name = function["name"]

    def run(**arguments: Any) -> str:
        return call_tool(name, json.dumps(arguments))

    return StructuredTool.from_function(
        run, name=name, description=function["description"], args_schema=function["parameters"]
    )


HANDBOOK_TOOLS = [handbook_tool(tool["function"]) for tool in TOOLS]


@wrap_model_call
def one_tool_a_turn(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """A model of this size calls tools only when it must, and by their schema. Leave this out with a larger one."""
    asked = request.messages[-1]
    first = next((tool for question, tool in QUESTIONS if asked.content == question), None)
    is_first = isinstance(asked, HumanMessage) and first is not None
    settings = {**request.model_settings, "strict": True}
    return handler(request.override(tool_choice=first if is_first else "none", model_settings=settings))


def main() -> None:
    parser = argparse.ArgumentParser(description="A LangChain agent with carryback's middleware.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the server's first one if not given")
    parser.add_argument("--thread", default=uuid.uuid4().hex)
    options = parser.parse_args()
    name = options.model or openai.OpenAI(
        base_url=options.base_url, api_key=options.api_key
    ).models.list().data[0].id  # fmt: skip

    model = ChatOpenAI(
        model=name, base_url=options.base_url, api_key=options.api_key, timeout=600, temperature=0,
        max_completion_tokens=48, include_response_headers=True,  # what was reused stands in a header
    )  # fmt: skip
    agent = create_agent(
        model,
        HANDBOOK_TOOLS,
        system_prompt=SYSTEM,
        middleware=[one_tool_a_turn, CarrybackMiddleware()],
        checkpointer=InMemorySaver(),
    )
    report = Report()
    for question, _ in QUESTIONS:
        print(f"\n> {question}")
        for update in agent.stream(
            {"messages": [HumanMessage(question)]},
            {"configurable": {"thread_id": options.thread}},
            stream_mode="updates",
        ):
            for message in (each for step in update.values() for each in (step or {}).get("messages", ())):
                print(f"{message.type}: {message.text or [call['args'] for call in message.tool_calls]}")
                if isinstance(message, AIMessage):
                    report.add("agent", reuse(message))
    print()
    report.total()


if __name__ == "__main__":
    main()
