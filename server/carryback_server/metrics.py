"""What the router counts, for Prometheus. One registry a router, so that tests can run several.

With several worker processes, the variable `PROMETHEUS_MULTIPROC_DIR` names a folder that they share; it
must be set before this module is imported. Each worker then answers for all of them. Who starts the
workers says when one has ended (`prometheus_client.multiprocess.mark_process_dead`).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import TypeVar

from carryback.wire import Report, Reuse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from carryback_server.access_log import Entry

CONTENT_TYPE = CONTENT_TYPE_LATEST
# No metric has more series than this: what an engine reports as a reason is not ours to bound.
MAX_SERIES = 1000

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)

# A series for each metric that says when it was made is of no use to anybody here.
disable_created_metrics()  # type: ignore[no-untyped-call]

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class Labelled(dict[tuple[str, ...], MetricT]):
    """A metric's children by their label values: `metric[a, b].inc()`. Much quicker than `labels(a, b)`.

    Label values past `MAX_SERIES` are all counted as `other`.
    """

    def __init__(self, metric: MetricT) -> None:
        super().__init__()
        self._metric: MetricT = metric

    def __missing__(self, labels: tuple[str, ...]) -> MetricT:
        if len(self) >= MAX_SERIES:
            return self._metric.labels(*("other" for _ in labels))
        self[labels] = self._metric.labels(*labels)
        return self[labels]


@dataclass(frozen=True)
class EngineMetrics:
    """One engine's metrics.

    Attributes:
        up: 1 if it answers.
        ejected: 1 while nothing is placed there because it failed too often.
        draining: 1 while nothing new is placed there because an operator said so.
        in_flight: requests at the engine.
        load_tokens: tokens of those, the measure of how busy it is.
        pinned_blocks: KV blocks that it holds for absent readers, by its own account.
        capacity_blocks: KV blocks that it has.
        mismatched: engines of the other role with which it cannot exchange KV, as they are set up.
    """

    up: Gauge
    ejected: Gauge
    draining: Gauge
    in_flight: Gauge
    load_tokens: Gauge
    pinned_blocks: Gauge
    capacity_blocks: Gauge
    mismatched: Gauge


class Metrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"carryback_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, over_workers: str = "livesum") -> Gauge:
            return Gauge(
                f"carryback_{name}",
                text,
                labels,
                registry=registry,
                multiprocess_mode=over_workers,  # type: ignore[arg-type]
            )

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"carryback_{name}", text, labels, buckets=buckets, registry=registry)

        # -- requests
        self.requests = counter("requests", "Requests answered.", "endpoint", "status")
        self.errors = counter("errors", "Errors that the router itself answered with, by code.", "code")
        self.duration = histogram(
            "request_duration_seconds",
            "From a request's arrival to the last byte of its answer.",
            _DURATION_S,
            "endpoint",
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to the first byte of its answer.",
            _TTFT_S,
            "outcome",
        )
        self.prefill = histogram(
            "prefill_seconds",
            "From sending a prompt to a prefill engine to its answer, tries that failed included.",
            _TTFT_S,
            "outcome",
        )
        self.added = histogram(
            "router_seconds",
            "Of the time to the first byte, what was spent in the router and not at engines.",
            _SHORT_S,
        )
        self.in_flight = gauge("in_flight_requests", "Requests that are being answered.")
        self.streams = gauge("active_streams", "Streamed answers on their way.")
        self.request_bytes = counter("request_bytes", "Bytes of request bodies.")
        self.response_bytes = counter("response_bytes", "Bytes of answers' bodies.")
        self.retries = counter("retries", "Hops tried again or done without.", "hop", "reason")

        # -- reuse
        self.reuse = counter("reuse", "Requests by what they reused, and why.", "outcome", "reason")
        self.prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens: reused (read back from decode), cached (on prefill), recomputed.",
            "source",
        )
        self.found_tokens = counter(
            "found_tokens", "Prompt tokens whose KV a decode engine that was asked had."
        )
        self.asked_engines = counter(
            "asked_engines",
            "Decode engines that were asked what they have of a prompt, by whether they answered.",
            "result",
        )
        self.declined = counter(
            "decode_declined",
            "Prompts that a decode engine computed itself rather than read wrong KV.",
            "reason",
        )

        self.break_even_tokens = gauge(
            "break_even_tokens",
            "Tokens from which on reading KV back is quicker than computing it, as learned; -1: never.",
            "prefill",
            "decode",
            over_workers="livemostrecent",
        )

        # -- what is held
        self.held_pins = gauge(
            "held_pins", "Finished requests whose KV is pinned for the next one.", "engine"
        )
        self.held_tokens = gauge("held_tokens", "Tokens in them.", "engine")
        self.held_blocks = gauge("held_blocks", "KV blocks pinned for them.", "engine")
        self.pin_budget_blocks = gauge(
            "pin_budget_blocks",
            "KV blocks that may be pinned for absent conversations.",
            "engine",
            over_workers="livemax",
        )
        self.pins_given_up = counter(
            "pins_given_up",
            "Pins given up before their engine's own time for them was over.",
            "rank",
            "reason",
        )
        self.locations_noted = counter("locations_noted", "Notes of where a conversation's KV is.")
        self.locations_lost = counter("locations_lost", "Such notes that the state did not take.")
        self.releases = counter(
            "releases", "Requests whose KV an engine was told to let go of, by its role.", "role"
        )

        # -- engines
        at = ("role", "engine")
        self.engine_up = gauge("engine_up", "Whether an engine answers.", *at, over_workers="livemin")
        self.engine_ejected = gauge(
            "engine_ejected",
            "Whether nothing is placed at an engine because it failed too often.",
            *at,
            over_workers="livemax",
        )
        self.engine_draining = gauge(
            "engine_draining", "Whether nothing new is placed at an engine.", *at, over_workers="livemax"
        )
        self.engine_in_flight = gauge("engine_in_flight_requests", "Requests at an engine.", *at)
        self.engine_load_tokens = gauge("engine_load_tokens", "Tokens of the requests at an engine.", *at)
        self.engine_pinned_blocks = gauge(
            "engine_pinned_blocks",
            "KV blocks that an engine holds for absent readers, by its own account.",
            *at,
            over_workers="livemax",
        )
        self.engine_capacity_blocks = gauge(
            "engine_capacity_blocks", "KV blocks that an engine has.", *at, over_workers="livemax"
        )
        self.engine_mismatched = gauge(
            "engine_mismatched",
            "Engines of the other role with which an engine cannot exchange KV: key, model or blocks differ.",
            *at,
            over_workers="livemax",
        )
        self.engine_ejections = counter(
            "engine_ejections", "Times that an engine was ejected.", *at, "reason"
        )
        self.engine_events_missed = counter(
            "engine_events_missed", "Events of an engine that did not arrive, by gaps in their numbers.", *at
        )
        self.engine_events_refused = counter(
            "engine_events_refused", "Events of an engine that this release of the router cannot read.", *at
        )
        self.background_faults = counter(
            "background_faults", "Exceptions in the router's background work, which went on.", "task"
        )
        self.engine_plugin_faults = counter(
            "engine_plugin_faults",
            "Faults of an engine's plug-in, after which it computed or held nothing.",
            *at,
        )

        # -- tenants
        self.tenant_requests = counter("tenant_requests", "Requests answered, by tenant.", "tenant")
        self.tenant_rejected = counter(
            "tenant_rejected_requests", "Requests refused by a tenant's limits.", "tenant", "reason"
        )
        self.tenant_in_flight = gauge("tenant_in_flight_requests", "Requests being answered.", "tenant")
        self.tenant_tokens = counter("tenant_prompt_tokens", "Prompt tokens, by tenant.", "tenant", "source")
        self.tenant_held_blocks = gauge(
            "tenant_held_blocks", "KV blocks pinned for a tenant's conversations.", "tenant"
        )

        self.fields_dropped = counter(
            "fields_dropped",
            "Fields of bodies that are not for clients to set, and reached no engine.",
            "field",
        )
        self.rate_uncounted = counter(
            "tenant_rate_uncounted_requests",
            "Requests whose rate one router counted alone, since Redis was gone.",
        )

        # -- state
        self.state_operations = counter(
            "state_operations", "Operations on the store of conversations.", "operation", "result"
        )
        self.state_seconds = histogram(
            "state_operation_seconds", "How long they took.", _SHORT_S, "operation"
        )
        self.messages_refused = counter(
            "messages_refused",
            "Messages in Redis that no router with this state_key sent, or that came before.",
        )
        self.state_junk = counter(
            "state_junk", "Values in Redis that were not ours, or of another version, and counted as absent."
        )

        # -- the router itself
        self.workers = gauge("workers", "Worker processes of the router.")
        self.build = gauge("build_info", "The router's version.", "version", over_workers="livemax")
        self.connections_closed = counter(
            "connections_closed", "Clients' connections closed or refused for a limit, by reason.", "reason"
        )
        self.body_workers_lost = counter(
            "body_workers_lost",
            "Processes for large bodies that ended, or were ended since a body took too long.",
        )
        self.log_lines_dropped = counter("log_lines_dropped", "Lines of the access log that nobody took.")
        self.trace_spans = counter("trace_spans", "Spans handed to the collector, by result.", "result")
        self.workers.set(1)
        self.build.labels(version("carryback")).set(1)
        if not self._is_shared:
            ProcessCollector(registry=registry)

        # Of those on a request's way.
        self._requests = Labelled(self.requests)
        self._errors = Labelled(self.errors)
        self._duration = Labelled(self.duration)
        self._ttft = Labelled(self.ttft)
        self._prefill = Labelled(self.prefill)
        self._reuse = Labelled(self.reuse)
        self._asked = Labelled(self.asked_engines)
        self._tokens = Labelled(self.prompt_tokens)
        self._tenant_requests = Labelled(self.tenant_requests)
        self._tenant_tokens = Labelled(self.tenant_tokens)
        self._tenant_rejected = Labelled(self.tenant_rejected)
        self._tenant_in_flight = Labelled(self.tenant_in_flight)
        self._tenant_held = Labelled(self.tenant_held_blocks)
        self._break_even = Labelled(self.break_even_tokens)
        self._held = Labelled(self.held_pins), Labelled(self.held_tokens), Labelled(self.held_blocks)
        self._given_up = Labelled(self.pins_given_up)
        self._pin_budget = Labelled(self.pin_budget_blocks)
        self._state_operations = Labelled(self.state_operations)
        self._state_seconds = Labelled(self.state_seconds)

    def observe_first_byte(self, entry: Entry) -> None:
        """The first byte of an answer has come: count how long it took, and what was reused."""
        outcome = entry.reuse.outcome if entry.reuse is not None else "miss"
        self._ttft[outcome,].observe(entry.ttft_s)
        if entry.prefill_s:
            self._prefill[outcome,].observe(entry.prefill_s)
        self.added.observe(max(entry.ttft_s - entry.prefill_s - entry.decode_wait_s, 0))
        if entry.reuse is not None:
            self.observe_reuse(entry.reuse, entry.tenant)

    def observe_request(self, entry: Entry) -> None:
        """A request is over, in whichever way."""
        self._requests[entry.endpoint, "499" if entry.client_gone else str(entry.status)].inc()
        self._duration[entry.endpoint,].observe(entry.duration_s)
        self.request_bytes.inc(entry.bytes_in)
        self.response_bytes.inc(entry.bytes_out)
        if entry.error:
            self._errors[entry.error,].inc()
        if entry.tenant:
            self._tenant_requests[entry.tenant,].inc()
            if entry.status == 429 and entry.error:
                self._tenant_rejected[entry.tenant, entry.error].inc()

    def in_flight_of(self, tenant: str) -> Gauge:
        """A tenant's requests that are being answered."""
        return self._tenant_in_flight[tenant,]

    def observe_reuse(self, reuse: Reuse, tenant: str = "") -> None:
        """Count what one request reused."""
        self._reuse[reuse.outcome, reuse.reason].inc()
        counts = ("reused", reuse.tokens), ("cached", reuse.cached), ("recomputed", reuse.recomputed)
        for source, tokens in counts:
            if tokens:
                self._tokens[source,].inc(tokens)
                if tenant:
                    self._tenant_tokens[tenant, source].inc(tokens)

    def observe_question(self, asked: int, report: Report) -> None:
        """Count what decode engines had of one prompt.

        Args:
            asked: how many were asked.
        """
        if report.found:
            self.found_tokens.inc(report.found)
        if report.asked:
            self._asked["answered",].inc(report.asked)
        if asked > report.asked:
            self._asked["silent",].inc(asked - report.asked)

    def break_even(self, prefill: str, decode: str, tokens: int | None) -> None:
        """From how many tokens on a read between two engines pays; -1: never; None: not known yet."""
        if tokens is not None:
            self._break_even[prefill, decode].set(tokens)

    def observe_state(self, operation: str, result: str, seconds: float) -> None:
        """An operation on the store of conversations is over.

        Args:
            operation: the method's name.
            result: `done`; `failed`, Redis is down; `refused`, it is not, and this operation alone failed.
        """
        self._state_operations[operation, result].inc()
        self._state_seconds[operation,].observe(seconds)

    def held(self, engine: str, pins: int, tokens: int, blocks: int, tenant: str = "") -> None:
        """More (or, negative, less) is pinned at an engine for absent conversations."""
        for metric, change in zip(self._held, (pins, tokens, blocks), strict=True):
            metric[engine,].inc(change)
        if tenant:
            self._tenant_held[tenant,].inc(blocks)

    def pin_budget(self, engine: str, blocks: float) -> None:
        """How many blocks may be held at an engine."""
        self._pin_budget[engine,].set(blocks)

    def given_up(self, rank: str, reason: str) -> None:
        """A pin was given up."""
        self._given_up[rank, reason].inc()

    def engine(self, role: str, name: str) -> EngineMetrics:
        """An engine's metrics, all 0 to begin with."""
        metrics = EngineMetrics(*(metric.labels(role, name) for metric in self._of_engines()))
        for each in fields(metrics):
            getattr(metrics, each.name).set(0)
        return metrics

    def forget_engine(self, role: str, name: str) -> None:
        """An engine was taken out of the configuration: show it no longer."""
        for metric in self._of_engines():
            if self._is_shared:
                metric.labels(role, name).set(math.nan)  # cannot be taken out of the shared files
            else:
                metric.remove(role, name)

    def exposition(self) -> bytes:
        """The text that Prometheus reads. Takes milliseconds."""
        if not self._is_shared:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        retrying = Retrying(
            stop=stop_after_attempt(5),
            wait=wait_fixed(0.05),
            retry=retry_if_exception_type(struct.error),  # a worker that starts has made an empty file
            reraise=True,
        )
        return retrying(generate_latest, registry)

    def _of_engines(self) -> tuple[Gauge, ...]:
        """In the order of `EngineMetrics`."""
        return (
            self.engine_up,
            self.engine_ejected,
            self.engine_draining,
            self.engine_in_flight,
            self.engine_load_tokens,
            self.engine_pinned_blocks,
            self.engine_capacity_blocks,
            self.engine_mismatched,
        )
