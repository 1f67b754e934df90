"""Traces: one a request, with a span for each of its steps.

What is here records nothing, and costs next to nothing: traces are off. A client's own trace context still
goes to the engines as it came. `carryback_server.otel` is the same with OpenTelemetry, and is imported only
if the settings name a collector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from carryback_server.access_log import Entry
from carryback_server.config import ConfigError, RouterConfig
from carryback_server.metrics import Metrics

# https://www.w3.org/TR/trace-context/
TRACE_CONTEXT = ("traceparent", "tracestate")

StepName = Literal["identify", "place", "prefill", "decode", "hold"]
Value = str | int | float | bool


class Step:
    """A step of a request, from when it is made until it ends: a context manager, or ended by hand."""

    __slots__ = ("_headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def headers(self) -> Mapping[str, str]:
        """What to send to an engine, so that its spans become children of this step."""
        return self._headers

    def engine(self, name: str, url: str) -> None:
        """The engine that the step talks to; the last one, if there are several tries."""

    def set(self, **values: Value) -> None:
        """Say more about the step, as attributes `carryback.<name>`. Never text of a prompt, or a key."""

    def event(self, name: str, **values: Value) -> None:
        """Something happened now, e.g. a retry."""

    def end(self, error: str = "") -> None:
        """The step is over; `error` is one word for what went wrong."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        pass


class Trace:
    """The trace of a request.

    Attributes:
        trace_id: 32 hex digits; empty if there is none.
    """

    __slots__ = ("_headers", "_step")

    trace_id = ""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._step = Step(headers)

    def headers(self) -> Mapping[str, str]:
        """What to send to an engine outside of any step."""
        return self._headers

    def step(self, name: StepName) -> Step:
        """Begin a step. It may end after the request has."""
        return self._step

    def end(self, entry: Entry) -> None:
        """The request is over, and the entry says how it went."""


_NOTHING = Trace({})


class Tracer:
    """Makes the traces of one router."""

    def request(self, headers: Mapping[str, str], endpoint: str) -> Trace:
        """A request has come.

        Args:
            headers: its headers; upper and lower case are the same, or all names are in lower case.
            endpoint: the route, e.g. `/v1/chat/completions`.
        """
        return Trace(context) if (context := trace_context(headers)) else _NOTHING

    async def stop(self) -> None:
        """Send what has not been sent; not for long."""


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The W3C trace context of a request; empty if there is none."""
    if "traceparent" not in headers:
        return {}
    values = {name: headers.get(name, "") for name in TRACE_CONTEXT}
    # What cannot be sent on as a header is left out.
    return {
        name: value for name, value in values.items() if value and value.isascii() and value.isprintable()
    }


def make_tracer(config: RouterConfig, metrics: Metrics) -> Tracer:
    """The tracer that the settings ask for.

    Raises:
        ConfigError: traces need packages that are not installed.
    """
    if config.otlp_endpoint is None:
        return Tracer()
    try:
        from carryback_server import otel
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs packages that are not installed ({error.name}): pip install 'carryback[otel]'"
        ) from error
    processor = otel.batches(config.otlp_endpoint, metrics.trace_spans)
    return otel.OtelTracer(processor, config.trace_sample_ratio)
