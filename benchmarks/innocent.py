"""What the innocent tenant has while somebody else attacks: one stream, conversations, and answers of `/health`.

A process of its own, so that what it sees does not wait for the attacker's work. It reads a `Watch` from its standard
input. Then it does the next thing with each line that comes, and prints one line when it is done: it opens the stream
(with the `Watch`); has the first turns of conversations that will go on after the attack, and begins with others;
looks, while it is attacked; and has the first ones go on, and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

CHAT = "/v1/chat/completions"
TEXT = "Tell me about the sea, the wind, the boats and all the people who go there in winter. " * 8
HEALTH_INTERVAL_S = 0.02
LOOK_INTERVAL_S = 0.05
PAUSE_S = 0.1
TURNS = 3
REQUEST_TIMEOUT_S = 60.0
AFTER_TIMEOUT_S = 20.0


class Watch(msgspec.Struct):
    """Whom to watch.

    Attributes:
        port, admin_port: of the router.
        pid: of its process.
        key: the innocent tenant's.
        sleepers: conversations that have their first turn before the attack and go on after it; half of them name
            themselves, the others are known by their messages.
    """

    port: int
    admin_port: int
    pid: int
    key: str
    sleepers: int = 8


class Seen(msgspec.Struct):
    """What came of it.

    Attributes:
        seconds: of the attack.
        gap_ms, gap_at_s: the longest time without a chunk of the stream, and when it ended.
        hits: turns that reused all of their conversation's KV.
        possible: turns after a conversation's first.
        errors: requests that did not get a whole answer with status 200, by what they got.
        health_ms: the slowest answer of `/health`, on either port.
        unhealthy: times that it gave none, or another status than 200.
        rss_before_mib, rss_mib: of the router and its children, before the attack and at most.
        descriptors_before, descriptors: likewise, of the router alone.
    """

    seconds: float = 0.0
    gap_ms: float = 0.0
    gap_at_s: float = 0.0
    hits: int = 0
    possible: int = 0
    errors: dict[str, int] = {}
    health_ms: float = 0.0
    unhealthy: int = 0
    rss_before_mib: float = 0.0
    rss_mib: float = 0.0
    descriptors_before: int = 0
    descriptors: int = 0


class Innocent:
    """The tenant."""

    def __init__(self, watch: Watch, session: aiohttp.ClientSession) -> None:
        self._watch = watch
        self._session = session
        self._headers = {"Authorization": f"Bearer {watch.key}", "Content-Type": "application/json"}
        self._last_chunk = 0.0
        self._looks = False
        self.has_stream = asyncio.Event()
        self.seen = Seen()

    def begin(self) -> None:
        """What is seen counts from now on."""
        self._looks = True
        self._last_chunk = self._began = time.perf_counter()
        self.seen.rss_before_mib, self.seen.descriptors_before = (
            _rss_mib(self._watch.pid, "VmRSS:"),
            self._open(),
        )

    def end(self) -> None:
        """It no longer does."""
        self._chunk()
        self._looks = False
        self.seen.seconds = time.perf_counter() - self._began
        peak = _rss_mib(self._watch.pid, "VmHWM:")
        self.seen.rss_mib = max(self.seen.rss_mib, peak)

    async def stream(self) -> None:
        """One endless answer, and another if it ends."""
        body = {"model": "stub", "messages": [_user(TEXT)], "stream": True, "max_tokens": 100_000_000}
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._watch.port)
                try:
                    writer.write(self._request(body))
                    while await reader.read(2**16):
                        self._chunk()
                        self.has_stream.set()
                finally:
                    writer.transport.abort()
                self.failed("stream broken off")
            except OSError as error:
                self.failed(f"stream: {type(error).__name__}")
            await asyncio.sleep(0.2)

    def _request(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        return (
            f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def _chunk(self) -> None:
        now = time.perf_counter()
        if self._looks and (gap_ms := 1000 * (now - self._last_chunk)) > self.seen.gap_ms:
            self.seen.gap_ms, self.seen.gap_at_s = gap_ms, now - self._began
        self._last_chunk = now

    async def conversations(self, *, named: bool) -> None:
        """One short conversation after the other."""
        while True:
            talk = Talk(self, named=named)
            for _ in range(TURNS):
                await talk.turn()
                await asyncio.sleep(PAUSE_S)

    async def ask(self, messages: list[dict[str, Any]], name: str) -> tuple[str, str] | None:
        """An answer's text, and what it says of reuse; None if there is none."""
        headers = {**self._headers, **({"X-Conversation-ID": name} if name else {})}
        body = {"model": "stub", "messages": messages, "max_tokens": 8}
        try:
            async with self._session.post(
                f"http://127.0.0.1:{self._watch.port}{CHAT}", data=json.dumps(body).encode(), headers=headers
            ) as response:
                data = await response.read()
                if response.status != 200:
                    self.failed(_code(response.status, data))
                    return None
                text: str = json.loads(data)["choices"][0]["message"]["content"]
                return text, response.headers.get("X-Carryback-Reuse", "").partition(";")[0]
        except (aiohttp.ClientError, OSError) as error:
            self.failed(type(error).__name__)
            return None

    async def health(self, port: int) -> None:
        """`/health`, again and again, each time over a new connection."""
        request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        while True:
            began, is_well = time.perf_counter(), False
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(request)
                    is_well = (await reader.read(2**16)).startswith(b"HTTP/1.1 200")
                finally:
                    writer.transport.abort()
            self._answered(began, is_well)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _answered(self, began: float, is_well: bool) -> None:
        if self._looks:
            self.seen.health_ms = max(
                self.seen.health_ms, 1000 * (time.perf_counter() - max(began, self._began))
            )
            self.seen.unhealthy += not is_well

    async def look(self) -> None:
        """At the router's process."""
        while True:
            if self._looks:
                self.seen.descriptors = max(self.seen.descriptors, self._open())
                self.seen.rss_mib = max(self.seen.rss_mib, _rss_mib(self._watch.pid, "VmRSS:"))
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _open(self) -> int:
        return len(os.listdir(f"/proc/{self._watch.pid}/fd"))

    def failed(self, what: str) -> None:
        """Something did not work."""
        if self._looks:
            self.seen.errors[what] = self.seen.errors.get(what, 0) + 1

    def count(self, reuse: str) -> None:
        """A turn after the first has its answer, which says this of reuse."""
        if self._looks:
            self.seen.possible += 1
            self.seen.hits += reuse == "hit"


