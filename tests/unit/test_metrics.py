from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from carryback.wire import Reuse
from carryback_server.access_log import Entry
from carryback_server.metrics import MAX_SERIES, Labelled, Metrics
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/carryback.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
DOCS = (ROOT / "docs/observability.md").read_text()

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Labels that Prometheus adds itself, and the one that buckets have.
TARGET = {"job", "instance", "le"}


def ours() -> list[MetricWrapperBase]:
    return [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]


def series() -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each series that the router shows."""
    found = {
        f"{each._name}{suffix}": (each._type, set(each._labelnames))
        for each in ours()
        for suffix in SUFFIXES[each._type]
    }
    for family in Metrics().registry.collect():
        if family.name.startswith("process_"):
            found |= {f"{family.name}{suffix}": (family.type, set()) for suffix in SUFFIXES[family.type]}
    return found | {"up": ("gauge", set())}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"carryback_{name}", labels)


# -- names


def test_names_have_units_and_help() -> None:
    units = ("seconds", "bytes", "tokens", "blocks")
    for metric in ours():
        name = metric._name
        assert name.startswith("carryback_"), name
        assert metric._documentation.endswith("."), name
        if metric._type == "histogram":
            assert name.endswith(units), name
    shown = Metrics().exposition().decode()
    assert "_created" not in shown
    assert "process_resident_memory_bytes" in shown


def test_all_metrics_are_documented() -> None:
    for metric in ours():
        name = metric._name + SUFFIXES[metric._type][0].replace("_bucket", "")
        assert f"`{name}`" in DOCS, name


def test_no_label_can_be_chosen_by_a_client() -> None:
    allowed = {
        *("endpoint", "status", "code", "outcome", "reason", "source", "hop", "role", "engine", "result"),
        *("tenant", "operation", "rank", "version", "prefill", "decode", "task"),
        "field",  # names of `trust.FIELDS`, and `other`
    }
    assert {label for metric in ours() for label in metric._labelnames} == allowed


# -- counting


def test_a_request_is_counted() -> None:
    metrics = Metrics()
    entry = Entry(
        "/v1/chat/completions",
        tenant="a",
        status=200,
        reuse=Reuse("hit", 1024, "verified", 37, 16),
        ttft_s=0.3,
        prefill_s=0.1,
        decode_wait_s=0.15,
        duration_s=2.0,
        bytes_in=4096,
        bytes_out=512,
    )
    metrics.observe_first_byte(entry)
    metrics.observe_request(entry)
    assert value(metrics, "requests_total", endpoint="/v1/chat/completions", status="200") == 1
    assert value(metrics, "reuse_total", outcome="hit", reason="verified") == 1
    for source, tokens in {"reused": 1024, "recomputed": 37, "cached": 16}.items():
        assert value(metrics, "prompt_tokens_total", source=source) == tokens
        assert value(metrics, "tenant_prompt_tokens_total", tenant="a", source=source) == tokens
    assert value(metrics, "time_to_first_token_seconds_sum", outcome="hit") == 0.3
    assert value(metrics, "prefill_seconds_sum", outcome="hit") == 0.1
    assert value(metrics, "router_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "request_duration_seconds_sum", endpoint="/v1/chat/completions") == 2
    assert value(metrics, "request_bytes_total") == 4096
    assert value(metrics, "response_bytes_total") == 512
    assert value(metrics, "tenant_requests_total", tenant="a") == 1


def test_a_client_that_left_and_an_error_are_counted() -> None:
    metrics = Metrics()
    metrics.observe_request(Entry("/v1/completions", status=200, client_gone=True))
    metrics.observe_request(Entry("/v1/completions", status=503, error="no_engine"))
    assert value(metrics, "requests_total", endpoint="/v1/completions", status="499") == 1
    assert value(metrics, "requests_total", endpoint="/v1/completions", status="503") == 1
    assert value(metrics, "errors_total", code="no_engine") == 1


def test_refused_requests_are_counted_by_tenant() -> None:
    metrics = Metrics()
    for entry in (
        Entry("/v1/completions", tenant="a", status=429, error="rate_limit_exceeded"),
        Entry("/v1/completions", tenant="a", status=429),  # an engine's own answer
        Entry("/v1/completions", status=401, error="invalid_api_key"),
    ):
        metrics.observe_request(entry)
    assert value(metrics, "tenant_rejected_requests_total", tenant="a", reason="rate_limit_exceeded") == 1
    assert value(metrics, "tenant_requests_total", tenant="a") == 2
    metrics.in_flight_of("a").inc()
    assert value(metrics, "tenant_in_flight_requests", tenant="a") == 1


def test_series_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_SERIES + 50):
        metrics.observe_reuse(Reuse("miss", 0, f"reason{number}"))
    shown = [line for line in metrics.exposition().decode().splitlines() if "carryback_reuse_total{" in line]
    assert len(shown) == MAX_SERIES + 1
    assert value(metrics, "reuse_total", outcome="other", reason="other") == 50


def test_children_are_kept() -> None:
    metrics = Metrics()
    retries = Labelled(metrics.retries)
    retries["prefill", "down"].inc()
    assert retries["prefill", "down"] is retries["prefill", "down"]
    assert value(metrics, "retries_total", hop="prefill", reason="down") == 1


def test_an_engine_comes_and_goes() -> None:
    metrics = Metrics()
    engine = metrics.engine("decode", "d0")
    engine.up.set(1)
    engine.pinned_blocks.set(7)
    assert value(metrics, "engine_up", role="decode", engine="d0") == 1
    assert value(metrics, "engine_pinned_blocks", role="decode", engine="d0") == 7
    metrics.forget_engine("decode", "d0")
    assert 'engine="d0"' not in metrics.exposition().decode()


def test_what_is_held_by_engine_and_tenant() -> None:
    metrics = Metrics()
    metrics.held("d0", 1, 64, 4, "a")
    metrics.held("d0", 1, 32, 2, "b")
    metrics.held("d0", -1, -64, -4, "a")
    assert value(metrics, "held_pins", engine="d0") == 1
    assert value(metrics, "held_tokens", engine="d0") == 32
    assert value(metrics, "held_blocks", engine="d0") == 2
    assert value(metrics, "tenant_held_blocks", tenant="a") == 0
    assert value(metrics, "tenant_held_blocks", tenant="b") == 2


# -- several workers

WORKER = """
import sys
from carryback_server.access_log import Entry
from carryback_server.metrics import Metrics

