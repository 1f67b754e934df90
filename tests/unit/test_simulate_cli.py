"""`carryback simulate` as a user types it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from carryback_server.bench.result import Request, Result, save
from carryback_server.cli import app
from typer.testing import CliRunner

SMALL = ["simulate", "--prefill", "2", "--decode", "2", "--agents", "20", "--duration-s", "400"]


def run(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, args, env={"COLUMNS": "240", "TERM": "dumb"})
    assert done.exit_code == code, done.output
    return done.output


def test_a_cluster_is_simulated_with_reuse_and_without(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    shown = run(*SMALL, "--json", str(file), "--plots", str(tmp_path / "plots"))
    assert "with reuse" in shown
    assert "without" in shown
    (one,) = json.loads(file.read_text())["runs"]
    assert one["reuse"]["hit_rate"] > 0.5 > one["no_reuse"]["hit_rate"] == 0
    assert one["reuse"]["ttft"]["p50"] < one["no_reuse"]["ttft"]["p50"]
    assert one["reuse"]["recomputed_per_new"] < one["no_reuse"]["recomputed_per_new"]
    assert "within budget" not in shown
    assert ET.parse(tmp_path / "plots" / "simulate-held.svg").getroot().tag.endswith("svg")


def test_a_sweep_goes_through_all_pairs(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sweep = ["--sweep", "hold_s=0,30,480", "--sweep", "pin_budget=0.01,0.5"]
    shown = run(*SMALL, *sweep, "--no-baseline", "--json", str(file), "--plots", str(tmp_path))
    runs = json.loads(file.read_text())["runs"]
    assert [each["values"] for each in runs] == [
        {"hold_s": hold_s, "pin_budget": budget}
        for hold_s in ("0", "30", "480")
        for budget in ("0.01", "0.5")
    ]
    held = [max(each["reuse"]["curve"]["held"]) for each in runs]
    assert held[0] == held[1] == 0
    assert held[4] < held[5]
    # There is room for all, pinned or not.
    assert {each["reuse"]["hit_rate"] for each in runs} == {1.0}
    assert shown.count("0.01") >= 3
    text = (tmp_path / "simulate-sweep.svg").read_text()
    assert "pin_budget" in text
    assert "hold_s=480" in text


def test_a_profile_of_ones_own_and_router_settings_from_a_file(tmp_path: Path) -> None:
    profile, config = tmp_path / "mine.yaml", tmp_path / "router.yaml"
    profile.write_text(
        "{kv_bytes_per_token: 1e5, prefill_blocks: 20000, decode_blocks: 20000, prefill_token_s: 1e-5, "
        "transfer_bytes_per_s: 1e10, decode_step_s: 0.01}"
    )
    config.write_text("pin_budget: 0.001\n")
    assert "mid_turn budget" in run(
        *SMALL, "--profile", str(profile), "--config", str(config), "--no-baseline"
    )


def test_a_run_of_bench_is_replayed(tmp_path: Path) -> None:
    requests = [
        Request(
            arm=arm, conversation=f"c{number}", turn=1, step=step, started_s=10.0 * step + number,
            prompt_tokens=500 * step, output_tokens=20, new_tokens=480 if step > 1 else 500, ttft_s=1.0,
            duration_s=2.0,
        )
        for arm in ("reuse", "no_reuse")
        for number in range(3)
        for step in (1, 2, 3)
    ]  # fmt: skip
    run_file, file = tmp_path / "run.json", tmp_path / "out.json"
    save(
        Result(
            carryback="1", workload="agent", settings={}, environment={}, started="2030-01-01T00:00:00Z",
            duration_s=40.0, block_size=16, requests=requests, transfers=[],
        ),
        run_file,
    )  # fmt: skip
    run("simulate", "--prefill", "1", "--decode", "1", "--trace", str(run_file), "--json", str(file))
    (one,) = json.loads(file.read_text())["runs"]
    assert one["reuse"]["requests"] == 9
    assert one["reuse"]["reasons"] == {"hit verified": 6}


def test_a_trace_that_bench_reads_is_replayed(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [
        {"timestamp": 0, "input_length": 2048, "output_length": 10, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 9000, "input_length": 3072, "output_length": 10, "hash_ids": [1, 2, 3, 4, 5, 6]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("simulate", "--prefill", "1", "--decode", "1", "--trace", str(trace), "--json", str(file))
    (one,) = json.loads(file.read_text())["runs"]
    assert one["reuse"]["reasons"] == {"hit verified": 1}
    assert one["reuse"]["token_hit_rate"] > 0.9


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "hold=3"], "hold is no setting of the router"),
        (["--set", "hold_s"], "want NAME=VALUE"),
        (["--sweep", "pin_budget=2"], "pin_budget: "),
        (["--profile", "b200"], "no profile b200; there are "),
        (["--profile", "missing.yaml"], "no profile missing.yaml"),
        (["--trace", "missing.json"], "missing.json: No such file"),
        (["--set", "decode_blocks=100"], "needs "),
        (["--set", "first_tokens=40000"], "max_context_tokens has to leave room"),
    ],
)
def test_what_is_wrong_is_said(args: list[str], said: str) -> None:
    assert said in run(*SMALL, *args, code=2)
