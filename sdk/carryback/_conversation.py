"""Conversations that are named by the program rather than told from their messages."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol

from carryback import wire


class Client(Protocol):
    """What a conversation needs of the clients it was used with."""

    def _release(self, conversation: str) -> Awaitable[None] | None: ...


# The conversations entered, innermost last. Tasks inherit it; what they enter stays theirs.
_entered: ContextVar[tuple[Conversation, ...]] = ContextVar("carryback_conversations", default=())


class Conversation:
    """A named conversation: every request inside its `with` or `async with` block belongs to it.

    Blocks nest, and reach the asyncio tasks started inside them (`asyncio.to_thread` too; a plain
    `threading.Thread` starts outside). The same object, or another of the same id, may be entered
    again for a later turn.

    Args:
        id: 1 to 256 printable ASCII characters; made if not given.
        parent: the conversation that this one shares its history with. Inside another
            conversation's block it is that one, unless given.
        turn: id of the turn; counted from the messages if not given.

    Raises:
        ValueError: an id is not printable ASCII, is empty or too long.
    """

    def __init__(self, id: str | None = None, *, parent: str | None = None, turn: str | None = None) -> None:
        self.id = f"c-{uuid.uuid4().hex}" if id is None else wire.check_id(id, "conversation id")
        self.parent = None if parent is None else wire.check_id(parent, "parent")
        self.turn = None if turn is None else wire.check_id(turn, "turn")
        self._clients: dict[object, Client] = {}

    def __repr__(self) -> str:
        return f"conversation({self.id!r}, parent={self.parent!r})"

    def __enter__(self) -> Conversation:
        entered = _entered.get()
        if self.parent is None and entered and entered[-1].id != self.id:
            self.parent = entered[-1].id
        _entered.set((*entered, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.set(_entered.get()[:-1])

    async def __aenter__(self) -> Conversation:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def used_by(self, client: Client, key: object) -> None:
        """Remember a client for `end`; one for each `key`."""
        self._clients[key] = client

    def end(self) -> None:
        """Tell the servers that the conversation is over, so that they release what they hold of it.

        Servers that know nothing of conversations, or cannot be reached, are left alone.

        Raises:
            RuntimeError: it was used with an `AsyncOpenAI`, which needs `await c.aend()`.
        """
        clients = self._clients
        if any(inspect.iscoroutinefunction(client._release) for client in clients.values()):
            raise RuntimeError("this conversation was used with an AsyncOpenAI; use `await c.aend()`")
        self._clients = {}
        for client in clients.values():
            client._release(self.id)

    async def aend(self) -> None:
        """`end`, for asyncio; sync clients are asked in a thread."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            if inspect.iscoroutinefunction(client._release):
                await client._release(self.id)
            else:
                await asyncio.to_thread(client._release, self.id)


def current() -> Conversation | None:
    """The innermost conversation whose block this is."""
    entered = _entered.get()
    return entered[-1] if entered else None
