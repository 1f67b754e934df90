"""What the LlamaIndex recipe does, in an environment of its own: `llamaindex_agent.py URL`.

Prints the requests of two conversations for each way of asking, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import carryback
import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from recipes import CALL, INSTRUCTIONS, KEPT, TEXT, Seen, async_hook, hook

requests: list[Seen] = []


def look_up(word: str) -> str:
    """Looks a word up."""
    return KEPT


def model(url: str) -> OpenAILike:
    """As the recipe makes it, with a note of each request."""
    server = {"base_url": url, "api_key": "none"}
    http = openai.DefaultHttpxClient(event_hooks={"response": [hook(requests)]})
    async_http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [async_hook(requests)]})
    return OpenAILike(
        model="stub",
        is_chat_model=True,
        is_function_calling_model=True,
        openai_client=carryback.OpenAI(**server, http_client=http),
        async_openai_client=carryback.AsyncOpenAI(**server, http_client=async_http),
    )


class Chat:
    """A conversation without an agent."""

    def __init__(self, llm: OpenAILike, name: str) -> None:
        self._llm = llm
        self._messages = [ChatMessage(INSTRUCTIONS + name, role="system")]
        self._tools = [FunctionTool.from_defaults(look_up)]

    async def turn(self, text: str, way: str) -> None:
        """A user's message, and what follows from it."""
        self._messages.append(ChatMessage(text))
        while True:
            message = (await self._ask(way)).message
            self._messages.append(message)
            calls = message.additional_kwargs.get("tool_calls") or ()
            for call in calls:
                known = {"tool_call_id": call.id, "name": call.function.name}
                self._messages.append(ChatMessage(KEPT, role="tool", additional_kwargs=known))
            if not calls:
                return

    async def _ask(self, way: str) -> Any:
        asked: dict[str, Any] = {"chat_history": self._messages, "tools": self._tools}
        if way == "chat":
            return await asyncio.to_thread(lambda: self._llm.chat_with_tools(**asked))
        if way == "achat":
            return await self._llm.achat_with_tools(**asked)
        if way == "stream_chat":
            return await asyncio.to_thread(lambda: list(self._llm.stream_chat_with_tools(**asked))[-1])
        return [each async for each in await self._llm.astream_chat_with_tools(**asked)][-1]


async def main(url: str) -> None:
    """Ask in each way."""
    llm = model(url)
    done: dict[str, list[Seen]] = {}
    for way in ("chat", "achat", "stream_chat", "astream_chat"):
        chats = [Chat(llm, f"{way} {each}") for each in ("a", "b")]
        for text in (CALL + TEXT, TEXT):
            for chat in chats:
                await chat.turn(text, way)
        done[way] = requests.copy()
        requests.clear()

    for way in ("agent", "agent in a block"):
        agent = FunctionAgent(tools=[look_up], llm=llm, system_prompt=INSTRUCTIONS + way)
        memories = {name: Memory.from_defaults(session_id=name, token_limit=30_000) for name in ("a", "b")}
        for text in (CALL + TEXT, TEXT):
            for name, memory in memories.items():
                if way == "agent":
                    await agent.run(text + name, memory=memory)
                else:
                    async with carryback.conversation(f"thread-{name}"):
                        await agent.run(text + name, memory=memory)
        done[way] = requests.copy()
        requests.clear()
    print(json.dumps(done))


asyncio.run(main(sys.argv[1]))
