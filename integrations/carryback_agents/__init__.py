"""OpenAI Agents SDK: every model call says which conversation and turn it belongs to.

from carryback_agents import CarrybackProvider, run_config

provider = CarrybackProvider(base_url="http://127.0.0.1:8000/v1", api_key="none")
config = run_config(provider, model="default")
result = await Runner.run(agent, "hi", session=session, run_config=config)
"""

from __future__ import annotations

from carryback_agents._models import CarrybackChatCompletionsModel, CarrybackResponsesModel, reuse
from carryback_agents._provider import CarrybackProvider, run_config

__all__ = [
    "CarrybackChatCompletionsModel", "CarrybackProvider", "CarrybackResponsesModel", "reuse", "run_config",
]  # fmt: skip
