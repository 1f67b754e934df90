"""Messages and answers of all endpoints in one form, so that two requests can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from carryback_server.body import Body
from carryback_server.endpoints import (
    AnthropicMessages,
    Completions,
    Endpoint,
    Responses,
    events,
)

# Fields beside messages and tools that can change how a prompt is rendered.
SETTINGS = (
    "chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs", "reasoning", "thinking",
    "output_config",
)  # fmt: skip
_ENDS = (b"response.completed", b"response.incomplete")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "summary_text")


@dataclass(frozen=True)
class Call:
    """A tool call. Those with the same JSON are equal, in whatever spaces and escapes it is written.

    Attributes:
        arguments: the JSON as it was written.
        parsed: the same in our spelling, keys in their order; as it was written if it is no JSON.
    """

    name: str
    arguments: str = field(compare=False)
    parsed: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            parsed = json.dumps(json.loads(self.arguments))
        except (ValueError, RecursionError):
            parsed = self.arguments
        object.__setattr__(self, "parsed", parsed)


@dataclass(frozen=True)
class Said:
    """One message.

    Attributes:
        media: its parts that are no text (images, audio, files), JSON.
    """

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    media: tuple[str, ...] = ()


@dataclass
class Asked:
    """What of a request goes into its prompt.

    Attributes:
        messages: in order; of a text completion one, whose role is `prompt`, or `tokens` for token ids.
        first: the index of the client's own first message: 1 if a system prompt of the request's own field
            was put in front, else 0.
        tools: as they came.
        settings: those of `SETTINGS` that the request has.
        model, salt: what separates prompts that are equal.
        is_constrained: a grammar spells the answer: a schema, or a tool that has to be called.
    """

    messages: list[Said]
    first: int = 0
    tools: list[Any] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    salt: str = ""
    is_constrained: bool = False


@dataclass
class Answered:
    """An answer.

    Attributes:
        stop: the stop string that ended it.
    """

    said: Said
    finish: str = ""
    stop: str = ""


def asked(endpoint: Endpoint, body: Body) -> Asked:
    """What a request asks.

    Raises:
        ApiError: a part of it is not valid JSON.
    """
    found = Asked(
        [],
        settings={name: value for name in SETTINGS if (value := body.get(name)) is not None},
        model=str(body.get("model") or ""),
        salt=str(body.get("cache_salt") or ""),
        is_constrained=_is_constrained(body),
    )
    if isinstance(endpoint, Completions):
        prompt = body.get("prompt")
        is_text = isinstance(prompt, str)
        # Token ids, each with a comma, so that a prompt that goes on begins with the one before.
        text = prompt if is_text else "".join(f"{each}," for each in prompt or ())
        found.messages = [Said("prompt" if is_text else "tokens", text)]
    elif (said := endpoint.messages(body)) is not None:
        found.messages = [message(each) for each in said[0]]
        found.tools = said[1] or []
        own = "instructions" if isinstance(endpoint, Responses) else "system"
        if isinstance(endpoint, Responses | AnthropicMessages) and body.get(own):
            found.first = 1
    return found


def answered(endpoint: Endpoint, data: bytes, *, streamed: bool) -> Answered | None:
    """A complete answer; None if it cannot be read."""
    try:
        if isinstance(endpoint, Responses):
            if streamed:
                return _response(
                    _decode([part for name, part in events(data) if name in _ENDS][-1])["response"]
                )
            return _response(_decode(data))
        if isinstance(endpoint, AnthropicMessages):
            return _anthropic_stream(data) if streamed else _anthropic(_decode(data))
        chunks = (
            [_decode(part) for _, part in events(data) if part != b"[DONE]"] if streamed else [_decode(data)]
        )
        return _choices(chunks)
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError, ValueError):
        return None  # not an engine's


def message(given: Mapping[str, Any]) -> Said:
    """A message of a chat, of Anthropic's, or an item of a response."""
    kind = given.get("type")
    role = str(given.get("role") or "")
    if kind in ("function_call", "custom_tool_call"):
        return Said("assistant", calls=(called(given),))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _parts("tool", given.get("output"))
    if kind == "reasoning":
        thoughts = given.get("content") or given.get("summary")
        return Said("assistant", reasoning=_parts("", thoughts).reasoning)
    if not role:
        return Said(str(kind or "item"), media=(_json(given),))
    said = _parts(role, given.get("content"))
    reasoning = given.get("reasoning") or given.get("reasoning_content") or said.reasoning
    calls = given.get("tool_calls")
    made = [_call(each) for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
    return Said(role, said.text, _text(reasoning), (*said.calls, *made), said.media)


def called(item: Mapping[str, Any]) -> Call:
    """The call in an item of a response, as engines have it in a chat.

    vLLM 0.32 (`vllm/entrypoints/openai/responses/utils.py`).
    """
    name = str(item.get("name"))
    if item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    if item.get("type") == "custom_tool_call":  # whose one argument is a text
        return Call(name, json.dumps({"input": _text(item.get("input"))}, ensure_ascii=False))
    return Call(name, _text(item.get("arguments")))


def first_answer(messages: Sequence[Said]) -> Said:
    """The first message; if it is a part of an answer, all of that."""
    others = (at for at, each in enumerate(messages) if each.role != "assistant")
    return joined(messages[: max(next(others, len(messages)), 1)])


def joined(messages: Iterable[Said]) -> Said:
    """Several messages of one speaker as one."""
    each = list(messages)
    return Said(
        each[0].role if each else "assistant",
        "".join(one.text for one in each),
        "".join(one.reasoning for one in each),
        tuple(call for one in each for call in one.calls),
        tuple(part for one in each for part in one.media),
    )


def _parts(role: str, content: object) -> Said:
    if not isinstance(content, list):
        return Said(role, _text(content))
    text, reasoning, calls, media = "", "", list[Call](), list[str]()
    for part in content:
        if not isinstance(part, dict):
            text += _text(part)
            continue
        kind = part.get("type")
        if kind in _TEXTS:
            text += _text(part.get("text") or part.get("refusal"))
        elif kind in _THOUGHTS:
            reasoning += _text(part.get("thinking") or part.get("text"))
        elif kind == "tool_use":
            calls.append(Call(str(part.get("name")), _json(part.get("input") or {})))
        elif kind == "tool_result":
            inner = _parts(role, part.get("content"))
            text += inner.text
            media += inner.media
        else:
            media.append(_json(part))
    return Said(role, text, reasoning, tuple(calls), tuple(media))


def _call(call: Mapping[str, Any]) -> Call:
    function = call.get("function")
    inner = function if isinstance(function, dict) else {}
    return Call(str(inner.get("name") or ""), _text(inner.get("arguments")))


def _choices(chunks: list[dict[str, Any]]) -> Answered:
    """Of a chat or text completion: its first choice."""
    text, reasoning, finish, stop = "", "", "", ""
    names, arguments = dict[int, str](), dict[int, str]()
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue
            said = choice.get("delta") or choice.get("message") or choice
            text += said.get("content") or said.get("text") or ""
            reasoning += said.get("reasoning") or said.get("reasoning_content") or ""
            for at, call in enumerate(said.get("tool_calls") or ()):
                index, function = call.get("index", at), call.get("function") or {}
                names[index] = names.get(index) or function.get("name") or ""
                arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
            finish = choice.get("finish_reason") or finish
            reason = choice.get("stop_reason")
            stop = reason if isinstance(reason, str) else stop
    calls = tuple(Call(names[index], arguments[index]) for index in sorted(names))
    return Answered(Said("assistant", text, reasoning, calls), finish, stop)


def _response(response: dict[str, Any]) -> Answered:
    said = joined(message(item) for item in response.get("output") or ())
    return Answered(Said("assistant", said.text, said.reasoning, said.calls), str(response.get("status")))


def _anthropic(answer: dict[str, Any]) -> Answered:
    said = message({"role": "assistant", "content": answer["content"]})
    return Answered(said, answer.get("stop_reason") or "", answer.get("stop_sequence") or "")


def _anthropic_stream(data: bytes) -> Answered:
    blocks = dict[int, dict[str, Any]]()
    ended: dict[str, Any] = {}
    for name, part in events(data):
        if name not in (b"content_block_start", b"content_block_delta", b"message_delta"):
            continue
        event = _decode(part)
        if name == b"content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif name == b"message_delta":
            ended.update(event["delta"])
        else:
            delta, block = event["delta"], blocks[event["index"]]
            for field_name in ("text", "thinking"):
                if field_name in delta:
                    block[field_name] = (block.get(field_name) or "") + delta[field_name]
            block["json"] += delta.get("partial_json", "")
    for block in blocks.values():
        if block["json"]:
            block["input"] = _decode(block["json"].encode())
    return _anthropic({"content": [blocks[index] for index in sorted(blocks)], **ended})


def _is_constrained(body: Body) -> bool:
    choice = body.get("tool_choice")
    kinds = [body.get("response_format.type"), body.get("text.format.type")]
    return (
        any(kind not in (None, "text") for kind in kinds)
        or body.has("structured_outputs")
        or choice in ("required", "any")
        or (isinstance(choice, dict) and choice.get("type") not in ("auto", "none"))
    )


def _decode(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else _json(value)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
