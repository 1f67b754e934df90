"""Nothing goes wrong unseen while routers, engines and Redis are killed. The long run: `python -m chaos`."""

from __future__ import annotations

from pathlib import Path

import chaos


async def test_every_request_ends_in_a_right_answer_or_a_clear_error_while_processes_are_killed(
    tmp_path: Path,
) -> None:
    """No record is used twice, nothing stays pinned, and reuse comes back."""
    plan = chaos.Plan(seconds=12, conversations=12, turns=4, seed=7, every_s=1.0, faults=4)
    report = await chaos.run(plan, tmp_path)
    assert not report.failures, report.table()
    assert report.faults.total() == 4
    assert report.conversations > 12
