"""Who asks for what, and when: agents drawn at random, or those of a run that was recorded.

An agent sends one request at a time, and the next one a while after it has its answer. So what it asks for
does not depend on how quick the engines are, and when it asks does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

import msgspec

from carryback_server.bench.result import Request, Result
from carryback_server.bench.workloads import Conversation, Message


class Step(NamedTuple):
    """One request of an agent.

    Attributes:
        gap_s: from the last answer's end (of the first: from the agent's start) until it is sent.
        conversation: its id.
        prompt_tokens: of the prompt.
        common_tokens: leading ones of them that are the conversation's last prompt and answer; of a first prompt, that
            all conversations begin with.
        output_tokens: of the answer.
        is_first: of the conversation.
        is_named: the conversation's id comes with it; a first one without may be a one-shot, to the router.
        ends_turn: a person thinks next, rather than that a tool runs.
        is_cut: the answer ended at its greatest length, which is a turn's end to the router.
        at_s: it is not sent before, in seconds from the simulation's start.
    """

    gap_s: float
    conversation: str
    prompt_tokens: int
    common_tokens: int
    output_tokens: int
    is_first: bool = False
    is_named: bool = True
    ends_turn: bool = False
    is_cut: bool = False
    at_s: float = 0.0


@dataclass(frozen=True)
class Agent:
    """Somebody who has conversations, one after the other.

    Attributes:
        start_s: when it starts, in seconds from the simulation's start.
        is_endless: it goes on until the simulation ends; else to its last request.
    """

    start_s: float
    steps: Iterable[Step]
    is_endless: bool = False


class Population(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Agents at work, as they are drawn. Tokens and seconds are log-normal: a median, and a `_sigma`, the
    standard deviation of the logarithm.

    The defaults return as published traces of agents do: 86% of the requests come within 1 s of the last
    answer, 95% within 10 s. Those traces say nothing of the rest, and the tokens are a guess.

    Attributes:
        agents: how many there are.
        steps: requests of a turn, the mean (geometric).
        turns: turns of a conversation, the mean (geometric). Then the agent begins another one.
        tool_s, tool_sigma: that a quick tool takes,
        slow_tool_s, slow_tool_sigma: and a slow one, such as a test run,
        slow_tool_share: which one call in so many is.
        think_s, think_sigma: that a person takes between two turns.
        first_tokens, first_sigma: of a conversation's first prompt: system prompt, tools, a question.
        shared_tokens: of those, that all conversations begin with, at most.
        tool_tokens, tool_tokens_sigma: that a tool's result adds to the prompt.
        user_tokens, user_sigma: that a person's message adds.
        output_tokens, output_sigma: of an answer.
        max_context_tokens: a conversation that would get longer is summarised first,
        summary_tokens: to so many, behind its first prompt.
        history_share: an agent's first conversation has been going on, somewhere else, and is so much of
            the way to its greatest length already: uniform from 0 to this.
        anonymous_share: of the conversations, whose first request names none.
    """

    agents: int = 10_000
    steps: float = 28.0
    turns: float = 4.0
    tool_s: float = 0.22
    tool_sigma: float = 0.8
    slow_tool_s: float = 4.0
    slow_tool_sigma: float = 1.0
    slow_tool_share: float = 0.089
    think_s: float = 300.0
    think_sigma: float = 1.3
    first_tokens: float = 8_000.0
    first_sigma: float = 0.4
    shared_tokens: int = 0
    tool_tokens: float = 300.0
    tool_tokens_sigma: float = 1.1
    user_tokens: float = 100.0
    user_sigma: float = 1.0
    output_tokens: float = 120.0
    output_sigma: float = 0.8
    max_context_tokens: int = 60_000
    summary_tokens: int = 2_000
    history_share: float = 0.8
    anonymous_share: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, or infinite")
        if self.agents < 1 or self.steps < 1 or self.turns < 1:
            raise ValueError("there is at least 1 of agents, steps and turns")
        for name in ("slow_tool_share", "history_share", "anonymous_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is at most 1")
        if self.summary_tokens + 2 * self.first_tokens > self.max_context_tokens:
            raise ValueError(
                "max_context_tokens has to leave room for first_tokens, twice, and summary_tokens"
            )

    def draw(self, seed: int, ramp_s: float) -> Iterator[Agent]:
        """The agents. Each has a random generator of its own, so that what it does depends on nothing else.

        Args:
            ramp_s: over how long they start.
        """
        for number in range(self.agents):
            random = Random(f"{seed} {number}")
            yield Agent(random.random() * ramp_s, self._work(random, f"agent-{number}"), is_endless=True)

    def _work(self, random: Random, name: str) -> Iterator[Step]:
        number = 0
        gap_s = 0.0
        while True:
            number += 1
            share = random.random() * self.history_share if number == 1 else 0.0
            yield from self._conversation(random, f"{name}.{number}", gap_s, share)
            gap_s = random.lognormvariate(math.log(self.think_s), self.think_sigma) if self.think_s else 0.0

    def _conversation(self, random: Random, name: str, gap_s: float, share: float) -> Iterator[Step]:
        limit = self.max_context_tokens
        first = min(_tokens(random, self.first_tokens, self.first_sigma), int(2 * self.first_tokens))
        prompt = first + int(share * (limit - first))
        common = min(self.shared_tokens, first)
        is_first, is_named = True, random.random() >= self.anonymous_share
        turn_ends = 1 / self.steps
        while True:
            output = _tokens(random, self.output_tokens, self.output_sigma)
            ends_turn = random.random() < turn_ends
            yield Step(gap_s, name, prompt, common, output, is_first, is_named, ends_turn)
            is_first = False
            if ends_turn:
                if random.random() < 1 / self.turns:
                    return
                added = _tokens(random, self.user_tokens, self.user_sigma)
                gap_s = (
                    random.lognormvariate(math.log(self.think_s), self.think_sigma) if self.think_s else 0.0
                )
            else:
                added = _tokens(random, self.tool_tokens, self.tool_tokens_sigma)
                gap_s = self._tool(random)
            common = prompt + output
            prompt = common + added
            if prompt > limit:
                common, prompt = first, first + self.summary_tokens

    def _tool(self, random: Random) -> float:
        is_slow = random.random() < self.slow_tool_share
        median, sigma = (
            (self.slow_tool_s, self.slow_tool_sigma) if is_slow else (self.tool_s, self.tool_sigma)
        )
        return random.lognormvariate(math.log(median), sigma) if median else 0.0


