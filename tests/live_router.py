"""A router that is a process of its own, in front of stub engines in a thread, for tests that use no event loop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from carryback.wire import Reuse
from prometheus_client.parser import text_string_to_metric_families
from service import TEXT, said, user
from stub_engine import StubEngine, expected
from stub_engine.prompts import CHAT

START_LIMIT_S = 60.0
# For all that the router does at once, on a machine that is busy with much else.
LIMIT_S = 30.0
# What no log may have in it.
COMPLAINTS = re.compile(
    r"Traceback|never retrieved|never awaited|destroyed but it is pending|Unclosed|was not handled|Exception in"
)


class LiveRouter:
    """`carryback router`, one prefill and one decode engine: `with LiveRouter(folder) as router: ...`.

    Args:
        folder: for its settings and its log.
        settings: of the router, as in its file.

    Attributes:
        url, admin_url: of its two ports.
        log: the file with all that it writes.
        prefill, decode: the engines, which run in another thread.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self.log = folder / "router.log"
        self.prefill = StubEngine("prefill")
        self.decode = StubEngine("decode")

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines")
        self._thread.start()
        self._call(self.prefill.start())
        self._call(self.decode.start())
        self.port, admin_port = _free_ports()
        self.url, self.admin_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{admin_port}"
        engines = [each.config().model_dump(exclude_none=True) for each in (self.prefill, self.decode)]
        settings = {"port": self.port, "admin_port": admin_port, "engines": engines, "log_format": "json"}
        file = self._folder / "router.yaml"
        file.write_text(yaml.safe_dump({**settings, **self._settings}))
        command = [sys.executable, "-m", "carryback_server", "router", "--config", str(file)]
        path = os.pathsep.join(sys.path)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
            )
        self.client = httpx.Client(timeout=LIMIT_S, limits=httpx.Limits(max_keepalive_connections=4))
        wait_until(self._is_ready, "the router is ready", START_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        ended = self._process.poll()
        if ended is None:
            self._process.kill()
            self._process.wait()
        self._call(self.prefill.kill())
        self._call(self.decode.kill())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert ended in (None, 0), f"the router ended with {ended}: {self.log.read_text()[-3000:]}"

    def stop(self) -> None:
        """Let it end as an operator does; then nothing may be held anywhere, and nothing have gone wrong."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(START_LIMIT_S) == 0
        wait_until(lambda: not (self.prefill.in_use or self.decode.in_use), "nothing is held")
        violations = self.prefill.violations + self.decode.violations
        assert violations == [], violations

    def check_log(self) -> None:
        """Nothing that nobody thought of has happened."""
        text = self.log.read_text(errors="replace")
        assert (found := COMPLAINTS.search(text)) is None, text[found.start() - 500 : found.start() + 3000]

    def check_well(self, key: str = "") -> None:
        """It is idle, and serves an ordinary conversation as it should."""
        wait_until(self.is_idle, "the router is idle")
        conversation = uuid.uuid4().hex
        headers = {"X-Conversation-ID": conversation, **({"Authorization": f"Bearer {key}"} if key else {})}
        messages = [user(TEXT)]
        for outcome in ("miss", "hit"):
            body = {"messages": messages}
            answer = self.client.post(self.url + CHAT, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            assert text == expected(body).text
            assert Reuse.parse(answer.headers["X-Carryback-Reuse"]).outcome == outcome
            messages += [said(text), user("And then?")]
        path = f"{self.url}/v1/conversations/{conversation}"
        assert self.client.delete(path, headers=headers).status_code == 200

    def log_lines(self) -> list[dict[str, Any]]:
        """All lines of the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def metrics(self) -> str:
        """What it tells Prometheus."""
        return self.client.get(f"{self.admin_url}/metrics").text

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        families = text_string_to_metric_families(self.metrics())
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"carryback_{name}")

    def is_idle(self) -> bool:
        """It does nothing for anybody, and nobody does anything for it."""
        busy = self.prefill.running or self.decode.running
        return not busy and self.metric("in_flight_requests") == 0 == self.metric("active_streams")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self.client.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _call(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_LIMIT_S)


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it never did; `what` should have happened.
    """
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
