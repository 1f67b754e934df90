"""The SDK's models for Chat Completions and Responses, whose calls say where they belong."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import carryback
from agents import (
    Model,
    ModelResponse,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    TResponseInputItem,
)
from agents.items import TResponseOutputItem, TResponseStreamEvent
from carryback._servers import atakes_ids
from openai import AsyncOpenAI
from openai.types.responses import ResponseCompletedEvent

from carryback_agents._calls import Call, marked

# What was reused for the answer that an item is of. The runner makes new objects of answers, but hands their
# items on as they are; nothing may be written on them, since they are sent again. By `id` while they live.
_reports: dict[int, tuple[weakref.ref[object], carryback.LastReuse]] = {}


class _Marked(Model):
    """Before one of the SDK's models: its items pass as they are, only headers are added."""

    _client: AsyncOpenAI

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        *args: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        await atakes_ids(self._client)  # what is learnt decides how the call is marked
        call, settings = self._marked(system_instructions, input, model_settings, kwargs)
        response = await super().get_response(  # type: ignore[safe-super]
            system_instructions, input, settings, *args, **kwargs
        )
        self._answered(call, response.output)
        return response

    async def stream_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[TResponseStreamEvent]:
        await atakes_ids(self._client)  # what is learnt decides how the call is marked
        call, settings = self._marked(system_instructions, input, model_settings, kwargs)
        events: Any = super().stream_response(  # type: ignore[safe-super]
            system_instructions, input, settings, *args, **kwargs
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ResponseCompletedEvent):
                    self._answered(call, event.response.output)
                yield event

    def _supports_default_prompt_cache_key(self) -> bool:
        return True  # so that the runner says which session or group this is

    def _marked(
        self,
        instructions: str | None,
        input: str | list[TResponseInputItem],
        settings: ModelSettings,
        options: dict[str, Any],
    ) -> tuple[Call, ModelSettings]:
        is_servers = bool(options.get("previous_response_id") or options.get("conversation_id"))
        return marked(self._client, instructions, input, settings, is_servers=is_servers)

    def _answered(self, call: Call, items: Sequence[TResponseOutputItem]) -> None:
        call.calls_tools = any(item.type.endswith("_call") for item in items)
        # Other clients do not note it, and what they find is of an earlier request.
        if isinstance(self._client, carryback.AsyncOpenAI) and (report := carryback.last_reuse()):
            for item in items:
                _note(item, report)


def _note(item: TResponseOutputItem, report: carryback.LastReuse) -> None:
    key = id(item)
    _reports[key] = weakref.ref(item, lambda _: _reports.pop(key, None)), report


class CarrybackChatCompletionsModel(_Marked, OpenAIChatCompletionsModel):
    """`agents.OpenAIChatCompletionsModel`, same arguments; its requests carry conversation and turn."""


class CarrybackResponsesModel(_Marked, OpenAIResponsesModel):
    """`agents.OpenAIResponsesModel`, same arguments; its requests carry conversation and turn."""


def reuse(response: ModelResponse) -> carryback.LastReuse | None:
    """What one model call reused.

    None if the server is not carryback's, or the client not `carryback.AsyncOpenAI` (it is, unless you gave
    the provider another one).

    Args:
        response: one of a result's `raw_responses`, or what `RunHooks.on_llm_end` is given.
    """
    for item in response.output:
        if (noted := _reports.get(id(item))) and noted[0]() is item:
            return noted[1]
    return None
