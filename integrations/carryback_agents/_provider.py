"""What an agent is run with: the provider of its models, and the run's configuration."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import carryback
from agents import Model, ModelProvider, RunConfig, UserError
from agents.run import CallModelData, ModelInputData
from openai import AsyncOpenAI

from carryback_agents._calls import begin
from carryback_agents._models import CarrybackChatCompletionsModel, CarrybackResponsesModel


class CarrybackProvider(ModelProvider):
    """Models of a server that speaks OpenAI's API; each call says which conversation and turn it belongs to.

    Make one for a program: it keeps the connections.

    Args:
        base_url, api_key: of the server; by default those of `openai.AsyncOpenAI`.
        openai_client: a client to use instead: `carryback.AsyncOpenAI`, or any `openai.AsyncOpenAI`.
        use_responses: ask `/responses` instead of `/chat/completions`.

    Raises:
        ValueError: both a client and what to make one of are given.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        openai_client: AsyncOpenAI | None = None,
        use_responses: bool = False,
    ) -> None:
        if openai_client is not None and (base_url is not None or api_key is not None):
            raise ValueError("give base_url and api_key, or openai_client")
        self._is_own = openai_client is None
        self._client = openai_client or carryback.AsyncOpenAI(base_url=base_url, api_key=api_key)
        self._use_responses = use_responses

    def get_model(self, model_name: str | None) -> Model:
        """The model of this name.

        Raises:
            agents.UserError: there is no name; the SDK's default is a model of OpenAI's.
        """
        if model_name is None:
            raise UserError("name the server's model: Agent(model=...) or run_config(provider, model=...)")
        if self._use_responses:
            return CarrybackResponsesModel(model_name, self._client)
        return CarrybackChatCompletionsModel(model_name, self._client)

    async def aclose(self) -> None:
        """Close the connections, unless the client was given."""
        if self._is_own:
            await self._client.close()


def run_config(provider: ModelProvider, **options: Any) -> RunConfig:
    """A `RunConfig` for `Runner.run`, with a provider and the name of each call's agent noted.

    Args:
        provider: usually a `CarrybackProvider`.
        options: any other of `RunConfig`'s, e.g. `model`, `group_id`, `workflow_name`. Your
            `call_model_input_filter` is called as before.
    """
    own = options.pop("call_model_input_filter", None)

    def note(data: CallModelData[Any]) -> ModelInputData | Awaitable[ModelInputData]:
        begin(data.agent.name)
        return data.model_data if own is None else own(data)

    return RunConfig(model_provider=provider, call_model_input_filter=note, **options)
