"""A router says on every answer of its clients' port that it is carryback's: clients send ids to no one else."""

from __future__ import annotations

import carryback
import pytest
from carryback import wire
from service import TEXT, Serve, request_to
from stub_engine.prompts import CHAT

HEADER = wire.CARRYBACK_ROUTER.lower()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/v1/models", 200), ("GET", "/v1/models", 200), ("GET", "/nowhere", 404), ("PUT", CHAT, 405),
        ("POST", CHAT, 400), ("GET", "/health", 200),
    ],
)  # fmt: skip
async def test_every_answer_says_whose_it_is(serve: Serve, method: str, path: str, status: int) -> None:
    service = await serve()
    async with service.session.request(method, service.url + path) as answer:
        assert (answer.status, answer.headers.get(HEADER)) == (status, "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_models_do(serve: Serve, stream: bool) -> None:
    service = await serve()
    answer = await service.post(CHAT, request_to(CHAT, TEXT, stream=stream))
    assert answer.headers[HEADER] == "1"


async def test_a_client_without_a_key_learns_it_too(serve: Serve) -> None:
    service = await serve(api_keys=["one=the-key-of-tenant-number-one"])
    async with service.session.head(service.url + "/v1/models") as answer:
        assert (answer.status, answer.headers[HEADER]) == (401, "1")


async def test_the_first_request_of_a_client_has_an_id_and_its_second_hits(serve: Serve) -> None:
    service = await serve()
    async with carryback.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": TEXT}]
        seen = []
        async with carryback.conversation("thread-7"):
            for _ in range(2):
                response = await client.chat.completions.with_raw_response.create(
                    model="stub", messages=messages
                )
                seen.append(carryback.reuse(response))
                text = response.parse().choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    assert [(each.conversation, each.outcome) for each in seen] == [("thread-7", "miss"), ("thread-7", "hit")]
