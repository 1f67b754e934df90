"""The load: N streams, each one conversation after another over one connection.

A process of its own, so that its work is not the router's, and light, so that it is not what is
measured. It connects, sends one request on each stream to warm up, prints `ready`, waits for a line on
its standard input, sends the load, and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import cast

import httptools
import msgspec
import uvloop

MARK = b"data: "
END = b"data: [DONE]\n\n"


class Load(msgspec.Struct):
    """What to send.

    Attributes:
        host: of the server.
        port: of the server.
        streams: connections, each with one request at a time.
        requests: in all, after the warm-up.
        chunks: tokens to ask for.
        events: SSE events that a full answer has, `[DONE]` among them; 0 if not known yet.
        prompt_bytes: size of a conversation's first request.
        turns: requests of one conversation.
        spread_s: the streams start one by one over this time.
    """

    host: str
    port: int
    streams: int
    requests: int
    chunks: int
    events: int
    prompt_bytes: int
    turns: int
    spread_s: float


class Seen(msgspec.Struct):
    """What came back.

    Attributes:
        seconds: from the first request to the last answer's end.
        cpu_s: CPU time of this process over the same.
        requests: answers, all of them complete.
        events: SSE events in one answer, `[DONE]` among them.
        ttft_s: seconds from sending a request until the first bytes of its body, one for each request.
        reuse: answers by the first word of `X-Carryback-Reuse`.
    """

    seconds: float
    cpu_s: float
    requests: int
    events: int
    ttft_s: list[float]
    reuse: dict[str, int]


class Bodies:
    """The requests of a conversation: each turn repeats the one before, and adds an answer and a question."""

    def __init__(self, load: Load) -> None:
        # Words of one letter: whoever looks into them finds nothing to skip.
        words = "".join(f"{chr(97 + n % 26)} " for n in range(load.prompt_bytes // 2))
        messages = [{"role": "system", "content": "@"}, {"role": "user", "content": ""}]
        request = {
            "model": "stub",
            "messages": messages,
            "max_tokens": load.chunks,
            "temperature": 0,
            "stream": True,
        }
        empty = len(json.dumps(request)) + len("conversation 00000000")
        messages[1]["content"] = words[: max(0, load.prompt_bytes - empty)]
        self._parts = []
        for _ in range(load.turns):
            before, after = json.dumps(request).encode().split(b"@")
            self._parts.append((before, after))
            messages.append({"role": "assistant", "content": "An answer, of which the client kept this."})
            messages.append({"role": "user", "content": "And then?"})

    def get(self, turn: int, conversation: str) -> bytes:
        """The body of one turn; conversations differ from the first message on."""
        before, after = self._parts[turn]
        return b"%sconversation %s%s" % (before, conversation.encode(), after)


class Run:
    """What the streams share: what is left to send, and what has been seen."""

    def __init__(self, load: Load, requests: int) -> None:
        self.load = load
        self.bodies = Bodies(load)
        self.head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
            "Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: load\r\n"
        )
        self.left = requests
        self.running = load.streams
        self.events = load.events
        self.ttft: list[float] = []
        self.reuse: dict[str, int] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


class Stream(asyncio.Protocol):
    """One connection: sends, counts, sends again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._turn = run.load.turns
        self._is_busy = False
        self._parser = httptools.HttpResponseParser(self)
        # One call less for each read; uvloop looks this up once, before `connection_made`.
        self.data_received = self._parser.feed_data  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_busy:
            self._run.fail(f"the connection was closed during an answer ({exc})")

    def close(self) -> None:
        self._transport.close()

    def begin(self) -> None:
        """Send the next request, or stop if none is left."""
        run = self._run
        if not run.left:
            run.running -= 1
            if not run.running and not run.done.done():
                run.done.set_result(None)
            return
        run.left -= 1
        if self._turn == run.load.turns:
            self._turn, self._conversation = 0, f"{random.getrandbits(32):08x}"
        body = run.bodies.get(self._turn, self._conversation)
        self._turn += 1
        self._events = 0
        self._tail = b""
        self._is_busy = True
        head = f"{run.head}X-Session-ID: {self._conversation}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + body)

    # -- of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 17 and name.lower() == b"x-carryback-reuse":
            outcome = value.partition(b";")[0].decode()
            self._run.reuse[outcome] = self._run.reuse.get(outcome, 0) + 1

    def on_body(self, body: bytes) -> None:
        if not self._tail:
            self._run.ttft.append(time.perf_counter() - self._sent)
        elif not self._tail.endswith(b"\n"):
            self._events += (self._tail[1 - len(MARK) :] + body[: len(MARK) - 1]).count(MARK)
        self._events += body.count(MARK)
        self._tail = body[-len(END) :] if len(body) >= len(END) else (self._tail + body)[-len(END) :]

    def on_message_complete(self) -> None:
        run = self._run
        self._is_busy = False
        run.events = run.events or self._events
        if (status := self._parser.get_status_code()) != 200:
            run.fail(f"status {status}: {self._tail!r}")
        elif self._tail != END or self._events != run.events or self._events <= run.load.chunks:
            run.fail(f"{self._events} events instead of {run.events}, the last {self._tail!r}")
        elif not self._parser.should_keep_alive():
            run.fail("the server does not keep the connection")
        else:
            self.begin()


async def connect(run: Run) -> list[Stream]:
    """As many streams as the load has."""
    load, loop = run.load, asyncio.get_running_loop()
    return [
        (await loop.create_connection(lambda: Stream(run), load.host, load.port))[1]
        for _ in range(load.streams)
    ]


async def send(load: Load) -> Seen:
    """Send the load once; see the module.

    Raises:
        RuntimeError: an answer that is not complete.
    """
    warm_up = Run(load, load.streams)
    streams = await connect(warm_up)
    for stream in streams:
        stream.begin()
    await warm_up.done
    for stream in streams:
        stream.close()

    # On new connections: the first to be done with the warm-up may have been idle for too long.
    run = Run(load, load.requests)
    run.events = warm_up.events
    streams = await connect(run)
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu = time.perf_counter(), time.process_time()
    for number, stream in enumerate(streams):
        asyncio.get_running_loop().call_later(load.spread_s * number / load.streams, stream.begin)
    await run.done
    return Seen(
        seconds=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu,
        requests=load.requests,
        events=run.events,
        ttft_s=run.ttft,
        reuse=run.reuse,
    )


if __name__ == "__main__":
    seen = uvloop.run(send(msgspec.json.decode(sys.stdin.readline(), type=Load)))
    print(msgspec.json.encode(seen).decode(), flush=True)
