"""Which engines can read each other's KV, by what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from carryback_server.alike import NEEDS, differences

SAME = {need.fact: "same" for need in NEEDS} | {"tensor_parallel_size": 2, "kv_heads": 8}


@pytest.mark.parametrize("fact", sorted(SAME.keys() - {"tensor_parallel_size", "kv_heads"}))
def test_what_has_to_be_equal(fact: str) -> None:
    assert differences(SAME, SAME) == []
    [need] = differences(SAME, SAME | {fact: "another"})
    assert need.fact == fact
    # Who does not say it is taken for equal.
    assert differences({name: value for name, value in SAME.items() if name != fact}, SAME) == []


@pytest.mark.parametrize(
    ("one", "other", "heads", "fits"),
    [
        (1, 2, 8, True),
        (8, 2, 8, True),
        (2, 3, 8, False),
        # Above the count of KV heads, ranks hold copies.
        (2, 4, 2, False),
        (4, 4, 2, True),
        (16, 1, 8, False),
        # All ranks have all of it.
        (1, 8, None, True),
    ],
)
def test_tensor_parallel_sizes_that_go_together(one: int, other: int, heads: int | None, fits: bool) -> None:
    def about(size: int) -> dict[str, Any]:
        facts = SAME | {"tensor_parallel_size": size, "kv_heads": heads}
        return {name: value for name, value in facts.items() if value is not None}

    for pair in ((about(one), about(other)), (about(other), about(one))):
        assert [need.fact for need in differences(*pair)] == ([] if fits else ["tensor_parallel_size"])
