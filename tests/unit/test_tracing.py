from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from carryback.wire import Reuse
from carryback_server import otel
from carryback_server.access_log import Entry
from carryback_server.config import ConfigError, RouterConfig
from carryback_server.errors import ApiError
from carryback_server.metrics import Metrics
from carryback_server.otel import OtelTracer, conversation_digest
from carryback_server.tracing import Tracer, make_tracer
from multidict import CIMultiDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

CHAT = "/v1/chat/completions"
STEPS = ("identify", "place", "prefill", "decode", "hold")
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def is_sampled(headers: Mapping[str, str]) -> bool:
    """Bit 0 of the flags; others may be set."""
    return bool(int(headers["traceparent"][-2:], 16) & 1)


class Memory:
    """A tracer that keeps its spans here."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(SimpleSpanProcessor(self._exporter), ratio)

    def spans(self) -> dict[str, ReadableSpan]:
        found = self._exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


def client(flags: str = "01") -> CIMultiDict[str]:
    """The headers of a client that is traced."""
    return CIMultiDict({"Traceparent": f"00-{TRACE}-{PARENT}-{flags}", "TraceState": "vendor=1,other=2"})


def entry(status: int = 200, error: str = "", *, client_gone: bool = False) -> Entry:
    return Entry(
        CHAT,
        request_id="secret-request-id",
        tenant="team-a",
        conversation="person@example.org",
        turn="person@example.org-turn",
        step=3,
        model="Qwen/Qwen3-8B",
        status=status,
        streamed=True,
        prefill_engine="p0",
        decode_engine="d0",
        reuse=Reuse("partial", 1024, "history_changed", 37, 16, 1040),
        ttft_s=0.25,
        bytes_in=4096,
        bytes_out=512,
        retries=1,
        client_gone=client_gone,
        error=error,
    )


# -- off


def test_off_the_clients_context_still_goes_to_the_engines() -> None:
    trace = make_tracer(RouterConfig(), Metrics()).request(client(), CHAT)
    context = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=2"}
    assert trace.trace_id == ""
    assert trace.headers() == context
    for name in STEPS:
        with trace.step(name) as step:  # type: ignore[arg-type]
            step.engine("p0", "http://127.0.0.1:8100")
            step.set(tokens=1)
            step.event("retry", reason="down")
            assert step.headers() == context
    trace.end(entry())


def test_off_and_no_context() -> None:
    trace = Tracer().request(CIMultiDict({"tracestate": "vendor=1"}), CHAT)
    assert trace.headers() == trace.step("prefill").headers() == {}


@pytest.mark.parametrize("tracer", [Tracer(), Memory().tracer])
def test_a_context_that_is_none_harms_nothing(tracer: Tracer) -> None:
    for value in ("", "nonsense", f"00-{TRACE}-{PARENT}-01\n", "00-é", f"00-{'0' * 32}-{PARENT}-01"):
        sent = tracer.request({"traceparent": value, "tracestate": "x"}, CHAT).step("prefill").headers()
        assert all(each.isascii() and each.isprintable() for each in sent.values())


def test_off_imports_nothing() -> None:
    program = (
        "import sys, carryback_server.tracing as t; from carryback_server.config import RouterConfig;"
        "from carryback_server.metrics import Metrics; t.make_tracer(RouterConfig(), Metrics());"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"opentelemetry", "requests"} & {name.split(".")[0] for name in done.stdout.split()}


def test_the_extra_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "carryback_server.otel")
    monkeypatch.delattr("carryback_server.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config = RouterConfig(otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"otlp_endpoint .*carryback\[otel\]"):
        make_tracer(config, Metrics())


# -- on


def test_one_trace_a_request() -> None:
    memory = Memory()
    trace = memory.tracer.request({}, CHAT)
    sent = {}
    for name in STEPS[:-1]:
        with trace.step(name) as step:  # type: ignore[arg-type]
            sent[name] = step.headers()
    hold = trace.step("hold")
    trace.end(entry())
    hold.set(blocks=4)
    hold.end()  # after the request

    spans = memory.spans()
    root = spans[f"POST {CHAT}"]
    assert set(spans) == {*STEPS, root.name}
    assert root.context is not None
    assert root.parent is None
    assert root.kind is SpanKind.SERVER
    assert trace.trace_id == f"{root.context.trace_id:032x}"
    for name in STEPS:
        span = spans[name]
        assert span.context is not None
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        assert (span.kind is SpanKind.CLIENT) == (name in ("prefill", "decode"))
        if name in sent:  # an engine's spans become children of the step's
            assert sent[name].keys() == {"traceparent"}
            assert sent[name]["traceparent"][:-2] == f"00-{trace.trace_id}-{span.context.span_id:016x}-"
            assert is_sampled(sent[name])
    assert spans["hold"].attributes == {"carryback.blocks": 4}
    assert (spans["hold"].end_time or 0) >= (root.end_time or 0)


def test_a_clients_trace_goes_on() -> None:
    memory = Memory(ratio=0.0)  # the client has decided
    trace = memory.tracer.request(client(), CHAT)
    with trace.step("decode") as step:
        sent = step.headers()
    trace.end(entry())
    root = memory.spans()[f"POST {CHAT}"]
    decode = memory.spans()["decode"]
    assert trace.trace_id == TRACE
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT, 16)
    assert decode.context is not None
    assert sent == {
        "traceparent": f"00-{TRACE}-{decode.context.span_id:016x}-01",
        "tracestate": "vendor=1,other=2",
    }


@pytest.mark.parametrize(("ratio", "headers"), [(0.0, {}), (1.0, client("00"))])
def test_not_sampled(ratio: float, headers: CIMultiDict[str]) -> None:
    memory = Memory(ratio)
    trace = memory.tracer.request(headers, CHAT)
    with trace.step("prefill") as step:
        # The engines are told not to sample it either.
        assert step.headers()["traceparent"].startswith(f"00-{trace.trace_id}-")
        assert not is_sampled(step.headers())
    trace.end(entry())
    assert memory.spans() == {}


def test_sampling_takes_its_share() -> None:
    memory = Memory(0.25)
    sampled = sum(is_sampled(memory.tracer.request({}, CHAT).headers()) for _ in range(2000))
    assert 350 < sampled < 650


def test_what_a_span_says() -> None:
    memory = Memory()
    trace = memory.tracer.request({}, CHAT)
    with trace.step("prefill") as step:
        step.event("retry", engine="p1", reason="down")
        step.engine("p0", "http://p0.internal:8100/base")
        step.set(tokens=1077)
    trace.end(entry())
    prefill, root = memory.spans()["prefill"], memory.spans()[f"POST {CHAT}"]
    assert prefill.attributes == {
        "carryback.engine": "p0",
        "server.address": "p0.internal",
        "server.port": 8100,
        "carryback.tokens": 1077,
    }
    (event,) = prefill.events
    assert event.name == "retry"
    assert event.attributes == {"carryback.engine": "p1", "carryback.reason": "down"}
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "http.request.body.size": 4096,
        "http.response.body.size": 512,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "Qwen/Qwen3-8B",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.conversation.id": conversation_digest("team-a", "person@example.org"),
        "gen_ai.usage.input_tokens": 1077,
        "gen_ai.usage.cache_read.input_tokens": 1040,
        "carryback.tenant": "team-a",
        "carryback.turn.step": 3,
        "carryback.prefill.engine": "p0",
        "carryback.decode.engine": "d0",
        "carryback.retries": 1,
        "carryback.reuse.outcome": "partial",
        "carryback.reuse.reason": "history_changed",
        "carryback.reuse.found": 1040,
        "carryback.reuse.tokens": 1024,
        "carryback.reuse.recomputed": 37,
        "carryback.reuse.cached": 16,
    }
    assert root.status.status_code is StatusCode.UNSET
    assert root.resource.attributes["service.name"] == "carryback"


def test_equal_ids_of_two_tenants_are_two_conversations() -> None:
    assert conversation_digest("a", "1") != conversation_digest("b", "1")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (entry(503, "no_engine"), "no_engine"),
        (entry(500), "500"),
        (entry(200, "engine_lost"), "engine_lost"),
        (entry(404, "model_not_found"), None),
        (entry(client_gone=True), None),
    ],
)
def test_a_request_that_failed(given: Entry, kind: str | None) -> None:
    memory = Memory()
    memory.tracer.request({}, CHAT).end(given)
    (span,) = memory.spans().values()
    assert span.attributes is not None
    assert span.attributes.get("error.type") == kind
    assert (span.status.status_code is StatusCode.ERROR) == (kind is not None)
    assert span.attributes.get("carryback.client_gone", False) == given.client_gone


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(504, "the prompt was: hello", code="engine_timeout"), "engine_timeout"),
        (ValueError("the prompt was: hello"), "ValueError"),
        (asyncio.CancelledError(), None),
    ],
)
def test_a_step_that_failed_quotes_nobody(error: BaseException, kind: str | None) -> None:
    memory = Memory()
    with pytest.raises(type(error)), memory.tracer.request({}, CHAT).step("decode"):
        raise error
    span = memory.spans()["decode"]
    assert span.attributes is not None
    assert span.attributes.get("error.type") == kind
    assert (span.status.status_code is StatusCode.ERROR) == (kind is not None)
    assert ("carryback.client_gone" in span.attributes) == (kind is None)
    assert "hello" not in span.to_json()


def test_opentelemetrys_own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    trace = Memory().tracer.request({}, CHAT)
    assert trace.trace_id == ""
    assert trace.step("decode").headers() == {}
    trace.end(entry())


# -- a collector


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP, or does not answer at all."""

    daemon_threads = True

    def __init__(self, *, hangs: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hangs = hangs
        self.release = threading.Event()
        self.paths: list[str] = []
        self.names: list[str] = []
        self.headers: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hangs:
            self.server.release.wait()
            return
        self.server.paths.append(self.path)
        self.server.headers.append(self.headers["X-Key"])
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.names += [span.name for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def collector(*, hangs: bool = False) -> Iterator[Collector]:
    server = Collector(hangs=hangs)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def sent(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("carryback_trace_spans_total", {"result": result}) or 0


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_reach_a_collector(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    with collector() as server:
        metrics = Metrics()
        config = RouterConfig(otlp_endpoint=f"http://127.0.0.1:{server.server_port}{path}")
        tracer = make_tracer(config, metrics)
        trace = tracer.request({}, CHAT)
        with trace.step("decode"):
            pass
        trace.end(entry())
        await tracer.stop()  # sends what waits
    assert set(server.paths) == {"/v1/traces"}
    assert server.headers == ["abc"]
    assert sorted(server.names) == [f"POST {CHAT}", "decode"]
    assert sent(metrics, "sent") == 2


async def test_a_collector_that_is_gone_costs_spans_only() -> None:
    with collector() as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
    metrics = Metrics()
    tracer = make_tracer(RouterConfig(otlp_endpoint=endpoint), metrics)
    tracer.request({}, CHAT).end(entry())
    await tracer.stop()
    assert sent(metrics, "failed") == 1


async def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "STOP_S", 0.1)
    monkeypatch.setattr(otel, "EXPORT_TIMEOUT_S", 3600)
    with collector(hangs=True) as server:
        tracer = make_tracer(RouterConfig(otlp_endpoint=f"http://127.0.0.1:{server.server_port}"), Metrics())
        for _ in range(5000):  # more than are kept
            tracer.request({}, CHAT).end(entry())
        await tracer.stop()