def _tokens(random: Random, median: float, sigma: float) -> int:
    return max(round(random.lognormvariate(math.log(median), sigma)), 1) if median >= 1 else 1


def recorded(result: Result, arm: str | None = None) -> list[Agent]:
    """The agents of a bench run: each conversation is one, with its pauses and its tokens as they were.

    The answers of such a run have a length that was asked for, and so are cut.

    Args:
        arm: which one's requests; the first one's unless given.

    Raises:
        ValueError: there are none.
    """
    arm = arm or (result.requests[0].arm if result.requests else "")
    conversations: dict[str, list[Request]] = {}
    for request in result.requests:
        if request.arm == arm and not request.error:
            conversations.setdefault(request.conversation, []).append(request)
    if not conversations:
        raise ValueError(f"the run has no request of arm {arm!r} that went well")
    begun = min(request.started_s for each in conversations.values() for request in each)
    agents = []
    for name, requests in conversations.items():
        requests.sort(key=lambda request: request.started_s)
        agents.append(Agent(requests[0].started_s - begun, _recorded(name, requests)))
    return agents


def _recorded(name: str, requests: list[Request]) -> list[Step]:
    gaps = [
        max(then.started_s - before.started_s - before.duration_s, 0.0) for before, then in pairwise(requests)
    ]
    same_turn = [before.turn == then.turn for before, then in pairwise(requests)]
    steps = []
    for index, request in enumerate(requests):
        if index == 0:
            common = 0
        elif request.new_tokens is not None:
            common = request.prompt_tokens - request.new_tokens
        else:  # not known: as if nothing had been changed
            last = requests[index - 1]
            common = min(last.prompt_tokens + last.output_tokens, request.prompt_tokens)
        steps.append(
            Step(
                gaps[index - 1] if index else 0.0,
                name,
                request.prompt_tokens,
                common,
                max(request.output_tokens, 1),
                is_first=index == 0,
                ends_turn=index + 1 == len(requests) or not same_turn[index],
                is_cut=True,
            )
        )
    return steps


def planned(conversations: Sequence[Conversation]) -> list[Agent]:
    """The agents of a workload of `carryback bench`, or of a trace that it can read.

    There are no token counts in it: a word counts as a token, and so the counts of traces that have
    lengths instead of texts are right.
    """
    return [Agent(0.0, list(_planned(each))) for each in conversations]


def _planned(conversation: Conversation) -> Iterator[Step]:
    tools = [word for each in conversation.tools for word in str(each).split()]
    history: list[list[str]] = []
    before: list[str] = []
    for turn in conversation.turns:
        for number, step in enumerate(turn, 1):
            if step.keep is not None:
                del history[step.keep :]
            history += [_words(message) for message in step.messages]
            prompt = [*tools, *(word for each in history for word in each)] or [""]
            prompt += ["more"] * ((step.fill_to or 0) - len(prompt))
            common = next(
                (
                    place
                    for place, (one, other) in enumerate(zip(before, prompt, strict=False))
                    if one != other
                ),
                min(len(before), len(prompt)),
            )
            yield Step(
                step.wait_s,
                conversation.name,
                len(prompt),
                common,
                step.max_tokens,
                is_first=not before,
                ends_turn=number == len(turn),
                at_s=step.at_s,
            )
            # What it says nobody knows, but it is in the next prompt.
            history.append([f"answer {len(history)}"] * step.max_tokens)
            before = [*prompt, *history[-1]]


def _words(message: Message) -> list[str]:
    content = message.get("content")
    return (content if isinstance(content, str) else str(message)).split()
