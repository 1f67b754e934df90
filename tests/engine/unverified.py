"""Mutants for `test_random.py`: a decode engine that answers every question with its last request's KV, as if it went by
name, and a prefill engine that takes whatever it is given, as stock vLLM does."""

from __future__ import annotations

from typing import Any

import msgspec
from carryback.wire.events import Ask, Leased, transfer_params
from carryback_vllm.connector import CarrybackConnector
from carryback_vllm.scheduler import CarrybackScheduler


class ByName(CarrybackScheduler):
    last: tuple[bytes, ...] = ()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if request.num_prompt_tokens > 100:
            self.last = tuple(request.block_hashes)
        return super().request_finished(request, block_ids)

    def _answer(self, ask: Ask, now: float) -> Leased:
        return super()._answer(msgspec.structs.replace(ask, hashes=b"".join(self.last)), now)


class Trusting(CarrybackScheduler):
    def _take_record(self, request: Any, params: dict[str, Any], best: Leased) -> str:
        params.update(transfer_params(best.record))
        return ""


class ByNameConnector(CarrybackConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = ByName


class TrustingConnector(CarrybackConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = Trusting
