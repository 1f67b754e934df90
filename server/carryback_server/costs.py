"""What it costs to compute a prompt's KV and to read it back, as learned; and so when a read is worth it.

Both are straight lines in the number of tokens. To compute `n` more tokens takes `n` times a rate, whose
fixed part is paid either way. A read takes a fixed time (it is asked for, waited for, told to its holder)
and a rate by the bytes. They cross at the break-even count: fewer tokens are computed quicker than read.

Attention makes late tokens dearer to compute than early ones. What is read is the beginning of a prompt, so a
rate that is learned from its end, after reads, is a little too high, and one from whole prompts about right.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from carryback.wire import Reuse, Work

# The weight that a sample has kept when the next one comes: some 50 count.
_KEEP = 0.98
# Samples of a line until it is believed.
MIN_SAMPLES = 5
# One that took so many times as long as the line says was held up by something else.
_OUTLIER = 4.0
# How much is assumed to be known before: that a time does not depend on the tokens. While all samples are
# of like size, the slope cannot be told.
_PRIOR = 0.01
# One read in so many goes through whatever it costs, to see whether it still costs that.
_TRY_EVERY = 32
# A read never pays.
NEVER = -1
# What an engine is told then.
_MORE_THAN_ANY = 2**31 - 1
MAX_PAIRS = 10_000


@dataclass
class Line:
    """Seconds by tokens, `fixed_s + slope_s * tokens`, fitted to the latest samples (weighted least squares)."""

    samples: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Something took so long for so many tokens."""
        if self.samples >= MIN_SAMPLES:
            seconds = min(seconds, _OUTLIER * self.seconds(tokens))
        self.samples += 1
        self._weight = _KEEP * self._weight + 1
        self._x = _KEEP * self._x + tokens
        self._y = _KEEP * self._y + seconds
        self._xx = _KEEP * self._xx + tokens * tokens
        self._xy = _KEEP * self._xy + tokens * seconds

    @property
    def is_known(self) -> bool:
        """There were samples enough."""
        return self.samples >= MIN_SAMPLES

    @property
    def slope_s(self) -> float:
        """Seconds for one more token."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2 + _PRIOR * mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 0 else 0.0
        return min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)  # neither part is negative

    @property
    def fixed_s(self) -> float:
        """Seconds for no token at all."""
        return (self._y - self.slope_s * self._x) / self._weight if self._weight else 0.0

    def seconds(self, tokens: int) -> float:
        """How long it takes for so many tokens."""
        return self.fixed_s + self.slope_s * tokens


@dataclass
class _Pair:
    read: Line = field(default_factory=Line)
    is_met: bool = False
    offered: int = 0


class Costs:
    """What each prefill engine takes to compute, and to read from each decode engine, by engines' names."""

    def __init__(self) -> None:
        self._compute: OrderedDict[str, Line] = OrderedDict()
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()

    def learn(self, prefill: str, decode: str | None, reuse: Reuse, work: Work) -> None:
        """A prompt was prefilled.

        Args:
            decode: the engine that its KV was read from, if any of it was.
            work: how long that took.
        """
        if work.computed > 0 and work.compute_s > 0:
            _of(self._compute, prefill, Line).learn(work.computed, work.compute_s)
        if decode is not None and reuse.tokens and work.read_s > 0:
            pair = _of(self._pairs, (prefill, decode), _Pair)
            # Engines that meet shake hands first, once.
            if pair.is_met:
                pair.read.learn(reuse.tokens, work.read_s)
            pair.is_met = True

    def break_even(self, prefill: str, decode: str) -> int | None:
        """Tokens from which on reading them is quicker than computing them; `NEVER`; None if that is not
        known."""
        compute, pair = self._compute.get(prefill), self._pairs.get((prefill, decode))
        if compute is None or pair is None or not (compute.is_known and pair.read.is_known):
            return None
        gain_s = compute.slope_s - pair.read.slope_s
        return math.ceil(pair.read.fixed_s / gain_s) if gain_s > 0 else NEVER

    def threshold(self, prefill: str, decode: str) -> int | None:
        """The `kv_recompute_threshold` for a request; None: the engine's own.

        Now and then a read goes through whatever it costs, since what is not tried is not learned.
        """
        tokens = self.break_even(prefill, decode)
        if tokens is None:
            return None
        pair = self._pairs[prefill, decode]
        pair.offered += 1
        if pair.offered % _TRY_EVERY == 0:
            return None
        return _MORE_THAN_ANY if tokens == NEVER else tokens

    def saved_s(self, prefill: str, decode: str, tokens: int) -> float | None:
        """Seconds that it saved to read so many tokens rather than to compute them; None: not known."""
        compute, pair = self._compute.get(prefill), self._pairs.get((prefill, decode))
        if compute is None or pair is None or not (compute.is_known and pair.read.is_known):
            return None
        return compute.slope_s * tokens - pair.read.seconds(tokens)

    def view(self) -> list[dict[str, Any]]:
        """What an operator is shown: each pair of engines between which something was read."""
        return [self._view(prefill, decode, pair) for (prefill, decode), pair in self._pairs.items()]

    def _view(self, prefill: str, decode: str, pair: _Pair) -> dict[str, Any]:
        compute = self._compute.get(prefill) or Line()
        return {
            "prefill": prefill,
            "decode": decode,
            "prefill_s_per_token": compute.slope_s if compute.is_known else None,
            "read_s": pair.read.fixed_s if pair.read.is_known else None,
            "read_s_per_token": pair.read.slope_s if pair.read.is_known else None,
            "break_even_tokens": self.break_even(prefill, decode),
            "samples": {"prefill": compute.samples, "read": pair.read.samples},
        }


def _of(lines: OrderedDict[Any, Any], key: Any, new: Any) -> Any:
    """What is under a key, made if it is not there; engines that come and go do not pile up."""
    if key not in lines:
        lines[key] = new()
        if len(lines) > MAX_PAIRS:
            lines.popitem(last=False)
    return lines[key]
