"""Conversations that are named by the program rather than told from their messages."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from carryback import wire


class Client(Protocol):
    """What a conversation needs of the clients it was used with."""

    def _release(self, conversation: str) -> Awaitable[None] | None: ...


@dataclass(eq=False)
class _Block:
    """A block that was entered.

    Attributes:
        is_over: it was left where it was not entered: a generator that someone else closed.
    """

    conversation: Conversation
    token: Token[tuple[_Block, ...]] = field(init=False)
    is_over: bool = False


# The blocks entered, innermost last. Tasks inherit it; what they enter stays theirs.
_entered: ContextVar[tuple[_Block, ...]] = ContextVar("carryback_conversations", default=())


class Conversation:
    """A named conversation: every request inside its `with` or `async with` block belongs to it.

    Blocks nest, and reach the asyncio tasks started inside them (`asyncio.to_thread` too; a plain
    `threading.Thread` starts outside). The same object, or another of the same id, may be entered
    again for a later turn. A `yield` inside a block leaves it open for whoever iterates, until the
    generator goes on or is closed.

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
        self._blocks: list[_Block] = []  # that are open

    def __repr__(self) -> str:
        return f"conversation({self.id!r}, parent={self.parent!r})"

    def __enter__(self) -> Conversation:
        around = _open()
        if self.parent is None and around and around[-1].conversation.id != self.id:
            self.parent = around[-1].conversation.id
        block = _Block(self)
        block.token = _entered.set((*around, block))
        self._blocks.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _open()
        here = (each for each in reversed(entered) if each.conversation is self)
        block = next(here, None) or next(reversed(self._blocks), None)
        if block is None:
            return
        with suppress(ValueError):
            self._blocks.remove(block)
        try:
            _entered.reset(block.token)  # only to learn whether it was entered in this context
        except ValueError:
            block.is_over = True
        else:
            _entered.set(tuple(each for each in entered if each is not block))

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
    entered = _open()
    return entered[-1].conversation if entered else None


def _open() -> tuple[_Block, ...]:
    return tuple(block for block in _entered.get() if not block.is_over)