class Talk:
    """One conversation.

    Args:
        named: it says which one it is; else it is told from its messages.
    """

    def __init__(self, innocent: Innocent, *, named: bool) -> None:
        self._innocent = innocent
        self._name = f"talk-{uuid.uuid4().hex}" if named else ""
        self._messages = [_user(f"{uuid.uuid4().hex}. {TEXT}")]

    async def turn(self) -> None:
        """One question, and its answer."""
        is_first = len(self._messages) == 1
        answer = await self._innocent.ask(self._messages, self._name)
        if not is_first:
            self._innocent.count(answer[1] if answer else "")
        self._messages += [{"role": "assistant", "content": answer[0] if answer else "?"}, _user("And then?")]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _code(status: int, data: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(data)['error']['code']}"
    return str(status)


def _rss_mib(pid: int, name: str) -> float:
    pids = [pid]
    with suppress(psutil.Error):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found = 0
    for each in pids:
        with suppress(OSError, IndexError):
            found += int(Path(f"/proc/{each}/status").read_text().partition(name)[2].split()[0])
    return found / 1024


async def main() -> None:
    """See the module."""
    watch = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=Watch)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        innocent = Innocent(watch, session)
        tasks = [asyncio.create_task(innocent.stream())]
        await innocent.has_stream.wait()
        print("streams", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        sleepers = [Talk(innocent, named=number % 2 == 0) for number in range(watch.sleepers)]
        for sleeper in sleepers:
            await sleeper.turn()
        works: list[Any] = [
            innocent.conversations(named=True), innocent.conversations(named=False), innocent.look(),
            innocent.health(watch.port), innocent.health(watch.admin_port),
        ]  # fmt: skip
        tasks += [asyncio.create_task(work) for work in works]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        innocent.begin()
        print("looks", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            async with asyncio.timeout(AFTER_TIMEOUT_S):
                for _ in range(1, TURNS):
                    await asyncio.gather(*(sleeper.turn() for sleeper in sleepers))
        except TimeoutError:
            innocent.failed("late")
        innocent.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(msgspec.json.encode(innocent.seen).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
