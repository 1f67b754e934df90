"""Conversations on several hosts, and what becomes of them when a link is cut or a host fails."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from hosts.machines import EVENTS_PORT, Machines
from pair import Answer, Client, document, eventually

# Of the tiny model: 4 layers, keys and values, 2 heads of 32 numbers of 4 bytes.
BYTES_A_TOKEN = 4 * 2 * 2 * 32 * 4
# Until the kernel has given up the connections of a process that was killed, off the network.
FORGOTTEN_S = 5


class Conversation:
    """A conversation that goes on, turn after turn.

    Attributes:
        turns: each prompt and its answer.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.turns: list[tuple[list[dict[str, Any]], Answer]] = []

    async def turn(self, client: Client, **fields: Any) -> Answer:
        """The next turn, which has to be answered."""
        messages = self.next()
        answer = await client.chat(messages, self.id, **fields)
        assert answer.status == 200, answer.raw
        self.turns.append((messages, answer))
        return answer

    def next(self) -> list[dict[str, Any]]:
        """The next turn's prompt."""
        messages = []
        if self.turns:
            before, answer = self.turns[-1]
            messages = [*before, {"role": "assistant", "content": answer.text}]
        return [*messages, {"role": "user", "content": document(len(messages), 8)}]

    async def end(self, client: Client) -> None:
        """The user is done with it."""
        async with client.session.delete(f"{client.url}/v1/conversations/{self.id}") as response:
            assert response.status == 200, await response.text()

    async def check(self, client: Client, *turns: int) -> None:
        """Assert that these turns, counted from 0, were answered as if nothing had been reused."""
        for messages, answer in (self.turns[turn] for turn in turns):
            answer.assert_same(await client.chat(messages, reuse=False))


def outcome(answer: Answer) -> tuple[str, str]:
    """What was reused of the last turn, and why no more."""
    assert answer.reuse is not None
    return answer.reuse.outcome, answer.reuse.reason


async def two_turns(first: Client, second: Client) -> Conversation:
    """A conversation whose second turn, through the other router, was a hit."""
    conversation = Conversation()
    await conversation.turn(first)
    assert outcome(await conversation.turn(second))[0] == "hit"
    return conversation


async def reuse_is_back(*clients: Client) -> None:
    """Wait until a new conversation's second turn is a hit."""

    async def is_hit() -> bool:
        await asyncio.sleep(1)
        conversation = Conversation()
        for client in clients:
            answer = await conversation.turn(client)
        await conversation.end(clients[0])
        return outcome(answer)[0] == "hit"

    await eventually(is_hit, 120, "nothing is reused again")


@asynccontextmanager
async def replaced(machines: Machines, role: str) -> AsyncIterator[None]:
    """An engine's host loses its power at the start of the block, and after it a new engine is in its place."""
    with machines.network.cut_off(role):
        await machines.kill(role)
        started = asyncio.create_task(machines.start_engine(role))
        yield
        await started
        await asyncio.sleep(FORGOTTEN_S)
    await machines.serves(role)

    async def is_back(client: Client) -> bool:
        return await client.hears() and (await client.engine(role))["state"] == "up"

    for client in machines.routers:
        await eventually(partial(is_back, client), 90, "a router does not find the new engine")


async def test_next_turn_comes_through_the_other_router(machines: Machines) -> None:
    first, second = machines.routers
    conversation = Conversation()
    assert outcome(await conversation.turn(first)) == ("miss", "new")
    for client, is_stream in ((second, False), (first, True), (second, True)):
        before = machines.network.received("prefill")
        answer = await conversation.turn(client, stream=is_stream)
        assert outcome(answer)[0] == "hit"
        # Over the network, and through nothing that two processes of one machine have in common.
        assert answer.reuse is not None
        assert machines.network.received("prefill") - before > answer.reuse.tokens * BYTES_A_TOKEN
    await conversation.check(first, 1, 2, 3)
    await conversation.end(first)
    await machines.pair.assert_unpinned()


