"""Step 2: which engines a request goes to, and how much work it is there.

The measure of work is tokens in flight. One long prompt weighs more than many short ones.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from carryback_server.engine_client import EngineClient, Engines
from carryback_server.state import Location


class Loaded(Protocol):
    """An engine, to this module.

    Attributes:
        load: tokens of the prompts that are there now.
    """

    @property
    def load(self) -> int: ...


EngineT = TypeVar("EngineT", bound=Loaded)


def less_loaded(engines: Sequence[EngineT], *, but: Collection[EngineT] = ()) -> EngineT | None:
    """Of two engines taken at random the less busy one, any of the two if they are equal; None if there is
    none.

    Nearly as even as the least busy one of all, and many routers that decide by the same loads do not all
    go to the same engine (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).

    Args:
        but: engines to leave out.
    """
    candidates = [engine for engine in engines if engine not in but]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    one, other = random.sample(candidates, 2)  # in random order, so that either wins if they are equal
    return one if one.load <= other.load else other


def decode_engine(
    engines: Sequence[EngineT],
    holder: EngineT | None,
    *,
    overload_factor: float,
    slack_tokens: int,
    but: Collection[EngineT] = (),
) -> EngineT | None:
    """The decode engine for a request: the one that has its conversation's KV, else a less busy one.

    Args:
        overload_factor: the holder is not chosen if its load is more than so many times the mean of the
            others',
        slack_tokens: and so many tokens.
        but: engines to leave out.
    """
    if holder is None or holder not in engines or holder in but:
        return less_loaded(engines, but=but)
    others = [engine.load for engine in engines if engine is not holder and engine not in but]
    if others and holder.load > overload_factor * sum(others) / len(others) + slack_tokens:
        return less_loaded(engines, but=[*but, holder])
    return holder


def last_engine(engines: Engines, location: Location | None) -> EngineClient | None:
    """The decode engine where a conversation was last, if it can still have what it had."""
    engine = engines.find(location.engine) if location is not None else None
    # A router that has just started has not heard the engine yet.
    if location is None or engine is None or not engine.is_up or engine.run not in (location.run, ""):
        return None
    return engine


# What text is between: one byte for each token, and long words of a plain language.
_BYTES_PER_TOKEN = (1.0, 16.0)
_WEIGHT = 0.05


class TokenEstimate:
    """How many tokens a request's prompt has, told from its size before an engine has counted them."""

    def __init__(self) -> None:
        self.bytes_per_token = 4.0

    def tokens(self, size: int) -> int:
        """The tokens of a body of this many bytes; at least one."""
        return max(round(size / self.bytes_per_token), 1)

    def learn(self, size: int, tokens: int) -> None:
        """A body of this many bytes had a prompt of so many tokens."""
        if tokens > 0:
            low, high = _BYTES_PER_TOKEN
            # Bounded, since an image is many bytes and few tokens.
            ratio = min(max(size / tokens, low), high)
            self.bytes_per_token += _WEIGHT * (ratio - self.bytes_per_token)
