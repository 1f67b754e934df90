"""Step 3, first half: which decode engines a prefill engine asks what they have of a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.engine_client import EngineClient, Engines
from carryback_server.state import Location


@dataclass(frozen=True)
class Ask:
    """Tells prefill engines whom to ask."""

    engines: Engines
    config: RouterConfig
    costs: Costs

    def __call__(
        self,
        prefill: EngineClient,
        location: Location | None,
        last: EngineClient | None,
        beside: EngineClient | None,
    ) -> dict[str, Any]:
        """What to ask, as `kv_transfer_params`: of the engines that can be asked, where the conversation was last,
        then where the request is to be decoded, then others at random.

        Args:
            location: where the conversation was last,
            last: and the engine of that name, if it can still have what it had.
            beside: the engine that will decode, if that is known.
        """
        able = [*self.engines.askable(prefill)]
        likely = [each for each in dict.fromkeys((last, beside)) if each is not None and each in able]
        if len(able) > len(likely):
            others = [each for each in able if each not in likely]
            most = max(self.config.ask_engines - len(likely), 0)
            likely += random.sample(others, min(most, len(others)))
        params: dict[str, Any] = {"carryback_ask": [each.events_address for each in likely]}
        if location is not None and location.tip:
            params["carryback_tip"] = {"tokens": location.tokens, "digest": location.tip.hex()}
        if (threshold := self._threshold(prefill, last)) is not None:
            params["carryback_threshold"] = threshold
        return params

    def _threshold(self, prefill: EngineClient, last: EngineClient | None) -> int | None:
        """Below how many tokens the prefill engine does not read, if it is told."""
        threshold = self.config.kv_recompute_threshold
        if threshold != "auto":
            return threshold
        return self.costs.threshold(prefill.name, last.name) if last is not None else None
