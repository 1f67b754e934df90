"""What is found of a prompt depends on its content, never on a name or on luck.

Each row is something that agents do. What could have been read is computed from the requests' bodies alone: the longest
beginning of a prompt, in whole blocks, that any decode engine has computed or received. That much must be read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import pytest
from carryback import wire
from cluster import TOOLS, Cluster, message_of
from service import TEXT, Answer, said, until, user
from stub_engine import Settings, StubEngine, expected
from stub_engine.prompts import BLOCK_SIZE, CHAT, COMPLETIONS, RESPONSES, prompts_of

SYSTEM = {"role": "system", "content": "You write programs, and read them before you change them. " * 12}


def shared_blocks(one: list[int], other: list[int]) -> int:
    """Whole blocks with which both begin."""
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(one), len(other)) if same is None else same) // BLOCK_SIZE


class Row:
    """Requests, what was read of each, and what could have been.

    Attributes:
        read, could: in tokens, of each request in the order in which they ended.
    """

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.settings = settings
        self.read: list[int] = []
        self.could: list[int] = []
        self._computed: list[list[int]] = []

    async def start(self) -> None:
        """A router that knows nothing, from now on."""
        self.router = await self.cluster.router(**self.settings)
        for engine in self.cluster.engines:
            await self.cluster.hears(self.router, engine)

    async def ask(
        self, body: dict[str, Any], id: str | None = "mine", path: str = CHAT, headers: Mapping[str, str] = {}
    ) -> Answer:
        """One request, with the right answer."""
        could = self.could_read(body, path)
        named = {wire.CONVERSATION_ID: id} if id is not None else {}
        answer = await self.cluster.post(self.router, path, body, headers={**named, **headers})
        assert answer.status == 200, answer.raw
        right = expected(body, path)
        if right.call is None:
            assert answer.text == right.text
        self.computed(body, path, right.tokens[:-1])
        self.read.append(answer.reuse.tokens + answer.reuse.cached)
        self.could.append(could)
        return answer

    def could_read(self, body: dict[str, Any], path: str = CHAT) -> int:
        """Tokens of a body's prompt that decode engines have."""
        tokens = prompts_of(path, body)[0].tokens
        most = (len(tokens) - 1) // BLOCK_SIZE
        return (
            min(max((shared_blocks(tokens, each) for each in self._computed), default=0), most) * BLOCK_SIZE
        )

    def computed(self, body: dict[str, Any], path: str = CHAT, answer: list[int] = []) -> None:  # noqa: B006
        """A decode engine has this now."""
        self._computed.append(prompts_of(path, body)[0].tokens + answer)

    def talk(self, id: str | None = "mine", system: Any = SYSTEM, **fields: Any) -> Talk:
        """A conversation."""
        return Talk(self, id, [system] if system else [], fields)


class Talk:
    """One conversation of a row, over chat completions."""

    def __init__(self, row: Row, id: str | None, messages: list[Any], fields: dict[str, Any]) -> None:
        self.row = row
        self.id = id
        self.messages = messages
        self.fields = fields

    async def say(self, text: str = TEXT, id: str | None = "", **fields: Any) -> Answer:
        """One turn; under another id, if one is given."""
        self.messages = [*self.messages, user(text)]
        body = {"messages": self.messages, **self.fields, **fields}
        answer = await self.row.ask(body, self.id if id == "" else id)
        self.messages = [*self.messages, message_of(answer)]
        return answer

    def fork(self, id: str | None = "") -> Self:
        """Another continuation of the same messages."""
        return type(self)(self.row, self.id if id == "" else id, self.messages, self.fields)


# -- what agents do


async def branches(row: Row) -> None:
    """Two continuations of one state, and more of each, one after the other."""
    talk = row.talk()
    await talk.say()
    await talk.say("And then?")
    forks = [talk.fork(), talk.fork(), talk.fork("another")]
    for number, fork in enumerate(forks):
        await fork.say(f"Way {number}. {TEXT}")
    for fork in reversed(forks):
        await fork.say("Go on.")


async def branches_at_once(row: Row) -> None:
    """The same, beside each other: parallel tool agents."""
    talk = row.talk()
    await talk.say()
    forks = [talk.fork() for _ in range(5)]
    for _ in range(2):
        await asyncio.gather(*(fork.say(f"Way {number}. {TEXT}") for number, fork in enumerate(forks)))


