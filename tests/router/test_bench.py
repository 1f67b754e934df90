"""`carryback bench` as a user runs it, against a router that runs already, with stub engines behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from carryback_server.bench import result as results
from carryback_server.bench.result import Request, Result
from live_router import LIMIT_S, LiveRouter, wait_until
from stub_engine.prompts import BLOCK_SIZE, CHAT

AGENT = ("agent", "--turns", "2", "--steps", "2", "--system-tokens", "64")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    with LiveRouter(tmp_path_factory.mktemp("bench")) as router:
        yield router
        router.stop()


def start(router: LiveRouter, *args: str) -> subprocess.Popen[str]:
    where = ("--url", router.url, "--admin-url", router.admin_url, "--out", str(out(router)))
    command = [sys.executable, "-m", "carryback_server", "bench", *args, *where]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def out(router: LiveRouter) -> Path:
    return router.log.parent / "run"


def bench(router: LiveRouter, *args: str, status: int = 0) -> tuple[Result, str]:
    """Run it; gives the result, and all that it said."""
    process = start(router, *args)
    said = "\n".join(process.communicate(timeout=120))
    assert process.returncode == status, said
    return results.load(out(router).with_suffix(".json")), said


def measured(result: Result, arm: str) -> list[Request]:
    return [each for each in result.requests if each.is_measured and each.arm == arm]


def answered(router: LiveRouter) -> int:
    """Chat requests that are over."""
    return router.log.read_text().count(f'"endpoint":"{CHAT}"')


def test_an_agent(router: LiveRouter) -> None:
    result, said = bench(router, *AGENT, "--aggregated-url", router.decode.url)
    on, off, aggregated = (measured(result, arm) for arm in ("reuse", "no_reuse", "aggregated"))
    assert [(each.turn, each.step) for each in on] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [each.outcome for each in on] == ["miss", "hit", "hit", "hit"]
    assert {(each.outcome, each.reason) for each in off} == {("miss", "off")}
    assert [each.prompt_tokens for each in on] == [each.prompt_tokens for each in off]
    assert [each.prompt_tokens for each in on] == [
        (each.reused_tokens or 0) + (each.recomputed_tokens or 0) for each in on
    ]
    assert all(each.is_identical for each in on)
    assert all(each.is_identical is None for each in off)
    assert {each.output_tokens for each in on} == {16}
    assert result.settings["turns"] == 2
    assert result.environment["model"] == "stub"
    assert all(each.is_identical and each.reused_tokens is None for each in aggregated)
    assert "Identical outputs: 8 of 8" in said
    assert "Identical outputs: 8 of 8" in out(router).with_suffix(".md").read_text()
    assert out(router).with_suffix(".html").read_text().startswith("<!doctype html>")
    firsts = [each.arm for each in result.requests][::3]
    assert set(firsts[:3]) == {"reuse", "no_reuse", "aggregated"}
    assert firsts == 2 * firsts[:3]
    # Nothing is left behind.
    assert router.client.get(f"{router.url}/v1/conversations").json()["data"] == []


def test_prompts_have_the_sizes_asked_for(router: LiveRouter) -> None:
    result, _ = bench(router, "paper", "--sizes", "200,400", "--repeats", "2", "--message-tokens", "8")
    grown = [each for each in result.requests if each.group and not each.is_measured]
    assert {each.group for each in grown} == {"200", "400"}
    assert all(0 <= int(each.group) - each.prompt_tokens < BLOCK_SIZE for each in grown)
    on = measured(result, "reuse")
    assert [each.group for each in on] == ["200", "200", "400", "400"]
    assert {each.outcome for each in on} == {"hit"}
    assert all((each.recomputed_tokens or 0) < 100 for each in on)


def test_many_conversations_at_a_time(router: LiveRouter) -> None:
    result, _ = bench(router, *AGENT, "--conversations", "6", "--concurrency", "3")
    on, off = measured(result, "reuse"), measured(result, "no_reuse")
    assert len(on) == len(off) == 6 * 4
    assert all(each.is_identical for each in on)
    # Each arm by itself: nothing of the one waited for the other.
    assert max(each.started_s + each.duration_s for each in off) <= min(each.started_s for each in on)
    assert result.settings["arms"] == "follow each other"


def test_branches_and_edits(router: LiveRouter) -> None:
    result, _ = bench(router, "branching", "--turns", "2", "--message-tokens", "64")
    on = measured(result, "reuse")
    assert all(each.is_identical for each in on)
    assert {each.outcome for each in on if each.group == "edit"} == {"partial"}
    seconds = [each for each in on if each.conversation.count("branch") and each.turn == 2]
    assert [each.outcome for each in seconds] == ["hit", "hit"]


def test_a_trace(router: LiveRouter, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"session_id": "a", "input_length": 100, "output_length": 5},
        {"session_id": "a", "input_length": 20, "output_length": 6, "delay": 10},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    result, _ = bench(router, "trace", str(file))
    assert [(each.conversation, each.output_tokens) for each in measured(result, "reuse")] == [
        ("a", 5),
        ("a", 6),
    ]


def test_an_output_that_differs(router: LiveRouter) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "Something else."}, "finish_reason": "length"}]}
    wrong = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    router.decode.fault(contains="Task 2", script=[(0.0, wrong)])
    result, said = bench(router, *AGENT, status=1)
    assert [each.is_identical for each in measured(result, "reuse")].count(False) == 1
    assert "1 outputs are not those of the reference" in said


def test_requests_that_fail(router: LiveRouter) -> None:
    router.decode.fault(contains="Task 2", error_after=3, times=None)
    result, said = bench(router, *AGENT, status=1)
    router.decode.faults.clear()
    failed = [each for each in result.requests if each.error]
    assert {(each.turn, each.step) for each in failed} == {(2, 1)}
    assert len([each for each in result.requests if each.is_measured and not each.error]) == 4
    assert "2 requests failed" in said


def test_what_was_measured_outlives_an_interrupt(router: LiveRouter) -> None:
    before = answered(router)
    process = start(router, "chat", "--think-s", "1000")
    warm_up_and_first_turn = 2 * (2 + 1)
    wait_until(lambda: answered(router) - before == warm_up_and_first_turn, "the first turn is over", LIMIT_S)
    wait_until(lambda: router.decode.in_use and router.is_idle(), "its KV is held", LIMIT_S)
    process.send_signal(signal.SIGINT)
    said = "\n".join(process.communicate(timeout=60))
    assert process.returncode == 130, said
    assert "interrupted" in said
    result = results.load(out(router).with_suffix(".json"))
    assert [each.turn for each in measured(result, "reuse")] == [1]
    wait_until(lambda: router.decode.in_use == 0, "nothing is held")
