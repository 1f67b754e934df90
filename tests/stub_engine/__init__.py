"""A stand-in for a vLLM engine with carryback's plug-in: its HTTP answers, events, latency and faults."""

from stub_engine.engine import StubEngine
from stub_engine.faults import Fault
from stub_engine.prompts import CALL_MARKER, Answer, expected, expected_text
from stub_engine.rank import Settings
from stub_engine.received import Received

__all__ = [
    "CALL_MARKER",
    "Answer",
    "Fault",
    "Received",
    "Settings",
    "StubEngine",
    "expected",
    "expected_text",
]
