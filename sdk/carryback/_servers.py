"""Which servers get ids: those that say that they are carryback's, or that the user says are."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import openai
from openai._models import FinalRequestOptions
from openai._types import Response  # type: ignore[attr-defined]  # of httpx or httpx2, as this openai has it

from carryback import wire
from carryback._fork import Lock
from carryback._headers import send_ids

log = logging.getLogger("carryback")

# For the question; and until one that could not be answered is asked again.
TIMEOUT_S = 5.0
AGAIN_S = 30.0


class _Server:
    """What is known of one base URL.

    Attributes:
        is_ours: None while nobody knows.
        asked: when it was last asked in vain, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.is_ours: bool | None = None
        self.asked = -AGAIN_S
        self.lock = Lock()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_due(self) -> bool:
        """Whether it is to be asked."""
        return self.is_ours is None and time.monotonic() >= self.asked + AGAIN_S

    @property
    def turn(self) -> asyncio.Lock:
        """For the tasks of this loop: one asks, the others wait for what it hears."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A question. An error is an answer, too, and what is no answer is noted."""
        try:
            yield
        except openai.APIStatusError as error:
            self.answered(error.status_code, error.response.headers)
        except openai.APIError as error:
            self.failed(error)

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """Take an answer to the question. An overloaded server, or a gateway without one, says nothing of what it is."""
        if _is_carryback(headers):
            self.is_ours = True
        elif status < 500 and status != 429:
            self.is_ours = False
        else:
            self.failed(f"status {status}")

    def failed(self, why: object) -> None:
        """There was no answer."""
        self.asked = time.monotonic()
        log.debug("it is not known whether the server is carryback's; nothing is sent: %s", why)


_servers: dict[str, _Server] = {}


def takes_ids(client: openai.OpenAI) -> bool:
    """Whether ids may be sent to a client's server, which is asked if nobody knows."""
    if (said := _said(client)) is not None:
        return said
    server = _of(client)
    if server.is_due:
        with server.lock:
            if server.is_due:
                with server.asking():
                    response = client.request(Response, _question())
                    server.answered(response.status_code, response.headers)
    return bool(server.is_ours)


async def atakes_ids(client: openai.AsyncOpenAI) -> bool:
    """`takes_ids`, for asyncio."""
    if (said := _said(client)) is not None:
        return said
    server = _of(client)
    if server.is_due:
        async with server.turn:
            if server.is_due:
                with server.asking():
                    response = await client.request(Response, _question())
                    server.answered(response.status_code, response.headers)
    return bool(server.is_ours)


def knows(client: openai.OpenAI | openai.AsyncOpenAI | None) -> bool:
    """The same, without asking."""
    if client is None:
        return send_ids() == "always"
    said = _said(client)
    return bool(_of(client).is_ours) if said is None else said


def learn(client: openai.OpenAI | openai.AsyncOpenAI, headers: Mapping[str, str]) -> None:
    """Take any answer of a client's server for what it says of itself."""
    if _is_carryback(headers):
        _of(client).is_ours = True


def _question() -> FinalRequestOptions:
    return FinalRequestOptions(method="head", url="/models", timeout=TIMEOUT_S, max_retries=0)


def _is_carryback(headers: Mapping[str, str]) -> bool:
    return wire.CARRYBACK_ROUTER in headers or wire.CARRYBACK_REUSE in headers


def _of(client: openai.OpenAI | openai.AsyncOpenAI) -> _Server:
    return _servers.setdefault(str(client.base_url), _Server())


def _said(client: openai.OpenAI | openai.AsyncOpenAI) -> bool | None:
    """What the user says of a client's server; None if nothing."""
    setting = send_ids()
    if setting == "auto":
        return None
    if setting in ("always", "never"):
        return setting == "always"
    url = client.base_url
    names = {url.host, f"{url.host}:{url.port or {'http': 80, 'https': 443}.get(url.scheme)}"}
    return True if names & {_host(each.strip()) for each in setting.split(",")} else None


def _host(text: str) -> str:
    """The host, and the port if it has one, of what may be a URL."""
    return urlsplit(text).netloc if "://" in text else text
