from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from carryback.wire.events import Held
from carryback_server.metrics import Metrics
from carryback_server.records import EXPIRY_MARGIN_S, Record, Records
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

IDS = st.sampled_from(["a", "b", "c"])


class RecordsLife(RuleBasedStateMachine):
    """Whatever happens, a record is taken, released or voided once, and the gauges tell the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics()
        self.released: list[str] = []
        self.records = Records(self.metrics, lambda record: self.released.append(record.held.key))
        self.engines: list[Any] = [SimpleNamespace(name="d0"), SimpleNamespace(name="d1")]
        self.made = 0
        self.gone: list[str] = []

    @rule(name=IDS, engine=st.integers(0, 1), is_short=st.booleans())
    def put(self, name: str, engine: int, is_short: bool) -> None:
        self.made += 1
        held = Held(f"run{engine}", self.made, f"key{self.made}", "r", 64, 2, 480, b"{}")
        life = EXPIRY_MARGIN_S - 1 if is_short else 480
        conversation = self.records.open(name, None)
        self.records.put(conversation, Record(self.engines[engine], held, time.monotonic() + life))

    @rule(name=IDS)
    def take(self, name: str) -> None:
        conversation = self.records.open(name, None)
        before = conversation.record
        taken = self.records.take(conversation)
        assert conversation.record is None
        if taken is not None:
            assert taken is before
            assert taken.is_usable
            self.gone.append(taken.held.key)

    @rule(name=IDS)
    def delete(self, name: str) -> None:
        conversation = self.records.get(name)
        record = self.records.delete(name)
        if record is not None:
            self.gone.append(record.held.key)
        if conversation is not None:
            held = Held("run0", 0, "late", "r", 64, 2, 480, b"{}")
            self.records.put(conversation, Record(self.engines[0], held, time.monotonic() + 480))
            assert self.released.pop() == "late"

    @rule(engine=st.integers(0, 1), is_restart=st.booleans())
    def void(self, engine: int, is_restart: bool) -> None:
        before = [each.record for each in self.records if each.record is not None]
        keep = f"run{engine}" if is_restart else None
        self.records.void(self.engines[engine], keep=keep)
        for record in before:
            is_there = any(each.record is record for each in self.records)
            assert is_there == (is_restart or record.engine is not self.engines[engine])
            if not is_there:
                self.gone.append(record.held.key)

    @rule(number=st.integers(1, 20))
    def engine_let_go(self, number: int) -> None:
        key = f"key{number}"
        was_there = any(each.record and each.record.held.key == key for each in self.records)
        self.records.released(key)
        if was_there:
            self.gone.append(key)

    @invariant()
    def once(self) -> None:
        there = [each.record.held.key for each in self.records if each.record is not None]
        every = there + self.gone + self.released
        assert len(every) == len(set(every)) == self.made
        assert self.total("carryback_held_records") == len(there)
        assert self.total("carryback_held_tokens") == 64 * len(there)
        assert self.total("carryback_held_blocks") == 2 * len(there)

    def total(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value
        return sum(value(name, {"engine": engine.name}) or 0 for engine in self.engines)


TestRecords = RecordsLife.TestCase
