"""The drop-in client as the official client is used, against real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import carryback
import pytest
from openai import NotFoundError
from pair import NAME, Client, document
from pydantic import BaseModel, Field
from tiny_model import no_whitespace

MESSAGES: list[Any] = [
    {"role": "system", "content": document(1, 3)},
    {"role": "user", "content": document(2, 15)},
]
ARGS: dict[str, Any] = {"model": NAME, "max_tokens": 16, "temperature": 0, "extra_body": {"min_tokens": 16}}


class Finding(BaseModel):
    number: int = Field(ge=0, le=9)
    found: bool


def grown(text: str | None, question: str = "Go on.") -> list[Any]:
    return [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


def plain(openai: carryback.OpenAI, messages: list[Any]) -> str:
    return openai.chat.completions.create(messages=messages, **ARGS).choices[0].message.content or ""


def streamed(openai: carryback.OpenAI, messages: list[Any]) -> str:
    chunks = openai.chat.completions.create(messages=messages, stream=True, **ARGS)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def raw(openai: carryback.OpenAI, messages: list[Any]) -> str:
    response = openai.chat.completions.with_raw_response.create(messages=messages, **ARGS)
    reuse = carryback.reuse(response)
    assert reuse == carryback.last_reuse()
    return response.parse().choices[0].message.content or ""


def helper(openai: carryback.OpenAI, messages: list[Any]) -> str:
    with openai.chat.completions.stream(messages=messages, **ARGS) as stream:
        return "".join(event.delta for event in stream if event.type == "content.delta")


@pytest.mark.parametrize("use", [plain, streamed, raw, helper])
async def test_sync_client(client: Client, use: Callable[[carryback.OpenAI, list[Any]], str]) -> None:
    def loop() -> None:
        openai = carryback.OpenAI(base_url=f"{client.url}/v1", api_key="none")
        text = use(openai, MESSAGES)
        first = carryback.last_reuse()
        text = use(openai, grown(text))
        second = carryback.last_reuse()
        assert (first.outcome, second.outcome) == ("miss", "hit")
        assert first.conversation == second.conversation
        assert (first.turn, second.turn) == ("1", "2")
        assert second.tokens > 600
        assert text

    await asyncio.to_thread(loop)


async def test_async_client_in_named_conversations(client: Client) -> None:
    openai = carryback.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")

    async def agent(number: int) -> None:
        with carryback.conversation(f"agent-{number}"):
            messages: list[Any] = [{"role": "user", "content": document(number + 20, 15)}]
            for turn in range(3):
                stream = await openai.chat.completions.create(messages=messages, stream=True, **ARGS)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                reuse = carryback.last_reuse()
                assert reuse.conversation == f"agent-{number}"
                assert reuse.outcome == ("hit" if turn else "miss")
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]

    await asyncio.gather(*(agent(number) for number in range(4)))


async def test_parsed_structured_output(client: Client) -> None:
    openai = carryback.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")
    completion = await openai.chat.completions.parse(
        model=NAME,
        messages=MESSAGES,
        response_format=Finding,
        max_tokens=100,
        temperature=0,
        logit_bias={name: int(bias) for name, bias in no_whitespace().items()},
    )
    finding = completion.choices[0].message.parsed
    assert isinstance(finding, Finding)
    completion = await openai.chat.completions.create(
        messages=grown(completion.choices[0].message.content), **ARGS
    )
    assert carryback.last_reuse().outcome == "hit"


async def test_completions(client: Client) -> None:
    openai = carryback.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")
    with carryback.conversation():
        text = document(40, 15)
        completion = await openai.completions.create(prompt=text, **ARGS)
        text += completion.choices[0].text + document(41, 1)
        await openai.completions.create(prompt=text, **ARGS)
        assert carryback.last_reuse().outcome == "hit"


async def test_an_error_is_the_official_clients_error(client: Client) -> None:
    openai = carryback.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none")
    with pytest.raises(NotFoundError, match="does not exist"):
        await openai.chat.completions.create(model="other", messages=MESSAGES)
