"""Why a request reused what it reused: keeps a conversation's last two requests, and compares them when asked.

Requests and answers are prompts and answers of clients: they stay in this process's memory, within a limit.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from carryback.wire import Reuse

from carryback_server.body import Body
from carryback_server.causes import (
    REASONS,
    Cause,
    Reason,
    answer_causes,
    differences,
    renamed,
    template_causes,
)
from carryback_server.endpoints import AnthropicMessages, Chat, Completions, Endpoint
from carryback_server.errors import ApiError
from carryback_server.lru import FairLru
from carryback_server.said import SETTINGS, Answered, Asked, Said, answered, asked, message
from carryback_server.state import Record

# Of a block, in a record.
DIGEST_BYTES = 16
# Of an answer; one that is longer is not kept.
MAX_ANSWER_BYTES = 2**20
# Tokens on either side of where prompts part, and characters of them that are shown.
_AROUND = 48
_BEFORE_CHARACTERS = 40
_AFTER_CHARACTERS = 60
# Conversations that are looked at for one that a new one continues.
_LOOK = 100
# Characters by which a message is found in a rendered prompt.
_PROBE = 60

Ask = Callable[[str, bytes], Awaitable[bytes]]
"Posts JSON to an engine's path, and has its answer; raises `CannotAsk` if there is none."

_encode = msgspec.json.Encoder().encode


class CannotAsk(Exception):
    """An engine did not answer, or refused; the message says why."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Detokenized(msgspec.Struct):
    prompt: str


@dataclass(eq=False)
class Kept:
    """One request.

    Attributes:
        key: the router's key of its decode hop.
        left_by: the key of the request that left what this one was offered; empty if it was offered nothing.
        held_tokens, block_size: how much that was, and the tokens of a block of it.
        holder: the engine that had it.
        named_by: the header or field of others that named its conversation; empty if none did.
        pieces: of its answer, as they were sent on.
    """

    tenant: str
    conversation: str
    turn: str
    step: int
    endpoint: Endpoint
    body: Body
    reuse: Reuse
    left_by: str = ""
    held_tokens: int = 0
    block_size: int = 0
    holder: str = ""
    prefill_engine: str = ""
    decode_engine: str = ""
    key: str = ""
    named_by: str = ""
    at: float = field(default_factory=time.time)
    is_streamed: bool = False
    pieces: list[bytes] = field(default_factory=list)
    answer_bytes: int = 0

    def keep(self, piece: bytes) -> None:
        """Take the next piece of the answer."""
        self.answer_bytes += len(piece)
        if self.answer_bytes <= MAX_ANSWER_BYTES:
            self.pieces.append(piece)
        else:
            self.pieces.clear()

    @property
    def size(self) -> int:
        """In bytes."""
        return self.body.size + sum(map(len, self.pieces))

    def asked(self) -> Asked:
        """What it asks."""
        return asked(self.endpoint, self.body)

    def answered(self) -> Answered | None:
        """What it was answered, as far as that is kept."""
        data = b"".join(self.pieces)
        return answered(self.endpoint, data, streamed=self.is_streamed) if data else None


class Explanations:
    """Keeps each conversation's last two requests, the least recently used forgotten first.

    Args:
        max_bytes: of all of them; 0: nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = FairLru[tuple[Kept, ...]](max_bytes)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def begin(self, kept: Kept, record: Record | None) -> None:
        """Keep a request that goes to its decode engine.

        Args:
            record: what it was offered.
        """
        if record is not None:
            kept.left_by, kept.holder = record.key, record.engine
            blocks = len(record.digests) // DIGEST_BYTES
            kept.held_tokens, kept.block_size = record.tokens, record.tokens // max(blocks, 1)
        last = self.get(kept.tenant, kept.conversation)
        # Of requests that ran at the same time, the one that left the record.
        before = [each for each in last if each.key == kept.left_by] or last
        self._store((*before[-1:], kept))

    def settle(self, kept: Kept) -> None:
        """A request is over, and all of its answer is there."""
        last = self.get(kept.tenant, kept.conversation)
        if kept in last:
            self._store(last)

    def get(self, tenant: str, conversation: str) -> tuple[Kept, ...]:
        """The last request of a conversation, and before it the one that it is to be compared with."""
        return self._kept.get(tenant, conversation) or ()

    def newest(self, tenant: str) -> Iterator[Kept]:
        """The last request of each of a tenant's conversations, the most recent first."""
        return (requests[-1] for requests in self._kept.newest(tenant))

    def forget(self, tenant: str, conversation: str) -> None:
        """A conversation is over."""
        self._kept.pop(tenant, conversation)

    def _store(self, requests: tuple[Kept, ...]) -> None:
        tenant, conversation = requests[-1].tenant, requests[-1].conversation
        size = sum(each.size for each in requests)
        # One that takes a large part of it all would push out everybody else.
        if size > self._max_bytes / 4:
            self.forget(tenant, conversation)
        else:
            self._kept.add(tenant, conversation, requests, size)


