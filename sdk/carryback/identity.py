"""Which conversation does a request belong to, told from its message history alone.

An agent sends its whole history with every request, so the next request of a conversation starts
with the messages of an earlier one. Each request leaves a *state* behind: a digest of its messages,
chained one by one. A request continues the longest state that it extends. A state is continued
once; a second continuation is a fork, a conversation of its own that names its parent.

What is said here is a hint: engines verify every block before they reuse it. Only ids matter, and
the rule for them is that two conversations never share one; when in doubt, an id is new.

A framework knows more: a thread, an agent's name. What goes by one *name* is one conversation, with
an id that is the same in every process, also where its history branches off or is edited. Requests of
the same name that begin differently, as two prompts of one program do, are told apart all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from carryback._fork import Lock

# An edited or trimmed history is recognised by the newest messages that were known: this many must
# be there unchanged, and an assistant's among the history.
_TAIL_KEY = 4
# Newest messages of a state that are compared further, and the share of them that must be equal.
_TAIL = 16
_TAIL_SHARE = 0.75
# Messages that may have been added behind a known tail.
_ADDED = 16
# Conversations with equal messages and different tools that are told apart.
_MAX_OPEN = 8

# Fields that come and go without changing what was said: answers echoed with more or fewer of the
# server's own fields, reasoning that clients drop, cache marks that clients move from turn to turn.
_IGNORED = frozenset(
    {
        "annotations", "audio", "cache_control", "id", "index", "logprobs", "phase", "reasoning",
        "reasoning_content", "reasoning_details", "refusal", "status",
    }
)  # fmt: skip
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})

# `dict` first: the check of an abstract class alone is slow, and every message needs some.
_MAPPING = (dict, Mapping)
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr).encode

# Derived ids: any other namespace would do, but it must never change.
_NAMESPACE = uuid.UUID("6ef1c1a6-6f0b-4b0e-9a52-8d5c7d1f4c0e")
# Prompts of one name whose system prompts and first questions begin with the same bytes are one conversation's.
_HEAD_BYTES = 64

# What a message is to a turn.
_USER, _ASSISTANT, _SYSTEM, _TOOL = "u", "a", "s", "t"
_ROLES = {"user": _USER, "assistant": _ASSISTANT, "system": _SYSTEM, "developer": _SYSTEM}


@dataclass(frozen=True)
class Identity:
    """Where a request belongs.

    Attributes:
        conversation: its conversation's id.
        parent: for a fork, the conversation that it shares its history with.
        turn: id of its turn within the conversation: `1` from the first user message to the final
            answer, and so on.
        step: which model call of the turn it is, from 1.
        is_new: nothing that it continues is known; the id was made for it, or is that of its name.
        is_edited: the conversation was told from a history that had been edited or trimmed.
    """

    conversation: str
    parent: str | None
    turn: str
    step: int
    is_new: bool
    is_edited: bool


@dataclass(slots=True)
class _State:
    """What one or more requests with equal messages left behind."""

    conversation: str  # the latest that was here
    turn: int
    answered: bool  # an assistant message follows a user's
    # Conversations that have not been continued from here, by the digest of their tools. An empty
    # id stands for several.
    open: dict[bytes, str] = field(default_factory=dict)
    # Digests of the newest messages, system prompts left out, while the state is open.
    tail: tuple[bytes, ...] = ()

    def continued_by(self, tools: bytes) -> bytes | None:
        """The key in `open` of the one conversation that a request can continue, if there is one."""
        key = tools if tools in self.open else next(iter(self.open)) if len(self.open) == 1 else None
        return key if key is not None and self.open[key] else None


@dataclass(frozen=True, slots=True)
class History:
    """A request's messages, digested: all that it takes to recognise its conversation.

    Attributes:
        scope: whose it is.
        chain: of each beginning of the messages, the empty one first, a digest of 16 bytes.
        kinds: of each message one letter, what it is to a turn.
        recent: of the newest messages, system prompts left out, each's number (from 1) and digest.
        tools: digest of the tools; empty without any.
        name: the id of the conversation that a framework says it is.
        beginning: with a name, digest of how the prompt begins.
    """

    scope: str
    chain: list[bytes]
    kinds: str
    recent: list[tuple[int, bytes]]
    tools: bytes
    name: str
    beginning: bytes


def digest(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    scope: str = "",
    group: str = "",
    name: str = "",
) -> History:
    """Digest a request's messages, for `Identifier.recognise`: work that grows with their size, and needs nothing
    else, so that another thread or process can do it. Arguments are those of `Identifier.identify`.
    """
    frames, kinds = _canonical(messages)
    # Everything below hangs on the scope's own digest, so that scopes cannot meet.
    root = last = _digest(json.dumps([scope, group, name]).encode())
    chain = [root]
    for frame in frames:
        last = blake2b(last + frame, digest_size=16).digest()
        chain.append(last)
    recent = [
        (at + 1, _digest(root + frames[at]))
        for at in range(max(0, len(frames) - _TAIL - _ADDED), len(frames))
        if kinds[at] != _SYSTEM
    ]
    return History(
        scope,
        chain,
        kinds,
        recent,
        _digest(_dump(tools)) if tools else b"",
        name,
        _beginning(frames, kinds) if name else b"",
    )


def derived_id(*names: str) -> str:
    """The id of the conversation that a framework knows by these names, the same in every process."""
    return f"c-{uuid.uuid5(_NAMESPACE, json.dumps(names)).hex}"


class Identifier:
    """Recognises conversations by their messages. Safe to share between threads and tasks.

    Memory is bounded: the scope that has most forgets its least recently used states, and a conversation
    of theirs that comes back starts anew.

    Args:
        capacity: states to remember; every request leaves one, of up to 1.5 KB. A router has a setting of its own.
    """

    def __init__(self, capacity: int = 5_000) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self._lock = Lock()
        self._states: dict[bytes, _State] = {}
        # Each scope's, in the order of use. A state is of one scope: its digest hangs on that.
        self._used: dict[str, OrderedDict[bytes, None]] = {}
        self._tails: dict[bytes, bytes] = {}  # key of a state's newest messages -> its digest
        self._beginnings: OrderedDict[bytes, str] = OrderedDict()  # of what goes by a name -> its id

    def __len__(self) -> int:
        return len(self._states)

    def identify(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        scope: str = "",
        group: str = "",
        name: str = "",
    ) -> Identity:
        """Say which conversation a request belongs to, and remember it for the next one.

        Args:
            messages: the request's messages: chat, Responses `input` items, or Anthropic's (with
                the system prompt put in front as a message).
            tools: the request's tools. A conversation may change them; they only tell apart
                conversations whose messages are all equal.
            scope: conversations of different scopes (tenants) never meet.
            group: the same, for a group within a scope, e.g. OpenAI's `prompt_cache_key`.
            name: the id of the conversation that a framework says it is (see `derived_id`). Branches
                keep it. Prompts that begin differently get ids that derive from it.
        """
        return self.recognise(digest(messages, tools, scope=scope, group=group, name=name))

    def recognise(self, history: History) -> Identity:
        """The same, of messages that `digest` has read already. Its cost grows with their number alone."""
        with self._lock as is_whole:
            if not is_whole:
                self._forget()
            return self._identify(
                history.scope,
                history.chain,
                history.kinds,
                history.recent,
                history.tools,
                history.name,
                history.beginning,
            )

    def _identify(
        self,
        scope: str,
        chain: list[bytes],
        kinds: str,
        recent: list[tuple[int, bytes]],
        tools: bytes,
        name: str,
        beginning: bytes,
    ) -> Identity:
        parent: str | None = None
        conversation = ""
        turn = kinds.count(_USER)
        is_edited = False

        length, state = self._longest(scope, chain, kinds)
        if state is not None:
            turn = state.turn + kinds.count(_USER, length)
            parent = state.conversation
            key = state.continued_by(tools)
            if key is not None:
                conversation = self._continue(chain[length], state, key)
        # A state that is open to several stays undecided; only without one may looser signs speak.
        unknown = state is None or not state.open
        if not conversation and unknown and (edited := self._edited(scope, kinds, recent, tools)):
            length, digest, key = edited
            state = self._states[digest]
            conversation = self._continue(digest, state, key)
            turn = state.turn + kinds.count(_USER, length)
            is_edited = True
        is_new = not conversation
        if is_new:
            if repeated := self._states.get(chain[-1]):
                parent, turn = repeated.conversation, repeated.turn
            if name:
                is_new = parent is None
                conversation = parent or self._named(chain[0], beginning, name)
                parent = name if conversation != name else None
            else:
                conversation = f"c-{uuid.uuid4().hex}"

        if kinds.strip(_SYSTEM):
            self._remember(scope, chain[-1], kinds, recent, tools, conversation, turn)
        return Identity(
            conversation=conversation,
            parent=parent if is_new else None,
            turn=str(turn),
            step=_step(kinds),
            is_new=is_new,
            is_edited=is_edited,
        )

    def _named(self, root: bytes, beginning: bytes, name: str) -> str:
        """The id of a prompt that continues nothing: the name, for the first that goes by it."""
        key = _digest(root + beginning)
        known = self._beginnings.get(key)
        if known is None:
            is_first = root not in self._beginnings
            known = name if is_first else derived_id(name, beginning.hex())
            self._beginnings[key] = known
        self._beginnings[root] = name
        for each in (key, root):
            self._beginnings.move_to_end(each)
        while len(self._beginnings) > 2 * self.capacity:
            self._beginnings.popitem(last=False)
        return known

    def _longest(self, scope: str, chain: list[bytes], kinds: str) -> tuple[int, _State | None]:
        """The longest state that the request extends, and its number of messages."""
        # Behind a state comes the answer to it. Without one (it was cut off and dropped), only a
        # conversation that was under way is recognised: prompts that share their first messages
        # are no conversation.
        last_answer = kinds.rfind(_ASSISTANT)
        for length in range(len(chain) - 2, 0, -1):
            state = self._states.get(chain[length])
            if state is not None and (length <= last_answer or state.answered):
                self._used[scope].move_to_end(chain[length])
                return length, state
        return 0, None

    def _edited(
        self, scope: str, kinds: str, recent: list[tuple[int, bytes]], tools: bytes
    ) -> tuple[int, bytes, bytes] | None:
        """The state whose newest messages are in the request, the older ones edited or dropped."""
        last_answer = kinds.rfind(_ASSISTANT)
        digests = [digest for _, digest in recent]
        for end in range(len(recent) - 1, max(_TAIL_KEY, len(recent) - _ADDED) - 1, -1):
            length = recent[end - 1][0]
            if length > last_answer:
                continue
            digest = self._tails.get(_digest(b"".join(digests[end - _TAIL_KEY : end])))
            if not digest:
                continue
            state = self._states[digest]
            pairs = list(zip(reversed(state.tail), reversed(digests[:end]), strict=False))
            equal = sum(old == new for old, new in pairs)
            key = state.continued_by(tools)
            if key is not None and equal >= _TAIL_SHARE * len(pairs):
                self._used[scope].move_to_end(digest)
                return length, digest, key
        return None

    def _continue(self, digest: bytes, state: _State, key: bytes) -> str:
        conversation = state.open.pop(key)
        if not state.open:
            self._forget_tail(digest, state)
        return conversation

    def _remember(
        self,
        scope: str,
        digest: bytes,
        kinds: str,
        recent: list[tuple[int, bytes]],
        tools: bytes,
        conversation: str,
        turn: int,
    ) -> None:
        state = self._states.get(digest)
        if state is None:
            first_user = kinds.find(_USER)
            answered = first_user >= 0 and kinds.find(_ASSISTANT, first_user) >= 0
            state = self._states[digest] = _State(conversation, turn, answered)
        if not state.open and state.answered and len(recent) >= _TAIL_KEY:
            state.tail = tuple(own for _, own in recent[-_TAIL:])
            key = _tail_key(state.tail)
            # Two conversations with the same newest messages: neither is told by them.
            self._tails[key] = b"" if key in self._tails else digest
        state.conversation, state.turn = conversation, turn
        if tools in state.open:
            state.open[tools] = ""
        elif len(state.open) < _MAX_OPEN:
            state.open[tools] = conversation
        used = self._used.setdefault(scope, OrderedDict())
        used[digest] = None
        used.move_to_end(digest)
        while len(self._states) > self.capacity:
            # Among equals, another's: so that one who has nothing yet gets a place.
            most = max(self._used, key=lambda each: (len(self._used[each]), each != scope))
            oldest, _ = self._used[most].popitem(last=False)
            if not self._used[most]:
                del self._used[most]
            self._forget_tail(oldest, self._states.pop(oldest))

    def _forget(self) -> None:
        for memory in (self._states, self._used, self._tails, self._beginnings):
            memory.clear()

    def _forget_tail(self, digest: bytes, state: _State) -> None:
        if state.tail:
            key = _tail_key(state.tail)
            if self._tails.get(key) in (digest, b""):
                del self._tails[key]
            state.tail = ()


def turn_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The turn and the step of a request, told from its messages alone.

    A turn is everything from a user's message to the final answer; its id is the number of user
    messages. A step is one model call in it, counted from 1.
    """
    kinds = "".join([_kind(message) for message in messages if not _is_reasoning(message)])
    return str(kinds.count(_USER)), _step(kinds)


