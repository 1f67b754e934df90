"""One streamed chat request: what came, and when."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import aiohttp
import msgspec
from carryback.wire import CARRYBACK_REUSE, Reuse

from carryback_server.bench.workloads import Message

# Where a server has no /tokenize.
_CHARACTERS_A_TOKEN = 4
_ERROR_LENGTH = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None

    def carries_token(self) -> bool:
        delta = self.delta
        return bool(
            self.token_ids or delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Count(msgspec.Struct):
    count: int


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_chunks = msgspec.json.Decoder(_Chunk)


class NoAnswer(Exception):
    """A server cannot be reached, or says nothing that can be used; the message has its address."""


@dataclass
class Answer:
    """What a request gave. Times are in seconds.

    Attributes:
        started: of the monotonic clock, when it was sent.
        text: its content, as the history goes on with.
        prompt, generated: token ids; None if the server does not give them.
        prompt_tokens, output_tokens: how many, by ids, else as the server counts.
        logprobs: of the generated tokens.
        ttft_s, itl_s, duration_s, error: see `result.Request`.
    """

    started: float
    text: str = ""
    prompt: list[int] | None = None
    generated: list[int] | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    reuse: Reuse | None = None
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    error: str = ""

    @property
    def digest(self) -> str:
        """Of the output: of its token ids, else of its text."""
        data = self.text.encode() if self.generated is None else msgspec.json.encode(self.generated)
        return blake2b(data, digest_size=8).hexdigest()

    def read(self, chunk: _Chunk) -> bool:
        """Take up a chunk; whether it carries a token."""
        if chunk.error is not None:
            self.error = bytes(chunk.error).decode()[:_ERROR_LENGTH]
        if chunk.prompt_token_ids is not None:
            self.prompt = chunk.prompt_token_ids
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens or self.output_tokens
        has_token = False
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            if choice.token_ids is not None:
                self.generated = [*(self.generated or []), *choice.token_ids]
            if choice.logprobs is not None:
                self.logprobs += [each.logprob for each in choice.logprobs.content or ()]
            has_token |= choice.carries_token()
        return has_token


class Client:
    """Asks one OpenAI-compatible server.

    Args:
        session: its timeouts are the requests' timeouts.
        url: of the server, without `/v1`.
        key: sent as a bearer token, if there is one.

    Attributes:
        model: its first model.
        max_model_len: tokens of a prompt and its answer together; None if the server does not say.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self._session = session
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        self.max_model_len: int | None = None

    async def connect(self) -> None:
        """Ask for the model.

        Raises:
            NoAnswer: it does not say.
        """
        url = f"{self.url}/v1/models"
        try:
            async with self._session.get(url, headers=self._headers) as response:
                data = await response.read()
                if response.status != 200:
                    raise NoAnswer(f"{url} answers {response.status}: {_shown(data)}")
            card = msgspec.json.decode(data, type=_Cards).data[0]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(f"no answer from {url}: {error}") from error
        except (msgspec.DecodeError, IndexError) as error:
            raise NoAnswer(f"{url} names no model: {error}") from error
        self.model, self.max_model_len = card.id, card.max_model_len

    async def count(self, messages: Sequence[Message], tools: Sequence[Message]) -> int:
        """Tokens of a prompt; a guess from its length if the server has no `/tokenize`."""
        body = {"model": self.model, "messages": messages, **({"tools": tools} if tools else {})}
        try:
            async with self._session.post(
                f"{self.url}/tokenize", json=body, headers=self._headers
            ) as response:
                return msgspec.json.decode(await response.read(), type=_Count).count
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return len(msgspec.json.encode(messages)) // _CHARACTERS_A_TOKEN

    async def release(self, conversation: str) -> None:
        """Have a router forget a conversation and let go of its KV. Ids that it does not know do no harm."""
        url = f"{self.url}/v1/conversations/{conversation}"
        async with self._session.delete(url, headers=self._headers) as response:
            await response.read()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        *,
        max_tokens: int,
        seed: int,
        salt: str,
        headers: Mapping[str, str],
    ) -> Answer:
        """A greedy answer of exactly `max_tokens`. What goes wrong is in its `error`.

        Args:
            salt: engines' prefix caches share nothing between requests with different ones.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "temperature": 0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            # vLLM's own: the tokens, as numbers, beside their text.
            "return_token_ids": True,
            "cache_salt": salt,
            # A small model may answer alike whatever it was told; how sure it is of each token shows more.
            "logprobs": True,
        }
        if tools:
            # They are in the prompt. The answer stays text, whatever the model says.
            body |= {"tools": tools, "tool_choice": "none"}
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", **self._headers, **headers}
        answer = Answer(time.monotonic())
        try:
            await self._read(answer, data, headers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
        answer.duration_s = time.monotonic() - answer.started
        if answer.prompt is not None:
            answer.prompt_tokens = len(answer.prompt)
        if answer.generated is not None:
            answer.output_tokens = len(answer.generated)
        return answer

    async def _read(self, answer: Answer, data: bytes, headers: Mapping[str, str]) -> None:
        url = f"{self.url}/v1/chat/completions"
        async with self._session.post(url, data=data, headers=headers) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {_shown(await response.read())}"
                return
            if said := response.headers.get(CARRYBACK_REUSE):
                answer.reuse = Reuse.parse(said)
            last = 0.0
            async for event in _events(response.content):
                now = time.monotonic()
                if event == b"[DONE]":
                    break
                if not answer.read(_chunks.decode(event)):
                    continue
                if last:
                    answer.itl_s.append(now - last)
                else:
                    answer.ttft_s = now - answer.started
                last = now
            else:
                answer.error = answer.error or "the answer broke off"
            if not last:
                answer.error = answer.error or "no token came"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events. Lines may be longer than aiohttp reads: a prompt's token ids are in one."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _shown(data: bytes) -> str:
    return data[:_ERROR_LENGTH].decode(errors="replace").strip()