metrics = Metrics()
up, load = (float(word) for word in sys.argv[1:])
metrics.observe_request(Entry("/v1/completions", status=200, duration_s=load, bytes_in=10))
metrics.held("d0", 1, 64, 4)
engine = metrics.engine("decode", "d0")
engine.up.set(up)
engine.load_tokens.set(load)
engine.capacity_blocks.set(1000)
gone = metrics.engine("decode", "gone")
gone.up.set(0)
metrics.forget_engine("decode", "gone")
print("ready", flush=True)
sys.stdin.read(1)
sys.stdout.write(metrics.exposition().decode())
"""


def start_worker(folder: Path, *words: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *words],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_one_worker_answers_for_all(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, "1", "5"), start_worker(tmp_path, "0", "7")]
    shown = samples(workers[0].communicate("\n")[0])
    d0 = frozenset({("role", "decode"), ("engine", "d0")})
    status = frozenset({("endpoint", "/v1/completions"), ("status", "200")})
    count = frozenset({("endpoint", "/v1/completions")})
    assert shown["carryback_workers", frozenset()] == 2
    assert shown["carryback_requests_total", status] == 2
    assert shown["carryback_request_duration_seconds_sum", count] == 12
    assert shown["carryback_request_duration_seconds_count", count] == 2
    assert shown["carryback_held_blocks", frozenset({("engine", "d0")})] == 8
    assert shown["carryback_engine_up", d0] == 0  # one of them does not reach it
    assert shown["carryback_engine_load_tokens", d0] == 12
    assert shown["carryback_engine_capacity_blocks", d0] == 1000
    # What is no longer there is neither up nor down.
    gone = shown["carryback_engine_up", frozenset({("role", "decode"), ("engine", "gone")})]
    assert gone != gone
    assert not [name for name, labels in shown if "pid" in dict(labels)]

    # A worker that ended: its gauges count no more, its counters do.
    mark_process_dead(workers[0].pid, str(tmp_path))  # type: ignore[no-untyped-call]
    shown = samples(workers[1].communicate("\n")[0])
    assert shown["carryback_workers", frozenset()] == 1
    assert shown["carryback_engine_load_tokens", d0] == 7
    assert shown["carryback_requests_total", status] == 2


# -- the dashboard and the alerts


def panels() -> list[dict[str, Any]]:
    return list(DASHBOARD["panels"])


def expressions() -> Iterator[Any]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield pytest.param(rule["expr"], id=rule["alert"])


def walk(node: object) -> Iterator[tuple[promql.VectorSelector, str, set[str]]]:
    """Each selector in an expression, the function that it is directly in, and the labels it is grouped by."""
    match node:
        case promql.VectorSelector():
            yield node, "", set()
        case promql.MatrixSelector():
            yield node.vector_selector, "", set()
        case promql.Call():
            for arg in node.args:
                yield from ((found, function or node.func.name, by) for found, function, by in walk(arg))
        case promql.AggregateExpr():
            by = set(node.modifier.labels) if node.modifier is not None else set()
            yield from ((found, function, by | inner) for found, function, inner in walk(node.expr))
        case promql.BinaryExpr():
            yield from walk(node.lhs)
            yield from walk(node.rhs)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from walk(node.expr)
        case promql.NumberLiteral():
            pass
        case _:
            raise AssertionError(f"{type(node).__name__} is not looked into")


@pytest.mark.parametrize("expression", [*expressions()])
def test_expressions_ask_for_what_exists(expression: str) -> None:
    known = series()
    selectors = list(walk(promql.parse(expression.replace("$__rate_interval", "5m"))))
    assert selectors
    for selector, function, by in selectors:
        kind, labels = known[selector.name]
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched | by <= labels | TARGET, selector.name
        assert (kind == "gauge") == (function not in ("rate", "increase")), f"{selector.name} in {function}"


def test_the_dashboard_is_whole() -> None:
    assert DASHBOARD["schemaVersion"] >= 38  # Grafana 10
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD)))
    assert used == variables
    for each in DASHBOARD["templating"]["list"]:
        if each["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", each["query"]["query"]).groups()  # type: ignore[union-attr]
            assert label in series()[metric][1] | TARGET
    for panel in panels():
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            # A legend names only labels that the expression keeps.
            by = set().union(
                *(by for _, _, by in walk(promql.parse(target["expr"].replace("$__rate_interval", "5m"))))
            )
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= by, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_metrics_that_are_worth_a_look_are_on_the_dashboard() -> None:
    shown = {
        selector.name.removesuffix("_bucket")
        for panel in panels()
        for target in panel.get("targets", [])
        for selector, _, _ in walk(promql.parse(target["expr"].replace("$__rate_interval", "5m")))
    }
    names = {metric._name + SUFFIXES[metric._type][0].replace("_bucket", "") for metric in ours()}
    unseen = {"carryback_held_tokens", "carryback_held_blocks"}
    assert names - shown == unseen


def test_alerts_say_what_to_do() -> None:
    for rule in ALERTS["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        by = set().union(*(by for _, _, by in walk(promql.parse(rule["expr"]))), {"instance"})
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= by, rule["alert"]
