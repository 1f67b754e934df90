"""Configuration of the router. Every timeout is here, in seconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """One vLLM engine, as the router reaches it.

    Attributes:
        role: `prefill` or `decode`.
        url: base URL of its OpenAI server, e.g. `http://127.0.0.1:8100`.
        events: ZMQ address of its event publisher, e.g. `tcp://127.0.0.1:8101`.
        name: shown in logs and metrics; the URL's host and port unless given.
    """

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode"]
    url: str
    events: str
    name: str = ""


class RouterConfig(BaseModel):
    """The router's settings. Bound to loopback unless told otherwise."""

    model_config = ConfigDict(extra="forbid")

    host: str = "127.0.0.1"
    port: int = 8000
    engines: list[EngineConfig] = []
    engine_api_key: str | None = None
    "Sent to the engines as a bearer token."

    max_body_bytes: int = Field(64 * 1024 * 1024, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)
    prefill_timeout_s: float = Field(300.0, gt=0)
    "From sending a prompt to a prefill engine until its answer."
    first_byte_timeout_s: float = Field(300.0, gt=0)
    "From sending a request to a decode engine until the first byte of its answer."
    idle_timeout_s: float = Field(300.0, gt=0)
    "Between two bytes of an answer."
    probe_interval_s: float = Field(1.0, gt=0)
    "Between two health probes of an engine."
    held_event_wait_s: float = Field(2.0, ge=0)
    "How long the next turn waits for the event that says where the last turn's KV is, if it is late."

    hold_s: float = Field(480.0, ge=0)
    "How long a decode engine holds a finished turn's KV; 0 turns reuse off."
    hold_first_s: float = Field(60.0, ge=0)
    "The same for a first request that names no conversation: it may be a one-shot."
    prefill_lease_s: float = Field(30.0, gt=0)
    "How long a prefill engine holds a prompt's KV for the decode engine, not counting its heartbeats."
    identity_capacity: int = Field(100_000, gt=0)
    "Message histories remembered to recognise conversations of clients that send no id."
