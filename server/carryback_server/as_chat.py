"""Requests of all endpoints as the chats that engines make of them, for `/tokenize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from carryback_server.body import Body
from carryback_server.endpoints import AnthropicMessages, Chat, Completions, Endpoint
from carryback_server.said import SETTINGS, Asked, Call, Said, called, message


def to_tokenize(endpoint: Endpoint, body: Body, asked: Asked) -> dict[str, Any]:
    """The request for `/tokenize` that renders a prompt as its endpoint does.

    vLLM 0.32 (`vllm/entrypoints/serve/tokenize/protocol.py`).
    """
    request: dict[str, Any] = {"model": asked.model} if asked.model else {}
    if isinstance(endpoint, Completions):
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
    if isinstance(endpoint, Chat):
        request["messages"] = body.get("messages")
        if asked.tools:
            request["tools"] = asked.tools
        return request
    # Engines turn these into a chat, too.
    if isinstance(endpoint, AnthropicMessages):
        given_messages = (endpoint.messages(body) or ([], None))[0]
        request["messages"] = [each for given in given_messages for each in _apart(given)]
        tools = [_as_function(tool) for tool in asked.tools]
    else:
        request["messages"] = _of_items((endpoint.messages(body) or ([], None))[0])
        tools = [function for tool in asked.tools for function in _of_response(tool)]
    if tools:
        request["tools"] = tools
    return request


def _apart(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One of Anthropic's messages as messages of a chat: results of tools are messages of their own."""
    blocks = _objects(given.get("content"))
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


def _of_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a response as messages of a chat.

    vLLM 0.32 (`vllm/entrypoints/openai/responses/utils.py`).
    """
    chat: list[dict[str, Any]] = []
    for item in items:
        kind, added = item.get("type"), dict[str, Any]()
        if kind in ("function_call", "custom_tool_call"):
            call = called(item)
            made = _function_call(call, item.get("call_id"))
            if chat and chat[-1]["role"] == "assistant":
                chat[-1].setdefault("tool_calls", []).append(made)
                continue
            added["tool_calls"] = [made]
        elif kind == "reasoning":
            added["reasoning"] = _first_text(item.get("content") or item.get("summary")) or ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _parts_of_chat(item.get("output"))
            chat.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id") or "call"})
            continue
        elif item.get("role") == "assistant":
            added["content"] = _first_text(item.get("content"))
        else:
            chat.append({"role": item.get("role"), "content": _parts_of_chat(item.get("content"))})
            continue
        # Thoughts, text and calls of one answer are one message.
        if chat and chat[-1]["role"] == "assistant" and not chat[-1].keys() & added.keys():
            chat[-1] |= added
        else:
            chat.append({"role": "assistant", **added})
    return chat


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _first_text(content: Any) -> Any:
    """The only one that engines take of an answer's parts."""
    return (
        next((part.get("text") for part in _objects(content)), None) if isinstance(content, list) else content
    )


def _parts_of_chat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in texts
        else part
        for part in content
    ]


def _of_response(tool: Any) -> Iterator[dict[str, Any]]:
    """The functions that a tool of the Responses API is to the model; most of its other tools are none.

    vLLM 0.32 (`vllm/tool_parsers/utils.py`).
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "function":
        yield _as_function(tool)
    elif kind == "custom":
        payload = {"type": "string", "description": "The freeform text payload for this tool."}
        schema = {"type": "object", "properties": {"input": payload}, "required": ["input"]}
        yield _as_function({**tool, "parameters": {**schema, "additionalProperties": False}})
    elif kind == "namespace":
        for each in _objects(tool.get("tools")):
            if each.get("type") == "function":
                yield _as_function({**each, "name": f"{tool.get('name')}__{each.get('name')}"})


def _as_chat(said: Said) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": said.role}
    if said.text or not (said.reasoning or said.calls):
        chat["content"] = said.text
    if said.reasoning:
        chat["reasoning"] = said.reasoning
    if said.calls:
        chat["tool_calls"] = [_function_call(call) for call in said.calls]
    if said.role == "tool":
        chat["tool_call_id"] = "call"
    return chat


def _function_call(call: Call, id: Any = None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": id or "call", "type": "function", "function": function}


def _as_function(tool: Any) -> Any:
    """A tool of the Responses API or of Anthropic's, as a chat has it."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    parameters = tool.get("parameters", tool.get("input_schema"))
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}
