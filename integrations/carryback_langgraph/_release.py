"""Telling the server that conversations are over."""

from __future__ import annotations

from itertools import chain
from typing import Any

from carryback import _release
from langchain_core.runnables import Runnable
from langchain_openai.chat_models.base import BaseChatOpenAI

from carryback_langgraph._lineage import lineage
from carryback_langgraph._settings import unwrap


def release(model: Runnable[Any, Any], *conversations: str) -> None:
    """Let the server release what it holds of conversations, and of those that they started in this process.

    A courtesy: a server lets go by itself after a while. Servers that know nothing of conversations, or
    cannot be reached, are left alone.

    Args:
        model: an OpenAI chat model that talks to the server.
        conversations: their ids, see `conversation_id`.

    Raises:
        ValueError: the model has no synchronous OpenAI client.
    """
    client = _client(model, "root_client")
    for conversation in dict.fromkeys(chain.from_iterable(map(lineage.family, conversations))):
        _release.release(client, conversation)


async def arelease(model: Runnable[Any, Any], *conversations: str) -> None:
    """`release`, for asyncio.

    Raises:
        ValueError: the model has no asynchronous OpenAI client.
    """
    client = _client(model, "root_async_client")
    for conversation in dict.fromkeys(chain.from_iterable(map(lineage.family, conversations))):
        await _release.arelease(client, conversation)


def _client(model: Runnable[Any, Any], attribute: str) -> Any:
    base, _ = unwrap(model)
    client = getattr(base, attribute, None) if isinstance(base, BaseChatOpenAI) else None
    if client is None:
        raise ValueError(f"{type(base).__name__} has no OpenAI client (`{attribute}`) to release with")
    return client
