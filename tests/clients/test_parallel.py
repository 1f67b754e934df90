"""Many conversations at once over one object: no id is shared, none changes, nothing is kept for ever."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import carryback
import openai
import pytest
from agents import Agent, Runner, SQLiteSession, set_tracing_disabled
from carryback import wire
from carryback.identity import Identifier
from carryback_agents import CarrybackProvider, _calls, _models, run_config
from fake_server import FakeServer, Request
from test_client import raw, streamed, streaming_response

SYSTEM = {"role": "system", "content": "Be brief."}


def first_words(request: Request) -> str:
    """What the user said first, which tells the conversations apart."""
    value = request.body.get("messages") or request.body["input"]
    said: str = next(each["content"] for each in value if each.get("role") == "user")
    return said


def check_apart(requests: Iterable[Request], *, turns: int) -> set[str]:
    """One id for each conversation, the same in all of its turns; returns what they were about.

    Args:
        turns: that those which came to their end had.
    """
    seen: dict[str, list[Request]] = {}
    for request in requests:
        seen.setdefault(first_words(request), []).append(request)
    ids = {words: {request.conversation for request in asked} for words, asked in seen.items()}
    assert all(len(each) == 1 and None not in each for each in ids.values())
    assert len(set().union(*ids.values())) == len(ids)
    for asked in seen.values():
        assert [r.value(wire.TURN_ID) for r in asked] == [str(n) for n in range(1, len(asked) + 1)]
        assert len(asked) <= turns
        assert {r.value(wire.CONVERSATION_PARENT) for r in asked} == {None}
    return set(seen)


def grown(messages: list[Any], answer: str | None, text: str) -> list[Any]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]


async def test_1000_conversations_share_one_client(server: FakeServer) -> None:
    """With one system prompt, and the same words in every turn but the first."""
    rng = random.Random(11)
    at_once = asyncio.Semaphore(50)  # requests, of all the conversations
    async with carryback.AsyncOpenAI(base_url=server.base_url, api_key="k", timeout=300) as client:

        async def talk(number: int) -> None:
            messages: list[Any] = [SYSTEM, {"role": "user", "content": f"conversation {number}"}]
            for _ in range(3):
                async with at_once:
                    answer = await client.chat.completions.create(model="m", messages=messages)
                await asyncio.sleep(rng.random() / 100)
                messages = grown(messages, answer.choices[0].message.content, "Go on.")

        await asyncio.gather(*[talk(number) for number in range(1000)])
        assert len(check_apart(server.requests, turns=3)) == 1000
        assert len(server.requests) == 3000


def test_what_is_remembered_is_bounded() -> None:
    identifier = Identifier(capacity=100)
    for number in range(1000):
        messages: list[Any] = [SYSTEM, {"role": "user", "content": f"conversation {number}"}]
        for name in ("", f"thread-{number}"):
            history = messages
            for _ in range(4):
                identifier.identify(history, name=name)
                history = grown(history, "Hello.", "Go on.")
    assert len(identifier) <= 100
    assert all(len(kept) <= 200 for kept in (identifier._states, identifier._tails, identifier._beginnings))


def copied(client: openai.OpenAI, messages: list[Any]) -> str | None:
    return raw(client.with_options(timeout=300, max_retries=0), messages)


@pytest.mark.parametrize("named", [True, False])
def test_200_conversations_in_threads_share_one_client(server: FakeServer, named: bool) -> None:
    client = carryback.OpenAI(
        base_url=server.base_url, api_key="k", timeout=300, default_headers={"X-Org": "a"}
    )
    uses: list[Callable[[openai.OpenAI, list[Any]], str | None]] = [raw, streamed, streaming_response, copied]
    numbers = iter(range(200))
    failed: list[BaseException] = []

    def work() -> None:
        rng = random.Random(threading.get_ident())
        for number in numbers:
            try:
                messages: list[Any] = [SYSTEM, {"role": "user", "content": f"conversation {number}"}]
                for _ in range(3):
                    use = rng.choice(uses)
                    if named:
                        with carryback.conversation(f"thread-{number}"):
                            answer = use(client, messages)
                    else:
                        answer = use(client, messages)
                    messages = grown(messages, answer, "Go on.")
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert not failed
    assert len(check_apart(server.requests, turns=3)) == 200
    assert {request.value("X-Org") for request in server.requests} == {"a"}
    if named:
        for request in server.requests:
            assert request.conversation == first_words(request).replace("conversation ", "thread-")


@pytest.mark.parametrize("use_responses", [True, False])
async def test_200_sessions_share_one_agent(server: FakeServer, use_responses: bool) -> None:
    """One agent, one provider, one configuration; some runs are cancelled."""
    set_tracing_disabled(True)
    rng = random.Random(5)
    client = carryback.AsyncOpenAI(base_url=server.base_url, api_key="k", timeout=300)
    config = run_config(CarrybackProvider(openai_client=client, use_responses=use_responses), model="m")
    agent = Agent(name="A", instructions="Be brief.")
    begun, at_once = asyncio.Semaphore(0), asyncio.Semaphore(20)

    async def talk(number: int) -> None:
        session = SQLiteSession(f"session-{number}") if number % 2 else None
        said: Any = f"conversation {number}"
        for turn in range(3):
            begun.release()
            async with at_once:
                if rng.random() < 0.5:
                    result: Any = await Runner.run(agent, said, session=session, run_config=config)
                else:
                    result = Runner.run_streamed(agent, said, session=session, run_config=config)
                    async for _ in result.stream_events():
                        pass
            said = f"more {turn}"
            if session is None:
                said = [*result.to_input_list(), {"role": "user", "content": said}]

    tasks = [asyncio.create_task(talk(number)) for number in range(200)]
    for _ in range(300):
        await begun.acquire()
    cancelled = rng.sample(tasks, 20)
    for task in cancelled:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in ended if each is not None and not isinstance(each, asyncio.CancelledError)] == []
    assert len(check_apart(server.requests, turns=3)) >= 180
    await client.close()

    del ended, tasks, cancelled
    for _ in range(20):  # what was cancelled is still being tidied up
        gc.collect()
        if not _calls._runs and not _models._reports:
            break
        await asyncio.sleep(0.05)
    # Of 600 runs, none is remembered but some of those 20: whoever saw their end may keep its traceback.
    assert len(_calls._runs) <= 20
    assert len(_models._reports) <= 60
    set_tracing_disabled(False)
