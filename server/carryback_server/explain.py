"""Why a request reused what it reused: keeps a conversation's last requests, and compares two when asked.

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
from carryback.wire import Report, Reuse

from carryback_server.as_chat import to_tokenize
from carryback_server.body import Body
from carryback_server.causes import (
    REASONS,
    Cause,
    Reason,
    answer_causes,
    common_start,
    differences,
    left_out,
    renamed,
    respelled_calls,
    template_causes,
)
from carryback_server.endpoints import Completions, Endpoint
from carryback_server.errors import ApiError
from carryback_server.lru import FairLru
from carryback_server.said import (
    Answered,
    Asked,
    Said,
    answered,
    asked,
    first_answer,
)
from carryback_server.state import Location

# Of an answer; one that is longer is not kept.
MAX_ANSWER_BYTES = 2**20
# Tokens on either side of where prompts part, and characters of them that are shown.
_AROUND = 48
_BEFORE_CHARACTERS = 40
_AFTER_CHARACTERS = 60
# Conversations that are looked at for one that a new one continues, or begins as.
_LOOK = 100
_FRONT = ("model", "cache_salt", "tools", "system", "instructions")
# In a body, at least.
_BYTES_OF_A_TOKEN = 2
_NOT_KEPT = (
    "the request before this one is no longer kept: others of the conversation have come since, or it had to make room "
    "(explain_bytes)"
)
_NOT_HERE = (
    "the request before this one is not kept here: another router or worker served it, or this one did before it was "
    "started anew"
)
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
        left_by: the key of the request before it of its conversation; empty if there was none.
        left_tokens: how much that one left at a decode engine.
        left_here: whether this router served it.
        holder: the decode engine that had what was found, by its name.
        block_size: tokens of a block at its prefill engine; 0 if that is not known.
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
    left_tokens: int = 0
    left_here: bool = False
    holder: str = ""
    block_size: int = 0
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
    """Keeps each conversation's last requests, the least recently used forgotten first.

    Args:
        max_bytes: of all of them; 0: nothing is kept.
        router_id: what the keys of this router's requests begin with.
    """

    def __init__(self, max_bytes: int, router_id: str = "") -> None:
        self._max_bytes = max_bytes
        self._router_id = router_id
        self._kept = FairLru[tuple[Kept, ...]](max_bytes)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def begin(self, kept: Kept, location: Location | None, parent: str = "") -> None:
        """Keep a request that goes to its decode engine.

        Args:
            location: what its conversation had when it came.
            parent: the conversation that it is a branch of.
        """
        if location is not None:
            kept.left_by, kept.left_tokens = location.key, location.tokens
            kept.left_here = bool(self._router_id) and location.key.startswith(self._router_id)
        last = self.get(kept.tenant, kept.conversation) or self.get(kept.tenant, parent)
        # Of requests that run at the same time, any of the last may leave what the next one has.
        before = [each for each in last[:-1] if each.key == kept.left_by]
        self._store((*before[-1:], *last[-1:], kept))

    def settle(self, kept: Kept) -> None:
        """A request is over, and all of its answer is there."""
        last = self.get(kept.tenant, kept.conversation)
        if kept in last:
            self._store(last)

    def get(self, tenant: str, conversation: str) -> tuple[Kept, ...]:
        """The last requests of a conversation, in the order in which they came."""
        return self._kept.get(tenant, conversation) or ()

    def newest(self, tenant: str) -> Iterator[Kept]:
        """The last request of each of a tenant's conversations, the most recent first."""
        return (requests[-1] for requests in self._kept.newest(tenant))

    def forget(self, tenant: str, conversation: str) -> None:
        """A conversation is over."""
        self._kept.pop(tenant, conversation)

    def _store(self, requests: tuple[Kept, ...]) -> None:
        kept, size = requests[-1], sum(each.size for each in requests)
        # One that takes a large part of it all would push out everybody else.
        if size <= self._max_bytes / 4:
            self._kept.add(kept.tenant, kept.conversation, requests, size)
        elif len(requests) > 2:
            self._store((requests[0], kept))
        else:
            self.forget(kept.tenant, kept.conversation)


