"""The mutant: a connector that trusts every record, as stock vLLM does. For `test_random.py` alone."""

from __future__ import annotations

from types import MethodType
from typing import Any

from carryback_vllm.connector import CarrybackConnector, CarrybackScheduler, _Match


def trusting_match(self: CarrybackScheduler, request: Any, params: dict[str, Any]) -> _Match:
    if params.get("do_remote_prefill") or not params.get("remote_block_ids"):
        return CarrybackScheduler._match(self, request, params)
    _, held = self._sealer.common_blocks(params, ())
    blocks = min(held, (request.num_prompt_tokens - 1) // self._hash_block_size)
    params["remote_block_ids"] = [params["remote_block_ids"][0][:blocks]]
    params["remote_num_tokens"] = blocks * self._hash_block_size
    return _Match(blocks, True, "verified")


class UnverifiedConnector(CarrybackConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_scheduler is not None:
            self.connector_scheduler._match = MethodType(trusting_match, self.connector_scheduler)
