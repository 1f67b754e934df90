"""Which conversation a model call belongs to: that of its session or group, one for each agent."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import carryback
from agents import ModelSettings, TResponseInputItem
from agents.tracing import AgentSpanData, TurnSpanData, get_current_span
from carryback import wire
from carryback._body import named_by
from carryback._fork import Lock
from carryback._servers import knows
from openai import AsyncOpenAI

try:
    from agents.models._run_context import get_model_run_owner
except ImportError:  # openai-agents before 0.20: an agent that is a tool goes by its messages

    def get_model_run_owner() -> object | None:
        return None


# The runner's own key for what belongs together: `agents-sdk:session:...`, `:group:...`, or `:run:...`.
CACHE_KEY = "prompt_cache_key"
_RUNNERS = "agents-sdk:"


@dataclass(eq=False)
class Run:
    """One `Runner.run`.

    Attributes:
        parent: for a run inside a tool, the conversation whose model called it.
        is_nested: it is inside a tool.
        id: tells it from all other runs.
        owner: the runner's object for it; gone when the run is over.
    """

    parent: str | None = None
    is_nested: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    owner: weakref.ref[object] | None = None


@dataclass(eq=False)
class Call:
    """One model call, retries included.

    Attributes:
        agent: the name of the agent whose call it is; empty if nobody knows.
        caller: the call in whose tools this one may be.
        input: what is sent, the same object in each retry.
        conversation: the id that is sent.
        calls_tools: the answer calls tools, which run now.
    """

    agent: str
    caller: Call | None = None
    input: str | list[TResponseInputItem] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    conversation: str | None = None
    run: Run | None = None
    calls_tools: bool = False


# Tools run in tasks that inherit it, so an agent that is a tool finds the call that called it.
_current: ContextVar[Call | None] = ContextVar("carryback_agents_call", default=None)

_runs: weakref.WeakKeyDictionary[object, Run] = weakref.WeakKeyDictionary()
_lock = Lock()


def begin(agent: str) -> Call:
    """The call that an agent is about to make."""
    before = _current.get()
    call = Call(agent, before if before is not None and before.calls_tools else None)
    _current.set(call)
    return call


def marked(
    client: AsyncOpenAI,
    instructions: str | None,
    input: str | list[TResponseInputItem],
    settings: ModelSettings,
    *,
    is_servers: bool,
) -> tuple[Call, ModelSettings]:
    """The call that this request is, and its settings with the wire's headers.

    Args:
        is_servers: the server holds the history, and knows the conversation.
    """
    call = _current.get()
    if call is None or (call.input is not None and call.input is not input) or isinstance(input, str):
        call = begin(_agent())
    if call.input is None:
        call.input = input
        _identify(call, client, instructions, settings, is_servers)
    extra_args = dict(settings.extra_args or {})
    if _runners_key(settings):
        del extra_args[CACHE_KEY]  # it was for us
    extra_headers = {**(settings.extra_headers or {}), **call.headers}
    return call, replace(settings, extra_args=extra_args, extra_headers=extra_headers)


def _identify(
    call: Call, client: AsyncOpenAI, instructions: str | None, settings: ModelSettings, is_servers: bool
) -> None:
    """Name the call's conversation, once."""
    call.run, call.caller = _run(call.caller), None
    messages: list[Any] | None = None
    if not is_servers:
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages += (
            [{"role": "user", "content": call.input}] if isinstance(call.input, str) else call.input or []
        )
    given = {name.lower(): value for name, value in _given(client, settings)}
    key = _runners_key(settings)
    name = () if is_servers else _name(call, key)
    if name and _is_summary(call.input):
        # Each summary is another one, and all are one conversation. That of the whole history stays as it is.
        name, messages = (*name, "summary"), None
    if knows(client):
        call.headers = carryback.headers(
            messages,
            name=name,
            parent=call.run.parent,
            scope=str(client.base_url),
            group="\0".join((call.agent, "" if key else _own_key(settings))),
            given=given,
        )
    id = given.get(wire.CONVERSATION_ID.lower(), call.headers.get(wire.CONVERSATION_ID))
    call.conversation = id if isinstance(id, str) else None


def _name(call: Call, key: str) -> tuple[str, ...]:
    """What the conversation is called; nothing if only its messages tell."""
    assert call.run is not None
    kind = key.removeprefix(_RUNNERS).partition(":")[0]
    if call.run.is_nested and kind != "session":
        return (call.run.id, call.agent)
    return (key, call.agent) if kind in ("session", "group") else ()


def _is_summary(input: object) -> bool:
    """The history begins with what an agent is told of it, as of `nest_handoff_history`."""
    first = input[0] if isinstance(input, list) and input else None
    return isinstance(first, Mapping) and first.get("role") == "assistant"


def _run(caller: Call | None) -> Run:
    """The run that a call is in.

    Args:
        caller: the call whose tools ran when this one was made.
    """
    owner = get_model_run_owner()
    if owner is None:
        return Run()
    with _lock:
        run = _runs.get(owner)
        if run is None:
            run = Run(owner=weakref.ref(owner))
            if caller is not None and caller.run is not None and caller.run.owner and caller.run.owner():
                run.is_nested, run.parent = True, caller.conversation
            _runs[owner] = run
        return run


def _agent() -> str:
    """The name of the agent that runs, from the SDK's spans. They are there without tracing, too."""
    span = get_current_span()
    data = span.span_data if span is not None else None
    if isinstance(data, TurnSpanData):
        return data.agent_name
    return data.name if isinstance(data, AgentSpanData) else ""


def _runners_key(settings: ModelSettings) -> str:
    """The runner's key, if it gave one."""
    key = (settings.extra_args or {}).get(CACHE_KEY)
    return key if isinstance(key, str) and key.startswith(_RUNNERS) else ""


def _own_key(settings: ModelSettings) -> str:
    """The key that the user gave."""
    body = settings.extra_body if isinstance(settings.extra_body, Mapping) else {}
    return str((settings.extra_args or {}).get(CACHE_KEY) or body.get(CACHE_KEY) or "")


def _given(client: AsyncOpenAI, settings: ModelSettings) -> Iterator[tuple[str, object]]:
    """What the user set already: headers, and body fields that name a conversation."""
    yield from client.default_headers.items()
    yield from (settings.extra_headers or {}).items()
    if isinstance(settings.extra_body, Mapping):
        yield from ((name, True) for name in named_by(settings.extra_body))
