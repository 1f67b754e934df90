"""Takes a workload through all arms, so that what else the machine does hits them alike.

One conversation after the other (`concurrency` 1): each step runs in every arm, one right after the other, and
which of them is first rotates. With several at a time that would not be fair: the requests of one arm would
wait behind those of another. Then the arms run the whole workload one after the other, each by itself.

All arms get the same prompts. The first one is the reference: the history goes on with its answers, and
the others' are compared with them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import aiohttp
from carryback import wire

from carryback_server.bench import workloads
from carryback_server.bench.client import Client
from carryback_server.bench.engine_metrics import EngineMetrics
from carryback_server.bench.result import Request
from carryback_server.bench.workloads import Conversation, Message, Step
from carryback_server.explain import common_prefix

RELEASE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Arm:
    """One way to be served.

    Attributes:
        headers: more of them for each request.
        is_router: conversations can be released when they are over.
    """

    name: str
    client: Client
    headers: Mapping[str, str] = field(default_factory=dict)
    is_router: bool = True


# A step's place: conversation, turn, step.
_Place = tuple[str, int, int]


class Run:
    """A workload on its way. What was measured so far can be read at any time.

    Args:
        arms: the reference first.
        conversations: forks come after what they were forked from.
        concurrency: conversations at a time.
        metrics: of the engines, if they can be reached.

    Attributes:
        requests: those that have ended, in this order.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        conversations: Sequence[Conversation],
        *,
        seed: int = 0,
        concurrency: int = 1,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._arms = arms
        self._conversations = conversations
        self._seed = seed
        self._concurrency = concurrency
        self._metrics = metrics
        self._forks = defaultdict[str, list[Conversation]](list)
        for each in conversations:
            self._forks[each.parent].append(each)
        # Unknown to any router that has served another run.
        self._name = uuid.uuid4().hex[:8]
        self._rounds = 0
        self._reference: dict[_Place, _Said] = {}
        # Where conversations go on that were forked: what was said until the end of a turn.
        self._histories: dict[tuple[str, int], list[Message]] = {}
        self._tokens: dict[tuple[str, int, str], list[int]] = {}
        self._on_request: Callable[[Request], object] = lambda request: None
        self.requests: list[Request] = []
        self.started = time.monotonic()

    @property
    def is_interleaved(self) -> bool:
        """The arms run step by step, not one after the other."""
        return self._concurrency == 1

    @property
    def total(self) -> int:
        """Requests of the whole run, those that warm up included."""
        steps = sum(1 for each in (workloads.warm_up(), *self._conversations) for _ in each.steps())
        return steps * len(self._arms)

    async def __call__(self, on_request: Callable[[Request], object] = lambda request: None) -> None:
        """Do all of it, beginning with a warm-up.

        Args:
            on_request: called with each request that has ended.
        """
        self._on_request = on_request
        await self._family(workloads.warm_up(), self._arms, time.monotonic())
        for arms in [self._arms] if self.is_interleaved else [[arm] for arm in self._arms]:
            await self._took(None)
            await self._all(arms)
            if not self.is_interleaved:
                await self._took(arms[0].name)

    async def _all(self, arms: Sequence[Arm]) -> None:
        room = asyncio.Semaphore(self._concurrency)
        started = time.monotonic()

        async def one(each: Conversation) -> None:
            first = next(each.steps())[2]  # until it is due, it takes nobody's room
            await _until(started + first.at_s)
            async with room:
                await self._family(each, arms, started)

        async with asyncio.TaskGroup() as tasks:
            for each in self._forks[""]:
                tasks.create_task(one(each))

    async def _family(self, conversation: Conversation, arms: Sequence[Arm], started: float) -> None:
        """A conversation, and those that were forked from it."""
        try:
            await self._conversation(conversation, arms, started)
            for fork in self._forks[conversation.name]:
                await self._family(fork, arms, started)
        finally:
            await self._release(conversation, arms)

    async def _conversation(self, conversation: Conversation, arms: Sequence[Arm], started: float) -> None:
        """All its steps; ends early if the reference has no answer to go on with."""
        origin = conversation.parent, conversation.parent_turn
        if conversation.parent and origin not in self._histories:
            return  # its parent ended early
        history = list(self._histories.get(origin, []))
        tokens = {arm.name: self._tokens.get((*origin, arm.name), []) for arm in arms}
        ended = time.monotonic()
        for turn, number, step in conversation.steps():
            place = conversation.name, turn, number
            await _until(max(started + step.at_s, ended + step.wait_s))
            if step.keep is not None:
                del history[step.keep :]
            history += await self._messages(place, step, history, conversation.tools)
            done = [
                await self._request(arm, conversation, place, step, history, tokens)
                for arm in self._in_turn(arms)
            ]
            ended = time.monotonic()
            said = self._reference[place]
            if said.error:
                return
            for request, logprobs in done:
                if request.arm != self._arms[0].name and not request.error:
                    request.is_identical = request.output == said.digest
                    if request.is_identical and logprobs:
                        gaps = (abs(one - other) for one, other in zip(logprobs, said.logprobs, strict=False))
                        request.logprob_gap = max(gaps, default=None)
            history.append(said.message(step))
            if self._forks[conversation.name]:
                self._histories[conversation.name, turn] = list(history)
                self._tokens |= {(conversation.name, turn, arm): each for arm, each in tokens.items()}

    def _in_turn(self, arms: Sequence[Arm]) -> list[Arm]:
        """Each time another one is first."""
        self._rounds += 1
        first = self._rounds % len(arms)
        return [*arms[first:], *arms[:first]]

    async def _messages(
        self, place: _Place, step: Step, history: Sequence[Message], tools: Sequence[Message]
    ) -> list[Message]:
        """What comes behind the history, with as many words as bring the prompt to its size."""
        if step.fill_to is None:
            return list(step.messages)
        *head, last = step.messages
        words = workloads.text(f"{self._seed} {place}", step.fill_to).split()

        def filled(count: int) -> list[Message]:
            return [*head, {**last, "content": last["content"] + " ".join(words[:count])}]

        # A word is a token or more, so the greatest number that fits is among these.
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            size = await self._arms[0].client.count([*history, *filled(middle)], tools)
            low, high = (middle, high) if size <= step.fill_to else (low, middle - 1)
        return filled(low)

    async def _request(
        self,
        arm: Arm,
        conversation: Conversation,
        place: _Place,
        step: Step,
        prompt: Sequence[Message],
        tokens: dict[str, list[int]],
    ) -> tuple[Request, list[float]]:
        """Ask, and write down what came; gives the log-probabilities beside it.

        Args:
            tokens: of the conversation's last prompt and answer, for each arm; brought up to date.
        """
        _, turn, number = place
        headers = {
            wire.CONVERSATION_ID: self._id(arm, conversation.name),
            wire.TURN_ID: str(turn),
            wire.TURN_STEP: str(number),
            **arm.headers,
        }
        if conversation.parent:
            headers[wire.CONVERSATION_PARENT] = self._id(arm, conversation.parent)
        answer = await arm.client.chat(
            prompt,
            conversation.tools,
            max_tokens=step.max_tokens,
            seed=self._seed,
            salt=f"{self._name}-{arm.name}",  # no arm finds what another one has computed
            headers=headers,
        )
        if arm is self._arms[0]:
            self._reference[place] = _Said(answer.text, answer.digest, answer.logprobs, answer.error)
        new = None
        if answer.prompt is not None:
            new = answer.prompt_tokens - common_prefix(answer.prompt, tokens[arm.name])
            tokens[arm.name] = answer.prompt + (answer.generated or [])
        reuse = answer.reuse
        request = Request(
            arm=arm.name,
            conversation=conversation.name,
            turn=turn,
            step=number,
            group=step.group,
            is_measured=step.is_measured,
            started_s=answer.started - self.started,
            prompt_tokens=answer.prompt_tokens or (reuse.prompt_tokens if reuse else 0),
            output_tokens=answer.output_tokens,
            new_tokens=new,
            reused_tokens=reuse.tokens if reuse else None,
            recomputed_tokens=reuse.recomputed if reuse else None,
            cached_tokens=reuse.cached if reuse else None,
            outcome=reuse.outcome if reuse else "",
            reason=reuse.reason if reuse else "",
            ttft_s=answer.ttft_s,
            duration_s=answer.duration_s,
            itl_s=answer.itl_s,
            output="" if answer.error else answer.digest,
            error=answer.error,
        )
        self.requests.append(request)
        self._on_request(request)
        if self.is_interleaved:
            await self._took(arm.name if step.is_measured else None)
        return request, answer.logprobs

    def _id(self, arm: Arm, conversation: str) -> str:
        """A conversation's id, which no other arm and no other run has."""
        digest = blake2b(conversation.encode(), digest_size=6).hexdigest()
        return f"bench-{self._name}-{arm.name}-{digest}"

    async def _release(self, conversation: Conversation, arms: Sequence[Arm]) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                for arm in arms:
                    if arm.is_router:
                        await arm.client.release(self._id(arm, conversation.name))

    async def _took(self, arm: str | None) -> None:
        if self._metrics is not None:
            await self._metrics.took(arm)


@dataclass(frozen=True)
class _Said:
    """An answer of the reference."""

    text: str
    digest: str
    logprobs: list[float]
    error: str

    def message(self, step: Step) -> Message:
        """It, as the history has it."""
        calls = {"tool_calls": list(step.calls)} if step.calls else {}
        return {"role": "assistant", "content": self.text, **calls}


async def _until(moment: float) -> None:
    """Wait for a moment of the monotonic clock."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