def _step(kinds: str) -> int:
    # One answer may be several items in a row (Responses: text, then calls).
    since = kinds[kinds.rfind(_USER) + 1 :]
    return 1 + sum(kind == _ASSISTANT and since[at - 1 : at] != _ASSISTANT for at, kind in enumerate(since))


def _kind(message: object) -> str:
    if not isinstance(message, _MAPPING):
        return _TOOL
    role = message.get("role")
    if role is None:
        # Responses items: `function_call`, `web_search_call`, ... come from the model.
        return _ASSISTANT if str(message.get("type", "")).endswith("_call") else _TOOL
    kind = _ROLES.get(role, _TOOL) if isinstance(role, str) else _TOOL
    content = message.get("content")
    # Anthropic's tool results come in a user's message.
    if (
        kind == _USER
        and isinstance(content, list)
        and any(isinstance(part, _MAPPING) and part.get("type") == "tool_result" for part in content)
    ):
        return _TOOL
    return kind


def _beginning(frames: list[bytes], kinds: str) -> bytes:
    """How a prompt begins: the start of its first message, and of its first question.

    They may change further on, by a date in a system prompt, by a question behind a long text. What is before
    can be reused.
    """
    if not frames:
        return b""
    question = next((at for at, kind in enumerate(kinds) if kind != _SYSTEM), 0)
    return _digest(frames[0][:_HEAD_BYTES] + b"\0" + frames[question][:_HEAD_BYTES])


