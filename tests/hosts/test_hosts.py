"""Conversations on several hosts, and what becomes of them when a link is cut or a host fails."""

from __future__ import annotations

import uuid
from typing import Any

from hosts.machines import Machines
from pair import Answer, Client, document

# Of the tiny model: 4 layers, keys and values, 2 heads of 32 numbers of 4 bytes.
BYTES_A_TOKEN = 4 * 2 * 2 * 32 * 4


class Conversation:
    """A conversation that goes on, turn after turn."""

    def __init__(self, sentences: int = 20) -> None:
        self.id = uuid.uuid4().hex
        self.messages: list[dict[str, Any]] = []
        self._sentences = sentences

    async def turn(self, client: Client, **fields: Any) -> Answer:
        """The next turn."""
        self.messages.append({"role": "user", "content": document(len(self.messages), self._sentences)})
        answer = await client.chat(self.messages, self.id, **fields)
        if answer.status == 200:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return answer

    async def end(self, client: Client) -> None:
        """Delete it."""
        async with client.session.delete(f"{client.url}/v1/conversations/{self.id}") as response:
            assert response.status in (200, 204), await response.text()

    async def recomputed(self, client: Client) -> Answer:
        """The last turn again, with nothing reused."""
        return await client.chat(self.messages[:-1], reuse=False)


def outcome(answer: Answer) -> tuple[str, str]:
    assert answer.status == 200, answer.raw
    assert answer.reuse is not None
    return answer.reuse.outcome, answer.reuse.reason


async def test_next_turn_through_the_other_router(machines: Machines) -> None:
    first, second = machines.routers
    conversation = Conversation()
    assert outcome(await conversation.turn(first)) == ("miss", "no_record")
    for client, is_stream in ((second, False), (first, True), (second, True)):
        before = machines.network.received("prefill")
        answer = await conversation.turn(client, stream=is_stream)
        print(answer.reuse)
        assert outcome(answer)[0] == "hit"
        assert machines.network.received("prefill") - before > answer.reuse.tokens * BYTES_A_TOKEN
        answer.assert_same(await conversation.recomputed(client))
    await conversation.end(first)
    await machines.pair.assert_unpinned()
