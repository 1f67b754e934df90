"""What is asked: conversations as plain data, the same for equal options and seed.

No model has to be good for them: tool calls are given, not asked of it, and each answer has a fixed length.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

# Common words, which are a token each in most vocabularies.
_COMMON = (
    "about after again all also always and another any area around ask back because before begin between book "
    "both business call case change child city come company could country day different do down each early "
    "end even every fact family far feel few find first follow form friend general give good great group hand "
    "head help high home house how idea important in into job keep kind know large last later learn leave less "
    "life like line little live long look make man many may mean might money month more most move much must "
    "name need never new next night no now number of off old on one open order other our out over own part "
    "people place plan play point power present problem program public question read really right room run "
    "same school see seem service set several she should show side small so some start state still story "
    "student study such system take tell than that the their them then there these they thing think this "
    "those time to today together too try turn two under until up use very want war water way we week well "
    "what when where which while who why will with without woman word work world would write year you young"
)
_WORDS = _COMMON.split()

# Spread of the log-normal waits: the 90th percentile is 2.8 times the median.
_WAIT_SIGMA = 0.8


@dataclass(frozen=True, kw_only=True)
class Step:
    """One request of a conversation.

    Attributes:
        messages: what comes behind the history.
        max_tokens: how many the answer has, neither more nor fewer.
        keep: messages of the history that stay, from its start; None: all of them.
        calls: tool calls that its answer is given in the history, whatever the model said.
        wait_s: since the answer before.
        at_s: not before that many seconds of the run.
        fill_to: tokens that the prompt should have; its last message is made longer until it has.
        group: see `result.Request`.
        is_measured: see there.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    keep: int | None = None
    calls: tuple[Message, ...] = ()
    wait_s: float = 0.0
    at_s: float = 0.0
    fill_to: int | None = None
    group: str = ""
    is_measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns, each of one or more steps.

    Attributes:
        name: unique within the workload.
        tools: of all its requests.
        parent: the conversation that it was forked from, an earlier one of the workload; empty if none.
        parent_turn: the turn of it behind which it goes on.
    """

    name: str
    turns: tuple[tuple[Step, ...], ...]
    tools: tuple[Message, ...] = ()
    parent: str = ""
    parent_turn: int = 0

    def steps(self) -> Iterator[tuple[int, int, Step]]:
        """Number of the turn, number of the step in it, and the step; both from 1."""
        for turn, steps in enumerate(self.turns, 1):
            for number, step in enumerate(steps, 1):
                yield turn, number, step


def text(seed: str, words: int) -> str:
    """Words drawn at random; a shorter text of the same seed is the beginning of a longer one."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def warm_up() -> Conversation:
    """Two short turns: whatever is done once only, such as that engines connect, is done then."""
    steps = [
        Step(messages=_said("user", said), max_tokens=4, is_measured=False)
        for said in (text("warm-up", 256), "Go on.")
    ]
    return Conversation(name="warm-up", turns=tuple((step,) for step in steps))


def agent(
    *,
    conversations: int,
    turns: int,
    steps: int,
    system_tokens: int,
    result_tokens: int,
    answer_tokens: int,
    tool_s: float,
    seed: int,
) -> list[Conversation]:
    """Tool loops: a long prompt, and short tool results that each come with a request of their own.

    Args:
        steps: requests a turn; all but the last are answered with a tool call.
        system_tokens, result_tokens: about so many.
        tool_s: median of the tools' running times, which are log-normal.
    """
    made = []
    for number in range(conversations):
        rng = random.Random(f"{seed} agent {number}")
        # All agents are told the same; what differs begins with the first question.
        head = {"role": "system", "content": f"You are an agent.\n{text(f'{seed} system', system_tokens)}"}
        all_turns = []
        for turn in range(1, turns + 1):
            first: tuple[Message, ...] = _said("user", f"Task {turn}: {text(f'{seed} {number} {turn}', 24)}?")
            if turn == 1:
                first = (head, *first)
            loop = []
            for step in range(1, steps + 1):
                key = f"{seed} {number} {turn} {step}"
                call = _call(f"call_{turn}_{step}", text(key, 3))
                is_last = step == steps
                loop.append(
                    Step(
                        messages=first,
                        max_tokens=answer_tokens,
                        calls=() if is_last else (call,),
                        wait_s=_wait(rng, tool_s) if step > 1 else 0.0,
                        group=str(turn),
                    )
                )
                first = ({"role": "tool", "tool_call_id": call["id"], "content": text(key, result_tokens)},)
            all_turns.append(tuple(loop))
        made.append(Conversation(name=f"agent-{number + 1}", turns=tuple(all_turns), tools=_TOOLS))
    return made