@dataclass
class Parting:
    """Where a prompt leaves what is held.

    Attributes:
        token: the first token that differs, from 0.
        until: where it parts at the latest, if it is known no better: before this token.
        where: the part of the newer prompt, in words.
        message: its message's index in the request; None if it is in none.
        before: the text that both have right before it.
        held, new: the text from there on.
    """

    token: int | None
    until: int | None
    where: str
    message: int | None
    before: str
    held: str
    new: str


@dataclass
class Explanation:
    """What `GET /admin/conversations/{tenant}/{id}/explain` says.

    Attributes:
        held_tokens: what it was offered; None if that was nothing.
        lost_tokens: how many of those are not the prompt's.
        means, do: the reason in a sentence, and what to do about it.
        compared: how the two requests were compared: `tokens`, as an engine renders them, or `messages`, or
            `nothing`.
        why: why not by tokens.
    """

    conversation: str
    tenant: str
    turn: str
    step: int
    endpoint: str
    at: float
    prefill_engine: str
    decode_engine: str
    outcome: str
    reason: str
    prompt_tokens: int
    reused_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    held_tokens: int | None
    means: str
    do: str
    lost_tokens: int | None = None
    compared: str = "nothing"
    why: str = ""
    parting: Parting | None = None
    causes: list[Cause] = field(default_factory=list)
    object: str = "conversation.explanation"


async def explain(requests: Sequence[Kept], ask: Ask, others: Iterable[Kept] = ()) -> Explanation:
    """Compare a conversation's last request with the one before.

    Args:
        requests: as `Explanations.get` has them, at least one.
        ask: an engine that has the model.
        others: the last requests of other conversations, the most recent first.
    """
    new, reuse = requests[-1], requests[-1].reuse
    reason = REASONS.get(reuse.reason, Reason(f"The engine says: {reuse.reason}."))
    result = Explanation(
        new.conversation,
        new.tenant,
        new.turn,
        new.step,
        new.endpoint.path,
        new.at,
        new.prefill_engine,
        new.decode_engine,
        reuse.outcome,
        reuse.reason,
        reuse.prompt_tokens,
        reuse.tokens,
        reuse.cached,
        reuse.recomputed,
        new.held_tokens if new.left_by else None,
        reason.means,
        reason.do,
    )
    if len(requests) == 1 or (new.left_by and requests[0].key != new.left_by):
        if reuse.reason == "new" and (before := _continued(new, others)) is not None:
            result.compared, result.causes = "messages", [renamed(new.named_by, before.conversation)]
        elif reuse.reason != "new":
            result.why = (
                "the request before this one is not kept here: another router or worker served it, or it was "
                "dropped to make room (explain_bytes)"
            )
        return result
    if reuse.outcome == "hit":
        return result  # nothing parts: what was computed is new, or fills no block
    try:
        await _Comparison(requests[0], new, ask).fill(result)
    except ApiError as error:
        result.why = error.message
    return result


def _continued(new: Kept, others: Iterable[Kept]) -> Kept | None:
    """The other conversation that a request's messages continue, if the same hint named both."""
    if not new.named_by or (now := _messages(new)) is None:
        return None
    for other in islice(others, _LOOK):
        if other.conversation == new.conversation or other.named_by != new.named_by:
            continue
        before = _messages(other) if other.body.size <= new.body.size else None
        if before and len(before) < len(now) and now[: len(before)] == before:
            return other
    return None


