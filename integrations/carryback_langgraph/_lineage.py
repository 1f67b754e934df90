"""Which conversation started which, as far as this process has seen."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from carryback._fork import Lock

from carryback_langgraph._names import Place

_CAPACITY = 10_000
_Key = TypeVar("_Key")


class Lineage:
    """Remembers who asked last in each graph, and the parents of conversations. Bounded; safe to share."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._parents: OrderedDict[str, str] = OrderedDict()

    def parent(self, place: Place) -> str | None:
        """The conversation that a new one at this place works for: the latest in the graph around it.

        A branch made by `Send` works for its own graph's.
        """
        depth = len(place.path) + place.is_branch
        for length in reversed(range(depth)):
            if (latest := self._latest.get((place.thread, *place.path[:length]))) is not None:
                return latest
        return None

    def asked(self, place: Place, conversation: str, parent: str | None) -> None:
        """Note a request of a conversation."""
        with self._lock:
            if not place.is_branch:  # branches run side by side: none of them is the latest
                _put(self._latest, (place.thread, *place.path), conversation)
            if parent is not None:
                _put(self._parents, conversation, parent)

    def family(self, conversation: str) -> list[str]:
        """A conversation, what it started, what that started, and so on; to be forgotten with it."""
        with self._lock:
            children: dict[str, list[str]] = {}
            for child, parent in self._parents.items():
                children.setdefault(parent, []).append(child)
            found = {conversation: None}
            waiting = [conversation]
            while waiting:
                new = [child for child in children.get(waiting.pop(), ()) if child not in found]
                found.update(dict.fromkeys(new))
                waiting += new
            for each in found:
                self._parents.pop(each, None)
        return list(found)


def _put(entries: OrderedDict[_Key, str], key: _Key, value: str) -> None:
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > _CAPACITY:
        entries.popitem(last=False)


lineage = Lineage()
