"""Which tasks were made by `Send`, and in which place.

A sub-graph does not see how the task that it runs in came about: its own tasks overwrite what LangGraph says
of it. LangChain announces every task before it runs, to callback handlers that every run has.
"""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

# Tasks to remember: those that run, and those whose sub-graphs still do.
_CAPACITY = 100_000

# As LangGraph marks them in `langgraph_path`: this, and their number. Calls of functions have none there.
_PUSH = "__pregel_push"


class _Sends(BaseCallbackHandler):
    """Remembers the numbers of tasks by their namespaces, which are unique. No lock: each step is one of a dict's."""

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_retriever = ignore_agent = ignore_retry = ignore_custom_event = (
        True
    )

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, metadata: dict[str, Any] | None = None, **_: Any
    ) -> None:
        path = (metadata or {}).get("langgraph_path")
        if not path or path[0] != _PUSH:
            return
        namespace, number = (metadata or {}).get("langgraph_checkpoint_ns"), path[1]
        if isinstance(namespace, str) and isinstance(number, int):
            self._numbers[namespace] = number
            if len(self._numbers) > _CAPACITY:
                self._numbers.popitem(last=False)

    def number(self, namespace: str) -> int | None:
        return self._numbers.get(namespace)


_sends = _Sends()
register_configure_hook(ContextVar("carryback_sends", default=_sends), inheritable=True)


def number_of(namespace: str) -> int | None:
    """The place of a task among the `Send`s of its step, from 0; None if it was not made by one."""
    return _sends.number(namespace)
