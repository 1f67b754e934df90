"""An OpenAI-compatible server on a real socket that records what it is sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from carryback import wire


@dataclass
class Request:
    """A request as it arrived. `path` is the raw path, percent-encoding kept."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: dict[str, Any]

    def values(self, name: str) -> list[str]:
        """All values of a header, any letter case."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def value(self, name: str) -> str | None:
        """The header's only value."""
        values = self.values(name)
        assert len(values) < 2, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def conversation(self) -> str | None:
        return self.value(wire.CONVERSATION_ID)


@dataclass
class FakeServer:
    """What the tests set and read.

    Attributes:
        requests: everything that arrived, in order, questions left out.
        questions: what clients asked to learn whose server it is.
        is_carrybacks: whether it says that it is carryback's.
        cannot_say: it is overloaded when it is asked.
        failures: statuses to answer the next requests with, one each.
        reuse: value of the reuse header, or None for a server that knows nothing of it.
        knows_conversations: whether `DELETE /v1/conversations/{id}` is there.
        calls_tools: whether a user's message is answered by a call of the first tool, where there is one.
        decide: the calls that a request is answered with, if any: names and arguments.
    """

    base_url: str = ""
    requests: list[Request] = field(default_factory=list)
    questions: list[Request] = field(default_factory=list)
    is_carrybacks: bool = True
    cannot_say: bool = False
    failures: list[int] = field(default_factory=list)
    reuse: str | None = None
    knows_conversations: bool = True
    calls_tools: bool = False
    decide: Callable[[Request], Sequence[tuple[str, dict[str, Any]]]] | None = None

    @property
    def last(self) -> Request:
        return self.requests[-1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        headers = [(key.decode(), value.decode()) for key, value in request.raw_headers]
        seen = Request(request.method, request.raw_path, headers, body)
        if request.method == "HEAD":
            self.questions.append(seen)
            return web.Response(status=503 if self.cannot_say else 200 if self.is_carrybacks else 405)
        self.requests.append(seen)
        if self.failures:
            error = {"error": {"message": "as told", "type": "server_error", "code": None, "param": None}}
            return web.json_response(error, status=self.failures.pop(0))
        path = request.path.removeprefix("/v1")
        if request.method == "DELETE" and path.startswith("/conversations/"):
            return web.Response(status=204 if self.knows_conversations else 404)
        answers: dict[str, Any] = {
            "/chat/completions": chat,
            "/completions": completion,
            "/responses": response,
            "/models": lambda _: {"object": "list", "data": []},
        }
        if path not in answers:
            raise web.HTTPNotFound
        answer = answers[path](body)
        calls = list(self.decide(seen)) if self.decide else []
        if self.calls_tools and (call := tool_call(path, body)):
            calls.append(call)
        if calls:
            put_calls(path, answer, calls, len(self.requests))
        extra = {}
        if self.reuse is not None:
            extra = {
                wire.CARRYBACK_REUSE: self.reuse,
                wire.CARRYBACK_CONVERSATION: seen.conversation or "c-made",
                wire.CARRYBACK_TURN: seen.value(wire.TURN_ID) or "",
            }
        if not body.get("stream"):
            return web.json_response(answer, headers=extra)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", **extra})
        await stream.prepare(request)
        for name, data in events(path, answer):
            line = f"event: {name}\n" if name else ""
            await stream.write(f"{line}data: {data}\n\n".encode())
        await stream.write_eof()
        return stream


def chat(body: dict[str, Any]) -> dict[str, Any]:
    content = '{"city": "Bern"}' if "response_format" in body else "Hello."
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def completion(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [{"index": 0, "text": "Hello.", "finish_reason": "stop", "logprobs": None}],
    }


def response(body: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "output_text", "text": "Hello.", "annotations": []}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "fake",
        "status": "completed",
        "error": None,
        "output": [
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def tool_call(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of the call that answers a user's message, if there are tools."""
    said = body.get("input" if path == "/responses" else "messages")
    by_user = isinstance(said, str) or (isinstance(said, list) and said[-1].get("role") == "user")
    if not by_user or not body.get("tools") or body.get("tool_choice") == "none":
        return None
    tool = body["tools"][0]
    function = tool.get("function", tool)
    schema = function.get("parameters") or {}
    values = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    arguments = {
        name: values.get(field.get("type"), "flange") for name, field in schema.get("properties", {}).items()
    }
    return function["name"], arguments


def put_calls(
    path: str, answer: dict[str, Any], calls: Sequence[tuple[str, dict[str, Any]]], number: int
) -> None:
    """Make an answer one that calls tools; its number tells its calls' ids from those of others."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    ids = [f"call_{number}_{at}" for at in range(len(calls))]
    if path == "/responses":
        item = {"type": "function_call", "status": "completed"}
        answer["output"] = [
            item | {"id": f"fc_{id}", "call_id": id} | each for id, each in zip(ids, functions, strict=True)
        ]
        return
    choice = answer["choices"][0]
    choice["message"] |= {
        "content": None,
        "tool_calls": [
            {"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)
        ],
    }
    choice["finish_reason"] = "tool_calls"


def events(path: str, answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The events of an answer that is streamed: names and data."""
    if path == "/responses":
        open_answer = answer | {"status": "in_progress", "output": []}
        steps = [("response.created", open_answer), ("response.completed", answer)]
        for number, (name, body) in enumerate(steps):
            yield name, json.dumps({"type": name, "sequence_number": number, "response": body})
        return
    choice = answer["choices"][0]
    if calls := choice.get("message", {}).get("tool_calls"):
        delta = {"role": "assistant", "tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}
        for part in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": "tool_calls"}):
            kind = "chat.completion.chunk"
            chunk = {
                "id": "1",
                "object": kind,
                "created": 1,
                "model": "fake",
                "choices": [{"index": 0, **part}],
            }
            yield "", json.dumps(chunk)
        yield "", "[DONE]"
        return
    text = choice["message"]["content"] if path == "/chat/completions" else choice["text"]
    for at, piece in enumerate((text[:3], text[3:])):
        last = "stop" if at else None
        part: dict[str, Any] = {"index": 0, "finish_reason": last}
        if path == "/chat/completions":
            part["delta"] = {"content": piece} if at else {"role": "assistant", "content": piece}
            kind = "chat.completion.chunk"
        else:
            part["text"] = piece
            kind = "text_completion"
        yield "", json.dumps({"id": "1", "object": kind, "created": 1, "model": "fake", "choices": [part]})
    yield "", "[DONE]"


@contextmanager
def running() -> Iterator[FakeServer]:
    """A server on a free port of the loopback, in a thread of its own."""
    server = FakeServer()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)

        async def say(request: web.Request, response: web.StreamResponse) -> None:
            if server.is_carrybacks and not server.cannot_say:
                response.headers[wire.CARRYBACK_ROUTER] = "1"

        app.on_response_prepare.append(say)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        host, port = runner.addresses[0][:2]
        server.base_url = f"http://{host}:{port}/v1"
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10), "the fake server did not start"
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
