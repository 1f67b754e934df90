"""Recorded conversations, from files in the forms of other benchmarks.

- vLLM's `benchmark_serving_multi_turn.py`: a JSON list of `{"id": ..., "messages": [{"role": ..., "content": ...}]}`;
  also ShareGPT's own form of it, `{"id": ..., "conversations": [{"from": "human", "value": ...}]}`.
- AIPerf's multi-turn JSONL: a session a line, `{"session_id": ..., "turns": [{"text": ..., "delay": ms}]}`.
- Mooncake's JSONL, as AIPerf extends it: a request a line, `{"timestamp": ms, "input_length": ...,
  "output_length": ..., "hash_ids": [...]}`. Instead of lengths it may have `text_input` or `messages`, and a
  `session_id` and a `delay` in ms. A session's lengths and texts are what each turn adds; without a session
  they are whole prompts, and a prompt that begins with all full blocks of an earlier one continues that one.

Recorded answers give the answers' lengths only: each conversation goes on with what the model says now. Where
only hashes were recorded, each stands for words of its own, so that equal prefixes are equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from carryback_server.bench.workloads import Conversation, Message, Step, text

_CHARACTERS_A_TOKEN = 4
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "system": "system"}  # fmt: skip


class _ShareGptMessage(msgspec.Struct):
    role: str = msgspec.field(name="from")
    value: str = ""


class _Recorded(msgspec.Struct):
    """A conversation of vLLM's benchmark."""

    id: str | int = ""
    messages: list[Message] | None = None
    conversations: list[_ShareGptMessage] | None = None
    tools: list[Message] = []


class _Text(msgspec.Struct):
    contents: list[str]


class _SessionTurn(msgspec.Struct):
    text: str | None = None
    texts: list[str | _Text] = []
    role: str | None = None
    delay: float = 0.0
    timestamp: float | None = None
    output_length: int | None = None
    image: Any = None
    images: Any = None
    audio: Any = None
    audios: Any = None
    video: Any = None
    videos: Any = None

    @property
    def content(self) -> str:
        """Its text, all parts of it."""
        said = [self.text] if self.text is not None else []
        for each in self.texts:
            said += [each] if isinstance(each, str) else each.contents
        return "\n".join(said)


class _Session(msgspec.Struct):
    """A line of AIPerf's multi-turn form."""

    turns: list[_SessionTurn]
    session_id: str = ""


class _Row(msgspec.Struct):
    """A line of Mooncake's form."""

    timestamp: float | None = None
    delay: float = 0.0
    session_id: str = ""
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []
    text_input: str | None = None
    messages: list[Message] | None = None
    message_mode: Literal["history", "delta"] = "history"
    tools: list[Message] = []


def load(
    path: Path, *, answer_tokens: int, block_tokens: int = 512, speed: float = 1.0
) -> list[Conversation]:
    """The conversations of a file. The first request comes at once, the others as long after it as recorded.

    Args:
        path: in one of the forms above, which is found out.
        answer_tokens: of an answer whose length was not recorded.
        block_tokens: that each of the `hash_ids` stands for.
        speed: recorded times are divided by it.

    Raises:
        ValueError: the file has none of these forms; says where and why.
    """
    try:
        data = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if data.lstrip()[:1] == "[":
        made = _recorded(path, data, answer_tokens)
    else:
        lines = [
            (f"{path}:{number}", line) for number, line in enumerate(data.splitlines(), 1) if line.strip()
        ]
        if not lines:
            raise ValueError(f"{path}: the file is empty")
        first = _parsed(*_whole_or_first(path, data, lines), dict[str, Any])
        if "filetype" in first:
            raise ValueError(
                f"{path}: it says how to generate conversations; give those that vLLM's benchmark writes with --output-file"
            )
        made = (
            _sessions(lines, answer_tokens) if "turns" in first else _rows(lines, answer_tokens, block_tokens)
        )
    if not made:
        raise ValueError(f"{path}: no conversation in it")
    first_s = min(step.at_s for each in made for _, _, step in each.steps())

    def timed(step: Step) -> Step:
        return replace(step, at_s=(step.at_s - first_s) / speed, wait_s=step.wait_s / speed)

    return [replace(each, turns=tuple(tuple(map(timed, steps)) for steps in each.turns)) for each in made]


