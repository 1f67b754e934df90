"""What an answer says, as a client of each endpoint reads it, and whether that is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stub_engine.prompts import CHAT, MESSAGES, RESPONSES, expected

from chaos.processes import ANSWER_TOKENS

# What only routers and engines may see.
_SECRETS = (b"remote_block_ids", b"remote_engine_id", b"carryback_key", b"127.0.0.1")


@dataclass
class Said:
    """What an answer says.

    Attributes:
        call: id, name and arguments (JSON, maybe not complete) of the tool that is called.
        finish: why it ended, in the endpoint's word.
        has_ended: its regular end came.
        error: code or type of the error that ended it; empty if there was none.
        problem: it is malformed; empty if not.
    """

    text: str = ""
    call: tuple[str, str, str] | None = None
    finish: str = ""
    id: str = ""
    has_ended: bool = False
    error: str = ""
    problem: str = ""
    unread: list[str] = field(default_factory=list)


def whole(path: str, data: bytes) -> Said:
    """Read an answer that is not streamed."""
    try:
        answer = json.loads(data)
        said = {CHAT: _chat, RESPONSES: _response, MESSAGES: _message}[path](answer)
    except (ValueError, LookupError, TypeError) as error:
        return Said(problem=f"malformed ({error!r}): {data[:300]!r}")
    said.has_ended = True
    return _checked(said, data)


def error_of(path: str, status: int, content_type: str, data: bytes) -> Said:
    """Read an answer with an error's status."""
    try:
        answer = json.loads(data)
        error = answer["error"]
        assert content_type.startswith("application/json")
        assert all(isinstance(error[name], str) and error[name] for name in ("message", "type"))
        assert path != MESSAGES or answer["type"] == "error"
    except (ValueError, LookupError, TypeError, AssertionError) as problem:
        return Said(problem=f"{status} without an error object ({problem!r}): {data[:300]!r}")
    return _checked(Said(error=str(error.get("code") or error["type"])), data)


def stream(path: str, data: bytes) -> Said:
    """Read what came of a streamed answer."""
    said = Said()
    read = {CHAT: _chat_event, RESPONSES: _response_event, MESSAGES: _message_event}[path]
    events = data.decode(errors="replace").split("\n\n")
    for event in events[:-1]:
        name, content = "", ""
        for line in event.splitlines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                content += line[6:]
        if said.has_ended or said.error:
            said.problem = f"an event after the end: {event[:300]}"
        elif said.unread and not (name == "error" or '"error"' in content):
            said.problem = f"not an event: {said.unread[0][:300]}"
        try:
            read(said, name, content)
        except ValueError:
            said.unread.append(event)  # fine if it broke off here, and the next one says so
        except (LookupError, TypeError) as problem:
            said.problem = f"malformed ({problem!r}): {event[:300]}"
    if said.unread and not said.error:
        said.problem = f"not an event: {said.unread[0][:300]}"
    return _checked(said, data)


def judge(path: str, body: Mapping[str, Any], said: Said) -> str:
    """Whether it is the right answer to a body, as far as it came; empty if it is.

    Args:
        body: with the whole history in it.
    """
    if said.problem:
        return said.problem
    right = expected(body, path, length=ANSWER_TOKENS)
    name, arguments = right.call or ("", "")
    if not said.has_ended:
        if not right.text.startswith(said.text):
            return f"a wrong part of an answer: {said.text!r} is not of {right.text!r}"
        if said.call is not None and not arguments.startswith(said.call[2]):
            return f"a wrong part of a call: {said.call!r} is not of {right.call!r}"
        return ""
    called = None if said.call is None else (said.call[1], json.loads(said.call[2]))
    if said.text != right.text or called != (None if right.call is None else (name, json.loads(arguments))):
        return f"a wrong answer: {said.text!r} {said.call!r} instead of {right.text!r} {right.call!r}"
    finish = _FINISH[path].get(right.finish, right.finish)
    return "" if said.finish == finish else f"finished with {said.finish!r} instead of {finish!r}"


_FINISH: dict[str, dict[str, str]] = {
    CHAT: {},
    RESPONSES: {"stop": "completed", "tool_calls": "completed", "length": "incomplete"},
    MESSAGES: {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"},
}


def _checked(said: Said, data: bytes) -> Said:
    for secret in _SECRETS:
        if secret in data and not said.problem:
            said.problem = f"{secret!r} in an answer: {data[:1000]!r}"
    return said


# -- whole


def _chat(answer: dict[str, Any]) -> Said:
    [choice] = answer["choices"]
    message = choice["message"]
    said = Said(message["content"] or "", finish=choice["finish_reason"], id=answer["id"])
    for call in message.get("tool_calls") or ():
        said.call = call["id"], call["function"]["name"], call["function"]["arguments"]
    return said


def _response(answer: dict[str, Any]) -> Said:
    said = Said(finish=answer["status"], id=answer["id"])
    for item in answer["output"]:
        if item["type"] == "function_call":
            said.call = item["call_id"], item["name"], item["arguments"]
        else:
            said.text += "".join(part["text"] for part in item["content"])
    return said


def _message(answer: dict[str, Any]) -> Said:
    said = Said(finish=answer["stop_reason"], id=answer["id"])
    for block in answer["content"]:
        if block["type"] == "tool_use":
            said.call = block["id"], block["name"], json.dumps(block["input"])
        else:
            said.text += block["text"]
    return said


# -- event by event


def _chat_event(said: Said, name: str, content: str) -> None:
    if content == "[DONE]":
        said.has_ended = True
        if not said.finish:
            said.problem = "the end without a finish reason"
        return
    chunk = json.loads(content)
    if "error" in chunk:
        said.error = str(chunk["error"]["code"] or chunk["error"]["type"])
        return
    for choice in chunk["choices"]:
        said.finish = choice["finish_reason"] or said.finish
        delta = choice["delta"]
        said.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            id, known, arguments = said.call or (call["id"], call["function"]["name"], "")
            said.call = id, known, arguments + call["function"]["arguments"]


def _response_event(said: Said, name: str, content: str) -> None:
    event = json.loads(content)
    kind = event["type"]
    if name != kind:
        said.problem = f"event {name!r} says that it is {kind!r}"
    if kind == "error" or kind == "response.failed":
        said.error = str((event.get("error") or event["response"]["error"])["code"])
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        said.call = event["item"]["call_id"], event["item"]["name"], ""
    elif kind == "response.function_call_arguments.delta":
        assert said.call is not None
        said.call = *said.call[:2], said.call[2] + event["delta"]
    elif kind == "response.output_text.delta":
        said.text += event["delta"]
    elif kind == "response.completed" or kind == "response.incomplete":
        final = _response(event["response"])
        if (final.text, final.call) != (said.text, said.call):
            said.problem = "the response at the end is not what was streamed"
        said.finish, said.id, said.has_ended = final.finish, final.id, True


def _message_event(said: Said, name: str, content: str) -> None:
    event = json.loads(content)
    kind = event["type"]
    if name != kind:
        said.problem = f"event {name!r} says that it is {kind!r}"
    if kind == "error":
        said.error = event["error"]["type"]
    elif kind == "message_start":
        said.id = event["message"]["id"]
    elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
        said.call = event["content_block"]["id"], event["content_block"]["name"], ""
    elif kind == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
        assert said.call is not None
        said.call = *said.call[:2], said.call[2] + event["delta"]["partial_json"]
    elif kind == "content_block_delta":
        said.text += event["delta"]["text"]
    elif kind == "message_delta":
        said.finish = event["delta"]["stop_reason"]
    elif kind == "message_stop":
        said.has_ended = True
