"""What a test can see of the requests that an engine got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class Received:
    """A request as it came.

    Attributes:
        headers: names in lower case.
        body: decoded; None if it was not a JSON object.
    """

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    body: dict[str, Any] | None

    @property
    def params(self) -> dict[str, Any]:
        """Its `kv_transfer_params`."""
        params = (self.body or {}).get("kv_transfer_params")
        return params if isinstance(params, dict) else {}

    @property
    def hop(self) -> Literal["prefill", "decode"]:
        """Which hop it is."""
        return "prefill" if self.params.get("do_remote_decode") else "decode"
