"""Agents: conversations over several endpoints, with tools, forks, edits, and people who leave."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from carryback import wire
from stub_engine import CALL_MARKER
from stub_engine.prompts import CHAT, MESSAGES, RESPONSES

from chaos import answers
from chaos.answers import Said
from chaos.processes import Program
from chaos.verdict import Report

# Longer than all of the routers' timeouts one after the other, and a pause.
HANG_S = 60.0
TRIES = 10
_WORDS = [
    "the",
    "sea",
    "wind",
    "boat",
    "harbour",
    "winter",
    "lamp",
    "quiet",
    "stone",
    "letter",
    "answer",
    "garden",
    "number",
    "copper",
    "seven",
    "morning",
    "under",
    "again",
    "river",
    "paper",
    "window",
    "train",
    "little",
    "music",
    "cold",
    "bread",
    "silver",
    "question",
    "north",
    "engine",
    "table",
]
_SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}


# A response to be continued, and how many items of the history it stands for.
Previous = tuple[str, int]
NONE: Previous = ("", 0)


@dataclass(frozen=True)
class Item:
    """A part of a conversation.

    Attributes:
        call: id, name and arguments of the tool that the assistant calls.
        call_id: of the call that a tool's text answers.
    """

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    call: tuple[str, str, str] | None = None
    call_id: str = ""


class Agent:
    """One conversation.

    Args:
        pace_s: mean time between a turn's answer and the next turn.
    """

    def __init__(
        self, seed: str, turns: int, pace_s: float, routers: Sequence[Program],
        session: aiohttp.ClientSession, report: Report,
    ) -> None:  # fmt: skip
        self._rng = rng = random.Random(seed)
        self._turns = turns
        self._pace_s = pace_s
        self._routers = routers
        self._session = session
        self._report = report
        self._router = rng.choice(routers)
        self._path = rng.choices([CHAT, RESPONSES, MESSAGES], [6, 3, 2])[0]
        self._id = f"agent-{uuid.UUID(int=rng.getrandbits(128))}" if rng.random() < 0.7 else ""
        self._says_turns = bool(self._id) and rng.random() < 0.4
        self._has_tools = rng.random() < 0.6
        self._chains = self._path == RESPONSES and rng.random() < 0.6
        self._system = f"You are agent {seed}. {self._words(rng.randint(20, 120))}"
        self._history: list[Item] = []
        self._previous = NONE
        self._answered = 0

    async def run(self) -> None:
        """All turns."""
        for number in range(self._turns):
            is_last = number == self._turns - 1
            await self._turn(number, ends=is_last and self._rng.random() < 0.3)
            if not is_last:
                await asyncio.sleep(min(self._rng.expovariate(1 / self._pace_s), 6 * self._pace_s))
        self._report.conversations += 1

    async def _turn(self, number: int, *, ends: bool) -> None:
        rng = self._rng
        self._edit()
        asks_tool = self._has_tools and rng.random() < 0.35
        self._history.append(self._question(asks_tool))
        if not asks_tool and rng.random() < 0.07:
            await self._leave(number)
            if rng.random() < 0.3:
                self._history[-1] = self._question(False)
        others = []
        if not asks_tool and rng.random() < 0.07:
            fork = [*self._history[:-1], self._question(False)]
            others = [asyncio.create_task(self._ask(fork, number, 1, self._previous))]
        step = 1
        while (said := await self._ask(self._history, number, step, self._previous, ends=ends)) is not None:
            self._history.append(Item("assistant", said.text, said.call))
            if said.id and self._chains:
                self._previous = said.id, len(self._history)
            if said.call is None:
                break
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            self._history.append(Item("tool", self._words(rng.randint(5, 60)), call_id=said.call[0]))
            step += 1
        else:
            self._report.given_up += 1
            while self._history and (self._history[-1].role != "assistant" or self._history[-1].call):
                self._history.pop()
            self._previous = NONE
        for other in others:
            await other

    def _edit(self) -> None:
        """Sometimes the history is not what it was."""
        rng = self._rng
        questions = [index for index, item in enumerate(self._history) if item.role == "user"]
        if not questions or rng.random() > 0.08:
            return
        at = rng.choice(questions)
        if rng.random() < 0.5:
            del self._history[at:]  # the user goes back
        else:
            self._history[at] = self._question(False)  # an agent that shortens what it remembers
        self._previous = NONE

    def _question(self, asks_tool: bool) -> Item:
        words = self._words(self._rng.randint(10, 80))
        return Item("user", f"{words} {CALL_MARKER}" if asks_tool else words)

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=count))

    # -- requests

    async def _ask(
        self, history: list[Item], number: int, step: int, previous: Previous, *, ends: bool = False
    ) -> Said | None:
        """An answer, by whichever router gives one; None if none does."""
        fields: dict[str, Any] = {"stream": self._rng.random() < 0.6}
        if self._path == MESSAGES:
            fields["max_tokens"] = 200
        if not self._has_tools and self._rng.random() < 0.06:
            fields["max_output_tokens" if self._path == RESPONSES else "max_tokens"] = 12
        headers = self._headers(number, step) | ({wire.CONVERSATION_END: "true"} if ends else {})
        if self._rng.random() < 0.3:
            self._router = self._rng.choice(self._routers)
        for tries in range(TRIES):
            said = await self._try(history, fields, headers, previous)
            if said.has_ended and not said.problem:
                self._answered += 1
                return said
            if said.problem:
                return None
            if said.error == "response_not_found":
                previous = NONE
            self._router = self._routers[(self._routers.index(self._router) + 1) % len(self._routers)]
            await asyncio.sleep(min(0.1 * 2**tries, 2.0))
        return None

    def _headers(self, number: int, step: int) -> dict[str, str]:
        headers = {wire.CONVERSATION_ID: self._id} if self._id else {}
        if self._says_turns:
            headers |= {wire.TURN_ID: f"turn-{number}", wire.TURN_STEP: str(step)}
        return headers

    async def _leave(self, number: int) -> None:
        """Ask, and go away before the answer's end."""
        await self._try(
            self._history,
            {"stream": True, **({"max_tokens": 200} if self._path == MESSAGES else {})},
            self._headers(number, 1),
            self._previous,
            leave_after_s=self._rng.uniform(0.0, 1.2),
        )

    async def _try(
        self, history: list[Item], fields: dict[str, Any], headers: dict[str, str], previous: Previous,
        leave_after_s: float | None = None,
    ) -> Said:  # fmt: skip
        """One request to one router, judged."""
        router, started = self._router, time.monotonic()
        body = {"model": "stub", **self._body(history), **fields}
        sent = _chained(body, previous)
        received = bytearray()
        reuse = ""
        said = Said()
        try:
            async with asyncio.timeout(HANG_S if leave_after_s is None else leave_after_s):
                async with self._session.post(
                    router.url + self._path, json=sent, headers=headers
                ) as response:
                    kind = response.headers.get("Content-Type", "")
                    reuse = response.headers.get(wire.CARRYBACK_REUSE, "")
                    async for piece in response.content.iter_any():
                        received += piece
            if response.status != 200:
                said = answers.error_of(self._path, response.status, kind, bytes(received))
                outcome = f"{response.status} {said.error}"
                if response.status < 500 and said.error != "response_not_found":
                    said.problem = said.problem or f"refused: {bytes(received[:500])!r}"
            elif fields["stream"]:
                said = answers.stream(self._path, bytes(received))
                outcome = f"error event {said.error}" if said.error else "answer"
                if not said.has_ended and not said.error:
                    said.problem = said.problem or f"cut off silently: {bytes(received[-300:])!r}"
            else:
                said = answers.whole(self._path, bytes(received))
                outcome = "answer"
        except TimeoutError:
            said = answers.stream(self._path, bytes(received)) if received else Said()
            outcome = "left"
            if leave_after_s is None:
                outcome, said.problem = "hang", f"no end within {HANG_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            said = answers.stream(self._path, bytes(received)) if fields["stream"] else Said()
            outcome = "broken connection"
            if not router.was_out(started):
                said.problem = f"{router.name} broke off: {error!r}"
        if said.error and not said.problem:
            said.has_ended = False
        said.problem = answers.judge(self._path, body, said)
        if said.problem:
            what = f"{self._path} to {router.name}, {headers}: {said.problem}"
            self._report.failures.append(f"{what}\n  body: {json.dumps(sent)[:2000]}")
            outcome = "WRONG"
        self._report.note(outcome, reuse, has_history=self._answered > 0 and outcome == "answer")
        return said

    # -- bodies

    def _body(self, history: list[Item]) -> dict[str, Any]:
        tool = {"name": "look", "description": "Looks somewhere."}
        if self._path == CHAT:
            messages = [{"role": "system", "content": self._system}, *map(_chat_message, history)]
            tools: list[Any] = [{"type": "function", "function": {**tool, "parameters": _SCHEMA}}]
            body: dict[str, Any] = {"messages": messages}
        elif self._path == RESPONSES:
            tools = [{"type": "function", **tool, "parameters": _SCHEMA}]
            body = {"instructions": self._system, "input": [_response_item(item) for item in history]}
        else:
            tools = [{**tool, "input_schema": _SCHEMA}]
            body = {"system": self._system, "messages": [_message(item) for item in history]}
        return {**body, "tools": tools} if self._has_tools else body


def _chained(body: dict[str, Any], previous: Previous) -> dict[str, Any]:
    """The body without what the response stands for, which is named instead, if there is one."""
    name, covered = previous
    return {**body, "previous_response_id": name, "input": body["input"][covered:]} if name else body


def _chat_message(item: Item) -> dict[str, Any]:
    if item.role == "tool":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.text}
    if item.call is None:
        return {"role": item.role, "content": item.text}
    id, name, arguments = item.call
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _response_item(item: Item) -> dict[str, Any]:
    if item.role == "tool":
        return {"type": "function_call_output", "call_id": item.call_id, "output": item.text}
    if item.call is None:
        return {"role": item.role, "content": item.text}
    id, name, arguments = item.call
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def _message(item: Item) -> dict[str, Any]:
    if item.role == "tool":
        content = {"type": "tool_result", "tool_use_id": item.call_id, "content": item.text}
        return {"role": "user", "content": [content]}
    if item.call is None:
        return {"role": item.role, "content": item.text}
    id, name, arguments = item.call
    call = {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
    return {"role": "assistant", "content": [call]}