def _is_reasoning(message: object) -> bool:
    return isinstance(message, _MAPPING) and message.get("type") == "reasoning"


def _canonical(messages: Sequence[Mapping[str, Any]]) -> tuple[list[bytes], str]:
    """The bytes that stand for each message, equal for messages that say the same; and the kinds."""
    frames, kinds = [], []
    for message in messages:
        if not _is_reasoning(message):
            frames.append(_frame(message))
            kinds.append(_kind(message))
    return frames, "".join(kinds)


def _frame(message: object) -> bytes:
    if not isinstance(message, _MAPPING):
        return b"j" + _dump(message)
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and type(role) is str and type(content) is str:
        return _text_frame(role, content)
    fields = _clean(message)
    if isinstance(content, list):
        fields["content"] = content = _content(content)
    if not content:  # absent, null, "" and [] are one: all are in use beside tool calls
        fields.pop("content", None)
        content = ""
    if fields.get("type") == "message":
        del fields["type"]
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del fields["tool_calls"]
    if type(role) is str and type(content) is str and fields.keys() <= {"role", "content"}:
        return _text_frame(role, content)
    return b"j" + _dump(fields)


def _text_frame(role: str, content: str) -> bytes:
    return f"t{role}\0{content}".encode("utf-8", "surrogatepass")