@dataclass
class Parting:
    """Where a prompt leaves the one before it.

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
    """What `GET /admin/conversations/{tenant}/{id}/explain` says. Counts are tokens of the prompt.

    Attributes:
        found_tokens: the most that a decode engine had, from the first on; `holder` is that engine.
        asked: decode engines that said what they had.
        reused_tokens, cached_tokens, recomputed_tokens: what the prefill engine read of it, had in its own prefix
            cache, and computed.
        left_tokens: what the request before left, in whole blocks; None if there was none. They are not all of this
            prompt.
        shared_tokens: of those found, if another conversation or branch had left them; 0 if none did.
        shared_with: such a conversation, as far as this router has seen one.
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
    found_tokens: int
    reused_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    left_tokens: int | None
    asked: int
    holder: str
    means: str
    do: str
    shared_tokens: int = 0
    shared_with: str = ""
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
        others: the last requests of the tenant's conversations, the most recent first.
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
        reuse.found,
        reuse.tokens,
        reuse.cached,
        reuse.recomputed,
        new.left_tokens if new.left_by else None,
        reuse.asked if isinstance(reuse, Report) else 0,
        new.holder,
        reason.means,
        reason.do,
    )
    known = [each for each in islice(others, _LOOK) if each.conversation != new.conversation]
    if not new.left_by:
        if new.named_by and (before := _continued(new, known)) is not None:
            result.compared, result.causes = "messages", [renamed(new.named_by, before.conversation)]
        # Requests of its own that broke off may have left something, too.
        result.shared_tokens = reuse.found if len(requests) == 1 else 0
    elif reuse.reason == "history_changed" or (
        reuse.reason == "below_threshold" and reuse.found < new.left_tokens
    ):
        old = next((each for each in requests[:-1] if each.key == new.left_by), None)
        if old is None:
            result.why = _NOT_KEPT if new.left_here else _NOT_HERE
        else:
            try:
                await _Comparison(old, new, ask).fill(result)
            except ApiError as error:
                result.why = error.message
    if result.shared_tokens:
        result.shared_with = _sharing(new, known)
    return result


def _continued(new: Kept, others: list[Kept]) -> Kept | None:
    """The other conversation that a request's messages continue, if the same hint named both."""
    if (now := _messages(new)) is None:
        return None
    for other in others:
        if other.named_by != new.named_by:
            continue
        before = _messages(other) if other.body.size <= new.body.size else None
        if before and len(before) < len(now) and now[: len(before)] == before:
            return other
    return None


def _sharing(new: Kept, others: list[Kept]) -> str:
    """The conversation whose last request begins as this one does, as far as was found; empty if none here does."""
    front, mine = _opening(new)
    most, found = _BYTES_OF_A_TOKEN * new.reuse.found, ""
    for other in others:
        before, theirs = _opening(other)
        if before == front and (same := len(front) + common_start(mine, theirs)) >= most:
            most, found = same + 1, other.conversation
    return found


