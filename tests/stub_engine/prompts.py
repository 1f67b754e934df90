"""From a request's body to the tokens of its prompt, and what the stub's model answers to it.

The model: the KV of a block is a digest of the block's tokens and of the KV of the block before it, and each
token of an answer depends on the KV of the whole prompt. So an answer is right only if all of the KV was.
`expected` computes it from a body alone, without any engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any, Literal
from zlib import crc32

BLOCK_SIZE = 16
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
# How each endpoint spells the number of tokens to generate, the newest spelling first.
LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
# A user's message with this in it is answered with a tool call, if there are tools.
CALL_MARKER = "[call]"

_PIECE = re.compile(r"<\|[a-z]+\|>| ?[^ <]{1,7}| |<")
_END = "<|end|>"
_LETTERS = "abcdefghijklmnopqrstuvwxyz012345"


class Invalid(Exception):
    """A body that vLLM's own checks refuse.

    Attributes:
        param: the field at fault.
    """

    def __init__(self, message: str, param: str | None = None, kind: str = "Bad Request") -> None:
        super().__init__(message)
        self.param = param
        self.kind = kind


# -- tokens


def tokenize(text: str) -> list[str]:
    """The text cut into tokens. Texts cut at a token's end give the same tokens as the whole."""
    return _PIECE.findall(text)


_known: dict[int, str] = {}


def token_id(piece: str) -> int:
    """A token's number."""
    number = crc32(piece.encode())
    _known[number] = piece
    return number


def token_ids(text: str) -> list[int]:
    """The numbers of a text's tokens."""
    return [token_id(piece) for piece in tokenize(text)]


def detokenize(numbers: Sequence[int]) -> str:
    """The text of tokens; of those never seen, `<?>`."""
    return "".join(_known.get(number, "<?>") for number in numbers)


# -- KV


def block_hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """The hashes of the full blocks, each a chain over all tokens before it, as vLLM's; the first one is
    salted."""
    hashes: list[bytes] = []
    parent = salt.encode(errors="surrogatepass")
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = sha256(parent + repr(tokens[start : start + BLOCK_SIZE]).encode()).digest()
        hashes.append(parent)
    return hashes


def block_kv(before: bytes, tokens: Sequence[int]) -> bytes:
    """What a block with these tokens holds, after a block that holds `before`."""
    return blake2b(before + repr(list(tokens)).encode(), digest_size=16).digest()


def compute_kv(tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """What the blocks of these tokens hold, the leading ones being known."""
    kv = list(known)
    for start in range(len(kv) * BLOCK_SIZE, len(tokens), BLOCK_SIZE):
        kv.append(block_kv(kv[-1] if kv else b"", tokens[start : start + BLOCK_SIZE]))
    return kv


# -- prompts


@dataclass
class Prompt:
    """What a body asks.

    Attributes:
        tokens: of the prompt.
        text: of the prompt; empty if it came as token ids.
        call: the tool to call, if the answer is to be a call: its name and its parameters' schema.
        is_named: the request names the tool.
    """

    tokens: list[int]
    text: str = ""
    call: tuple[str, dict[str, Any]] | None = None
    is_named: bool = False


@dataclass
class _Message:
    role: str
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def rendered(self) -> str:
        calls = "".join(_rendered_call(name, arguments) for name, arguments in self.calls)
        return f"<|{self.role}|>{self.text}{calls}{_END}"


def _rendered_call(name: str, arguments: Any) -> str:
    """A call as prompts have it: the same whether its arguments come as JSON or as an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"<|call|>{name} {arguments}"
    return f"<|call|>{name} {_canonical(arguments)}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def prompts_of(path: str, body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a body: one, but for a completion of several.

    Raises:
        Invalid: a required field is absent or of the wrong type.
    """
    if path == COMPLETIONS:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [Prompt(token_ids(prompt), prompt)]
        if isinstance(prompt, list) and prompt:
            if _are_tokens(prompt):
                return [Prompt(list(prompt))]
            if all(isinstance(each, str) for each in prompt):
                return [Prompt(token_ids(each), each) for each in prompt]
            if all(_are_tokens(each) for each in prompt):
                return [Prompt(list(each)) for each in prompt]
        raise Invalid("prompt must be a text, token ids, or a list of either", "prompt")
    messages = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _anthropic}[path](body)
    tools = [_tool(each) for each in body.get("tools") or () if isinstance(each, dict)]
    text = f"<|tools|>{_canonical(tools)}{_END}" if tools else ""
    text += "".join(message.rendered() for message in messages) + "<|assistant|>"
    call, is_named = _call(body, messages, tools)
    return [Prompt(token_ids(text), text, call, is_named)]


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**32 for each in value)


def _items(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Invalid(f"{name} must be a list of objects", name)
    return value


def _chat(body: Mapping[str, Any]) -> list[_Message]:
    messages = []
    for each in _items(body, "messages"):
        calls: list[tuple[str, Any]] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in each.get("tool_calls") or ()
        ]
        messages.append(_Message(str(each.get("role", "user")), _text(each.get("content")), calls))
    return messages


def _responses(body: Mapping[str, Any]) -> list[_Message]:
    messages: list[_Message] = []
    if body.get("instructions"):
        messages.append(_Message("system", body["instructions"]))
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else _items(body, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_Message(str(item.get("role", "user")), _text(item.get("content"))))
        elif kind == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(_Message("assistant"))
            messages[-1].calls.append((str(item["name"]), item["arguments"]))
        elif kind == "function_call_output":
            messages.append(_Message("tool", _text(item.get("output"))))
    return messages


