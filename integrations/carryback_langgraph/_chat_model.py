"""`ChatOpenAI` whose requests say which conversation and turn they belong to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import NoneType
from typing import Any, Self

import carryback
import openai
from carryback._conversation import current
from carryback._servers import atakes_ids, takes_ids
from carryback.identity import Identifier
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from pydantic import model_validator

from carryback_langgraph._mark import marked
from carryback_langgraph._names import called_with
from carryback_langgraph._reuse import KEY, report


class ChatCarryback(ChatOpenAI):
    """`langchain_openai.ChatOpenAI`, same arguments and methods; its requests carry conversation and turn.

    The conversation is told from the thread and the namespace of the run's config, without a thread from the
    messages. Headers that the user has set are left alone. What the server says it reused is in
    `response_metadata["carryback"]` of each answer; see `carryback_langgraph.reuse`.

    Unlike with `ChatOpenAI`, streamed answers report their usage unless `stream_usage=False`.
    """

    stream_usage: bool | None = True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["carryback_langgraph"]

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        given = (self.root_client, self.root_async_client)
        super().validate_environment()  # type: ignore[operator]
        # The clients that it has made report what was reused. Others stay what they are.
        for client, kind in (
            (self.root_client, carryback.OpenAI),
            (self.root_async_client, carryback.AsyncOpenAI),
        ):
            if type(client) in (openai.OpenAI, openai.AsyncOpenAI) and not any(
                client is each for each in given
            ):
                client.__class__ = kind
                client._identifier = Identifier()
        return self

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        with called_with(config):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        with called_with(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        chunks = super().stream(input, config, stop=stop, **kwargs)
        with called_with(config):  # the request is made for the first chunk
            first = next(chunks, None)
        if first is not None:
            yield first
            yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        chunks = super().astream(input, config, stop=stop, **kwargs)
        with called_with(config):
            first = await anext(chunks, None)
        if first is not None:
            yield first
            async for chunk in chunks:
                yield chunk

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        # Within a conversation's block the client marks, which the conversation then knows for its end.
        if current() is None or not self._reports():
            payload["extra_headers"] = marked(self, payload)
        return payload

    def _ask(self) -> None:
        """Learn whether the server takes ids, before the request is marked."""
        if self.root_client is not None:
            takes_ids(self.root_client)

    async def _aask(self) -> None:
        if self.root_async_client is not None:
            await atakes_ids(self.root_async_client)

    def _reports(self) -> bool:
        """Whether the clients are carryback's. The sync one is None where the API key is asked for by asyncio."""
        return isinstance(self.root_client, carryback.OpenAI | NoneType) and isinstance(
            self.root_async_client, carryback.AsyncOpenAI
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._ask()
        return self._noted(super()._generate(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await self._aask()
        return self._noted(await super()._agenerate(messages, stop, run_manager, **kwargs))

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        self._ask()
        is_first = True
        for chunk in super()._stream(*args, **kwargs):
            if is_first:
                self._note(chunk.message)
            is_first = False
            yield chunk

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        await self._aask()
        is_first = True
        async for chunk in super()._astream(*args, **kwargs):
            if is_first:
                self._note(chunk.message)
            is_first = False
            yield chunk

    def _noted(self, result: ChatResult) -> ChatResult:
        for generation in result.generations:
            self._note(generation.message)
        return result

    def _note(self, message: BaseMessage) -> None:
        if self._reports() and (said := report()) is not None:
            message.response_metadata[KEY] = said