def _messages(kept: Kept) -> list[dict[str, Any]] | None:
    with suppress(ApiError):
        if (said := kept.endpoint.messages(kept.body)) is not None:
            return said[0]
    return None


class _Comparison:
    """Of two requests."""

    def __init__(self, old: Kept, new: Kept, ask: Ask) -> None:
        self._old, self._new, self._ask = old, new, ask
        self._old_asked, self._new_asked = old.asked(), new.asked()
        self._causes = differences(self._old_asked, self._new_asked)
        # Where the prefill engine found the first block that is not the same.
        self._bounds: tuple[int, int] | None = None
        reuse = new.reuse
        if reuse.reason == "history_changed" and new.block_size:
            # Without anything read, what is cached is another conversation's.
            same = reuse.tokens + reuse.cached if reuse.tokens else 0
            self._bounds = same, same + new.block_size

    async def fill(self, result: Explanation) -> None:
        try:
            old = await self._tokens(self._old, self._old_asked)
            new = await self._tokens(self._new, self._new_asked)
            result.compared = "tokens"
            await self._by_tokens(result, old, new)
        except CannotAsk as error:
            result.compared, result.why = "messages", str(error)
            self._by_messages(result)
        if self._bounds is not None and result.held_tokens is not None:
            result.lost_tokens = result.held_tokens - self._bounds[0]

    async def _by_tokens(self, result: Explanation, old: list[int], new: list[int]) -> None:
        same = common_prefix(old, new)
        if self._bounds is not None and same >= self._bounds[1]:
            await self._elsewhere(result, new)
        elif same < len(old):
            await self._in_prompt(result, old, new, same)
        else:
            await self._in_answer(result, old, new)

    async def _in_prompt(self, result: Explanation, old: list[int], new: list[int], at: int) -> None:
        """They part within what was asked before."""
        before, held = await self._around(old, at)
        _, other = await self._around(new, at)
        message = await self._message_at(new, at)
        causes = self._causes or template_causes(before + held, before + other)
        # A message's own cause first, if that message is where it is.
        result.causes = sorted(causes, key=lambda each: each.message is None or each.message != message)
        first = result.causes[0]
        place = first.message if first.message is not None else message
        where = "the tools" if first.code.startswith("tool") else self._where(place)
        result.parting = Parting(at, None, where, place, before, held, other)

    async def _in_answer(self, result: Explanation, old: list[int], new: list[int]) -> None:
        """All that was asked before is there; what was generated is not, or not in its tokens."""
        answer = self._old.answered()
        said = _spoken(answer.said) if answer is not None else ""
        rendered = await self._text(new[len(old) :])
        spelled = (
            await self._tokenized({"prompt": said, "add_special_tokens": False, **self._model()})
            if said
            else []
        )
        at = len(old) + common_prefix(spelled, new[len(old) :])
        until = None
        if self._bounds is not None and not self._bounds[0] <= at < self._bounds[1]:
            at, until = max(self._bounds[0], len(old)), self._bounds[1]
        causes = answer_causes(self._old_asked, self._new_asked, answer, rendered)
        if self._bounds is None and causes[0].code == "respelled":
            return  # nothing says that it is
        result.causes = causes
        before, other = await self._around(new, at)
        if until is None:
            held = await self._text(spelled[at - len(old) :][:_AROUND])
        else:
            held = said[common_prefix(said, rendered) :]
        message = causes[0].message
        where = f"the answer, {self._where(message)}"
        result.parting = Parting(at, until, where, message, before, _cut(held), other)

    async def _elsewhere(self, result: Explanation, new: list[int]) -> None:
        """The tokens agree where the KV does not."""
        assert self._bounds is not None
        low, high = self._bounds
        before, other = await self._around(new, low)
        message = await self._message_at(new, low)
        result.causes = self._causes or [
            Cause(
                "kv_differs",
                "The tokens are the same, and their KV is not: an image, an adapter or a salt changed.",
                "Keep attachments, model and cache_salt the same for a whole conversation.",
            )
        ]
        first = result.causes[0].message
        place = first if first is not None else message
        result.parting = Parting(low, high, self._where(place), place, before, other, other)

    def _by_messages(self, result: Explanation) -> None:
        """As far as can be seen without an engine."""
        result.causes = self._causes
        if not self._causes and self._bounds is not None:
            result.causes = answer_causes(self._old_asked, self._new_asked, self._old.answered(), None)
        if not result.causes:
            return
        first = result.causes[0]
        token, until = self._bounds or (None, None)
        held, other = "", ""
        if first.message is not None:
            held = self._spoken_at(self._old_asked, first.message)
            other = self._spoken_at(self._new_asked, first.message)
        same = common_prefix(held, other)
        start = max(same - _BEFORE_CHARACTERS, 0)
        where = "the tools" if first.code.startswith("tool") else self._where(first.message)
        result.parting = Parting(
            token, until, where, first.message, held[start:same], _cut(held[same:]), _cut(other[same:])
        )

    # -- what an engine says

    async def _tokens(self, kept: Kept, asked: Asked) -> list[int]:
        """A request's prompt.

        Raises:
            CannotAsk: no engine answers, or it renders that otherwise than the request was.
        """
        if isinstance(kept.endpoint, Completions) and isinstance(prompt := kept.body.get("prompt"), list):
            return prompt
        tokens = await self._tokenized(_to_tokenize(kept, asked))
        counted = kept.reuse.prompt_tokens
        if counted and counted != len(tokens):
            raise CannotAsk(
                f"/tokenize renders a request of {kept.endpoint.path} to {len(tokens)} tokens, and the engine "
                f"that served it had {counted}"
            )
        return tokens

    async def _tokenized(self, request: dict[str, Any]) -> list[int]:
        answer = await self._ask("/tokenize", _encode(request))
        try:
            return msgspec.json.decode(answer, type=_Tokenized).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CannotAsk("/tokenize: the engine's answer cannot be read") from error

    async def _text(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        answer = await self._ask("/detokenize", _encode({"tokens": tokens, **self._model()}))
        try:
            return msgspec.json.decode(answer, type=_Detokenized).prompt
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CannotAsk("/detokenize: the engine's answer cannot be read") from error

    async def _around(self, tokens: list[int], at: int) -> tuple[str, str]:
        """The text before and from a token on."""
        before = await self._text(tokens[max(at - _AROUND, 0) : at])
        after = await self._text(tokens[at : at + _AROUND])
        return before[-_BEFORE_CHARACTERS:].lstrip("\ufffd"), _cut(after)

    async def _message_at(self, tokens: list[int], at: int) -> int | None:
        """The message of the newer request that a token is in, told from where the messages' texts are."""
        text = await self._text(tokens[: at + _AROUND])
        end = len(await self._text(tokens[:at]))
        found, position, behind = None, 0, 0
        for index, each in enumerate(self._new_asked.messages):
            # What is rendered for certain: a template may drop reasoning.
            words = (each.text or "".join(call.arguments for call in each.calls)).strip()
            start = text.find(words[:_PROBE], position) if words else -1
            if start > end:
                break
            if start >= 0:
                found, position, behind = index, start + len(words[:_PROBE]), start + len(words)
        if found is None:
            return None
        if behind < end and found + 1 < len(self._new_asked.messages):
            found += 1  # what is behind a message's text begins the next one
        return found - self._new_asked.first

    def _model(self) -> dict[str, str]:
        return {"model": self._new_asked.model} if self._new_asked.model else {}

    # -- words

    def _where(self, message: int | None) -> str:
        if message is None:
            return "the prompt"
        if message < 0:
            return "the system prompt"
        messages = self._new_asked.messages
        at = message + self._new_asked.first
        if at >= len(messages):
            return "the end of the prompt"
        return (
            "the prompt"
            if messages[at].role in ("prompt", "tokens")
            else f"message {message} ({messages[at].role})"
        )

    def _spoken_at(self, asked: Asked, message: int) -> str:
        at = message + self._new_asked.first
        return _spoken(asked.messages[at]) if 0 <= at < len(asked.messages) else ""


def _to_tokenize(kept: Kept, asked: Asked) -> dict[str, Any]:
    """The request for `/tokenize` that renders a prompt as its endpoint does.

    vLLM 0.32 (`vllm/entrypoints/serve/tokenize/protocol.py`).
    """
    body = kept.body
    request: dict[str, Any] = {"model": asked.model} if asked.model else {}
    if isinstance(kept.endpoint, Completions):
        request["prompt"] = body.get("prompt")
        if body.has("add_special_tokens"):
            request["add_special_tokens"] = body.get("add_special_tokens")
        return request
    taken = set(SETTINGS) - {"documents", "reasoning_effort", "reasoning", "thinking", "output_config"}
    request |= {name: value for name, value in asked.settings.items() if name in taken}
    words: dict[str, Any] = {
        name: asked.settings[name] for name in ("documents", "reasoning_effort") if name in asked.settings
    }
    given = request.get("chat_template_kwargs") or {}
    if "reasoning_effort" in words and "enable_thinking" not in given:
        words["enable_thinking"] = words["reasoning_effort"] != "none"
    if words:
        request["chat_template_kwargs"] = {**given, **words}
    if isinstance(kept.endpoint, Chat):
        request["messages"] = body.get("messages")
        if asked.tools:
            request["tools"] = asked.tools
        return request
    # Engines turn these into a chat, too.
    if isinstance(kept.endpoint, AnthropicMessages):
        given_messages = (kept.endpoint.messages(body) or ([], None))[0]
        request["messages"] = [each for given in given_messages for each in _apart(given)]
    else:
        request["messages"] = _joined(asked.messages)
    if asked.tools:
        request["tools"] = [_as_function(tool) for tool in asked.tools]
    return request


def _apart(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as messages of a chat: results of tools are messages of their own."""
    content = given.get("content")
    blocks = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    results = [each for each in blocks if each.get("type") == "tool_result"]
    for block in results:
        inner = block.get("content")
        texts = (
            [message({"role": "tool", "content": [part]}).text for part in inner]
            if isinstance(inner, list)
            else [inner]
        )
        yield {"role": "tool", "tool_call_id": "call", "content": "\n".join(each or "" for each in texts)}
    if not results:
        yield _as_chat(message(given))
    elif rest := [each for each in blocks if each not in results]:
        yield _as_chat(message({**given, "content": rest}))


def _joined(messages: list[Said]) -> list[dict[str, Any]]:
    """Items of a response as messages of a chat: those of one answer are one message, as far as they can be."""
    chat: list[dict[str, Any]] = []
    for said in messages:
        added, last = _as_chat(said), chat[-1] if chat else {}
        is_more = said.role == last.get("role") == "assistant"
        if is_more and not (last.keys() & added.keys()) - {"role", "tool_calls"}:
            calls = [*last.get("tool_calls", []), *added.get("tool_calls", [])]
            last |= added | ({"tool_calls": calls} if calls else {})
        else:
            chat.append(added)
    return chat


def _as_chat(said: Said) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": said.role}
    if said.text or not (said.reasoning or said.calls):
        chat["content"] = said.text
    if said.reasoning:
        chat["reasoning"] = said.reasoning
    if said.calls:
        chat["tool_calls"] = [
            {"id": "call", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    if said.role == "tool":
        chat["tool_call_id"] = "call"
    return chat


def _as_function(tool: Any) -> Any:
    """A tool of the Responses API or of Anthropic's, as a chat has it."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    parameters = tool.get("parameters", tool.get("input_schema"))
    return {
        "type": "function",
        "function": {**function, **({"parameters": parameters} if parameters else {})},
    }


def _spoken(said: Said) -> str:
    """All text of a message, in the order in which a model says it."""
    return said.reasoning + said.text + "".join(call.arguments for call in said.calls)


def common_prefix(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many leading things are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


def _cut(text: str) -> str:
    return text[:_AFTER_CHARACTERS].rstrip("\ufffd")