def _anthropic(body: Mapping[str, Any]) -> list[_Message]:
    messages = []
    if body.get("system"):
        messages.append(_Message("system", _text(body["system"])))
    for each in _items(body, "messages"):
        content = each.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        message = _Message(str(each.get("role", "user")))
        for block in blocks:
            if block.get("type") == "tool_result":
                messages.append(_Message("tool", _text(block.get("content"))))
            elif block.get("type") == "tool_use":
                message.calls.append((str(block["name"]), block["input"]))
            elif block.get("type") != "thinking":
                message.text += _text([block])
        if message.text or message.calls:
            messages.append(message)
    return messages


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Invalid("content must be a text or a list of parts", "content")
    return "".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else _canonical(part)
        for part in content
    )


def _tool(tool: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    function = tool.get("function") or tool
    schema = function.get("parameters") or function.get("input_schema") or {}
    return str(function.get("name", "")), str(function.get("description") or ""), schema


def _call(
    body: Mapping[str, Any], messages: list[_Message], tools: list[tuple[str, str, dict[str, Any]]]
) -> tuple[tuple[str, dict[str, Any]] | None, bool]:
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        name = (choice.get("function") or choice).get("name")
        if name is not None:
            return next(((each, schema) for each, _, schema in tools if each == name), None), True
        choice = choice.get("type", "auto")
    asked = bool(messages) and messages[-1].role == "user" and CALL_MARKER in messages[-1].text
    if tools and (choice in ("required", "any") or (choice == "auto" and asked)):
        return (tools[0][0], tools[0][2]), False
    return None, False


# -- answers


@dataclass
class Answer:
    """What the model answers.

    Attributes:
        pieces: the texts of its tokens; of a tool call, of how a prompt renders it.
        tokens: their numbers, with that of the end if it came to it.
        text: what a client gets as text.
        call: name and arguments (JSON) of the tool that is called, if one is.
        finish: `stop`, `length` or `tool_calls`.
    """

    pieces: list[str]
    tokens: list[int]
    text: str
    call: tuple[str, str] | None
    finish: Literal["stop", "length", "tool_calls"]


def answer(
    prompt: Prompt, kv: Sequence[bytes], body: Mapping[str, Any], limit: int, length: int, index: int = 0
) -> Answer:
    """The answer of a model that has this KV of the prompt.

    Args:
        limit: most tokens that it may have.
        length: tokens of text that it has if it may, unless the body says otherwise.
        index: which of several answers.
    """
    state = blake2b(b"".join(kv) + bytes([index]), digest_size=16).digest()
    if prompt.call is not None:
        name, schema = prompt.call
        arguments = _canonical(_arguments(schema, state))
        pieces = tokenize(_rendered_call(name, arguments))
        if len(pieces) < limit:
            finish: Literal["stop", "tool_calls"] = "stop" if prompt.is_named else "tool_calls"
            return Answer(pieces, _ended(pieces), "", (name, arguments), finish)
    count = limit if body.get("ignore_eos") else max(length, body.get("min_tokens") or 0)
    pieces = [_word(state, number) for number in range(min(count, limit))]
    text = "".join(pieces)
    if count < limit:
        return Answer(pieces, _ended(pieces), text, None, "stop")
    return Answer(pieces, [token_id(piece) for piece in pieces], text, None, "length")


def _ended(pieces: Sequence[str]) -> list[int]:
    return [token_id(piece) for piece in (*pieces, _END)]


def _word(state: bytes, number: int) -> str:
    digest = blake2b(state + number.to_bytes(4, "big"), digest_size=6).digest()
    # Some end in a character of several bytes, so that one may be cut by a packet.
    word = "".join(_LETTERS[byte % 32] for byte in digest[:5]) + ("é" if digest[5] % 4 == 0 else "")
    return f" {word}" if number else word


def _arguments(schema: Mapping[str, Any], state: bytes) -> dict[str, Any]:
    properties = schema.get("properties") or {"query": {}}
    names = schema.get("required") or list(properties)[:1]
    return {name: _value((properties.get(name) or {}).get("type"), state) for name in names}


def _value(kind: object, state: bytes) -> Any:
    if kind in ("integer", "number"):
        return state[0]
    if kind == "boolean":
        return True
    if kind in ("array", "object"):
        return [] if kind == "array" else {}
    return "".join(_word(state, number) for number in range(3))


def limit_of(path: str, body: Mapping[str, Any], room: int) -> int:
    """Most tokens that the answer may have.

    Args:
        room: what the model's context has left.

    Raises:
        Invalid: the limit is not a positive number, or `min_tokens` is greater.
    """
    limit = next((body[name] for name in LIMITS[path] if body.get(name) is not None), None)
    if limit is None:
        limit = 16 if path == COMPLETIONS else room
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise Invalid(
            f"{LIMITS[path][-1]} must be at least 1, got {limit}.", LIMITS[path][-1], "BadRequestError"
        )
    least = body.get("min_tokens") or 0
    if not isinstance(least, int) or least > limit:
        raise Invalid(f"min_tokens must be at most max_tokens={limit}, got {least}.", None, "BadRequestError")
    return limit


def expected(
    body: Mapping[str, Any], path: str = CHAT, *, length: int = 16, room: int = 10**6, index: int = 0
) -> Answer:
    """The right answer to a client's body, from nothing but the body.

    Args:
        path: the endpoint.
        length: the engine's `answer_tokens`.
        room: what the model's context has left; of no matter unless the answer fills it.
        index: which of several answers (`n`).
    """
    prompt = prompts_of(path, body)[0]
    return answer(prompt, compute_kv(prompt.tokens), body, limit_of(path, body, room), length, index)


def expected_text(messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
    """The text of the right answer to a chat of these messages, with more of the body's fields."""
    return expected({"messages": list(messages), **fields}).text
