"""Small requests to engines and routers, each with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec


class NoAnswer(Exception):
    """Nobody answered; the message says why."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        headers: names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body; None if it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None

    @property
    def problem(self) -> str:
        """What an error says, in one line."""
        error = self.json.get("error") if isinstance(self.json, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else self.body[:200].decode(errors="replace")
        return f"status {self.status}: {' '.join(text.split())}"


class Asker:
    """Asks, as an asynchronous context.

    Args:
        timeout_s: for an answer, in seconds, unless a request says otherwise.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    async def __aenter__(self) -> Asker:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self,
        url: str,
        *,
        method: str = "GET",
        body: object = None,
        headers: Mapping[str, str] = {},
        timeout_s: float | None = None,
    ) -> Reply:
        """A request and its whole answer, whatever its status.

        Raises:
            NoAnswer: no connection, broken off, or not in time.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with self._session.request(
                method, url, json=body, headers=headers, timeout=aiohttp.ClientTimeout(total=limit)
            ) as response:
                names = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, names, await response.read())
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {limit:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(why(error)) from error


async def connects(host: str, port: int, timeout_s: float) -> str:
    """Why no TCP connection can be made; empty if one was made."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {timeout_s:g} s"
    except OSError as error:
        return why(error)
    writer.close()
    return ""


def why(error: BaseException) -> str:
    """An error in a few words."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, ConnectionRefusedError) or "Connect call failed" in str(cause):
        return "connection refused"
    return " ".join(str(cause).split()) or type(cause).__name__
