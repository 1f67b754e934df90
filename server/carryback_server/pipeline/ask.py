"""Step 3, first half: which decode engines a prefill engine asks what they have of a prompt."""

from __future__ import annotations

import random
from typing import Any

from carryback_server.engine_client import EngineClient
from carryback_server.pipeline.context import RequestContext, Shared


def question(
    shared: Shared, context: RequestContext, prefill: EngineClient, beside: EngineClient | None
) -> dict[str, Any]:
    """What to ask, as `kv_transfer_params`: of the engines that can be asked, where the conversation was last, then where
    the request is to be decoded, then others at random.

    Args:
        beside: the engine that will decode, if that is known.
    """
    if not context.asked.use:
        return {"carryback_ask": []}
    able, last = [*shared.engines.askable(prefill)], context.last
    asked = [each for each in dict.fromkeys((last, beside)) if each is not None and each in able]
    if len(able) > len(asked):
        others = [each for each in able if each not in asked]
        most = max(shared.config.ask_engines - len(asked), 0)
        asked += random.sample(others, min(most, len(others)))
    params: dict[str, Any] = {"carryback_ask": [each.events_address for each in asked]}
    location = context.asked.conversation.location
    if location is not None and location.tip:
        params["carryback_tip"] = {"tokens": location.tokens, "digest": location.tip.hex()}
    threshold = shared.config.kv_recompute_threshold
    if threshold == "auto":
        threshold = shared.costs.threshold(prefill.name, last.name) if last is not None else None
    return params if threshold is None else {**params, "carryback_threshold": threshold}
