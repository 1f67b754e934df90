"""Step 3: which engines a request goes to."""

from __future__ import annotations

import random
from collections.abc import Collection

from carryback_server.engines import Engine


def least_loaded(engines: list[Engine], *, but: Collection[Engine] = ()) -> Engine | None:
    """The least busy engine, a random one of equals; None if there is none.

    Args:
        but: engines to leave out.
    """
    candidates = [engine for engine in engines if engine not in but]
    if not candidates:
        return None
    lowest = min(engine.load for engine in candidates)
    return random.choice([engine for engine in candidates if engine.load == lowest])


def decode_engine(
    engines: list[Engine], holder: Engine | None, *, but: Collection[Engine] = ()
) -> Engine | None:
    """The decode engine for a request: the one that holds its conversation's KV, else the least busy."""
    if holder is not None and holder in engines and holder not in but:
        return holder
    return least_loaded(engines, but=but)
