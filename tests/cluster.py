"""Stub engines, routers in front of them, and their clients: over real sockets, and gone after the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import aiohttp
from carryback import wire
from carryback_server.app import Router
from carryback_server.config import RouterConfig
from prometheus_client.parser import text_string_to_metric_families
from service import TEXT, Answer, until
from stub_engine import CALL_MARKER, StubEngine, expected
from stub_engine.prompts import CHAT

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"required": ["where"]}}}]


async def eventually(condition: Callable[[], Awaitable[object]], limit_s: float = 30.0) -> None:
    """Wait until a condition holds that has to be asked for."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def message_of(answer: Answer) -> dict[str, Any]:
    """The assistant's message of a chat completion, streamed or not, as the next request repeats it."""
    calls: list[dict[str, Any]] = []
    if answer.headers["content-type"].startswith("application/json"):
        calls = answer.json["choices"][0]["message"].get("tool_calls") or []
    else:
        for choice in (each for event in answer.events for each in event["choices"]):
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"role": "assistant", "content": answer.text, **({"tool_calls": calls} if calls else {})}


class Chat:
    """One conversation over chat completions. Every answer is compared with the right one.

    Args:
        id: sent as `X-Conversation-ID`, unless it is None.
        key: the client's API key.
        fields: of every request's body.
    """

    def __init__(
        self, cluster: Cluster, router: Router, id: str | None, *, key: str = "", **fields: Any
    ) -> None:
        self.cluster = cluster
        self.router = router
        self.id = id
        self.headers = {wire.CONVERSATION_ID: id} if id is not None else {}
        self.key = key
        self.fields = fields
        self.messages: list[dict[str, Any]] = []
        self.asked_at = 0.0

    async def say(
        self, text: str = TEXT, *, via: Router | None = None, headers: Mapping[str, str] = {}, **fields: Any
    ) -> Answer:
        """One turn; `CALL_MARKER` in the text makes the model call a tool if there are `tools`."""
        self.messages.append({"role": "user", "content": text})
        return await self.go_on(via=via, headers=headers, **fields)

    async def call(self, **options: Any) -> Answer:
        """A turn that ends in a tool call."""
        return await self.say(f"{CALL_MARKER} {TEXT}", **{"tools": TOOLS, **options})

    async def result(self, text: str = TEXT, **options: Any) -> Answer:
        """The tool's result."""
        call = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})
        return await self.go_on(**{"tools": TOOLS, **options})

    async def go_on(
        self, *, via: Router | None = None, headers: Mapping[str, str] = {}, **fields: Any
    ) -> Answer:
        """Send the messages as they are, and add the answer to them."""
        body = {"messages": self.messages, **self.fields, **fields}
        router = via or self.router
        self.asked_at = time.time()
        answer = await self.cluster.post(
            router, CHAT, body, key=self.key, headers={**self.headers, **headers}
        )
        assert answer.status == 200, answer.raw
        message, right = message_of(answer), expected(body)
        assert message["content"] == right.text
        calls = [
            (each["function"]["name"], each["function"]["arguments"])
            for each in message.get("tool_calls", ())
        ]
        assert calls == ([right.call] if right.call else [])
        self.messages.append(message)
        return answer


class Cluster:
    """Engines, routers and one client's connections."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.engines: list[StubEngine] = []
        self.routers: list[Router] = []

    async def start(self) -> None:
        """Connect the client."""
        connector = aiohttp.TCPConnector(limit=0)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def engine(self, role: Literal["prefill", "decode"], **options: Any) -> StubEngine:
        """One more engine."""
        engine = await self._stack.enter_async_context(StubEngine(role, **options))
        self.engines.append(engine)
        return engine

    async def pair(self, **options: Any) -> tuple[StubEngine, StubEngine]:
        """A prefill and a decode engine."""
        return await self.engine("prefill", **options), await self.engine("decode", **options)

    async def router(self, **settings: Any) -> Router:
        """A router in front of all engines that there are, unless `engines` says which."""
        quick = {"port": 0, "admin_port": 0, "log_format": "off", "probe_interval_s": 0.1}
        engines = [each.config() for each in self.engines]
        router = Router(RouterConfig(**{"engines": engines, **quick, **settings}))
        await router.start()
        self.routers.append(router)
        return router

    async def hears(self, router: Router, engine: StubEngine) -> None:
        """Wait until an engine's events arrive; nothing is held at it before."""
        name = engine.url.removeprefix("http://")

        def is_heard() -> bool:
            found = router.pipeline.pool.find(name, engine.role)
            return found is not None and found.is_heard

        await until(is_heard)

    async def stop(self, router: Router) -> None:
        """End a router before the test ends."""
        self.routers.remove(router)
        await router.stop()

    async def close(self) -> None:
        """End all routers; then the engines must have seen nothing wrong."""
        for router in self.routers:
            await router.stop()
        for engine in self.engines:
            assert engine.violations == []

    # -- clients

    def chat(self, router: Router, id: str | None = "chat-1", **options: Any) -> Chat:
        """A conversation."""
        return Chat(self, router, id, **options)

    async def request(
        self, method: str, url: str, body: Any = None, *, key: str = "", headers: Mapping[str, str] = {}
    ) -> Answer:
        """Any request; its body as JSON, unless it is bytes."""
        own = {"Authorization": f"Bearer {key}"} if key else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if data is not None:
            own["Content-Type"] = "application/json"
        async with self.client.request(method, url, data=data, headers={**own, **headers}) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, names, await response.read())

    async def post(self, router: Router, path: str, body: Any, **options: Any) -> Answer:
        """A client's POST."""
        return await self.request("POST", router.url + path, body, **options)

    async def get(self, router: Router, path: str, **options: Any) -> Answer:
        """A client's GET."""
        return await self.request("GET", router.url + path, **options)

    async def delete(self, router: Router, path: str, **options: Any) -> Answer:
        """A client's DELETE."""
        return await self.request("DELETE", router.url + path, **options)

    async def admin(self, router: Router, method: str, path: str, body: Any = None) -> Answer:
        """An operator's request."""
        return await self.request(method, router.admin_url + path, body)

    async def conversation(self, router: Router, id: str = "chat-1", *, key: str = "") -> Any:
        """What `GET /v1/conversations/{id}` says; None if there is none."""
        answer = await self.get(router, f"/v1/conversations/{id}", key=key)
        return answer.json if answer.status == 200 else None

    async def held(self, chat: Chat) -> Any:
        """Where a chat is, once the engine of its last request has said what it has; as operators see it."""
        async with asyncio.timeout(30):
            while True:
                mine = await self.conversation(chat.router, chat.id or "", key=chat.key)
                known = await chat.router.pipeline.state.get(mine["tenant"], mine["id"])
                location = known.location if known is not None else None
                if location is not None and location.tip and location.at >= chat.asked_at:
                    everyone = (await self.admin(chat.router, "GET", "/admin/conversations")).json["data"]
                    name = mine["tenant"], mine["id"]
                    return next(each for each in everyone if (each["tenant"], each["id"]) == name)["location"]
                await asyncio.sleep(0.01)

    async def metric(self, router: Router | str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, from `/metrics`."""
        url = router if isinstance(router, str) else router.admin_url
        exposition = (await self.request("GET", f"{url}/metrics")).raw.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(exposition)
            for sample in family.samples
            if sample.name == f"carryback_{name}" and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def running_cluster() -> AsyncIterator[Cluster]:
    """A cluster for one test; at its end no engine may have seen a violation."""
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        await cluster.start()
        yield cluster
        await cluster.close()
