"""What a prefill engine says of a prompt: what was read, and why not more."""

from __future__ import annotations

from typing import Any

import pytest
from carryback import wire
from carryback_vllm.match import Match
from hypothesis import given
from hypothesis import strategies as st

# Ten blocks of 32 tokens, and one.
PROMPT = 321


@pytest.mark.parametrize(
    ("match", "outcome", "reason"),
    [
        ({}, "miss", "new"),
        ({"reason": "nothing", "asked": 1}, "miss", "new"),
        ({"reason": "nothing", "cached_tokens": 64}, "hit", "local_cache"),
        ({"read_tokens": 320, "found": 320}, "hit", "verified"),  # a new conversation's shared beginning
        ({"read_tokens": 320, "found": 320, "expected": 320}, "hit", "verified"),
        ({"read_tokens": 64, "cached_tokens": 256, "found": 320, "expected": 320}, "hit", "verified"),
        ({"reason": "local_cache", "cached_tokens": 320, "expected": 320}, "hit", "local_cache"),
        ({"read_tokens": 320, "expected": 256}, "hit", "verified"),  # more than the last request left
        ({"read_tokens": 64, "found": 64, "expected": 320}, "partial", "overwritten"),
        ({"reason": "nothing", "expected": 320}, "miss", "overwritten"),
        ({"reason": "nothing", "cached_tokens": 64, "expected": 320}, "partial", "overwritten"),
        ({"read_tokens": 64, "found": 64, "expected": 320, "is_changed": True}, "partial", "history_changed"),
        ({"reason": "nothing", "expected": 320, "is_changed": True}, "miss", "history_changed"),
        ({"read_tokens": 320, "expected": 320, "is_changed": True}, "partial", "history_changed"),
        ({"reason": "local_cache", "cached_tokens": 320, "expected": 320, "is_changed": True}, "partial", "history_changed"),
        # A prompt that is shorter than what was left.
        ({"read_tokens": 320, "found": 320, "expected": 320, "is_changed": None}, "hit", "verified"),
        ({"read_tokens": 64, "found": 64, "expected": 320, "is_changed": None}, "partial", "history_changed"),
        ({"reason": "below_threshold", "found": 32, "expected": 32}, "miss", "below_threshold"),
        ({"reason": "too_many_leases", "found": 320, "cached_tokens": 64}, "partial", "too_many_leases"),
        ({"reason": "no_answer", "expected": 320}, "miss", "no_answer"),
        ({"reason": "no_answer", "cached_tokens": 64, "expected": 320}, "partial", "no_answer"),
        ({"reason": "load_failed", "found": 320, "expected": 320}, "miss", "load_failed"),
        ({"reason": "off"}, "miss", "off"),
        ({"reason": "plugin_failed"}, "miss", "plugin_failed"),
        ({"reason": "unsupported_layout"}, "miss", "unsupported_layout"),
        ({"reason": "too_short"}, "miss", "too_short"),
    ],
)  # fmt: skip
def test_what_a_report_says(match: dict[str, Any], outcome: str, reason: str) -> None:
    report = Match(**match).report(PROMPT)
    assert (report["outcome"], report["reason"]) == (outcome, reason)
    assert reason in wire.ENGINE_REASONS
    assert report["tokens"] + report["cached"] + report["recomputed"] == PROMPT


@given(
    expected=st.integers(0, 10), read=st.integers(0, 10), cached=st.integers(0, 10),
    is_changed=st.sampled_from([True, False, None]),
    reason=st.sampled_from(["", "nothing", *wire.ENGINE_REASONS]),
)  # fmt: skip
def test_a_hit_lacks_nothing_of_what_there_was(
    expected: int, read: int, cached: int, is_changed: bool | None, reason: str
) -> None:
    made = Match(
        expected=expected, is_changed=is_changed, reason=reason, read_tokens=read, cached_tokens=cached
    )
    report = made.report(32)
    assert report["reason"] in wire.ENGINE_REASONS
    assert (report["outcome"] == "miss") == (read + cached == 0)
    if report["outcome"] == "hit":
        assert read + cached >= expected
        assert not is_changed
