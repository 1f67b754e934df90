"""A tool-using agent: a plain loop around the OpenAI client, with one import changed.

    carryback serve
    python examples/openai_loop.py --base-url http://127.0.0.1:8000/v1

It keeps a handbook in its context, answers three questions about it, and calls a tool before each
answer. Every model call sends the whole history again, as agents do; with carryback the server reads
back what it computed before instead of computing it again, and the loop prints how much that was.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import carryback
from openai.types.chat import ChatCompletionChunk

HANDBOOK = Path(__file__).with_name("handbook.md").read_text()
SECTIONS: dict[str, str] = dict(
    re.findall(r"^## (\d+\.\d+) (.+?)\s*(?=^## |\Z)", HANDBOOK, re.MULTILINE | re.DOTALL)
)
SYSTEM = f"You answer questions of a ferry's crew. Answer in one short sentence. The handbook:\n\n{HANDBOOK}"

# What the user asks, and the tool that the first call of the turn must use.
QUESTIONS = (
    ("How many days off do I have in a year?", "search_document"),
    ("And when does a boat stay in port?", "read_section"),
    ("What do two grown-ups and a car with its driver pay?", "calculate"),
)


def search_document(query: str) -> str:
    """The sections with the most words of the query, best first."""
    words = set(re.findall(r"\w+", query.lower()))
    found = {n: len(words & set(re.findall(r"\w+", text.lower()))) for n, text in SECTIONS.items()}
    best = sorted((n for n in found if found[n]), key=lambda n: -found[n])[:3]
    return "\n".join(f"{n} {SECTIONS[n].splitlines()[0]}" for n in best) or "nothing found"


def read_section(section: str) -> str:
    """A section's text."""
    return SECTIONS.get(section, f"no section {section}; there are {', '.join(SECTIONS)}")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / and brackets, nothing else."""
    operators = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("only numbers, + - * / and brackets")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        return f"cannot calculate: {error}"


def tool(function: Callable[[str], str], description: str, argument: str, **schema: Any) -> dict[str, Any]:
    """A tool with one argument, as the API wants it. `strict` binds the model to the schema."""
    parameters = {
        "type": "object",
        "properties": {argument: schema},
        "required": [argument],
        "additionalProperties": False,
    }
    described = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": {**described, "strict": True}}


TOOLS = [
    tool(search_document, "Find sections by words.", "query", type="string", pattern="^[a-z ]{3,30}$"),
    tool(read_section, "Read one section.", "section", type="string", enum=list(SECTIONS)),
    tool(calculate, "Do arithmetic.", "expression", type="string", pattern="^[0-9.+*/() -]{3,30}$"),
]
FUNCTIONS = {function.__name__: function for function in (search_document, read_section, calculate)}


def call_tool(name: str, arguments: str) -> str:
    """What a tool answers; a call that makes no sense gets an answer that says so."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"this call does not work: {error!r}"


@dataclass
class Step:
    """One model call of a turn.

    Attributes:
        message: the model's answer, as it goes into the history.
        chunks: what was streamed.
        ttft_s: seconds from sending the request to the first text or tool call that came back.
        reuse: what the server reused; None if the server is not carryback's.
    """

    turn: int
    number: int
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": ""})
    chunks: list[ChatCompletionChunk] = field(default_factory=list)
    ttft_s: float = 0.0
    reuse: carryback.LastReuse | None = None


def run_agent(
    client: carryback.OpenAI, model: str, *, show: Callable[[str], None], **options: Any
) -> Iterator[Step]:
    """The loop. Yields each step when it is done.

    Args:
        show: called with each piece of text as it comes.
        options: more arguments for `client.chat.completions.create`.
    """
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn, (question, first_tool) in enumerate(QUESTIONS, 1):
        show(f"\n> {question}\n")
        messages.append({"role": "user", "content": question})
        # A model of this size calls tools only when it must; let a larger one choose ("auto").
        tool_choice: Any = {"type": "function", "function": {"name": first_tool}}
        number = 0
        while True:
            number += 1
            step = Step(turn, number)
            sent = time.monotonic()
            stream = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                tool_choice=tool_choice,
                max_completion_tokens=64 if number == 1 else 24,
                temperature=0,
                stream=True,
                **options,
            )
            step.reuse = carryback.last_reuse()
            for chunk in stream:
                step.chunks.append(chunk)
                delta = chunk.choices[0].delta if chunk.choices else None
                if delta and (delta.content or delta.tool_calls):
                    step.ttft_s = step.ttft_s or time.monotonic() - sent
                    add_delta(step.message, delta.model_dump(exclude_none=True), show)
            messages.append(step.message)
            show("\n")
            yield step
            if not (calls := step.message.get("tool_calls")):
                break
            for call in calls:
                result = call_tool(call["function"]["name"], call["function"]["arguments"])
                show(f"  -> {result}\n")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            tool_choice = "none"


def add_delta(message: dict[str, Any], delta: dict[str, Any], show: Callable[[str], None]) -> None:
    """Add a streamed piece to the message that it belongs to."""
    message["content"] += delta.get("content", "")
    show(delta.get("content", ""))
    for piece in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name, text in piece.get("function", {}).items():
            calls[piece["index"]]["function"][name] += text
            show(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="A tool-using agent in a plain loop.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="the first one that the server names, unless given")
    args = parser.parse_args()

    client = carryback.OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    for step in run_agent(client, model, show=lambda text: print(text, end="", flush=True)):
        reused = "the server does not say what it reused"
        if step.reuse:
            reused = f"{step.reuse.tokens} of {step.reuse.prompt_tokens} tokens reused"
        print(f"  [turn {step.turn}, step {step.number}: {reused}; first token after {step.ttft_s:.1f} s]")


if __name__ == "__main__":
    main()