async def test_link_between_the_engines_is_cut(machines: Machines) -> None:
    first, second = machines.routers
    conversation, other = await two_turns(first, second), Conversation()
    with machines.network.cut("prefill", "decode"):
        # No engine can read from the other: each computes the prompt itself.
        assert outcome(await conversation.turn(first)) == ("miss", "no_answer")
        await conversation.turn(second)
        await other.turn(second, stream=True)
    await reuse_is_back(first, second)
    await conversation.turn(second)
    assert outcome(await conversation.turn(first))[0] == "hit"
    await conversation.check(first, 2, 3, 5)
    await other.check(first, 0)
    await conversation.end(first)
    await other.end(second)
    await machines.pair.assert_unpinned(within_s=60)


async def test_events_do_not_reach_a_router(machines: Machines) -> None:
    first, second = machines.routers
    conversation = await two_turns(first, second)

    async def is_deaf() -> bool:
        return not (await second.engine("decode"))["events"]

    with machines.network.cut_port("decode", EVENTS_PORT["decode"], "router-2"):
        # Engines ask each other, and not the router.
        assert outcome(await conversation.turn(second))[0] == "hit"
        await eventually(is_deaf, 30, "the router does not notice")
        # An engine that it does not hear it has nobody ask.
        assert outcome(await conversation.turn(second)) == ("miss", "no_answer")
        assert outcome(await conversation.turn(first))[0] == "hit"
    await eventually(second.hears, 90, "the router stays deaf")
    await conversation.turn(second)
    assert outcome(await conversation.turn(second))[0] == "hit"
    await conversation.check(first, *range(2, len(conversation.turns)))
    await conversation.end(first)
    await machines.pair.assert_unpinned(within_s=90)


async def test_decode_engine_loses_its_power(machines: Machines) -> None:
    first, second = machines.routers
    conversation = await two_turns(first, second)

    long = asyncio.create_task(first.chat(Conversation().next(), tokens=3000))
    await eventually(partial(first.is_busy, "decode"), 30, "the request does not come to the decode engine")
    async with replaced(machines, "decode"):
        # An error that a client knows how to handle, long before `first_byte_timeout_s`.
        answers = [await long, await second.chat(conversation.next(), conversation.id)]
        for answer in answers:
            assert answer.status in (502, 503), answer.raw
            assert answer.body["error"]["code"] in ("engine_failed", "no_engine")
    assert outcome(await conversation.turn(second)) == ("miss", "engine_lost")
    assert outcome(await conversation.turn(first))[0] == "hit"
    await conversation.check(first, 2, 3)
    await conversation.end(first)
    await machines.pair.assert_unpinned()


async def test_prefill_engine_loses_its_power(machines: Machines) -> None:
    first, second = machines.routers
    conversation = await two_turns(first, second)

    long = asyncio.create_task(first.chat([{"role": "user", "content": document(7, 80)}]))
    await eventually(partial(first.is_busy, "prefill"), 30, "the request does not come to the prefill engine")
    async with replaced(machines, "prefill"):
        # The decode engine does all of it.
        assert (await long).status == 200
        for client in (first, second):
            assert outcome(await conversation.turn(client)) in (
                ("miss", "prefill_failed"),
                ("miss", "prefill_unavailable"),
            )
    # The new engine reads what the decode engine holds of the turns that it did alone.
    assert outcome(await conversation.turn(first))[0] == "hit"
    assert outcome(await conversation.turn(second))[0] == "hit"
    await conversation.check(first, 2, 3, 4, 5)
    await conversation.end(first)
    await machines.pair.assert_unpinned(within_s=60)


async def test_redis_is_cut_off(machines: Machines) -> None:
    first, second = machines.routers
    conversation = await two_turns(first, second)
    with machines.network.cut_off("redis"):
        for client in (first, second, first):
            assert outcome(await conversation.turn(client))[0] == "hit"  # it is asked for all the same
    await reuse_is_back(first, second)
    await conversation.turn(second)
    assert outcome(await conversation.turn(first))[0] == "hit"
    await conversation.check(first, *range(2, 7))
    await conversation.end(first)
    await machines.pair.assert_unpinned(within_s=60)