def chat(
    *, conversations: int, turns: int, message_tokens: int, answer_tokens: int, think_s: float, seed: int
) -> list[Conversation]:
    """People who read an answer and think before they go on.

    Args:
        message_tokens: about so many in each message.
        think_s: median of the times that they take, which are log-normal.
    """
    made = []
    for number in range(conversations):
        rng = random.Random(f"{seed} chat {number}")
        steps = [
            Step(
                messages=_said("user", text(f"{seed} {number} {turn}", message_tokens)),
                max_tokens=answer_tokens,
                wait_s=_wait(rng, think_s) if turn > 1 else 0.0,
                group=str(turn),
            )
            for turn in range(1, turns + 1)
        ]
        made.append(Conversation(name=f"chat-{number + 1}", turns=tuple((step,) for step in steps)))
    return made


def paper(
    *, sizes: Sequence[int], repeats: int, message_tokens: int, answer_tokens: int, seed: int
) -> list[Conversation]:
    """The published measurement: one conversation whose prompt grows, and short turns at each size.

    A turn that is not measured brings the prompt to each size; `repeats` measured turns follow it, whose
    prompts are longer than the size only by what they add.

    Args:
        sizes: tokens of the prompts, growing.
        message_tokens: about so many new ones in each measured turn.
    """
    steps = []
    for size in sizes:
        grow = _said("user", "Read this: ")
        steps.append(
            Step(messages=grow, max_tokens=answer_tokens, fill_to=size, group=str(size), is_measured=False)
        )
        for number in range(repeats):
            messages = _said("user", text(f"{seed} {size} {number}", message_tokens))
            steps.append(Step(messages=messages, max_tokens=answer_tokens, group=str(size)))
    return [Conversation(name="paper", turns=tuple((step,) for step in steps))]


def branching(
    *,
    conversations: int,
    turns: int,
    branches: int,
    branch_turns: int,
    edits: int,
    message_tokens: int,
    answer_tokens: int,
    seed: int,
) -> list[Conversation]:
    """Conversations that go on in several ways from one state, and in which earlier messages are changed.

    Args:
        turns: until the state.
        branches: ways from there: the conversation itself, and forks with names of their own.
        branch_turns: turns of each of them.
        edits: how often the conversation then goes back by one turn and says something else there.
        message_tokens: about so many in each message.
    """

    def turn(key: str, group: str, keep: int | None = None) -> tuple[Step, ...]:
        messages = _said("user", text(f"{seed} {key}", message_tokens))
        return (Step(messages=messages, max_tokens=answer_tokens, keep=keep, group=group),)

    made = []
    for number in range(1, conversations + 1):
        name = f"root-{number}"
        own = [turn(f"{name} {each}", "shared") for each in range(turns)]
        own += [turn(f"{name} 0 {each}", "branch") for each in range(branch_turns)]
        # A turn is two messages; the last question and its answer go.
        keep = 2 * (len(own) - 1)
        own += [turn(f"{name} edit {each}", "edit", keep) for each in range(edits)]
        made.append(Conversation(name=name, turns=tuple(own)))
        for branch in range(1, branches):
            others = [turn(f"{name} {branch} {each}", "branch") for each in range(branch_turns)]
            made.append(
                Conversation(
                    name=f"{name}-branch-{branch}", turns=tuple(others), parent=name, parent_turn=turns
                )
            )
    return made


def _said(role: str, content: str) -> tuple[Message, ...]:
    return ({"role": role, "content": content},)


def _call(name: str, query: str) -> Message:
    arguments = json.dumps({"query": query})
    return {"id": name, "type": "function", "function": {"name": "search", "arguments": arguments}}


def _wait(rng: random.Random, median_s: float) -> float:
    return rng.lognormvariate(math.log(median_s), _WAIT_SIGMA) if median_s else 0.0


def _tool(name: str, description: str, argument: str) -> Message:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


_TOOLS = (
    _tool("search", "Find passages in the documents.", "query"),
    _tool("read", "Read a document.", "name"),
    _tool("run", "Run a program and return what it prints.", "code"),
)
