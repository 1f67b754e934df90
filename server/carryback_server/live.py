"""The latest steps of the conversations that are active, for whoever watches.

Requests only mark that something changed; what a watcher is shown is made when it asks. A watcher asks again
and again for what has changed since, so nothing is kept for it here: one that is slow gets more at a time.
No text of a prompt or an answer is here, and no key.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from carryback_server.access_log import Entry

# What is kept, some 20 MB at most; the conversations that were active last.
MAX_CONVERSATIONS = 2_000
MAX_STEPS_EACH = 64
MAX_STEPS = 20_000
# In one answer: two milliseconds' work.
MAX_CHANGES = 250

# The process, and the number of the last change.
_AFTER = re.compile(r"[0-9a-f]{12}\.[0-9]{1,19}")

State = Literal["prefill", "decode", "answer", "done", "failed", "gone"]


@dataclass(eq=False, slots=True)
class Step:
    """One request on its way, or over. What there is to say of it is in its entry, at any time.

    Attributes:
        holder: the decode engine that had most of it.
        key: of its decode, under which the engine's event comes back.
        generated: tokens of its answer; 0: not known.
        number: counts the steps that were shown.
        began: Unix time.
        changed: counts changes of all steps; this one's last.
    """

    entry: Entry
    holder: str = ""
    key: str = ""
    generated: int = 0
    is_over: bool = False
    number: int = 0
    began: float = field(default_factory=time.time)
    changed: int = 0

    @property
    def state(self) -> State:
        """Where it is: at a prefill engine, waiting for its first byte, being answered, or how it ended."""
        entry = self.entry
        if not self.is_over:
            return "prefill" if entry.reuse is None else "answer" if entry.ttft_s else "decode"
        if entry.client_gone:
            return "gone"
        return "failed" if entry.error or entry.status >= 400 else "done"


class View(msgspec.Struct, omit_defaults=True):
    """A step as a watcher gets it; tokens and seconds that are 0 or not known are left out.

    Attributes:
        id: of the step, in this router process.
        began: Unix time of the request's arrival.
        saved_s: how much later the first token would have come without reuse, as far as is learned.
    """

    id: int
    tenant: str
    conversation: str
    began: float
    state: State
    endpoint: str
    turn: str = ""
    step: int = 0
    outcome: str = ""
    reason: str = ""
    reused: int = 0
    cached: int = 0
    recomputed: int = 0
    found: int = 0
    generated: int = 0
    ttft_s: float = 0
    prefill_s: float = 0
    saved_s: float | None = None
    duration_s: float = 0
    prefill_engine: str = ""
    decode_engine: str = ""
    retries: int = 0
    status: int = 0
    error: str = ""


class Live:
    """What is going on at this router process, in memory that is bounded.

    Args:
        saved_s: seconds that it saved to read tokens rather than to compute them, of a prefill and a decode
            engine by name; None if that is not known.
    """

    def __init__(self, saved_s: Callable[[str, str, int], float | None]) -> None:
        self._saved_s = saved_s
        self._run = uuid.uuid4().hex[:12]
        self._clock = 0
        self._count = 0
        # By number, in the order of their last change.
        self._steps: OrderedDict[int, Step] = OrderedDict()
        # Each in the order of their beginning, by tenant and id; the conversation used last is the last.
        self._conversations: OrderedDict[tuple[str, str], deque[Step]] = OrderedDict()
        self._by_key: dict[str, Step] = {}

    def begin(self, step: Step) -> None:
        """A request has said which conversation it belongs to: show it from now on."""
        self._count += 1
        step.number = self._count
        name = step.entry.tenant, step.entry.conversation
        steps = self._conversations.get(name)
        if steps is None:
            steps = self._conversations[name] = deque()
        else:
            self._conversations.move_to_end(name)
        steps.append(step)
        self._steps[step.number] = step
        self.changed(step)
        if len(steps) > MAX_STEPS_EACH:
            self._drop(steps.popleft())
        if len(self._steps) > MAX_STEPS or len(self._conversations) > MAX_CONVERSATIONS:
            for each in self._conversations.popitem(last=False)[1]:
                self._drop(each)

    def changed(self, step: Step) -> None:
        """There is more to say of a step. Of one that is not shown, or no longer, nothing is."""
        if step.number in self._steps:
            self._clock += 1
            step.changed = self._clock
            self._steps.move_to_end(step.number)

    def decoding(self, step: Step, key: str) -> None:
        """A decode begins, under a key."""
        if step.number in self._steps:
            self._by_key.pop(step.key, None)
            step.key = key
            self._by_key[key] = step

    def generated(self, key: str, tokens: int) -> None:
        """A decode engine has said how many tokens the answer has that it gave under a key."""
        if (step := self._by_key.get(key)) is not None:
            step.generated = tokens
            self.changed(step)

    def end(self, step: Step) -> None:
        """A request is over, in whichever way."""
        step.is_over = True
        self.changed(step)

    def _drop(self, step: Step) -> None:
        del self._steps[step.number]
        self._by_key.pop(step.key, None)

    def since(self, after: str) -> dict[str, Any]:
        """What has changed since an earlier answer, the earliest change first.

        Args:
            after: that answer's `after`; empty for all there is.

        Returns:
            `after`, for the next time; `has_more`, whether to ask again at once; `is_reset`, whether what was
            got before is not this process's, and so to be forgotten; `data`, the steps.

        Raises:
            ValueError: there is no such `after`.
        """
        run, _, number = after.partition(".")
        if after and not _AFTER.fullmatch(after):
            raise ValueError("it must be what an answer had as its after")
        last = int(number) if run == self._run else 0
        changed: list[Step] = []
        for step in reversed(self._steps.values()):
            if step.changed <= last:
                break
            changed.append(step)
        changed.reverse()
        has_more = len(changed) > MAX_CHANGES
        del changed[MAX_CHANGES:]
        last = changed[-1].changed if has_more else self._clock
        return {
            "after": f"{self._run}.{last}",
            "has_more": has_more,
            "is_reset": run != self._run,
            "data": [self._view(step) for step in changed],
        }

    def _view(self, step: Step) -> View:
        entry = step.entry
        view = View(
            step.number,
            entry.tenant,
            entry.conversation,
            round(step.began, 3),
            step.state,
            entry.endpoint,
            entry.turn,
            entry.step,
            generated=step.generated,
            ttft_s=round(entry.ttft_s, 6) or 0,
            prefill_s=round(entry.prefill_s, 6) or 0,
            duration_s=round(entry.duration_s, 6) or 0,
            prefill_engine=entry.prefill_engine,
            decode_engine=entry.decode_engine,
            retries=entry.retries,
            status=entry.status,
            error=entry.error,
        )
        if (reuse := entry.reuse) is not None:
            view.outcome, view.reason = reuse.outcome, reuse.reason
            view.reused, view.cached, view.recomputed = reuse.tokens, reuse.cached, reuse.recomputed
            view.found = reuse.found
            if reuse.tokens and step.holder:
                saved_s = self._saved_s(entry.prefill_engine, step.holder, reuse.tokens)
                view.saved_s = round(saved_s, 6) if saved_s is not None else None
        return view
