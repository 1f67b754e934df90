"""Recorded conversations, in the forms of other benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from carryback_server.bench import traces
from carryback_server.bench.workloads import Conversation, Step


def load(folder: Path, *lines: object, as_list: bool = False, **options: Any) -> list[Conversation]:
    """What is loaded from a file with these lines, or with this list of them."""
    file = folder / "trace"
    file.write_text(json.dumps(lines, indent=1) if as_list else "\n".join(map(json.dumps, lines)))
    return traces.load(file, **{"answer_tokens": 10, **options})


def steps(conversation: Conversation) -> list[Step]:
    return [step for _, _, step in conversation.steps()]


def said(step: Step) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in step.messages]


def test_vllms_multi_turn_benchmark(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "It."},
        {"role": "assistant", "content": "Here is all of it."},
        {"role": "user", "content": "Thanks."},
    ]
    (one,) = load(tmp_path, {"id": "a", "messages": messages}, as_list=True)
    assert one.name == "a"
    assert [(turn, number, said(step)) for turn, number, step in one.steps()] == [
        (1, 1, [("system", "Help."), ("user", "Find it.")]),
        (1, 2, [("tool", "It.")]),
        (2, 1, [("user", "Thanks.")]),
    ]
    assert [step.calls for step in steps(one)] == [(call,), (), ()]
    assert [step.max_tokens for step in steps(one)] == [
        10,
        5,
        10,
    ]  # 18 characters were recorded of the second


def test_sharegpt(tmp_path: Path) -> None:
    talk = [{"from": "gpt", "value": "I begin."}, {"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Hi!!"}]  # fmt: skip
    (one,) = load(tmp_path, {"id": 7, "conversations": talk}, as_list=True)
    assert (one.name, [said(step) for step in steps(one)]) == ("7", [[("user", "Hello.")]])


def test_aiperfs_sessions(tmp_path: Path) -> None:
    first, second = load(
        tmp_path,
        {"session_id": "a", "turns": [{"role": "system", "text": "Help."}, {"text": "Hello.", "timestamp": 500}]},
        {"session_id": "b", "turns": [{"texts": ["One.", {"contents": ["Two."]}], "timestamp": 1500, "output_length": 3}]},
        {"session_id": "a", "turns": [{"text": "And?", "delay": 4000}]},
        speed=2.0,
    )  # fmt: skip
    assert [said(step) for step in steps(first)] == [
        [("system", "Help."), ("user", "Hello.")],
        [("user", "And?")],
    ]
    assert [step.wait_s for step in steps(first)] == [0.0, 2.0]
    (only,) = steps(second)
    assert (said(only), only.max_tokens) == ([("user", "One.\nTwo.")], 3)
    assert only.at_s - steps(first)[0].at_s == 0.5


def test_mooncakes_prompts_are_equal_where_their_hashes_are(tmp_path: Path) -> None:
    conversations = load(
        tmp_path,
        {"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 4000, "input_length": 30, "output_length": 6, "hash_ids": [1, 4, 5, 6]},
        {"timestamp": 5000, "input_length": 40, "output_length": 7, "hash_ids": [1, 2, 7, 8, 9]},
        block_tokens=8,
    )  # fmt: skip
    # The third begins with all full blocks of the first, so it is its next turn; the second has only one.
    assert [len(steps(each)) for each in conversations] == [2, 1]
    (one, three), (two,) = map(steps, conversations)
    words = [step.messages[0]["content"].split() for step in (one, two, three)]
    assert [len(each) for each in words] == [20, 30, 40]
    assert words[0][:16] == words[2][:16] != words[1][:16]
    assert words[0][:8] == words[1][:8]
    assert three.keep == 0  # it is a whole prompt
    assert [(step.at_s, step.max_tokens) for step in (one, two, three)] == [(0, 5), (1, 6), (2, 7)]


def test_mooncakes_sessions_say_what_each_turn_adds(tmp_path: Path) -> None:
    first, second = load(
        tmp_path,
        {"session_id": "a", "input_length": 10, "output_length": 4},
        {"session_id": "b", "text_input": "Hello."},
        {"session_id": "a", "input_length": 5, "delay": 1000},
    )
    assert [(step.keep, step.wait_s, len(said(step)[0][1].split())) for step in steps(first)] == [
        (None, 0.0, 10),
        (None, 1.0, 5),
    ]
    assert said(steps(second)[0]) == [("user", "Hello.")]


@pytest.mark.parametrize(("mode", "keep"), [("history", 0), ("delta", None)])
def test_mooncakes_messages(tmp_path: Path, mode: str, keep: int | None) -> None:
    message = {"role": "user", "content": "Hello."}
    tool = {"type": "function", "function": {"name": "find"}}
    row = {"session_id": "a", "messages": [message], "message_mode": mode, "tools": [tool]}
    (one,) = load(tmp_path, row, row)
    assert [step.keep for step in steps(one)] == [keep, keep]
    assert one.tools == (tool,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "trace: the file is empty"),
        ("[]", "trace: no conversation in it"),
        ('[{"id": "a"\n"messages": []}]', "trace:2: Expecting"),
        ('[{"id": "a"}]', "trace: conversation 1: neither `messages` nor `conversations`"),
        ('[{"messages": [{"content": "Hello."}]}]', "trace: conversation 1: message 1 has no role"),
        ('[{"conversations": [{"from": "bot", "value": ""}]}]', "conversation 1: message 1: from 'bot'"),
        ('[{"messages": 1}]', r"trace: conversation 1: Expected `array \| null`, got `int`"),
        ('[{"id": "a", "messages": [{"role": "user", "content": "?"}]}, {"id": "a", "messages": [{"role": "user", "content": "?"}]}]', "two conversations have the id 'a'"),
        ('{\n"filetype": "generate_conversations"\n}', "it says how to generate conversations"),
        ('{"turns": [{"text": "Hello."}]}\n{"turns": [{"image": "a.png"}]}', "trace:2: turn 1 has more than text"),
        ('{"turns": [{}]}', "trace:1: turn 1 has no text"),
        ('{"turns": [{"text": "Hello."}]}\n{"turns": 3}', "trace:2: Expected `array`, got `int` - at `\\$.turns`"),
        ('{"input_length": 5}\n\n{"input_length": "5"}', "trace:3: Expected `int"),
        ('{"timestamp": 1}', "trace:1: want one of input_length, text_input and messages"),
        ('{"input_length": 5, "text_input": "Hello."}', "trace:1: want one of"),
        ('{"input_length": 0}', "trace:1: input_length is 0"),
        ('{"input_length": 1, "output_length": 0}', "trace:1: output_length is 0"),
        ('{"input_length": 1', "trace:1: Input data was truncated"),
        ("hello", "trace:1: JSON is malformed"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        traces.load(file, answer_tokens=10)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace: No such file"):
        traces.load(tmp_path / "trace", answer_tokens=10)
    (tmp_path / "trace").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"trace: .*decode"):
        traces.load(tmp_path / "trace", answer_tokens=10)