def _clean(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    arguments = kept.get("arguments")
    if isinstance(arguments, str):
        # A model's arguments need not be JSON; then they are compared as text.
        with contextlib.suppress(ValueError, RecursionError):
            kept["arguments"] = json.loads(arguments)
    return kept


def _content(parts: list[Any]) -> str | list[Any]:
    """Text parts become one string; other parts stay, reasoning left out."""
    cleaned: list[Any] = []
    only_text = True
    for part in parts:
        if not isinstance(part, _MAPPING):
            cleaned.append(part)
            only_text = False
        elif part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            cleaned.append(part["text"])
        elif part.get("type") not in _REASONING_PARTS:
            kept = _clean(part)
            # A tool use of Anthropic's is known by its id; a result has parts of its own.
            if part.get("id"):
                kept["id"] = part["id"]
            if isinstance(inner := part.get("content"), list):
                kept["content"] = [_clean(each) if isinstance(each, _MAPPING) else each for each in inner]
            cleaned.append(kept)
            only_text = False
    return "".join(cleaned) if only_text else cleaned


def _call(call: object) -> object:
    if not isinstance(call, _MAPPING):
        return call
    kept = _clean(call)
    function = kept.get("function")
    if isinstance(function, _MAPPING):
        kept["function"] = _clean(function)
    if kept.get("type") == "function":
        del kept["type"]
    return kept | {"id": call.get("id")}


def _dump(value: object) -> bytes:
    try:
        return _encode(value).encode()
    except (TypeError, ValueError, RecursionError):
        return os.urandom(16)  # nested too deeply, or no JSON: equal to nothing


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _tail_key(tail: tuple[bytes, ...]) -> bytes:
    return _digest(b"".join(tail[-_TAIL_KEY:]))