def _opening(kept: Kept) -> tuple[bytes, bytes]:
    """What templates render at a prompt's front, and what follows it, as the client wrote them."""
    fronts = (kept.body.raw(name) or b"" for name in _FRONT)
    rests = (kept.body.raw(name) or b"" for name in ("messages", "input", "prompt"))
    return b"".join(fronts), b"".join(rests)


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
        self._answer = old.answered()
        self._causes = differences(self._old_asked, self._new_asked, self._answer)
        self._is_changed = new.reuse.reason == "history_changed"
        # As many tokens are known to be some engine's; the first that is not is of the next block.
        self._known = max(new.reuse.found, new.reuse.cached)
        self._until = self._known + new.block_size if new.block_size else None

    async def fill(self, result: Explanation) -> None:
        try:
            old = await self._tokens(self._old, self._old_asked)
            new = await self._tokens(self._new, self._new_asked)
            result.compared = "tokens"
            await self._by_tokens(result, old, new)
        except CannotAsk as error:
            result.compared, result.why = "messages", str(error)
            self._by_messages(result)

    async def _by_tokens(self, result: Explanation, old: list[int], new: list[int]) -> None:
        same = common_prefix(old, new)
        if self._is_beyond(same) and self._is_of_other_kv():
            await self._elsewhere(result, new)
        elif same < len(old):
            await self._in_prompt(result, old, new, same)
        else:
            await self._in_answer(result, old, new)

    def _is_beyond(self, token: int) -> bool:
        """Whether a token comes after the first block that nobody had."""
        return self._is_changed and self._until is not None and token >= self._until

    def _is_of_other_kv(self) -> bool:
        """Whether the same tokens may have other KV than they had."""
        if self._causes:
            return self._causes[0].code in ("model_changed", "cache_salt_changed", "media_changed")
        return any(each.media for each in self._new_asked.messages)

    def _part(self, result: Explanation, token: int) -> None:
        """They part at this token, for certain: say what of the rest is not explained by that."""
        if self._is_beyond(token):
            result.causes.append(
                Cause(
                    "overwritten",
                    f"From token {self._known:,} to {token:,} the prompts are the same, and no decode engine had that "
                    "any more: other requests have overwritten it.",
                    REASONS["overwritten"].do,
                )
            )
        elif self._new.reuse.found > token:
            result.shared_tokens = self._new.reuse.found

    async def _in_prompt(self, result: Explanation, old: list[int], new: list[int], at: int) -> None:
        """They part within what was asked before."""
        before, held = await self._around(old, at)
        _, other = await self._around(new, at)
        message = await self._message_at(new, at)
        causes = self._causes or self._unchanged(message, before + held, before + other)
        # A message's own cause first, if that message is where it is.
        result.causes = sorted(causes, key=lambda each: each.message is None or each.message != message)
        first = result.causes[0]
        place = first.message if first.message is not None else message
        where = "the tools" if first.code.startswith("tool") else self._where(place)
        result.parting = Parting(at, None, where, place, before, held, other)
        self._part(result, at)

    def _unchanged(self, message: int | None, held: str, new: str) -> list[Cause]:
        """Why prompts part though the newer request has all that the older one has.

        Args:
            message: where they do.
            held, new: the rendered texts from shortly before.
        """
        if (gone := left_out(self._old_asked, self._new_asked)) is not None:
            return [gone]
        respelled = respelled_calls(self._old_asked, self._new_asked)
        if respelled is not None and respelled.message == message:
            return [respelled]
        return template_causes(held, new)

    async def _in_answer(self, result: Explanation, old: list[int], new: list[int]) -> None:
        """All that was asked before is there; what was generated is not, or not in its tokens."""
        answer = self._answer
        said = _spoken(answer.said) if answer is not None else ""
        rendered = await self._text(new[len(old) :])
        causes = answer_causes(self._old_asked, self._new_asked, answer, rendered)
        if not self._is_changed and causes[0].code == "respelled":
            return  # nothing says that it is
        spelled = (
            await self._tokenized({"prompt": said, "add_special_tokens": False, **self._model()})
            if said
            else []
        )
        result.causes = causes
        at, until = len(old) + common_prefix(spelled, new[len(old) :]), None
        # How a model spelled what it called, or thought, is not known; nor which tokens it chose for a text.
        is_plain = answer is not None and not (answer.said.calls or answer.said.reasoning)
        is_sure = is_plain and causes[0].code in ("answer_changed", "answer_left_out", "prompt_repeated")
        is_found = self._is_changed and self._until is not None and self._until > len(old)
        if is_found and not is_sure and not self._known <= at < (self._until or 0):
            at, until = max(self._known, len(old)), self._until
        else:
            self._part(result, at)
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
        before, other = await self._around(new, self._known)
        message = await self._message_at(new, self._known)
        result.causes = self._causes or [
            Cause(
                "kv_differs",
                "The tokens are the same, and their KV is not: an attachment is another one, or their KV has been "
                "overwritten.",
                "Keep attachments the same for a whole conversation, also behind a URL.",
            )
        ]
        first = result.causes[0].message
        place = first if first is not None else message
        result.parting = Parting(self._known, self._until, self._where(place), place, before, other, other)

    def _by_messages(self, result: Explanation) -> None:
        """As far as can be seen without an engine."""
        result.causes = self._causes
        if not self._causes and self._is_changed:
            result.causes = answer_causes(self._old_asked, self._new_asked, self._answer, None)
        if not result.causes:
            return
        first = result.causes[0]
        held, other = self._shown(first)
        same = common_prefix(held, other)
        start = max(same - _BEFORE_CHARACTERS, 0)
        where = "the tools" if first.code.startswith("tool") else self._where(first.message)
        result.parting = Parting(
            None, None, where, first.message, held[start:same], _cut(held[same:]), _cut(other[same:])
        )

    def _shown(self, cause: Cause) -> tuple[str, str]:
        """What both requests have where a cause is, as text."""
        old, new = self._old_asked, self._new_asked
        if cause.message is None:
            name = cause.code.removesuffix("_changed")
            if cause.code.startswith("tool"):
                return _written(old.tools), _written(new.tools)
            one, two = (
                {"model": each.model, "cache_salt": each.salt, **each.settings} for each in (old, new)
            )
            return _written(one.get(name)), _written(two.get(name))
        at = cause.message + new.first
        held, other = (each.messages[at] if 0 <= at < len(each.messages) else None for each in (old, new))
        if held is None and self._answer is not None:
            # What follows the older request is its answer; of a response that may be several items.
            held, other = self._answer.said, first_answer(new.messages[at:])
        return _shown(held), _shown(other)

    # -- what an engine says

    async def _tokens(self, kept: Kept, asked: Asked) -> list[int]:
        """A request's prompt.

        Raises:
            CannotAsk: no engine answers, or it renders that otherwise than the request was.
        """
        if isinstance(kept.endpoint, Completions) and isinstance(prompt := kept.body.get("prompt"), list):
            return prompt
        tokens = await self._tokenized(to_tokenize(kept.endpoint, kept.body, asked))
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


def _spoken(said: Said) -> str:
    """All text of an answer, in the order in which a model says it."""
    return said.reasoning + said.text + "".join(call.arguments for call in said.calls)


def _shown(said: Said | None) -> str:
    """All of a message, for a person."""
    if said is None:
        return ""
    calls = (f"{call.name}({call.arguments})" for call in said.calls)
    return "".join((said.reasoning, said.text, *calls, *said.media))


def _written(value: object) -> str:
    return _encode(value).decode() if value else ""


def common_prefix(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many leading things are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


def _cut(text: str) -> str:
    return text[:_AFTER_CHARACTERS].rstrip("\ufffd")
