"""What usage says was cached: what `X-Carryback-Reuse` says, in every form and on every way through.

Both engines have prefix caches, so that there is more than one answer to "what was cached".
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from pair import NAME, Answer, Client, Pair, document

TOKENS = 4
OFF = {"X-Carryback-Reuse": "off"}


@dataclass(frozen=True)
class Form:
    """A way to ask for usage."""

    path: str
    name: str
    fields: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.path.removeprefix('/v1/')}, {self.name}"


def streamed(path: str, name: str, **options: bool) -> Form:
    return Form(path, name, (("stream", True), *((("stream_options", options),) if options else ())))


CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FORMS = [
    *(
        form
        for path in (CHAT, TEXT)
        for form in (
            Form(path, "whole"),
            streamed(path, "streamed", include_usage=True),
            streamed(path, "continuous", include_usage=True, continuous_usage_stats=True),
        )
    ),
    *(form for path in (RESPONSES, MESSAGES) for form in (Form(path, "whole"), streamed(path, "streamed"))),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def caching(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A second pair of engines, with prefix caching."""
    async with pair.beside(tmp_path_factory.mktemp("billing"), "--enable-prefix-caching") as caching:
        yield caching


@dataclass
class Bill:
    """What one answer, or a chunk of it, says of its prompt; `cached` is None if it does not say."""

    prompt: int
    cached: int | None


def bills(form: Form, answer: Answer) -> list[Bill]:
    """All that an answer says of its usage, in order."""
    chunks = answer.body if isinstance(answer.body, list) else [answer.body]
    found = []
    for chunk in chunks:
        if form.path == RESPONSES:
            usage = chunk.get("response", chunk).get("usage")
            if usage:
                found.append(Bill(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))
        elif form.path == MESSAGES:
            usage = chunk.get("usage") or (chunk.get("message") or {}).get("usage")
            if usage:
                cached = usage.get("cache_read_input_tokens")
                found.append(Bill(usage["input_tokens"] + (cached or 0), cached))
        elif usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            found.append(Bill(usage["prompt_tokens"], details.get("cached_tokens")))
    return found


class Talk:
    """A conversation whose every answer's bills are compared with its header."""

    def __init__(self, client: Client, form: Form, headers: dict[str, str], **fields: Any) -> None:
        self.client = client
        self.form = form
        self.id = uuid.uuid4().hex
        self.headers = headers
        self.fields = {"cache_salt": self.id, **fields}
        self.history: list[str] = []

    async def ask(self, text: str, **fields: Any) -> tuple[Answer, Bill]:
        self.history.append(text)
        path = self.form.path
        said: Any = [
            {"role": "assistant" if at % 2 else "user", "content": each}
            for at, each in enumerate(self.history)
        ]
        name, limit = {
            CHAT: ("messages", "max_tokens"), TEXT: ("prompt", "max_tokens"),
            RESPONSES: ("input", "max_output_tokens"), MESSAGES: ("messages", "max_tokens"),
        }[path]  # fmt: skip
        body = {
            "model": NAME, name: "".join(self.history) if path == TEXT else said, limit: TOKENS,
            "temperature": 0, **dict(self.form.fields), **self.fields, **fields,
        }  # fmt: skip
        answer = await self.client.post(path, body, {"X-Conversation-ID": self.id, **self.headers})
        assert answer.status == 200, answer.raw
        self.history.append("It is so.")  # not the answer: what is held is the prompt's, and a token or two
        found = bills(self.form, answer)
        assert found, answer.raw
        bill = found[-1]
        # vLLM's chunks before the last say how long the prompt is, and nothing of what was cached.
        assert {each.prompt for each in found} == {bill.prompt}
        assert {each.cached for each in found} <= {bill.cached, None}
        assert bill.cached is not None
        assert 0 <= bill.cached < bill.prompt
        assert bill.cached == answer.reuse.tokens + answer.reuse.cached
        assert answer.reuse.prompt_tokens in (bill.prompt, 0)
        return answer, bill


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a38_read_back(caching: Pair, form: Form) -> None:
    async with caching.router() as client:
        talk = Talk(client, form, {})
        _, cold = await talk.ask(document(1, 15))
        assert cold.cached == 0
        assert cold.prompt > 500
        for number in (2, 3):
            _, bill = await talk.ask(document(number, 2))
            assert bill.cached > 400, "what the last turn left"
        # The same again: all is in the prefill engine's own cache.
        del talk.history[-2:]
        answer, bill = await talk.ask(document(3, 2))
        assert answer.reuse.reason in ("local_cache", "verified")
        assert bill.cached > 400


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a38_reuse_off(caching: Pair, form: Form) -> None:
    async with caching.router() as client:
        talk = Talk(client, form, OFF)
        for number in (1, 2, 3):
            answer, bill = await talk.ask(document(number, 10))
            assert answer.reuse.reason == "off"
            # Not read back; the prefill engine's own cache still serves.
            assert (bill.cached == 0) == (number == 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a38_a_decode_engine_alone(caching: Pair, form: Form) -> None:
    alone = {"n": 2, "temperature": 1} if form.path in (CHAT, TEXT) else {}
    engines = [command.engine() for command in caching.commands if alone or command.role == "decode"]
    async with caching.router(engines=engines) as client:
        talk = Talk(client, form, {}, **alone)
        for number in (1, 2, 3):
            answer, bill = await talk.ask(document(number, 10))
            assert answer.reuse.reason == ("several_answers" if alone else "prefill_unavailable")
            assert bill.cached == 0, "the decode engine's own cache is not counted"


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a38_retried_without_the_transfer(caching: Pair, form: Form) -> None:
    async with failing_once(caching) as (client, failed):
        talk = Talk(client, form, {})
        _, cold = await talk.ask(document(1, 15))
        assert cold.cached == 0
        for number in (2, 3):
            _, bill = await talk.ask(document(number, 2))
            assert bill.cached > 400, "what the prefill engine did not compute; the retry is ours"
        assert len(failed) == 3


@asynccontextmanager
async def failing_once(pair: Pair) -> AsyncIterator[tuple[Client, list[str]]]:
    """A router whose decode engine fails whenever it is to read a prompt's KV, and the paths where it did."""
    failed: list[str] = []
    prefill, decode = (command.engine() for command in pair.commands)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if b"remote_block_ids" in data:
            failed.append(request.path)
            return web.json_response({"error": {"message": "as told", "code": 500}}, status=500)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with pair.session.request(
            request.method, f"{decode.url}{request.path}", data=data, headers=headers
        ) as answer:
            content = await answer.read()
            kind = answer.headers.get("Content-Type", "application/json")
            return web.Response(status=answer.status, body=content, headers={"Content-Type": kind})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engines = [prefill, decode.model_copy(update={"url": url})]
    try:
        async with pair.router(engines=engines, admit_early=False) as client:
            yield client, failed
    finally:
        await runner.cleanup()
