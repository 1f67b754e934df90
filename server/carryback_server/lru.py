"""A bounded store that tenants share: past its capacity, the tenant that has most gives up its oldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLru(Generic[T]):
    """Things of tenants by id, each in the order of use.

    Args:
        capacity: the greatest total weight.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._things: dict[str, OrderedDict[str, tuple[T, int]]] = {}
        self._weights: dict[str, int] = {}
        self._total = 0

    def get(self, tenant: str, id: str) -> T | None:
        """The thing with this id."""
        things = self._things.get(tenant)
        found = things.get(id) if things is not None else None
        return found[0] if found is not None else None

    def use(self, tenant: str, id: str) -> T | None:
        """The thing with this id, which becomes the most recently used one."""
        found = self.get(tenant, id)
        if found is not None:
            self._things[tenant].move_to_end(id)
        return found

    def add(self, tenant: str, id: str, thing: T, weight: int = 1) -> None:
        """Add a thing, in place of one with the same id; others go to make room."""
        self.pop(tenant, id)
        self._things.setdefault(tenant, OrderedDict())[id] = (thing, weight)
        self._weights[tenant] = self._weights.get(tenant, 0) + weight
        self._total += weight
        while self._total > self._capacity:
            most = max(self._weights, key=lambda each: (self._weights[each], each != tenant))
            self.pop(most, next(iter(self._things[most])))

    def pop(self, tenant: str, id: str) -> T | None:
        """Take the thing with this id out."""
        things = self._things.get(tenant)
        found = things.pop(id, None) if things is not None else None
        if found is None:
            return None
        self._weights[tenant] -= found[1]
        self._total -= found[1]
        if not self._things[tenant]:
            del self._things[tenant], self._weights[tenant]
        return found[0]

    def tenants(self) -> list[str]:
        """Those that have anything."""
        return list(self._things)

    def newest(self, tenant: str) -> Iterator[T]:
        """A tenant's things, the most recently used first."""
        things = self._things.get(tenant)
        return (thing for thing, _ in reversed(things.values())) if things is not None else iter(())
