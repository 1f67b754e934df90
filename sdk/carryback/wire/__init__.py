"""What crosses a process boundary: header names, ids, and the reuse report.

The client, the router and the engine plug-in share this module. It needs nothing but the standard
library; the engine events, which need msgspec, are in `carryback.wire.events`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

# Sent by the client. Plain headers, so that any OpenAI-compatible server accepts the request.
CONVERSATION_ID = "X-Conversation-ID"
CONVERSATION_PARENT = "X-Conversation-Parent"
CONVERSATION_END = "X-Conversation-End"
TURN_ID = "X-Turn-ID"
TURN_STEP = "X-Turn-Step"

# Sent by the router. `X-Carryback-Reuse: off` is also read from a request: no reuse for this one.
CARRYBACK_CONVERSATION = "X-Carryback-Conversation"
CARRYBACK_TURN = "X-Carryback-Turn"
CARRYBACK_REUSE = "X-Carryback-Reuse"
# On every answer of a router's, errors too, so that a client knows whom it is talking to.
CARRYBACK_ROUTER = "X-Carryback-Router"

MAX_ID_LENGTH = 256

# Headers of others that may name a conversation: hints, which the router reads unless its setting `conversation_headers`
# says otherwise. `X-Correlation-ID` is none: gateways make a new one for each request.
CONVERSATION_HEADERS = (
    "X-Session-ID",
    "X-Dynamo-Session-ID",
    "X-Session-Affinity",
    "X-LiteLLM-Session-Id",
    "X-Claude-Code-Session-Id",
    "session_id",
    "session-id",
)

# Where a conversation id may come from, first one present wins. (kind, name); "body" names are
# paths into the JSON body. `conversation_id` is removed before the body reaches an engine. The first two are carryback's
# own; the others are hints, and one that is malformed is ignored.
CONVERSATION_SOURCES: tuple[tuple[Literal["header", "body"], str], ...] = (
    ("header", CONVERSATION_ID),
    ("body", "conversation_id"),
    *(("header", name) for name in CONVERSATION_HEADERS),
    ("body", "session_id"),
    ("body", "session_params.session_id"),
)


def check_id(value: str, name: str) -> str:
    """Return `value` if it may be an id: 1 to 256 printable ASCII characters, no space at the ends.

    Args:
        value: the id as it came.
        name: the header or field it came from, for the message.

    Raises:
        ValueError: says what is wrong with which field.
    """
    if not value:
        raise ValueError(f"{name} is empty; an id has 1 to {MAX_ID_LENGTH} characters")
    if len(value) > MAX_ID_LENGTH:
        raise ValueError(f"{name} has {len(value)} characters; at most {MAX_ID_LENGTH} are allowed")
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{name} has characters that are not printable ASCII")
    if value != value.strip():  # HTTP strips it from headers, so that it would be another id
        raise ValueError(f"{name} begins or ends with a space")
    return value


Outcome = Literal["hit", "partial", "miss"]

# Why a request reused no more than it did; docs/router.md says what each means. Others are another release's.
ENGINE_REASONS = (
    "verified", "history_changed", "overwritten", "new", "too_short", "below_threshold", "local_cache", "off",
    "no_answer", "too_many_leases", "load_failed", "plugin_failed", "unverified", "layouts_differ",
    "unsupported_layout",
)  # fmt: skip
ROUTER_REASONS = (
    "engine_lost", "no_plugin", "prefill_failed", "prefill_unavailable", "prefill_refused",
    "several_answers", "several_prompts", "prompt_logprobs", "prompt_embeds",
)  # fmt: skip

_OUTCOMES = get_args(Outcome)
_REASON = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# No prompt is that long: ten digits.
_MAX_TOKENS_DIGITS = 10
# A value of ours has about 100 characters, and may get more parameters.
_MAX_REUSE_LENGTH = 1024


@dataclass(frozen=True)
class Work:
    """How long an engine took for a prompt, on its own clock.

    Attributes:
        read_s: seconds from asking for KV that another engine holds until it was there.
        compute_s: seconds from then, or from when the prompt was first scheduled, until its first token.
        computed: tokens that the engine scheduled in `compute_s`, of this prompt and of all others.
    """

    read_s: float
    compute_s: float
    computed: int


@dataclass(frozen=True)
class Reuse:
    """What one request reused, as the `X-Carryback-Reuse` response header says it.

    Attributes:
        outcome: `hit` (all that was left of the conversation, in full blocks), `partial` (its verified beginning) or
            `miss` (nothing).
        tokens: prompt tokens whose KV was read back from a decode engine.
        reason: one word, of `ENGINE_REASONS` or `ROUTER_REASONS`.
        recomputed: prompt tokens that the prefill engine computed.
        cached: prompt tokens that the prefill engine had in its own prefix cache.
        found: prompt tokens, from the first on, that the decode engine that had most of them had.
    """

    outcome: Outcome
    tokens: int
    reason: str
    recomputed: int = 0
    cached: int = 0
    found: int = 0

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt: read back, computed and locally cached."""
        return self.tokens + self.recomputed + self.cached

    def header(self) -> str:
        """The header's value, e.g. `hit; tokens=1024; reason=verified; recomputed=37; cached=0; found=1024`."""
        return (
            f"{self.outcome}; tokens={self.tokens}; reason={self.reason}; "
            f"recomputed={self.recomputed}; cached={self.cached}; found={self.found}"
        )

    @classmethod
    def parse(cls, header: str) -> Self:
        """Read a header's value; parameters that are not known are left aside.

        Raises:
            ValueError: the value is not of the header's form.
        """
        outcome, *parameters = header[: _MAX_REUSE_LENGTH + 1].split(";")
        outcome = outcome.strip()
        if len(header) > _MAX_REUSE_LENGTH or outcome not in _OUTCOMES:
            raise ValueError(f"not a {CARRYBACK_REUSE} value: {header[:100]!r}")
        fields = {
            name.strip(): value.strip() for name, _, value in (each.partition("=") for each in parameters)
        }
        reason = fields.get("reason", "")
        if reason and not _REASON.fullmatch(reason):
            raise ValueError(f"{CARRYBACK_REUSE}: reason is no word: {reason[:100]!r}")
        return cls(
            outcome=outcome,  # type: ignore[arg-type]
            tokens=_count(fields, "tokens"),
            reason=reason,
            recomputed=_count(fields, "recomputed"),
            cached=_count(fields, "cached"),
            found=_count(fields, "found"),
        )


@dataclass(frozen=True)
class Report(Reuse):
    """What a prefill engine says of one request (`kv_transfer_params["carryback_reuse"]`): more than clients are told.

    Attributes:
        holder: the id of the decode engine that had what was found; empty if none had any.
        asked: decode engines that answered what they have.
    """

    holder: str = ""
    asked: int = 0


def _count(fields: Mapping[str, str], name: str) -> int:
    value = fields.get(name, "0")
    if not (value.isascii() and value.isdigit() and len(value) <= _MAX_TOKENS_DIGITS):
        raise ValueError(f"{CARRYBACK_REUSE}: {name} is no number of tokens: {value[:100]!r}")
    return int(value)