def _whole_or_first(path: Path, data: str, lines: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """A file that is one object over many lines, or the first of its lines."""
    return (str(path), data) if lines[0][1].strip() == "{" else lines[0]


def _parsed(where: str, line: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from error


# -- vLLM's benchmark


def _recorded(path: Path, data: str, answer_tokens: int) -> list[Conversation]:
    try:
        found = json.loads(data)  # its errors have the line
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    made = []
    for number, each in enumerate(found, 1):
        where = f"{path}: conversation {number}"
        try:
            one = msgspec.convert(each, _Recorded)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where}: {error}") from error
        turns = _turns(where, _messages(where, one), answer_tokens)
        if turns:
            made.append(Conversation(name=f"{one.id or number}", turns=turns, tools=tuple(one.tools)))
    _check_names(path, made)
    return made


def _messages(where: str, one: _Recorded) -> list[Message]:
    if one.messages is not None:
        return one.messages
    if one.conversations is None:
        raise ValueError(f"{where}: neither `messages` nor `conversations` in it")
    messages = []
    for number, each in enumerate(one.conversations, 1):
        if each.role not in _ROLES:
            raise ValueError(
                f"{where}: message {number}: from {each.role!r}; want one of {', '.join(_ROLES)}"
            )
        messages.append({"role": _ROLES[each.role], "content": each.value})
    return messages


def _turns(where: str, messages: Sequence[Message], answer_tokens: int) -> tuple[tuple[Step, ...], ...]:
    """A turn begins with a user's message; each answer, and what is said last, ends a step."""
    turns: list[list[Step]] = []
    said: list[Message] = []

    def ask(limit: int, calls: Sequence[Message] = ()) -> None:
        step = Step(messages=tuple(said), max_tokens=limit, calls=tuple(calls))
        if not turns or any(each["role"] == "user" for each in said):
            turns.append([])
        turns[-1].append(step)
        said.clear()

    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {number} has no role")
        if message["role"] != "assistant":
            said.append(message)
        elif said:  # an answer to nothing cannot be asked for
            ask(_length(message) or answer_tokens, message.get("tool_calls") or ())
    if said:
        ask(answer_tokens)
    return tuple(map(tuple, turns))


def _length(answer: Message) -> int:
    content = answer.get("content")
    return -(-len(content) // _CHARACTERS_A_TOKEN) if isinstance(content, str) else 0


# -- AIPerf's multi-turn form


def _sessions(lines: Sequence[tuple[str, str]], answer_tokens: int) -> list[Conversation]:
    sessions: dict[str, list[Step]] = {}
    for where, line in lines:
        session: _Session = _parsed(where, line, _Session)
        steps = sessions.setdefault(session.session_id or where.rpartition(":")[2], [])
        head: list[Message] = []
        for number, turn in enumerate(session.turns, 1):
            if any((turn.image, turn.images, turn.audio, turn.audios, turn.video, turn.videos)):
                raise ValueError(f"{where}: turn {number} has more than text, which cannot be replayed")
            if not turn.content:
                raise ValueError(f"{where}: turn {number} has no text")
            message = {"role": turn.role or "user", "content": turn.content}
            if message["role"] == "system":
                head.append(message)
                continue
            steps.append(
                Step(
                    messages=(*head, message),
                    max_tokens=turn.output_length or answer_tokens,
                    wait_s=turn.delay / 1000,
                    at_s=(turn.timestamp or 0.0) / 1000,
                )
            )
            head = []
    return [_one_step_turns(name, steps) for name, steps in sessions.items() if steps]


def _one_step_turns(name: str, steps: Sequence[Step], tools: Sequence[Message] = ()) -> Conversation:
    return Conversation(name=name, turns=tuple((step,) for step in steps), tools=tuple(tools))


# -- Mooncake's form


class _Prompts:
    """Whole prompts by their blocks: which conversation each continues."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last: dict[tuple[int, ...], str] = {}

    def continued(self, row: _Row) -> str | None:
        """The conversation whose last prompt this one begins with; the longest one wins."""
        for size in range(len(row.hash_ids), 0, -1):
            if (name := self._last.pop(tuple(row.hash_ids[:size]), None)) is not None:
                return name
        return None

    def add(self, row: _Row, name: str) -> None:
        full = (row.input_length or 0) // self._block_tokens
        if ids := tuple(row.hash_ids[:full]):
            self._last[ids] = name


def _rows(lines: Sequence[tuple[str, str]], answer_tokens: int, block_tokens: int) -> list[Conversation]:
    steps: dict[str, list[Step]] = {}
    tools: dict[str, list[Message]] = {}
    prompts = _Prompts(block_tokens)
    for where, line in lines:
        row: _Row = _parsed(where, line, _Row)
        number = where.rpartition(":")[2]
        name = row.session_id or prompts.continued(row) or number
        if not row.session_id:
            prompts.add(row, name)
        if row.output_length is not None and row.output_length < 1:
            raise ValueError(f"{where}: output_length is {row.output_length}; want at least 1")
        is_whole = not row.session_id or (row.messages is not None and row.message_mode == "history")
        steps.setdefault(name, []).append(
            Step(
                messages=_said(where, row, block_tokens),
                max_tokens=row.output_length or answer_tokens,
                keep=0 if is_whole else None,
                wait_s=row.delay / 1000,
                at_s=(row.timestamp or 0.0) / 1000,
            )
        )
        tools[name] = row.tools or tools.get(name, [])
    return [_one_step_turns(name, each, tools[name]) for name, each in steps.items()]


def _said(where: str, row: _Row, block_tokens: int) -> tuple[Message, ...]:
    given = [each is not None for each in (row.messages, row.text_input, row.input_length)]
    if sum(given) != 1:
        raise ValueError(f"{where}: want one of input_length, text_input and messages")
    if row.messages is not None:
        return tuple(row.messages)
    content = row.text_input
    if content is None:
        assert row.input_length is not None
        if row.input_length < 1:
            raise ValueError(f"{where}: input_length is {row.input_length}; want at least 1")
        content = " ".join(_blocks(where, row, row.input_length, block_tokens))
    return ({"role": "user", "content": content},)


def _blocks(where: str, row: _Row, length: int, block_tokens: int) -> Iterator[str]:
    """Words for each block, about a token each; for what no hash stands for, words of no other prompt."""
    for number in range(-(-length // block_tokens)):
        words = min(block_tokens, length - number * block_tokens)
        known = number < len(row.hash_ids)
        yield text(f"block {row.hash_ids[number]}" if known else f"{where} {number}", words)


def _check_names(path: Path, conversations: Sequence[Conversation]) -> None:
    seen = set()
    for each in conversations:
        if each.name in seen:
            raise ValueError(f"{path}: two conversations have the id {each.name!r}")
        seen.add(each.name)
