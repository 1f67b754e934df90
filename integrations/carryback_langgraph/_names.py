"""What LangGraph calls the place that a model is called from, and the conversation's id that follows from it.

A namespace of LangGraph names every task on the way down: `research:<task id>|model:<task id>`. Task ids
are of one run. Without them the words are the same in each turn and in each process; what tells parallel
tasks of one node apart is then lost, so tasks made by `Send` keep their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from carryback.identity import derived_id
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from carryback_langgraph._sends import number_of

# The config that a model was called with, until its request has been made.
_called_with: ContextVar[RunnableConfig | None] = ContextVar("carryback_config", default=None)


@dataclass(frozen=True)
class Place:
    """Where a model is called from.

    Attributes:
        thread: the thread's id.
        path: the tasks on the way down to the graph: `()` for the outermost one.
        node: the node in it; empty outside of any graph.
        is_branch: the node was called by `Send`.
    """

    thread: str
    path: tuple[str, ...]
    node: str
    is_branch: bool

    @property
    def words(self) -> tuple[str, ...]:
        """The names that the conversation's id derives from."""
        return (self.thread, *self.path, *((self.node,) if self.node else ()))


def conversation_id(thread_id: str, *path: str, node: str = "model") -> str:
    """The id by which the router knows a conversation of a thread.

    Args:
        thread_id: `configurable.thread_id` of the run.
        path: the nodes on the way down to the sub-graph or the sub-agent that calls the model; none for the
            graph that was invoked itself. `tools#0` is the first task that `Send` made of node `tools`.
        node: the node that calls the model; `create_agent` names it `model`. Empty: the model was called
            outside of any graph.
    """
    return derived_id(str(thread_id), *path, *((node,) if node else ()))


@contextmanager
def called_with(config: RunnableConfig | None) -> Iterator[None]:
    """Let `place` see the config that a model is called with."""
    token = _called_with.set(None if config is None else ensure_config(config))
    try:
        yield
    finally:
        _called_with.reset(token)


def place() -> Place | None:
    """Where the present call comes from; None if no thread is known."""
    for config in (_called_with.get(), ensure_config()):
        if config is not None and (found := _place(config)) is not None:
            return found
    return None


def _place(config: RunnableConfig) -> Place | None:
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    thread, namespace = configurable.get("thread_id"), configurable.get("checkpoint_ns")
    if thread is None:
        # Whoever configures a model within a node replaces all of `configurable`, the thread with it.
        thread, namespace = metadata.get("thread_id"), metadata.get("langgraph_checkpoint_ns")
    if thread is None or thread == "":
        return None
    *path, node = _tasks(namespace or "") or [("", None)]
    return Place(str(thread), tuple(_word(*task) for task in path), _word(*node), node[1] is not None)


def _word(name: str, number: int | None) -> str:
    return name if number is None else f"{name}#{number}"


def _tasks(namespace: str) -> list[tuple[str, int | None]]:
    """The tasks that a namespace names, and the numbers of those that `Send` made."""
    parts = namespace.split("|") if namespace else []
    # Parts that are numbers count the graphs that one task has invoked: no names, and in the order of arrival.
    return [
        (part.partition(":")[0], number_of("|".join(parts[: at + 1])))
        for at, part in enumerate(parts)
        if not part.isdigit()
    ]
