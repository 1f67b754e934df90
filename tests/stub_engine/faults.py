"""What can be made to go wrong with requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class Fault:
    """What goes wrong with the next requests. A request suffers the first fault that is for it.

    Attributes:
        times: how many requests; None: all.
        path: only those whose path begins so. Empty: those to endpoints that generate.
        contains: only those whose body contains this.
        hop: only those of this hop.
        status_delay_s: before the status.
        first_delay_s: between the status and the first event.
        chunk_delay_s: before each further event.
        answer_delay_s: of an answer that is not streamed: before it leaves, when the engine is done with it.
        hang: no status, ever.
        status: an error of this status, with `error` as its body if given, else one in vLLM's shape.
        drop: the connection breaks off: before the status, after the status and before the first byte, or
            after so many events.
        error_after: after so many events the engine fails, and says so as vLLM does.
        framing: of the events: `crlf`, `cr`, or `no_space` after `data:`.
        split: each event in two writes, cut within a character, or between CR and LF, if it can be.
        comments: so many SSE comments, `comment_interval_s` apart, before the first event.
        omit_finish: the finish reason is null.
        omit_done: the event that ends the stream does not come.
        held: of a decode: `never`: no `Held` event; `lost`: sent and lost; else it comes so late, in seconds.
        load_delay_s: before the KV is read.
        fail_load: the KV cannot be read.
        script: (delay, bytes) pairs: the body of the answer, a stream, instead of an answer.
    """

    times: int | None = 1
    path: str = ""
    contains: str = ""
    hop: Literal["", "prefill", "decode"] = ""
    status_delay_s: float = 0.0
    first_delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    answer_delay_s: float = 0.0
    hang: bool = False
    status: int = 0
    error: str | None = None
    drop: Literal["", "before_status", "before_first_byte"] | int = ""
    error_after: int | None = None
    framing: Literal["", "crlf", "cr", "no_space"] = ""
    split: bool = False
    comments: int = 0
    comment_interval_s: float = 0.0
    omit_finish: bool = False
    omit_done: bool = False
    held: Literal["never", "lost"] | float = 0.0
    load_delay_s: float = 0.0
    fail_load: bool = False
    script: list[tuple[float, bytes]] | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Fault:
        """From an object as `POST /stub/faults` takes it: a script's bytes are text there."""
        fault = cls(**fields)
        if fault.script is not None:
            fault.script = [(delay, text.encode()) for delay, text in fields["script"]]
        return fault

    def writes(self, event: str) -> Iterator[bytes]:
        """An event as it goes on the wire: one write or more, or none."""
        is_last = "[DONE]" in event or event.startswith(("event: message_stop", "event: response.completed"))
        if self.omit_done and is_last:
            return
        if self.omit_finish:
            event = re.sub(r'("(?:finish|stop)_reason":)"\w+"', r"\1null", event)
        if self.framing == "no_space":
            event = event.replace("data: ", "data:", 1)
        elif self.framing:
            event = event.replace("\n", "\r\n" if self.framing == "crlf" else "\r")
        data = event.encode()
        if not self.split:
            yield data
            return
        wide = next((at for at, byte in enumerate(data) if byte >= 0x80), None)
        cut = wide + 1 if wide is not None else data.find(b"\r\n") + 1 or len(data) // 2
        yield data[:cut]
        yield data[cut:]


NO_FAULT = Fault()
