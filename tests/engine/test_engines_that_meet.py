"""Two prefill and two decode engines that have never met: conversations spread, move, and outlive an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path
from typing import Any

from carryback import wire
from carryback_server.supervisor import Engines
from pair import Answer, Client, Pair, document, eventually

CONVERSATIONS = 6
TOKENS = 16


class Talk:
    """A conversation whose answers are compared with those of one engine that computes everything.

    Args:
        alone: a client of that engine.
    """

    def __init__(self, client: Client, alone: Client, seed: int) -> None:
        self.client = client
        self.alone = alone
        self.id = uuid.uuid4().hex
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": document(seed, 12)}]

    async def turn(self) -> Answer:
        """One turn, asked for again if its engine dies of it."""
        answer = await self._ask()
        while answer.status != 200 or not _is_whole(answer):
            await asyncio.sleep(0.2)
            answer = await self._ask()
        answer.assert_same(await self.alone.chat(self.messages, reuse=False, tokens=TOKENS))
        self.messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": document(len(self.messages), 2)},
        ]
        return answer

    async def _ask(self) -> Answer:
        return await self.client.chat(self.messages, self.id, tokens=TOKENS, stream=True)


def _is_whole(answer: Answer) -> bool:
    return len(answer.tokens) == TOKENS


async def turns(talks: list[Talk]) -> tuple[list[Answer], list[str]]:
    """One turn of each, all at once: the answers, and the decode engines where that left the conversations."""
    answers = await asyncio.gather(*(talk.turn() for talk in talks))
    places: dict[str, str] = {}

    async def are_known() -> bool:
        client = talks[0].client
        async with client.session.get(f"{client.admin_url}/admin/conversations") as response:
            views = (await response.json())["data"]
        left = {
            (each["id"], each["location"]["turn"]): each["location"] for each in views if each["location"]
        }
        for talk, answer in zip(talks, answers, strict=True):
            location = left.get((talk.id, answer.headers[wire.CARRYBACK_TURN]))
            if location is not None and location["tokens"]:
                places[talk.id] = location["engine"]
        return len(places) == len(talks)

    await eventually(are_known, 30, "the router does not know where the conversations are")
    return answers, [places[talk.id] for talk in talks]


def outcomes(answers: list[Answer]) -> set[str]:
    return {answer.reuse.outcome for answer in answers if answer.reuse is not None}


async def set_drained(client: Client, name: str, verb: str) -> None:
    async with client.session.post(f"{client.admin_url}/admin/engines/{name}/{verb}?role=decode") as response:
        assert response.status == 200, await response.text()


async def prompts_at(pair: Pair, url: str) -> float:
    """How many requests an engine has answered."""
    async with pair.session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith("vllm:request_success_total")
    )


async def test_conversations_go_on_among_engines_that_come_and_go(pair: Pair, tmp_path: Path) -> None:
    more = [pair.another("prefill", "prefill2"), pair.another("decode", "decode2")]
    configs = [command.engine() for command in (*pair.commands, *more)]
    alone = Client(pair.session, pair.url("decode"), "")
    async with Engines(more, log_dir=tmp_path, restart_wait_s=600) as engines:
        await engines.wait_ready()
        before = [await prompts_at(pair, config.url) for config in configs if config.role == "prefill"]
        async with pair.router(configs) as client:
            talks = [Talk(client, alone, seed) for seed in range(CONVERSATIONS)]
            # They spread, and each goes on where it was.
            _, places = await turns(talks)
            assert set(places) == {"decode", "decode2"}
            after = [await prompts_at(pair, config.url) for config in configs if config.role == "prefill"]
            assert all(now > then for now, then in zip(after, before, strict=True))
            answers, then = await turns(talks)
            assert outcomes(answers) == {"hit"}
            assert then == places
            # One decode engine is drained: its conversations go on at the other, with what is read from it.
            await set_drained(client, "decode", "drain")
            answers, places = await turns(talks)
            assert outcomes(answers) == {"hit"}
            assert set(places) == {"decode2"}
            await set_drained(client, "decode", "undrain")
            # And then the other is killed, while it answers.
            going_on = [asyncio.create_task(talk.turn()) for talk in talks]
            await eventually(lambda: answers_one(client, "decode2"), 30, "no request came to decode2")
            os.killpg(engines.pid("decode2"), signal.SIGKILL)
            await asyncio.gather(*going_on)
            # Nothing is left of what it had, and what comes after that is read again.
            _, places = await turns(talks)
            assert set(places) == {"decode"}
            answers, places = await turns(talks)
            assert outcomes(answers) == {"hit"}
            assert set(places) == {"decode"}
        await pair.assert_unpinned(within_s=60)


async def answers_one(client: Client, name: str) -> bool:
    """Whether a request is at an engine."""
    return any(each["name"] == name and each["in_flight"] for each in await client.engines())
