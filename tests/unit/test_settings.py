"""Settings that cannot work, by themselves or together, are errors that say so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from carryback_server.config import (
    LEASE_MARGIN_S,
    ConfigError,
    RouterSettings,
    ServeConfig,
    load,
)

REDIS = "redis://127.0.0.1:6379"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prefill_lease_s": 1}, ["prefill_lease_s", "1 s"]),
        ({"ejection_s": 20, "ejection_max_s": 10}, ["ejection_s (20)", "ejection_max_s (10)"]),
        (
            {"max_response_bytes": 2000, "responses_max_bytes": 1000},
            ["max_response_bytes", "responses_max_bytes"],
        ),
        ({"hold_s": 60, "hold_mid_turn_s": 90}, ["hold_mid_turn_s (90)", "hold_s (60)"]),
        ({"hold_s": 600, "conversation_ttl_s": 60, "state": REDIS}, ["conversation_ttl_s", "hold_s"]),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, object], names: list[str]) -> None:
    for kind in (RouterSettings, ServeConfig):
        with pytest.raises(ConfigError) as caught:
            load(kind, **settings)
        assert all(name in str(caught.value) for name in names), caught.value


def test_an_engines_and_a_pairs_own() -> None:
    with pytest.raises(ConfigError, match=r"restart_wait_s \(9\) is above restart_wait_max_s \(5\)"):
        load(ServeConfig, restart_wait_s=9, restart_wait_max_s=5)


def test_it_does_not_matter_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("hold_s: 60\n")
    monkeypatch.setenv("CARRYBACK_HOLD_MID_TURN_S", "90")
    with pytest.raises(ConfigError, match=r"hold_mid_turn_s \(90\) is above hold_s \(60\)"):
        load(RouterSettings, file)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hold_s": 0, "pin_budget": 0},
        {"hold_s": 0, "hold_mid_turn_s": 90},
        {"hold_s": 6, "hold_first_s": 0},
        {"hold_s": 60},  # what was not given is capped without a word
        {"responses_max_bytes": 0, "max_response_bytes": 10},
        {"responses_max_bytes": 1000},
        {"hold_s": 600, "conversation_ttl_s": 60},  # there is no Redis
    ],
)
def test_what_can_work(settings: dict[str, object]) -> None:
    load(RouterSettings, **settings)
    load(ServeConfig, **settings)


def test_the_margin_is_the_plug_ins() -> None:
    """Said twice, since routers run without vLLM."""
    source = Path(__file__).parents[2] / "server" / "carryback_vllm" / "worker.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEASE_MARGIN_S":
            assert ast.literal_eval(node.value) == LEASE_MARGIN_S
            return
    raise AssertionError("it has none")
