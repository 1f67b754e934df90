"""Traces with OpenTelemetry, sent to a collector over OTLP.

Attributes have the names of the semantic conventions where there are some
(https://opentelemetry.io/docs/specs/semconv/, `http` and `gen_ai`), else they begin with `carryback.`.
They hold no text of a prompt or an answer, no key, and no id that a client chose.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import Counter

from carryback_server.access_log import Entry, printable
from carryback_server.errors import ApiError
from carryback_server.tracing import Step, StepName, Trace, Tracer, Value, trace_context

EXPORT_TIMEOUT_S = 5.0
# How long the router's stop waits for the collector.
STOP_S = 5.0

_OPERATIONS = {"/v1/completions": "text_completion"}
_EMPTY = Context()
_propagator = TraceContextTextMapPropagator()


class OtelTracer(Tracer):
    """Traces of a share of all requests.

    Args:
        processor: takes the spans that have ended.
        ratio: of requests that come without a trace context; a client that sends one has decided.
    """

    def __init__(self, processor: SpanProcessor, ratio: float) -> None:
        resource = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "carryback"),
            "service.version": version("carryback"),
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=256),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("carryback", version("carryback"))

    def request(self, headers: Mapping[str, str], endpoint: str) -> Trace:
        context = trace_context(headers)
        span = self._tracer.start_span(
            f"POST {endpoint}",
            _propagator.extract(context, _EMPTY) if context else _EMPTY,
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": endpoint,
                "url.path": endpoint,
                "url.scheme": "http",
                "gen_ai.operation.name": _OPERATIONS.get(endpoint, "chat"),
                "gen_ai.provider.name": "vllm",
            },
        )
        if not span.get_span_context().is_valid:  # OTEL_SDK_DISABLED
            return Trace(context)
        return OtelTrace(self, span)

    def start(self, name: str, parent: Context, kind: SpanKind) -> Span:
        """Begin a span."""
        return self._tracer.start_span(name, parent, kind)

    async def stop(self) -> None:
        # Not in a thread that Python waits for at its end: the collector may hang.
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="otel-stop", daemon=True).start()
        try:
            async with asyncio.timeout(STOP_S):
                await done.wait()
        except TimeoutError:
            pass  # the spans are lost; the exporter has said why


class OtelTrace(Trace):
    """A request's trace. One that is not sampled has no steps, but its context goes to the engines."""

    __slots__ = ("_context", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        context = span.get_span_context()
        super().__init__(_headers(context))
        self.trace_id = f"{context.trace_id:032x}"
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, _EMPTY)

    def step(self, name: StepName) -> Step:
        if not self._span.is_recording() and not self._span.get_span_context().trace_flags.sampled:
            return self._step
        kind = SpanKind.CLIENT if name in ("prefill", "decode") else SpanKind.INTERNAL
        return OtelStep(self._tracer.start(name, self._context, kind))

    def end(self, entry: Entry) -> None:
        span = self._span
        if not span.is_recording():
            return
        span.set_attributes(_attributes(entry))
        if entry.has_failed:
            span.set_attribute("error.type", entry.error or str(entry.status))
            span.set_status(StatusCode.ERROR)
        span.end()


class OtelStep(Step):
    """A step's span."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        super().__init__(_headers(span.get_span_context()))
        self._span = span

    def engine(self, name: str, url: str) -> None:
        host, port = _address(url)
        self._span.set_attributes({"carryback.engine": name, "server.address": host, "server.port": port})

    def set(self, **values: Value) -> None:
        self._span.set_attributes({f"carryback.{name}": value for name, value in values.items()})

    def event(self, name: str, **values: Value) -> None:
        self._span.add_event(name, {f"carryback.{name}": value for name, value in values.items()})

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        # The kind of error only: its message may quote what an engine says, and that a prompt.
        if isinstance(error, asyncio.CancelledError | ConnectionResetError):
            self._span.set_attribute("carryback.client_gone", True)
            self._span.end()
        elif isinstance(error, ApiError):
            self.end(error.code)
        else:
            self.end(type(error).__name__ if error is not None else "")


class _Counted(SpanExporter):
    """Counts what the collector took."""

    def __init__(self, exporter: SpanExporter, spans: Counter) -> None:
        self._exporter = exporter
        self._spans = spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._spans.labels("sent" if result is SpanExportResult.SUCCESS else "failed").inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def batches(endpoint: str, spans: Counter) -> SpanProcessor:
    """Sends spans to a collector in batches, from a thread of its own. Those that it does not take are lost.

    Args:
        endpoint: the collector's base URL. What its `/v1/traces` needs besides, such as a key, comes from
            `OTEL_EXPORTER_OTLP_HEADERS` and the other variables of the OTLP specification.
        spans: counts them, by result.
    """
    url = endpoint.rstrip("/")
    url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
    return BatchSpanProcessor(_Counted(OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S), spans))


def conversation_digest(tenant: str, conversation: str) -> str:
    """What stands for a conversation in traces: the same for all its requests, and nothing that a client chose."""
    return blake2b(f"{tenant}\0{conversation}".encode(), digest_size=8).hexdigest()


def _headers(context: SpanContext) -> dict[str, str]:
    headers = {
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    }
    if context.trace_state:
        headers["tracestate"] = context.trace_state.to_header()
    return headers


def _attributes(entry: Entry) -> dict[str, AttributeValue]:
    reuse = entry.reuse
    values: dict[str, AttributeValue] = {
        "http.response.status_code": entry.status,
        "http.request.body.size": entry.bytes_in,
        "http.response.body.size": entry.bytes_out,
        "gen_ai.request.model": printable(entry.model),
        "gen_ai.request.stream": entry.streamed,
        "gen_ai.response.time_to_first_chunk": entry.ttft_s,
        "carryback.tenant": entry.tenant,
        "carryback.turn.step": entry.step,
        "carryback.prefill.engine": entry.prefill_engine,
        "carryback.decode.engine": entry.decode_engine,
        "carryback.retries": entry.retries,
        "carryback.client_gone": entry.client_gone,
    }
    if entry.conversation:
        values["gen_ai.conversation.id"] = conversation_digest(entry.tenant, entry.conversation)
    values = {name: value for name, value in values.items() if value}
    if reuse is not None:
        values |= {
            "gen_ai.usage.input_tokens": reuse.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": reuse.tokens + reuse.cached,
            "carryback.reuse.outcome": reuse.outcome,
            "carryback.reuse.reason": reuse.reason,
            "carryback.reuse.found": reuse.found,
            "carryback.reuse.tokens": reuse.tokens,
            "carryback.reuse.recomputed": reuse.recomputed,
            "carryback.reuse.cached": reuse.cached,
        }
    return values


@lru_cache(1024)
def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
