"""A router with stub engines behind it, and what its clients see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from carryback.wire import Reuse
from carryback_server.app import Router
from carryback_server.config import EngineConfig, RouterConfig
from stub_engine import StubEngine
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

TEXT = "Tell me about the sea, the wind, the boats and all the people who go there in winter. " * 4

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


async def until(condition: Callable[[], object], what: str = "", within_s: float = 30) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it never did; `what` should have happened.
    """
    for _ in range(int(within_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {within_s:g} s: {what}")


@dataclass
class Answer:
    """What a client got.

    Attributes:
        headers: names in lower case.
        is_cut: the connection broke before the answer's end.
    """

    status: int
    headers: dict[str, str]
    raw: bytes
    is_cut: bool = False

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        """The error object that it is."""
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, decoded, but for `[DONE]`."""
        lines = self.raw.decode().splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]

    @property
    def text(self) -> str:
        """What the model says, at whichever endpoint, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return _text(self.json)
        return "".join(_delta(event) for event in self.events)

    @property
    def reuse(self) -> Reuse:
        """What the router says was reused."""
        return Reuse.parse(self.headers["x-carryback-reuse"])


def _text(answer: Any) -> str:
    """Of a whole answer."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    content = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return str(content[0]["text"])


def _delta(event: Any) -> str:
    """Of an event of a stream."""
    if choices := event.get("choices"):
        return str(choices[0]["text"] if "text" in choices[0] else choices[0]["delta"].get("content") or "")
    delta = event.get("delta")
    return str(delta.get("text", "") if isinstance(delta, dict) else delta or "")


class Service:
    """Stub engines and a router: `async with Service(prefill=1, decode=2) as service: ...`.

    Args:
        prefill, decode: how many engines of each role.
        engine: what all of them are made with.
        engines: more of them, for the router's configuration only.
        settings: the router's.
    """

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        engine: Mapping[str, Any] = {},
        engines: list[EngineConfig] | None = None,
        **settings: Any,
    ) -> None:
        self.prefills = [StubEngine("prefill", **engine) for _ in range(prefill)]
        self.decodes = [StubEngine("decode", **engine) for _ in range(decode)]
        self._others = engines or []
        self._settings = settings

    @property
    def engines(self) -> list[StubEngine]:
        """All stub engines."""
        return [*self.prefills, *self.decodes]

    @property
    def prefill(self) -> StubEngine:
        """The first prefill engine."""
        return self.prefills[0]

    @property
    def decode(self) -> StubEngine:
        """The first decode engine."""
        return self.decodes[0]

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(engine.start() for engine in self.engines))
        quick = {"port": 0, "probe_interval_s": 0.1, "shutdown_timeout_s": 5.0, "log_format": "off"}
        configs = [*(engine.config() for engine in self.engines), *self._others]
        self.router = Router(RouterConfig(engines=configs, **{**quick, **self._settings}))
        await self.router.start()
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_router()
        for engine in self.engines:
            await engine.kill()

    async def stop_router(self) -> None:
        """End the clients' connections and the router, if that was not done."""
        if not self.session.closed:
            await self.session.close()
            await self.router.stop()

    @property
    def url(self) -> str:
        """Of the clients' port."""
        return self.router.url

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] = {}, *, conversation: str = ""
    ) -> Answer:
        """A request, and all of its answer.

        Args:
            body: bytes as they are, anything else as JSON.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        if conversation:
            sent["X-Conversation-ID"] = conversation
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            received: list[bytes] = []
            is_cut = False
            try:
                async for piece in response.content.iter_any():
                    received.append(piece)
            except aiohttp.ClientPayloadError:
                is_cut = True
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, names, b"".join(received), is_cut)

    async def chat(
        self, messages: object, conversation: str = "", headers: Mapping[str, str] = {}, **fields: Any
    ) -> Answer:
        """A chat request."""
        return await self.post(CHAT, {"messages": messages, **fields}, headers, conversation=conversation)

    async def conversation(self, name: str) -> Any:
        """What the router says of a conversation."""
        async with self.session.get(f"{self.url}/v1/conversations/{name}") as response:
            return await response.json()

    async def metrics(self) -> str:
        """What it tells Prometheus."""
        async with self.session.get(f"{self.router.admin_url}/metrics") as response:
            return await response.text()

    async def idle(self) -> None:
        """Wait until no engine does anything."""
        await until(lambda: not any(engine.running for engine in self.engines), "the engines are idle")

    async def unpinned(self) -> None:
        """Wait until no engine holds anything."""
        await until(
            lambda: not any(engine.running or engine.in_use for engine in self.engines),
            f"all blocks are free: {[engine.state() for engine in self.engines]}",
        )

    async def finish(self) -> None:
        """Stop the router, wait until nothing is held, and `check`."""
        await self.stop_router()
        await self.unpinned()
        self.check()

    def check(self) -> None:
        """Assert that the engines saw nothing that a correct router never does."""
        assert [each for engine in self.engines for each in engine.violations] == []


Serve = Callable[..., Awaitable[Service]]
"The fixture `serve`: starts a `Service`, with its arguments."


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    """An answer, as the next request has it."""
    return {"role": "assistant", "content": text}


def request_to(path: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    """A body with one question, for an endpoint that generates."""
    asked: dict[str, Any] = {"messages": [user(text)]}
    if path == COMPLETIONS:
        asked = {"prompt": text}
    elif path == RESPONSES:
        asked = {"input": [user(text)]}
    return {**asked, **fields}
