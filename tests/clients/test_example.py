"""The example agent without a model: its tools, what it sends, and how the demo counts."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import carryback
import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
import openai_loop

HIT = carryback.LastReuse("hit", 64, "verified", recomputed=10)
MISS = carryback.LastReuse("miss", 0, "off", recomputed=74)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("2*14 + 38", "66"), ("-(3 - 1) / 4", "-0.5"), ("1e3", "1000")],
)
def test_calculates(expression: str, result: str) -> None:
    assert openai_loop.calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getpid()",
        "9**9**9",
        "x",
        "'a'*3",
        "True",
        "1/0",
        "1 if 2 else 3",
        "",
        "-" * 5000 + "1",
    ],
)
def test_does_not_run_what_is_no_arithmetic(expression: str) -> None:
    assert openai_loop.calculate(expression).startswith("cannot calculate")


def test_tools_answer_from_the_handbook() -> None:
    assert openai_loop.search_document("days off in a year").splitlines()[0] == "2.2 Days off"
    assert openai_loop.search_document("zeppelin") == "nothing found"
    assert "32 knots" in openai_loop.call_tool("read_section", '{"section": "4.1"}')
    for name, arguments in (("read_section", '{"section": "9'), ("read_section", "[]"), ("sing", "{}")):
        assert "does not work" in openai_loop.call_tool(name, arguments)


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n"


def answer(request: httpx.Request) -> httpx.Response:
    """Calls the tool that it must call, in pieces; else says something."""
    forced = json.loads(request.content)["tool_choice"]
    pieces = [chunk({"role": "assistant", "content": ""})]
    if isinstance(forced, dict):
        argument = {"search_document": "query", "read_section": "section", "calculate": "expression"}
        name = forced["function"]["name"]
        for function in (
            {"name": name, "arguments": ""},
            {"arguments": f'{{"{argument[name]}"'},
            {"arguments": ': "4.1"}'},
        ):
            first = {"id": "call-1", "type": "function"} if "name" in function else {}
            pieces.append(chunk({"tool_calls": [{"index": 0, "function": function, **first}]}))
    else:
        pieces += [chunk({"content": "In a "}), chunk({"content": "storm."}, "length")]
    headers = {"Content-Type": "text/event-stream", "X-Carryback-Reuse": HIT.header()}
    return httpx.Response(200, headers=headers, text="".join(pieces) + "data: [DONE]\n\n")


def test_loop_appends_what_it_got_and_names_one_conversation() -> None:
    requests: list[httpx.Request] = []

    def record(request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return httpx.Response(200, headers={"X-Carryback-Router": "1"})
        requests.append(request)
        return answer(request)

    client = carryback.OpenAI(
        base_url="http://server/v1",
        api_key="k",
        http_client=httpx.Client(transport=httpx.MockTransport(record)),
    )
    shown: list[str] = []
    steps = list(openai_loop.run_agent(client, "m", show=shown.append))

    assert [(step.turn, step.number) for step in steps] == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert all(step.reuse and step.reuse.tokens == 64 and step.ttft_s > 0 for step in steps)
    assert "In a storm." in "".join(shown)
    histories = [json.loads(request.content)["messages"] for request in requests]
    for earlier, later in pairwise(histories):
        assert later[: len(earlier)] == earlier
    called, result, said = histories[-1][2:5]
    assert called["tool_calls"][0]["function"] == {"name": "search_document", "arguments": '{"query": "4.1"}'}
    found = openai_loop.search_document("4.1")
    assert result == {"role": "tool", "tool_call_id": "call-1", "content": found}
    assert said == {"role": "assistant", "content": "In a storm."}
    assert len({request.headers["X-Conversation-ID"] for request in requests}) == 1


def step(
    prompt: list[int], generated: list[int], ttft_s: float, reuse: carryback.LastReuse
) -> openai_loop.Step:
    first = {"prompt_token_ids": prompt, "choices": []}
    rest = [{"choices": [{"index": 0, "delta": {}, "token_ids": [token]}]} for token in generated]
    chunks = [
        ChatCompletionChunk.construct(**ChatCompletionChunk.construct(**each).to_dict())
        for each in (first, *rest)
    ]
    return openai_loop.Step(1, 2, chunks=chunks, ttft_s=ttft_s, reuse=reuse)


def test_demo_counts_by_tokens() -> None:
    before = list(range(70))
    prompt = [*range(66), 7, 7, *range(6)]  # 8 tokens that the step before did not have
    on, off = step(prompt, [1, 2], 0.5, HIT), step(prompt, [1, 2], 2.0, MISS)
    row, after = demo.compared(on, off, before)
    assert (row.prompt, row.new, row.reused, row.recomputed, row.ratio) == (74, 8, 64, 10, 4.0)
    assert row.identical
    assert row.is_bounded
    assert after == [*prompt, 1, 2]

    other, _ = demo.compared(on, step(prompt, [1, 3], 2.0, MISS), before)
    assert not other.identical
    assert not replace(row, recomputed=row.new + demo.BLOCK + 1).is_bounded
    with pytest.raises(SystemExit):
        demo.compared(on, replace(off, reuse=HIT), before)

    first = replace(row, reused=0, recomputed=74, ttft_s=2.0)  # no step before it: not in the median
    assert demo.summary([first, row, replace(row, ttft_off_s=5.0)]) == {
        "turns": 3,
        "steps": 3,
        "reused_tokens": 128,
        "recomputed_tokens": 94,
        "ttft_ratio_median": 7.0,
        "identical": True,
    }
    assert demo.summary([first, other])["identical"] is False

    out = io.StringIO()
    demo.print_table([row, other], Console(file=out, width=200))
    same, differs = (line.split() for line in out.getvalue().splitlines() if "answer" in line)
    assert same[2:] == ["74", "8", "64", "10", "0.50", "2.00", "4.0", "yes"]
    assert differs[-1] == "NO"


def test_demo_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, time; print(f'ready at {os.getpid()}', flush=True); time.sleep(60)"
    monkeypatch.setattr(demo, "SERVE", (sys.executable, "-c", script))
    seen: list[int] = []

    def interrupted() -> None:
        with demo.serving() as pid:
            seen.append(int(pid))
            os.kill(seen[0], 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)

    monkeypatch.setattr(demo, "SERVE", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(SystemExit, match="exit status 3"), demo.serving():
        pass
