"""What the router counts, for Prometheus. One registry a router, so that tests can run several."""

from __future__ import annotations

from carryback.wire import Reuse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)


class Metrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "carryback_requests", "Requests answered.", ["endpoint", "status"], registry=registry
        )
        self.reuse = Counter(
            "carryback_reuse",
            "Requests by what they reused, and why.",
            ["outcome", "reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "carryback_prompt_tokens",
            "Prompt tokens: reused (read back from decode), cached (on prefill), recomputed.",
            ["source"],
            registry=registry,
        )
        self.ttft = Histogram(
            "carryback_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its answer.",
            ["outcome"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.held_records = Gauge(
            "carryback_held_records", "Finished turns whose KV is held for the next one.", registry=registry
        )
        self.held_tokens = Gauge("carryback_held_tokens", "Tokens in them.", registry=registry)
        self.held_blocks = Gauge("carryback_held_blocks", "KV blocks pinned for them.", registry=registry)
        self.held_missing = Counter(
            "carryback_held_events_missing",
            "Turns whose KV was not reused since the engine's event did not come.",
            registry=registry,
        )
        self.records_lost = Counter(
            "carryback_records_lost", "Records dropped unused, by reason.", ["reason"], registry=registry
        )
        self.releases = Counter(
            "carryback_releases",
            "KV that an engine was asked to let go of.",
            ["role", "result"],
            registry=registry,
        )
        self.retries = Counter(
            "carryback_retries", "Hops tried again or done without.", ["hop", "reason"], registry=registry
        )
        self.declined = Counter(
            "carryback_decode_declined",
            "Prompts that a decode engine computed itself rather than read wrong KV.",
            ["reason"],
            registry=registry,
        )
        self.engine_up = Gauge(
            "carryback_engine_up", "Whether an engine answers.", ["role", "engine"], registry=registry
        )
        self.engine_in_flight = Gauge(
            "carryback_engine_in_flight_requests",
            "Requests at an engine.",
            ["role", "engine"],
            registry=registry,
        )

    def observe_reuse(self, reuse: Reuse) -> None:
        """Count what one request reused."""
        self.reuse.labels(reuse.outcome, reuse.reason).inc()
        self.prompt_tokens.labels("reused").inc(reuse.tokens)
        self.prompt_tokens.labels("cached").inc(reuse.cached)
        self.prompt_tokens.labels("recomputed").inc(reuse.recomputed)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
