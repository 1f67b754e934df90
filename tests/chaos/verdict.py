"""What is counted, and what is wrong.

A request may end in the right answer, in an error object with a 5xx status, in a stream that ends with an error
event after a right beginning, or, if its router was killed meanwhile, in a broken connection; a response to be
continued may be gone (404) with the Redis that knew it. Wrong is all else: another text, a stream that
just stops, no end at all, KV read that is not the prompt's, KV that stays pinned, leased or in use, a traceback.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from carryback.wire import Reuse

STEPS = 15


@dataclass
class Span:
    """A part of the time.

    Attributes:
        outcomes: requests by how they ended.
        reuse: answers that could have reused something, by whether they did.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reuse: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)

    @property
    def hit_share(self) -> float:
        """Hits among the answers that could be one."""
        return self.reuse["hit"] / max(self.reuse.total(), 1)


@dataclass
class Report:
    """Everything that happened.

    Attributes:
        failures: what must not be.
        phase: `before`, `during` or `after` the faults, or `calm`: the conversations that begin after them.
        given_up: turns that got no answer in all of their tries.
    """

    seconds: float
    seed: int
    failures: list[str] = field(default_factory=list)
    phase: str = "before"
    phases: dict[str, Span] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    given_up: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def note(self, outcome: str, reuse: str, *, has_history: bool) -> None:
        """A request has ended.

        Args:
            reuse: what its answer says of reuse; empty if nothing.
            has_history: something may be there of it.
        """
        for span in self._now():
            span.outcomes[outcome] += 1
            if has_history and reuse:
                span.reuse[Reuse.parse(reuse).outcome] += 1
        if has_history and reuse:
            self.reasons[f"{Reuse.parse(reuse).outcome}: {Reuse.parse(reuse).reason}"] += 1

    def event(self, what: str) -> None:
        """Something was made to go wrong."""
        self.faults[what] += 1
        for span in self._now():
            span.events.append(what)

    def _now(self) -> list[Span]:
        index = int((time.monotonic() - self._started) / (self.seconds / STEPS))
        return [self.spans.setdefault(index, Span()), self.phases.setdefault(self.phase, Span())]

    @property
    def outcomes(self) -> Counter[str]:
        """All requests by how they ended."""
        return sum((span.outcomes for span in self.phases.values()), Counter())

    def judge(self) -> None:
        """Look at the whole: reuse has to come back once nothing fails any more."""
        before, calm = (self.phases.get(each, Span()) for each in ("before", "calm"))
        self.facts["hit_share"] = {name: round(span.hit_share, 3) for name, span in self.phases.items()}
        if not calm.reuse["hit"]:
            self.failures.append("nothing was reused after the faults")
        elif before.reuse.total() > 50 and calm.hit_share < before.hit_share - 0.25:
            self.failures.append(
                f"reuse did not come back: {before.hit_share:.0%} before, {calm.hit_share:.0%} after"
            )

    def table(self) -> str:
        """For a person."""
        lines = [
            f"{'from s':>7} {'answers':>8} {'errors':>7} {'broken':>7} {'left':>5} {'hit':>5} {'partial':>8}"
        ]
        for index, span in sorted(self.spans.items()):
            answers = span.outcomes["answer"]
            broken, left = span.outcomes["broken connection"], span.outcomes["left"]
            errors = span.outcomes.total() - answers - broken - left
            partial = span.reuse["partial"] / max(span.reuse.total(), 1)
            events = ", ".join(f"{what} x{n}" if n > 1 else what for what, n in Counter(span.events).items())
            lines.append(
                f"{index * self.seconds / STEPS:7.0f} {answers:8} {errors:7} {broken:7} {left:5} "
                f"{span.hit_share:5.0%} {partial:8.0%}  {events}"
            )
        lines += [
            "",
            "hits: " + ", ".join(f"{name} {span.hit_share:.0%}" for name, span in self.phases.items()),
        ]
        for title, counts in (("requests", self.outcomes), ("reuse", self.reasons), ("faults", self.faults)):
            lines += ["", f"{title}, {counts.total()}"]
            lines += [f"{count:8}  {name}" for name, count in counts.most_common()]
        lines += [
            "",
            f"{self.conversations} conversations, {self.given_up} turns given up",
        ]
        lines += [f"{name}: {value}" for name, value in self.facts.items()]
        lines += ["", f"{len(self.failures)} failures"]
        return "\n".join([*lines, *self.failures[:20]])

    def json(self) -> str:
        """For a program."""
        return json.dumps(
            {
                "seed": self.seed,
                "seconds": self.seconds,
                "requests": self.outcomes,
                "reuse": self.reasons,
                "faults": self.faults,
                "conversations": self.conversations,
                "given_up": self.given_up,
                **self.facts,
                "failures": self.failures,
            }
        )
