"""An unmodified OpenAI client: it says nothing of conversations, and the router tells them by their messages.

    carryback serve
    python examples/bring_your_own_client.py --base-url http://127.0.0.1:8000/v1

Two members of a crew talk to the same agent, in turns, with the same system prompt and the same client. Each
model call sends the whole history, as agents do. What was reused stands in a header of each answer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import openai
from openai_loop import QUESTIONS, SYSTEM, TOOLS, call_tool


@dataclass
class Crew:
    """One member of the crew, and what was said."""

    name: str
    messages: list[Any]


def ask(client: openai.OpenAI, model: str, crew: Crew, question: str, tool: str) -> None:
    """One turn: a question, a tool call, an answer."""
    print(f"\n{crew.name}> {question}")
    crew.messages.append({"role": "user", "content": question})
    tool_choice: Any = {"type": "function", "function": {"name": tool}}
    while True:
        response = client.chat.completions.with_raw_response.create(
            model=model,
            messages=crew.messages,
            tools=TOOLS,
            tool_choice=tool_choice,
            max_completion_tokens=64 if tool_choice != "none" else 24,
            temperature=0,
        )
        reuse = response.headers.get("X-Carryback-Reuse", "unknown, the server is not carryback's")
        print(f"  [{crew.name}] reuse: {reuse}")
        message = response.parse().choices[0].message
        crew.messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            assert call.type == "function"
            result = call_tool(call.function.name, call.function.arguments)
            print(f"  {call.function.name}({call.function.arguments}) -> {result!r:.60}")
            crew.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "none"  # a model of this size would go on calling; let a larger one choose


def main() -> None:
    parser = argparse.ArgumentParser(description="An unmodified OpenAI client.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the server's first one if not given")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.base_url, api_key=options.api_key, timeout=600)
    model = options.model or client.models.list().data[0].id
    crews = [Crew(name, [{"role": "system", "content": SYSTEM}]) for name in ("deck", "the engine")]
    for question, tool in QUESTIONS[:2]:
        for crew in crews:
            ask(client, model, crew, f"I work on {crew.name}. {question}", tool)


if __name__ == "__main__":
    main()
