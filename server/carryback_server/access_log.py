"""One line for each request, and the form of all other lines of the log.

No line holds text of a prompt or an answer, or a key. A client cannot make a line of its own: what it
sent is in quotes, and has no control characters.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Literal

import msgspec
from carryback.wire import MAX_ID_LENGTH, Reuse
from prometheus_client import Counter

LogFormat = Literal["json", "text", "off"]

# How long lines are gathered before they are written together.
GATHER_S = 0.1
# Lines that wait for a reader of the log that is too slow. More are dropped, and counted.
MAX_LINES = 10_000
STOP_S = 2.0
# POSIX: what is written to a pipe in one go stays together up to this size, also among worker processes.
PIPE_BUF = 4096


class Entry(msgspec.Struct, omit_defaults=True):
    """What there is to say about one request. Filled in along its way; times are in seconds.

    Attributes:
        time: when the request was over.
        level: `error` if the router or an engine failed, else `info`.
        request_id: the client's `X-Request-Id`.
        trace_id: of its trace, 32 hex digits, if there is one.
        endpoint: the route, e.g. `/v1/chat/completions`.
        status: HTTP status; 0 if the client went away before there was one.
        streamed: the answer is a stream of events.
        prefill_engine: the engine that computed the prompt.
        decode_engine: the engine that answered.
        ttft_s: from its arrival to the first byte of the answer.
        prefill_s: of that, at prefill engines.
        read_s: of that, reading KV back, as the engine says.
        compute_s: of that, computing, as the engine says.
        decode_wait_s: of that, at decode engines.
        duration_s: from its arrival to the end of the answer.
        bytes_in: of the request's body.
        bytes_out: of the answer's body.
        retries: hops that were tried again.
        client_gone: the client went away before the end.
        error: the code of the error that it got, also within a stream.
    """

    endpoint: str
    time: datetime | None = None
    level: Literal["", "info", "error"] = ""
    request_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    conversation: str = ""
    turn: str = ""
    step: int = 0
    model: str = ""
    status: int = 0
    streamed: bool = False
    prefill_engine: str = ""
    decode_engine: str = ""
    reuse: Reuse | None = None
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    decode_wait_s: float = 0.0
    duration_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    retries: int = 0
    client_gone: bool = False
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """The router or an engine failed, before the answer or within it."""
        return self.status >= 500 or (self.error != "" and self.status < 400)


_SECONDS = ("ttft_s", "prefill_s", "read_s", "compute_s", "decode_wait_s", "duration_s")


def printable(text: str, length: int = MAX_ID_LENGTH) -> str:
    """A text on one line, without control characters and cut to a length."""
    text = text[:length]
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class AccessLog:
    """Writes a line for each request. Writing never waits for whoever reads the log.

    Args:
        form: `json`, `text` (`key=value` pairs) or `off`.
        dropped: counts the lines that could not be written.
        fd: the file descriptor to write to; standard error unless given.
    """

    def __init__(self, form: LogFormat, dropped: Counter, fd: int = 2) -> None:
        self._form = form
        self._dropped = dropped
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._encoder = msgspec.json.Encoder()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        if form != "off":
            self._thread.start()

    def write(self, entry: Entry) -> None:
        """Log a request that is over. Sets its time and level."""
        if self._form == "off":
            return
        if len(self._lines) >= MAX_LINES:
            self._dropped.inc()
            return
        entry.time = datetime.now(UTC)
        entry.level = "error" if entry.has_failed else "info"
        entry.request_id = printable(entry.request_id)
        entry.conversation = printable(entry.conversation)
        entry.turn = printable(entry.turn)
        entry.model = printable(entry.model)
        for name in _SECONDS:
            if value := getattr(entry, name):  # a zero stays the default, which is left out
                setattr(entry, name, round(value, 6))
        line = self._encoder.encode(entry) if self._form == "json" else _text(entry)
        self._lines.append(line + b"\n")
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """Write what waits; not longer than `STOP_S` if nobody reads."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _write(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(GATHER_S)
            self._wake.clear()
            while self._lines:
                self._write_some()

    def _write_some(self) -> None:
        """Whole lines, as many as stay together."""
        taken = [self._lines.popleft()]
        size = len(taken[0])
        while self._lines and (size := size + len(self._lines[0])) <= PIPE_BUF:
            taken.append(self._lines.popleft())
        data = b"".join(taken)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # there is nobody to tell
            self._dropped.inc(len(taken))


def _text(entry: Entry) -> bytes:
    values = msgspec.structs.asdict(entry)
    time: datetime = values.pop("time")
    level = values.pop("level").upper()
    words = [_zulu(time), level]
    for name, value in values.items():
        if isinstance(value, Reuse):
            value = value.header()
        if isinstance(value, str) and value:
            words.append(f"{name}={_quoted(value)}")
        elif value:
            words.append(f"{name}={str(value).lower()}")
    return " ".join(words).encode()


def _zulu(time: datetime) -> str:
    return f"{time.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _quoted(value: str) -> str:
    plain = value.isascii() and not any(each in value for each in ' ="\\')
    return value if plain else msgspec.json.encode(value).decode()


class _Text(logging.Formatter):
    """One line, but for tracebacks."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _zulu(datetime.fromtimestamp(record.created, UTC))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, 10_000)
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage(), 10_000),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(form: LogFormat) -> None:
    """Give all other lines, on standard error, the form of the access log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
