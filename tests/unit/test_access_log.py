from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from carryback.wire import Report
from carryback_server import access_log
from carryback_server.access_log import AccessLog, Entry, LogFormat, printable, set_up_logging
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

HOSTILE = 'x"\n{"level":"info","tenant":"victim"}\r\x1b[31m\x9b31m\u2028\u202e\\'


def counter() -> Counter:
    return Counter("dropped", "Lines.", registry=CollectorRegistry())


def lines(tmp_path: Path, form: LogFormat, *entries: Entry) -> list[str]:
    """What a log of these requests holds."""
    path = tmp_path / f"{form}.log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = AccessLog(form, counter(), fd)
    for entry in entries:
        log.write(entry)
    log.stop()
    os.close(fd)
    return path.read_text().split("\n")[:-1]


def test_times_that_are_zero_are_left_out(tmp_path: Path) -> None:
    [line] = lines(tmp_path, "json", Entry("/v1/models", status=200))
    assert not [name for name in json.loads(line) if name.endswith("_s")]


def full() -> Entry:
    return Entry(
        "/v1/chat/completions",
        request_id="r-17",
        trace_id="0af7651916cd43dd8448eb211c80319c",
        tenant="team-a",
        conversation="c 1",
        turn="t-2",
        step=3,
        model="Qwen/Qwen3-8B",
        status=200,
        streamed=True,
        prefill_engine="p0:8000",
        decode_engine="d0:8000",
        reuse=Report("hit", 1024, "verified", 37, 16, 1040, "d0-7f3a", 2),
        ttft_s=0.18312345678,
        prefill_s=0.151,
        decode_wait_s=0.031,
        duration_s=2.46,
        bytes_in=48213,
        bytes_out=9120,
        retries=1,
    )


def test_a_line_says_it_all(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "json", full())
    values = json.loads(line)
    assert datetime.fromisoformat(values.pop("time")).tzinfo is not None
    assert values == {
        "endpoint": "/v1/chat/completions",
        "level": "info",
        "request_id": "r-17",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "tenant": "team-a",
        "conversation": "c 1",
        "turn": "t-2",
        "step": 3,
        "model": "Qwen/Qwen3-8B",
        "status": 200,
        "streamed": True,
        "prefill_engine": "p0:8000",
        "decode_engine": "d0:8000",
        "reuse": {
            "outcome": "hit",
            "tokens": 1024,
            "reason": "verified",
            "recomputed": 37,
            "cached": 16,
            "found": 1040,
            "holder": "d0-7f3a",
            "asked": 2,
        },
        "ttft_s": 0.183123,
        "prefill_s": 0.151,
        "decode_wait_s": 0.031,
        "duration_s": 2.46,
        "bytes_in": 48213,
        "bytes_out": 9120,
        "retries": 1,
    }


def test_text(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "text", full())
    time, level, *words = line.split(" ", 2)
    assert time.endswith("Z")
    assert datetime.fromisoformat(time).tzinfo is not None
    assert level == "INFO"
    assert words[0].startswith("endpoint=/v1/chat/completions request_id=r-17 ")
    for word in (
        'conversation="c 1"',
        "step=3",
        "status=200",
        "streamed=true",
        'reuse="hit; tokens=1024; reason=verified; recomputed=37; cached=16; found=1040"',
        "ttft_s=0.183123",
    ):
        assert f" {word} " in line


def test_off(tmp_path: Path) -> None:
    assert lines(tmp_path, "off", full()) == []


@pytest.mark.parametrize(
    ("entry", "level"),
    [
        (Entry("/v1/completions", status=200), "info"),
        (Entry("/v1/completions", status=404, error="model_not_found"), "info"),
        (Entry("/v1/completions", status=503, error="no_engine"), "error"),
        (Entry("/v1/completions", status=500), "error"),
        (Entry("/v1/completions", status=200, error="engine_lost"), "error"),
        (Entry("/v1/completions", client_gone=True), "info"),
    ],
)
def test_levels(tmp_path: Path, entry: Entry, level: str) -> None:
    assert json.loads(lines(tmp_path, "json", entry)[0])["level"] == level


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_client_cannot_forge_a_line(tmp_path: Path, form: LogFormat) -> None:
    entry = Entry(
        "/v1/completions", request_id=HOSTILE, conversation=HOSTILE, turn=HOSTILE, model=HOSTILE, status=404
    )
    found = lines(tmp_path, form, entry)
    assert len(found) == 1
    assert found[0].isprintable()
    if form == "json":
        values = json.loads(found[0])
        assert "tenant" not in values
        assert values["model"] == HOSTILE.encode("unicode_escape").decode()
    else:
        assert found[0].count(" status=") == 1


@given(st.text())
def test_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable() or len(text) > 256


def test_a_long_model_name_is_cut(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "json", Entry("/v1/completions", model="m" * 100_000))
    assert json.loads(line)["model"] == "m" * 256


def test_lines_of_several_writers_stay_whole() -> None:
    """As worker processes do, they share a pipe."""
    reader, writer = os.pipe()
    logs = [AccessLog("json", counter(), writer) for _ in range(3)]
    read = bytearray()

    def drain() -> None:
        while chunk := os.read(reader, 1000):
            read.extend(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    for number in range(500):
        for worker, log in enumerate(logs):
            log.write(Entry("/v1/completions", conversation=f"{worker}-{number}", model="m" * 200))
    for log in logs:
        log.stop()
    os.close(writer)
    thread.join()
    os.close(reader)
    seen = [json.loads(line)["conversation"] for line in read.decode().splitlines()]
    assert len(seen) == 1500
    for worker in range(3):  # each one's in its order
        assert [each for each in seen if each.startswith(f"{worker}-")] == [
            f"{worker}-{number}" for number in range(500)
        ]


def test_nobody_reads_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "STOP_S", 0.05)
    reader, writer = os.pipe()
    dropped = counter()
    log = AccessLog("json", dropped, writer)
    for _ in range(access_log.MAX_LINES + 5000):
        log.write(full())
    log.stop()  # comes back
    assert dropped._value.get() > 0
    os.close(reader)  # and so does its thread
    log._thread.join(60)
    assert not log._thread.is_alive()
    os.close(writer)


def test_a_log_that_is_closed_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    dropped = counter()
    log = AccessLog("json", dropped, writer)
    log.write(full())
    log.write(full())
    log.stop()
    os.close(writer)
    assert dropped._value.get() == 2


# -- other lines


@contextmanager
def logged(form: LogFormat, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    root.handlers = []  # so that those of the tests are not closed
    try:
        set_up_logging(form)
        yield stderr
    finally:
        root.handlers, root.level = before, level


def test_other_lines_are_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with logged("json", monkeypatch) as stderr:
        logging.getLogger("carryback").warning("engine %s said %s", "d0", HOSTILE)
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("carryback").exception("failed")
    first, second = (json.loads(line) for line in stderr.getvalue().splitlines())
    assert first["level"] == "warning"
    assert first["logger"] == "carryback"
    assert first["message"].startswith('engine d0 said x"')
    assert second["message"] == "failed"
    assert second["exception"].endswith("ValueError: no")


def test_other_lines_stay_lines_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with logged("text", monkeypatch) as stderr:
        logging.getLogger("carryback").warning("engine %s said %s", "d0", HOSTILE)
    (line,) = stderr.getvalue().split("\n")[:-1]
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert datetime.fromisoformat(time).tzinfo is not None
    assert rest.startswith("WARNING engine d0 said")
    assert line.isprintable()