async def equal_first_prompts(row: Row) -> None:
    """Rollouts, and a `batch`: the same first prompt again and again."""
    for number in range(4):
        await row.talk(f"rollout-{number}" if number % 2 else None).say()


async def sub_agent_under_one_header(row: Row) -> None:
    """Claude Code: a sub-agent has the session's id, and the main agent goes on after it."""
    main = row.talk(tools=TOOLS)
    await main.say()
    await main.say("Look for it.")
    sub = row.talk(system={"role": "system", "content": "You search files. " * 20})
    for _ in range(3):
        await sub.say()
    await main.say("And now?")


async def sub_agents_at_once_under_one_header(row: Row) -> None:
    """The same with six of them beside each other, several turns each."""
    main = row.talk()
    await main.say()
    subs = [row.talk(system={"role": "system", "content": f"You are number {n}. " * 20}) for n in range(6)]
    for turn in range(3):
        await asyncio.gather(*(sub.say(f"Turn {turn}. {TEXT}") for sub in subs))
    await main.say("And now?")


async def threads_under_one_session(row: Row) -> None:
    """Codex: threads of one `session-id`, over `/v1/responses`."""
    threads: list[list[Any]] = [[user(f"Thread {number}. {TEXT}")] for number in range(3)]
    for turn in range(3):
        for thread in threads:
            body = {"instructions": SYSTEM["content"], "input": thread, "prompt_cache_key": "session"}
            await row.ask(body, "session", RESPONSES)
            thread += [said(expected(body, RESPONSES).text), user(f"And then {turn}?")]


async def title_call_between(row: Row) -> None:
    """A title or a summary is asked for under the same name."""
    talk = row.talk()
    await talk.say()
    await row.ask({"messages": [user(f"A title for this, please: {TEXT}")], "max_tokens": 8})
    await talk.say("And then?")
    await row.ask({"messages": [*talk.messages, user("Summarise this.")], "max_tokens": 8})
    await talk.say("Go on.")


async def stopped_and_asked_again(row: Row) -> None:
    """A client timed out, or its user pressed stop, and asks the same again."""
    talk = row.talk()
    await talk.say()
    body = {"messages": [*talk.messages, user(f"Wait. {TEXT}")]}
    for stream in (True, False):
        for engine in row.cluster.engines:
            engine.fault(hop="decode", chunk_delay_s=600, contains="Wait")
        asking = asyncio.create_task(row.ask({**body, "stream": stream}))
        decodes = [each for each in row.cluster.engines if each.role == "decode"]
        await until(
            lambda decodes=decodes: any(_is_at_it(each) for each in decodes), "its prompt is computed"
        )
        asking.cancel()
        await until(lambda decodes=decodes: not any(each.running for each in decodes), "it is stopped")
        for engine in row.cluster.engines:
            engine.faults.clear()
        row.computed(body)
    await row.ask(body)


def _is_at_it(decode: StubEngine) -> bool:
    """Whether it has computed the prompt of what it is at."""
    return bool(decode.running) and decode.in_use > decode.pinned + decode.leased


