"""Which of the prompts that wait at a prefill engine is computed next. No vLLM in here: `carryback simulate` runs it too.

First come, first served, one new conversation of 30,000 tokens makes all those wait that have 50 tokens to compute,
and where many wait, what they stand to read is given up before their turn comes: then they are long as well, and the
engine does not recover. So a prompt with little to compute goes before one with much. Nobody waits for ever: a prompt
is passed by those only that come up to `PASSED` times its own computing time after it, and never later than the patience.
(Shortest job first, with aging.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

# A prompt lets those pass that come this many times its own computing time after it.
PASSED = 300.0
# But nobody who comes later than this, in seconds.
PATIENCE_S = 120.0
# What counts of the past for the time that a token takes, with each prompt that was computed.
_MEMORY = 0.9

T = TypeVar("T")


@dataclass(slots=True)
class _Place(Generic[T]):
    item: T
    since: float
    tokens: int
    priority: int


class Line(Generic[T]):
    """Prompts that wait, by their order.

    Args:
        patience_s: how much longer than first come, first served a prompt may wait, in seconds; 0: that is the order.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._places: dict[str, _Place[T]] = {}
        self._first: str | None = None
        self._is_known = False
        self._seconds = self._tokens = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def join(self, key: str, item: T, tokens: int, now: float, priority: int = 0) -> None:
        """A prompt comes.

        Args:
            tokens: that will have to be computed, as far as one can say.
            now: in seconds, on any clock.
            priority: lower ones go before all higher ones, as vLLM has it.
        """
        self._places[key] = _Place(item, now, tokens, priority)
        self._is_known = False

    def shorten(self, key: str, tokens: int) -> None:
        """It turns out that at most so many tokens of a prompt will have to be computed."""
        if (place := self._places.get(key)) is not None and tokens < place.tokens:
            place.tokens = tokens
            self._is_known = False

    def leave(self, key: str) -> None:
        """A prompt is being computed or read, or waits no more."""
        if self._places.pop(key, None) is not None:
            self._is_known = False

    def learn(self, seconds: float, tokens: int) -> None:
        """So many tokens were computed in so many seconds. Before anything is learned, who comes first goes first."""
        self._seconds = _MEMORY * self._seconds + seconds
        self._tokens = _MEMORY * self._tokens + tokens
        self._is_known = False

    def look_again(self) -> None:
        """Who can go may have changed."""
        self._is_known = False

    def first(self, can_go: Callable[[T], bool] | None = None) -> str | None:
        """The prompt that goes next.

        Args:
            can_go: for those that may be held up by something else; nobody waits for them. Asked again only after
                something has changed.
        """
        if not self._is_known:
            token_s = self._seconds / self._tokens if self._tokens else 0.0

            def order(key: str) -> tuple[int, float]:
                place = self._places[key]
                return place.priority, place.since + min(PASSED * place.tokens * token_s, self._patience_s)

            able = (key for key, place in self._places.items() if can_go is None or can_go(place.item))
            self._first = min(able, key=order, default=None)
            self._is_known = True
        return self._first

    def __getitem__(self, key: str) -> T:
        return self._places[key].item
