"""The conversations that `carryback bench` has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from carryback_server.bench import workloads
from carryback_server.bench.workloads import Conversation
from carryback_server.explain import common_prefix
from hypothesis import given
from hypothesis import strategies as st

Prompt = list[dict[str, Any]]


def agents(**options: Any) -> list[Conversation]:
    defaults = {
        "conversations": 2, "turns": 2, "steps": 3, "system_tokens": 100, "result_tokens": 20,
        "answer_tokens": 4, "tool_s": 0.0, "seed": 0,
    }  # fmt: skip
    return workloads.agent(**{**defaults, **options})


def branches(**options: Any) -> list[Conversation]:
    defaults = {
        "conversations": 2, "turns": 2, "branches": 3, "branch_turns": 2, "edits": 2, "message_tokens": 20,
        "answer_tokens": 4, "seed": 0,
    }  # fmt: skip
    return workloads.branching(**{**defaults, **options})


def prompts(conversations: Sequence[Conversation]) -> dict[str, list[Prompt]]:
    """Each conversation's prompts, if every answer is the same."""
    found: dict[str, list[Prompt]] = {}
    ends: dict[tuple[str, int], Prompt] = {}
    for conversation in conversations:
        history = list(ends[conversation.parent, conversation.parent_turn]) if conversation.parent else []
        mine = found[conversation.name] = []
        for turn, _, step in conversation.steps():
            history = [*history[: step.keep], *step.messages]
            mine.append(history)
            history = [
                *history,
                {
                    "role": "assistant",
                    "content": "Well.",
                    **({"tool_calls": step.calls} if step.calls else {}),
                },
            ]
            ends[conversation.name, turn] = history
    return found


def test_a_seed_says_it_all() -> None:
    assert agents() == agents()
    assert agents() != agents(seed=1)
    assert branches() == branches()
    assert branches() != branches(seed=1)


def test_an_agent_calls_tools_until_its_last_step() -> None:
    for conversation in agents():
        (prompt,) = prompts([conversation]).values()
        assert len(prompt) == 2 * 3
        assert [each["role"] for each in prompt[-1]] == [
            "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
            "user", "assistant", "tool", "assistant", "tool",
        ]  # fmt: skip
        for before, message in zip(prompt[-1], prompt[-1][1:], strict=False):
            if message["role"] == "tool":
                assert message["tool_call_id"] == before["tool_calls"][0]["id"]
        names = {each["function"]["name"] for each in conversation.tools}
        calls = [call for message in prompt[-1] for call in message.get("tool_calls", ())]
        assert {call["function"]["name"] for call in calls} <= names
        assert len({call["id"] for call in calls}) == len(calls)


def test_agents_share_their_instructions_and_nothing_else() -> None:
    first, second = (each[0] for each in prompts(agents()).values())
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_conversation_only_grows() -> None:
    chat = workloads.chat(conversations=1, turns=4, message_tokens=10, answer_tokens=4, think_s=1.0, seed=0)
    paper = workloads.paper(sizes=[100, 200], repeats=2, message_tokens=8, answer_tokens=4, seed=0)
    for (one,) in (prompts(chat).values(), prompts(paper).values(), prompts(agents()[:1]).values()):
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(one))


def test_people_think_about_as_long_as_asked() -> None:
    made = workloads.chat(conversations=100, turns=11, message_tokens=1, answer_tokens=1, think_s=2.0, seed=0)
    waits = [[step.wait_s for _, _, step in each.steps()] for each in made]
    assert all(each[0] == 0.0 for each in waits)
    assert statistics.median(wait for each in waits for wait in each[1:]) == pytest.approx(2.0, rel=0.1)


def test_the_paper_measures_short_turns_at_each_size() -> None:
    (conversation,) = workloads.paper(
        sizes=[500, 1000], repeats=3, message_tokens=16, answer_tokens=8, seed=0
    )
    steps = [step for _, _, step in conversation.steps()]
    assert [(step.group, step.is_measured, step.fill_to) for step in steps] == [
        ("500", False, 500), *3 * [("500", True, None)], ("1000", False, 1000), *3 * [("1000", True, None)],
    ]  # fmt: skip


def test_branches_go_on_from_one_state() -> None:
    found = prompts(branches(conversations=1))
    shared = found["root-1"][1]  # the last prompt before they part
    assert list(found) == ["root-1", "root-1-branch-1", "root-1-branch-2"]
    ways = [found["root-1"][2], found["root-1-branch-1"][0], found["root-1-branch-2"][0]]
    assert all(way[: len(shared)] == shared for way in ways)
    assert len({way[-1]["content"] for way in ways}) == 3


def test_an_edit_changes_the_last_message() -> None:
    root = prompts(branches(conversations=1))["root-1"]
    for before, after in zip(root[-3:], root[-2:], strict=False):
        assert before[:-1] == after[:-1]
        assert before[-1] != after[-1]


def test_longer_texts_begin_with_shorter_ones() -> None:
    assert workloads.text("a", 100).startswith(workloads.text("a", 50))
    assert workloads.text("a", 100) != workloads.text("b", 100)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(one: list[int], other: list[int]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one) == len(other)