async def more_than_may_be_pinned(row: Row) -> None:
    """Eight conversations, of which the pin budget is enough for one."""
    talks = [row.talk(f"chat-{number}", system=None) for number in range(8)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            await talk.say(f"{number}, {turn}. {TEXT}")


async def reminder_moved(row: Row) -> None:
    """aider: what it reminds of stands before the last question, and moves on with it."""
    messages: list[Any] = [SYSTEM]
    reminder = {"role": "system", "content": "Answer with edits alone."}
    for turn in range(3):
        question = user(f"Turn {turn}. {TEXT}")
        body = {"messages": [*messages, reminder, question]}
        answer = await row.ask(body)
        messages += [question, message_of(answer)]


async def answers_trimmed(row: Row) -> None:
    """qwen-code: answers lose their end when a conversation is resumed."""
    talk = row.talk()
    for turn in range(3):
        await talk.say(f"Turn {turn}. {TEXT}", max_tokens=120, ignore_eos=True)
    talk.messages = [
        {**each, "content": each["content"][:300]} if each["role"] == "assistant" else each
        for each in talk.messages
    ]
    await talk.say("And then?")


async def name_added(row: Row) -> None:
    """agent-framework: messages get a `name`, which no template renders."""
    talk = row.talk()
    await talk.say()
    talk.messages = [{**each, "name": "writer"} for each in talk.messages]
    await talk.say("And then?")


async def one_growing_message(row: Row) -> None:
    """DSPy's ReAct: one message of the user's, which grows."""
    text = TEXT
    for turn in range(4):
        await row.ask({"messages": [SYSTEM, user(text)]})
        text += f"Thought {turn}: look. Observation: nothing is there yet. "


async def growing_completion(row: Row) -> None:
    """The same, with a text to be completed."""
    text = TEXT
    for _ in range(4):
        body = {"prompt": text, "max_tokens": 20}
        text += expected(body, COMPLETIONS).text + " So go on."
        await row.ask(body, None, COMPLETIONS)


async def same_system_prompt(row: Row) -> None:
    """New conversations with the same system prompt and tools."""
    for number in range(3):
        await row.talk(f"chat-{number}", tools=TOOLS).say(f"{number} is new. {TEXT}")


async def wrong_id(row: Row) -> None:
    """Each turn comes under an id of its own, or under that of another."""
    one, other = row.talk("one"), row.talk("other")
    for turn in range(3):
        await one.say(f"One, {turn}. {TEXT}", id=f"{turn}")
        await other.say(f"Other, {turn}. {TEXT}", id="one")


async def ids_shared_on_purpose(row: Row) -> None:
    """Every request gets a random one of three ids; histories are edited and branch off, too."""
    draw = random.Random(14)
    talks = [row.talk() for _ in range(4)]
    for number in range(30):
        talk = draw.choice(talks)
        if draw.random() < 0.2:
            talk = talk.fork()
            talks.append(talk)
        if draw.random() < 0.2 and len(talk.messages) > 3:
            talk.messages = talk.messages[: draw.choice(range(1, len(talk.messages), 2))]
        await talk.say(f"{number}. {TEXT[: draw.choice((40, 200))]}", id=draw.choice(("a", "b", "c")))


async def without_ids(row: Row) -> None:
    """No client names anything; two agents take turns."""
    talks = [row.talk(None, system=None), row.talk(None, system=None)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            await talk.say(f"{number}, {turn}. {TEXT}")


async def a_new_router(row: Row) -> None:
    """Each turn comes to a router that knows nothing."""
    talk = row.talk()
    for turn in range(3):
        await talk.say(f"{turn}. {TEXT}")
        await row.start()


ROWS: list[Callable[[Row], Awaitable[None]]] = [
    branches, branches_at_once, equal_first_prompts, sub_agent_under_one_header, sub_agents_at_once_under_one_header,
    threads_under_one_session, title_call_between, stopped_and_asked_again, more_than_may_be_pinned, reminder_moved,
    answers_trimmed, name_added, one_growing_message, growing_completion, same_system_prompt, wrong_id,
    ids_shared_on_purpose, without_ids, a_new_router,
]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"pin_budget": 0}], ids=["pinned", "never pinned"])
@pytest.mark.parametrize("decodes", [1, 3])
@pytest.mark.parametrize("what", ROWS, ids=lambda what: what.__name__)
async def test_all_that_is_there_is_read(
    cluster: Cluster, what: Callable[[Row], Awaitable[None]], decodes: int, settings: dict[str, Any]
) -> None:
    if what is more_than_may_be_pinned and not settings:
        settings = {"pin_budget": 0.005}
    patient = Settings(max_leased=1, max_leased_by_all=1, ask_timeout_s=30)
    for role, count in (("prefill", 2), ("decode", decodes)):
        for _ in range(count):
            await cluster.engine(role, settings=patient)  # type: ignore[arg-type]
    row = Row(cluster, {"kv_recompute_threshold": 0, **settings})
    await row.start()
    await what(row)
    print(f"| {(what.__doc__ or '').strip()} | {decodes} | {sum(row.read)} / {sum(row.could)} |")
    assert sum(row.could) > 0
    if "at_once" in what.__name__:  # what another has read meanwhile is there, too
        assert all(read >= could for read, could in zip(row.read, row.could, strict=True))
    else:
        assert row.read == row.could
    # No lease outlives its reader, and none had to be ended by its time.
    await until(lambda: not any(each.leased for each in cluster.engines), "all leases are over")
    assert sum(rank.expired for each in cluster.engines for rank in each.ranks) == 0
    if settings.get("pin_budget") == 0:
        await until(lambda: not any(each.in_use for each in cluster.engines), "nothing is held")
