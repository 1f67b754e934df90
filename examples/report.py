"""Says what model calls reused. The examples share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from carryback import LastReuse


@dataclass
class Report:
    """Prints a line a call, and what they come to."""

    calls: list[LastReuse] = field(default_factory=list)
    silent: int = 0

    def add(self, who: str, reuse: LastReuse | None) -> None:
        """A model call.

        Args:
            who: what made it.
            reuse: None if the server said nothing; it is not carryback's then.
        """
        if reuse is None:
            self.silent += 1
            return
        self.calls.append(reuse)
        cached = f", {reuse.cached:,} in its cache" if reuse.cached else ""
        print(
            f"  [{who}, turn {reuse.turn}] {reuse.tokens:,} of {reuse.prompt_tokens:,} prompt tokens reused, "
            f"{reuse.recomputed:,} computed{cached} ({reuse.reason})",
            flush=True,
        )

    def total(self) -> None:
        """The last line."""
        if self.silent:
            print(f"The server did not say what {self.silent} calls reused: it is not carryback's.")
        if self.calls:
            prompts = sum(call.prompt_tokens for call in self.calls)
            reused = sum(call.tokens + call.cached for call in self.calls)
            conversations = len({call.conversation for call in self.calls})
            print(
                f"{len(self.calls)} model calls in {conversations} conversations: {reused:,} of {prompts:,} "
                f"prompt tokens reused ({reused / prompts:.0%})."
            )
