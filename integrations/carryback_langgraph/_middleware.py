"""Middleware for `create_agent`: the agent's requests say which conversation and turn they belong to."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NotRequired, Self

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    PrivateStateAttr,
)
from langchain_core.runnables import Runnable
from langgraph.runtime import Runtime
from langgraph.types import Command

from carryback_langgraph._mark import asked
from carryback_langgraph._release import arelease, release
from carryback_langgraph._settings import aask, ask, settings_for, unwrap

log = logging.getLogger("carryback")

# Conversations whose models are remembered until the agent's end.
_CAPACITY = 10_000

_KEY = "carryback_conversations"


class CarrybackMiddleware(AgentMiddleware[Any, Any, Any]):
    """`create_agent(model, tools, middleware=[CarrybackMiddleware()])`, with any OpenAI chat model.

    Put it last in the list, so that it sees the messages as they are sent. Headers that the user has set on
    the model or for the call are left alone; `ChatCarryback` marks its requests itself. Requests of models
    that are not OpenAI's (`BaseChatOpenAI`) are passed on as they are, with a warning.

    Args:
        release_on: `end`: when a run of the agent has ended, the server is told that the agent's conversation
            is over, and those that it started in this process; an interrupt or an error is no end. `never`:
            the next run may reuse it; the server lets go of it by itself after a while.

    Raises:
        ValueError: `release_on` is neither.
    """

    def __new__(cls, release_on: Literal["end", "never"] = "never") -> Self:
        # A hook for the end is a node in the agent's graph: only where there is something to do.
        is_releasing = cls is CarrybackMiddleware and release_on == "end"
        return super().__new__(_Releasing if is_releasing else cls)  # type: ignore[return-value]

    def __init__(self, release_on: Literal["end", "never"] = "never") -> None:
        if release_on not in ("end", "never"):
            raise ValueError(f"release_on is 'end' or 'never', not {release_on!r}")
        super().__init__()
        self.release_on = release_on
        self._warned: set[type] = set()

    @property
    def name(self) -> str:
        return CarrybackMiddleware.__name__

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        ask(request.model)
        return handler(self._marked(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        await aask(request.model)
        return await handler(self._marked(request))

    def _marked(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        messages = [*([request.system_message] if request.system_message else []), *request.messages]
        settings = settings_for(request.model, messages, request.tools, request.model_settings)
        if settings is None:
            kind = type(unwrap(request.model)[0])
            if kind not in self._warned:
                self._warned.add(kind)
                log.warning("%s is no OpenAI chat model: its requests are not marked", kind.__name__)
            return request
        return request.override(model_settings=settings)


class _State(AgentState[Any]):
    carryback_conversations: NotRequired[Annotated[list[str], PrivateStateAttr]]


class _Releasing(CarrybackMiddleware):
    """Notes the agent's conversations in its state, so that another process can end what this one began."""

    state_schema = _State

    def __init__(self, release_on: Literal["end", "never"] = "end") -> None:
        super().__init__(release_on)
        self._models: OrderedDict[str, Runnable[Any, Any]] = OrderedDict()
        self._latest: Runnable[Any, Any] | None = None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        ask(request.model)
        with asked() as ids:
            response = handler(self._marked(request))
        return self._noted(request, response, ids)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ExtendedModelResponse[Any]:
        await aask(request.model)
        with asked() as ids:
            response = await handler(self._marked(request))
        return self._noted(request, response, ids)

    def _noted(
        self, request: ModelRequest[Any], response: ModelResponse[Any], ids: list[str]
    ) -> ExtendedModelResponse[Any]:
        self._latest = request.model
        for conversation in ids:
            self._models[conversation] = request.model
            self._models.move_to_end(conversation)
        while len(self._models) > _CAPACITY:
            self._models.popitem(last=False)
        state: Any = request.state
        known = dict.fromkeys([*state.get(_KEY, ()), *ids])
        return ExtendedModelResponse(response, Command(update={_KEY: list(known)}))

    def after_agent(self, state: Any, runtime: Runtime[Any]) -> dict[str, Any] | None:
        for conversation in state.get(_KEY, ()):
            try:
                release(self._model(conversation), conversation)
            except ValueError as error:
                log.warning("conversation %s is left to expire: %s", conversation, error)
        return {_KEY: []}

    async def aafter_agent(self, state: Any, runtime: Runtime[Any]) -> dict[str, Any] | None:
        for conversation in state.get(_KEY, ()):
            try:
                await arelease(self._model(conversation), conversation)
            except ValueError as error:
                log.warning("conversation %s is left to expire: %s", conversation, error)
        return {_KEY: []}

    def _model(self, conversation: str) -> Runnable[Any, Any]:
        """The model that a conversation was led with; that of another process is taken to be like the latest."""
        model = self._models.pop(conversation, self._latest)
        if model is None:
            raise ValueError("no model was called in this process")
        return model
