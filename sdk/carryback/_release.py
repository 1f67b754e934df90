"""Telling a server that a conversation is over: a courtesy, so whatever goes wrong is left alone."""

from __future__ import annotations

import logging
from types import NoneType
from urllib.parse import quote

import openai

from carryback._servers import atakes_ids, takes_ids

log = logging.getLogger("carryback")

TIMEOUT_S = 10.0


def release(client: openai.OpenAI, conversation: str) -> None:
    """Have the client's server release what it holds of a conversation, if ids may be sent to it."""
    if not takes_ids(client):
        return
    try:
        client.delete(_path(conversation), cast_to=NoneType, options={"timeout": TIMEOUT_S})
    except openai.APIError as error:
        log.debug("conversation %s was not released: %s", conversation, error)


async def arelease(client: openai.AsyncOpenAI, conversation: str) -> None:
    """`release`, for asyncio."""
    if not await atakes_ids(client):
        return
    try:
        await client.delete(_path(conversation), cast_to=NoneType, options={"timeout": TIMEOUT_S})
    except openai.APIError as error:
        log.debug("conversation %s was not released: %s", conversation, error)


def _path(conversation: str) -> str:
    return f"/conversations/{quote(conversation, safe='')}"
