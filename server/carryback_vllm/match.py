"""What a prefill engine reads of a prompt, and why not more. No vLLM in here: `carryback simulate` runs it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Match:
    """What a request may read, decided once, and what became of it.

    Attributes:
        blocks: leading full blocks of the prompt that it reads, those in its own prefix cache included.
        expected: tokens that the conversation's last request left at a decode engine; 0 if nobody knows.
        is_changed: the prompt does not begin with those; None: it is shorter.
        reason: why not more is read; empty where all is.
        found, holder, asked: the most tokens that a decode engine had, which one (its id), and how many have answered.
        is_looked_up: vLLM has looked up what it has in this engine's own prefix cache.
        allocated: when it was given blocks to read into.
        began: when it was scheduled to be computed,
        scheduled: and how many tokens the engine had scheduled until then.
    """

    blocks: int = 0
    expected: int = 0
    is_changed: bool | None = False
    reason: str = ""
    found: int = 0
    holder: str = ""
    asked: int = 0
    is_looked_up: bool = False
    cached_tokens: int = 0
    read_tokens: int = 0
    allocated: float = 0.0
    read_s: float = 0.0
    began: float = 0.0
    scheduled: int = 0

    def report(self, prompt_tokens: int) -> dict[str, Any]:
        """What became of a prompt of so many tokens, for the router (`carryback.wire.Report`): how many were read, were in
        the engine's own prefix cache, and were computed; and why not more."""
        reused = self.read_tokens + self.cached_tokens
        # A shorter prompt that was not found whole was cut somewhere in the middle, most likely.
        is_changed = reused < self.expected if self.is_changed is None else self.is_changed
        is_whole = reused >= self.expected and not is_changed
        reason = self.reason
        if reason == "nothing" and self.cached_tokens:
            reason = "local_cache"
        if reason in ("", "nothing", "local_cache"):
            if is_changed:
                reason = "history_changed"
            elif reused < self.expected:
                reason = "overwritten"
            elif not reused:
                reason = "new"
            else:
                reason = reason or "verified"
        return {
            "outcome": "miss"
            if not reused
            else "hit"
            if is_whole and reason in ("verified", "local_cache")
            else "partial",
            "tokens": self.read_tokens,
            "cached": self.cached_tokens,
            "recomputed": max(prompt_tokens - reused, 0),
            "reason": reason,
            "found": self.found,
            "holder": self.holder,
            "asked": self.asked,
        }
