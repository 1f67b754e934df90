"""Fields of trust: what a client's body may tell an engine, and what only a layer in front of it may.

Engines take every field from whoever sends it. Some of those move, keep or drop KV, say which requests belong together, or
put one request before others: between clients that compete these are the router's. `docs/security.md` has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from carryback_server.body import Body
from carryback_server.errors import ApiError

Rule = Literal["dropped", "own", "alone", "passed"]
"""What becomes of a field. `dropped`: it never reaches an engine. `own`: with several tenants its value is made the tenant's,
so that equal values of two do not meet. `alone`: it passes where there is one tenant, and else only if `pass_fields` names
it. `passed`: it passes as it is."""

_TRUST: dict[str, Rule] = {
    # Where KV lies, and that it may be fetched there.
    "kv_transfer_params": "dropped",
    "ec_transfer_params": "dropped",
    # What an engine is to keep, move or let go of.
    "kv_hints": "dropped",
    "agent_hint": "dropped",
    "agentic_context": "dropped",
    "kv_cache_report_mode": "dropped",
    # Which request it is, and which rank it goes to: the router says so in headers.
    "request_id": "dropped",
    "data_parallel_rank": "dropped",
    "cache_salt": "own",
    "session_id": "own",
    "prompt_cache_key": "own",
    "priority": "alone",
    # For what extends an engine; key by key.
    "vllm_xargs": "alone",
    # A client could take off the watermark that its operator puts on.
    "watermarking": "alone",
}

# All other fields of vLLM 0.32's requests on the endpoints that are served (`vllm/entrypoints`): the prompt, how it is
# rendered and sampled, and the form of the answer. `store` and `background` are the router's to answer.
_PASSED = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "background", "bad_words",
        "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo",
        "enable_response_messages", "frequency_penalty", "ignore_eos", "include", "include_reasoning",
        "include_stop_str_in_output", "input", "instructions", "length_penalty", "logit_bias",
        "logprob_token_ids", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens",
        "max_tool_calls", "media_io_kwargs", "messages", "metadata", "min_p", "min_tokens", "mm_payload",
        "mm_processor_kwargs", "model", "n", "output_config", "parallel_tool_calls", "presence_penalty",
        "previous_input_messages", "previous_response_id", "prompt", "prompt_embeds", "prompt_logprobs",
        "reasoning", "reasoning_effort", "repetition_detection", "repetition_penalty", "response_format",
        "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
        "return_token_strs", "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed",
        "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_sequences",
        "stop_token_ids", "store", "stream", "stream_interval", "stream_options", "structured_outputs",
        "suffix", "system", "temperature", "text", "thinking", "thinking_token_budget", "tokens",
        "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens", "truncation",
        "truncation_side", "use_beam_search", "user",
    }
)  # fmt: skip

FIELDS: dict[str, Rule] = {**_TRUST, **dict.fromkeys(sorted(_PASSED), "passed")}
"Every field that is decided on. One that is not in here is treated as `alone`: a later engine may act on it."

XARGS = "vllm_xargs"

# Where messages and their parts are.
_SAID = ("messages", "input", "system", "previous_input_messages", "prompt")
# The word `uuid` as a field's name, in any spelling that JSON has for it.
_UUID = re.compile(rb'"(?:u|\\u0075)(?:u|\\u0075)(?:i|\\u0069)(?:d|\\u0064)"\s*:')
# What a model said to a tool, and what that is like: nothing that an engine takes for media.
_NO_MEDIA = ("arguments", "input_schema", "parameters")


def never_passed(name: str) -> bool:
    """Whether no setting can let a field, or a key of `vllm_xargs`, through as it is."""
    return FIELDS.get(name.removeprefix(f"{XARGS}.")) in ("dropped", "own")


class Trust:
    """Applies the table.

    Args:
        pass_fields: names of fields that are `alone` or not in the table, and `vllm_xargs.<key>`, that pass although there
            are several tenants.
        on_dropped: called with the name of each field that does not pass; `other` for one that is not in the table.
    """

    def __init__(self, pass_fields: Iterable[str], on_dropped: Callable[[str], None]) -> None:
        self._pass = frozenset(pass_fields)
        self._on_dropped = on_dropped

    def apply(self, body: Body, own: Callable[[str], str] | None) -> None:
        """Leave in a body what may reach an engine.

        Args:
            own: makes a value the tenant's; None if there is one tenant. `cache_salt` is `Tenant.salt`'s.
        """
        for name in body.names():
            rule = FIELDS.get(name, "alone")
            if rule == "passed":
                continue
            if name == XARGS:
                self._xargs(body, is_alone=own is None)
            elif rule == "dropped" or (rule == "alone" and own is not None and name not in self._pass):
                self._drop(body, name)
            elif rule == "own" and own is not None and name != "cache_salt":
                value = body.get(name)
                if isinstance(value, str):
                    body.put(name, own(f"{name}\0{value}"))
                elif value is not None:
                    self._drop(body, name)

    def _xargs(self, body: Body, *, is_alone: bool) -> None:
        given = body.get(XARGS)
        if not isinstance(given, dict):
            if not is_alone and given is not None:
                self._drop(body, XARGS)
            return
        kept = {
            name: value
            for name, value in given.items()
            if FIELDS.get(name) != "dropped" and (is_alone or f"{XARGS}.{name}" in self._pass)
        }
        if len(kept) < len(given):
            self._on_dropped(XARGS)
            body.pop(XARGS)
            if kept:
                body.put(XARGS, kept)

    def _drop(self, body: Body, name: str) -> None:
        body.pop(name)
        self._on_dropped(name if name in FIELDS else "other")


def check_media(body: Body) -> None:
    """Whether nothing that is said has an id of the client's own (`uuid`) for an image, audio or video.

    Engines keep media under that id, whoever sent them and whatever the salt, and serve them to whoever names it: it would
    be a way to read another tenant's. They look for it in messages, in results of tools, and in what those contain.

    Raises:
        ApiError: 400, there is one; or what is said is not JSON.
    """
    for field in _SAID:
        raw = body.raw(field)
        if raw is None or _UUID.search(raw) is None:
            continue
        said = body.get(field)
        # A message itself is no part of one.
        top = (
            [list(each.values()) for each in said if isinstance(each, dict)] if field == "messages" else said
        )
        for part in _objects(top):
            if part.get("uuid") is not None:
                raise ApiError(
                    400,
                    "a content part has a uuid; engines share what they keep under it among all tenants",
                    code="uuid_not_allowed",
                    param="uuid",
                )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a decoded value at whatever depth, but for what tools were asked."""
    to_see = [value]
    while to_see:
        each = to_see.pop()
        if isinstance(each, dict):
            yield each
            is_call = each.get("type") in ("tool_use", "server_tool_use", "mcp_tool_use")
            to_see += [
                inner
                for name, inner in each.items()
                if isinstance(inner, dict | list)
                and name not in _NO_MEDIA
                and not (is_call and name == "input")
            ]
        elif isinstance(each, list):
            to_see += [inner for inner in each if isinstance(inner, dict | list)]
