"""What two requests, what the engine reported, and an engine's tokens are explained by."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from carryback.wire import Report, Reuse
from carryback_server import told
from carryback_server.body import Body
from carryback_server.endpoints import ENDPOINTS
from carryback_server.explain import CannotAsk, Explanation, Explanations, Kept, explain
from stub_engine.prompts import CHAT, COMPLETIONS, RESPONSES, detokenize, prompts_of

BLOCK = 16
ROUTER = "r1-"
WORDS = "The harbour is calm and the boats are in. " * 12


class Location:
    """As the state has it."""

    def __init__(self, key: str, tokens: int) -> None:
        self.key, self.tokens = key, tokens


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def called(arguments: str, name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return said(None, tool_calls=[{"id": "1", "type": "function", "function": function}])


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


async def engine(path: str, data: bytes) -> bytes:
    """An engine."""
    body = json.loads(data)
    if path == "/detokenize":
        return json.dumps({"prompt": detokenize(body["tokens"])}).encode()
    kind = CHAT if "messages" in body else COMPLETIONS
    return json.dumps({"tokens": prompts_of(kind, body)[0].tokens}).encode()


class Scene:
    """Requests of several conversations, as a router keeps them."""

    def __init__(self) -> None:
        self.explanations = Explanations(2**24, ROUTER)
        self.numbers = itertools.count()
        self.left: dict[str, Location] = {}

    def ask(
        self,
        body: dict[str, Any],
        conversation: str = "t",
        *,
        answer: dict[str, Any] | str = "It is.",
        reason: str = "new",
        outcome: Any = "miss",
        found: int = 0,
        path: str = CHAT,
        prompt: int | None = None,
        named_by: str = "",
        parent: str = "",
        location: Location | None = None,
    ) -> Kept:
        """A request comes, and is answered."""
        tokens = len(prompts_of(path, body)[0].tokens) if prompt is None else prompt
        reuse = Report(outcome, found, reason, tokens - found, 0, found, "run-1" if found else "", 1)
        kept = Kept(
            "default", conversation, "1", 1, ENDPOINTS[path], Body(json.dumps(body).encode()), reuse,
            key=f"{ROUTER}{next(self.numbers)}", block_size=BLOCK, holder="d0" if found else "", named_by=named_by,
        )  # fmt: skip
        before = location or self.left.get(conversation) or self.left.get(parent)
        self.explanations.begin(kept, before, parent)
        kept.keep(msgspec.json.encode(_answer(path, answer)))
        self.explanations.settle(kept)
        self.left[conversation] = Location(kept.key, (tokens + 6) // BLOCK * BLOCK)
        return kept

    async def explain(self, conversation: str = "t", ask: Any = engine) -> Explanation:
        requests = self.explanations.get("default", conversation)
        return await explain(requests, ask, self.explanations.newest("default"))

    def says(self, found: Explanation) -> str:
        """As a person reads it."""
        return "\n".join(str(line) for line in told.lines(msgspec.to_builtins(found)))


def _answer(path: str, answer: dict[str, Any] | str) -> dict[str, Any]:
    if path == RESPONSES:
        items = answer["output"] if isinstance(answer, dict) else [said(answer)]
        return {"status": "completed", "output": items}
    if path == COMPLETIONS:
        return {"choices": [{"index": 0, "text": answer, "finish_reason": "stop"}]}
    message = said(answer) if isinstance(answer, str) else answer
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def tokens_of(*messages: dict[str, Any], **fields: Any) -> int:
    return len(prompts_of(CHAT, chat(*messages, **fields))[0].tokens)


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def codes(found: Explanation) -> list[str]:
    return [each.code for each in found.causes]


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- faults found from outside


async def test_an_answer_that_the_client_left_out(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)))
    at = tokens_of(user(WORDS)) - 1  # where the answer's own mark was
    scene.ask(
        chat(user(WORDS), user("And the wind?")), reason="history_changed", outcome="partial", found=whole(at)
    )
    found = await scene.explain()
    assert codes(found) == ["answer_left_out"]
    assert found.parting is not None
    assert (found.parting.token, found.parting.message) == (at, 1)
    assert found.parting.new.startswith("<|user|>And")


async def test_a_prompt_that_is_sent_again(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)))
    whole_prompt = whole(tokens_of(user(WORDS)))
    scene.ask(chat(user(WORDS)), reason="history_changed", outcome="partial", found=whole_prompt)
    found = await scene.explain()
    assert codes(found) == ["prompt_repeated"]
    assert "retry" in found.causes[0].what


async def test_compact_arguments_are_not_to_blame_where_the_template_renders_them_the_same(
    scene: Scene,
) -> None:
    """Many clients parse arguments and write them without spaces; engines do parse them, too."""
    spaced, compact = '{"where": "sea", "days": 2}', '{"where":"sea","days":2}'
    first = chat(user(f"At 10:00. {WORDS}"))
    scene.ask(first, answer=called(spaced))
    scene.ask(
        chat(user(f"At 10:01. {WORDS}"), called(compact), result("a boat")), reason="history_changed", found=0
    )
    found = await scene.explain()
    assert codes(found) == ["message_changed"]
    # An earlier call, spelled anew by a gateway, and a prompt that parts elsewhere.
    before = [user(f"At 10:00. {WORDS}"), called(spaced), result("a boat"), user("?")]
    after = [user(f"At 10:00. {WORDS}"), called(compact), result("a boat"), user("?")]
    scene.ask(chat(*before), "u", answer="Calm.")
    parted = tokens_of(*before)
    more = [*after, said("Rough."), user("Why?")]
    scene.ask(chat(*more), "u", reason="history_changed", outcome="partial", found=whole(parted))
    found = await scene.explain("u")
    assert codes(found) == ["answer_changed"]


async def test_compact_arguments_are_to_blame_where_the_template_renders_them_as_they_are(
    scene: Scene,
) -> None:
    async def raw(path: str, data: bytes) -> bytes:
        """Of an engine that does not parse them."""
        body = json.loads(data)
        if path == "/tokenize" and "messages" in body:
            for message in body["messages"]:
                for call in message.pop("tool_calls", None) or ():
                    message["content"] = (message.get("content") or "") + call["function"]["arguments"]
            data = json.dumps(body).encode()
        return await engine(path, data)

    spaced, compact = '{"where": "sea"}', '{"where":"sea"}'
    history = [user(WORDS), called(spaced), result("a boat")]
    body = chat(*history)
    count = len(json.loads(await raw("/tokenize", json.dumps(body).encode()))["tokens"])
    scene.ask(body, answer="Calm.", prompt=count)
    history = [user(WORDS), called(compact), result("a boat"), said("Calm."), user("?")]
    count = len(json.loads(await raw("/tokenize", json.dumps(chat(*history)).encode()))["tokens"])
    found_tokens = whole(tokens_of(user(WORDS)))
    scene.ask(chat(*history), reason="history_changed", outcome="partial", found=found_tokens, prompt=count)
    found = await scene.explain(ask=raw)
    assert found.compared == "tokens", found.why
    assert codes(found) == ["arguments_respelled"]
    assert found.parting is not None
    assert found.parting.message == 1


async def test_a_template_that_writes_no_json_is_not_said_to_rewrite_it(scene: Scene) -> None:
    """Some models call tools in a form of their own, which the engine's parser makes JSON of."""

    async def xml(path: str, data: bytes) -> bytes:
        body = json.loads(data)
        if path == "/tokenize" and "messages" in body:
            for message in body["messages"]:
                for call in message.pop("tool_calls", None) or ():
                    arguments = json.loads(call["function"]["arguments"])
                    text = "".join(f"<p={name}>{value}</p>" for name, value in arguments.items())
                    message["content"] = (message.get("content") or "") + text
            data = json.dumps(body).encode()
        return await engine(path, data)

    scene.ask(chat(user(WORDS)), answer=called('{"where": "sea"}'))
    history = [user(WORDS), called('{"where": "sea"}'), result("a boat")]
    count = len(json.loads(await xml("/tokenize", json.dumps(chat(*history)).encode()))["tokens"])
    known = whole(tokens_of(user(WORDS)))
    scene.ask(chat(*history), reason="history_changed", outcome="partial", found=known, prompt=count)
    assert codes(await scene.explain(ask=xml)) == ["respelled"]


@pytest.mark.parametrize(
    ("before", "title"),
    [
        ([system("You sail. " * 9), user("It is warm. " * 5), user(WORDS)], [system("Write titles."), user(WORDS)]),
        ([user("Rules: be kind."), user("Here: /sea"), user(WORDS)], [user("Name this talk."), user(WORDS)]),
        ([user(WORDS)], [system("Write a title."), user(WORDS)]),
        ([system("You sail. " * 9), user(WORDS)], [system("Write titles."), user("Name this:"), user(WORDS)]),
        ([user(WORDS), said("Calm."), user("Why?")], [user(f"### Task: name it. USER: {WORDS} ASSISTANT: Calm. ###")]),
    ],
)  # fmt: skip
async def test_a_title_under_the_same_name_is_another_conversation(
    scene: Scene, before: list[dict[str, Any]], title: list[dict[str, Any]]
) -> None:
    tools = [{"type": "function", "function": {"name": "dive"}}]
    scene.ask(chat(*before, tools=tools))
    scene.ask(chat(*title), reason="history_changed")
    assert codes(await scene.explain()) == ["other_conversation"]


async def test_what_another_request_of_the_same_name_left_in_between_costs_nothing(scene: Scene) -> None:
    """The conversation goes on after a title was asked for under its name: all of it is found all the same."""
    history = [system("You sail. " * 9), user(WORDS)]
    scene.ask(chat(*history))
    scene.ask(chat(system("Write titles."), user(WORDS)), answer="A calm sea", reason="history_changed")
    more = [*history, said("It is."), user("Why?")]
    known = whole(tokens_of(*history, said("It is.")))
    scene.ask(chat(*more), reason="history_changed", outcome="partial", found=known)
    found = await scene.explain()
    assert codes(found) == ["other_conversation"]
    assert (found.shared_tokens, found.recomputed_tokens) == (known, tokens_of(*more) - known)
    assert "Another conversation or branch begins in the same way." in scene.says(found)


async def test_this_router_served_it_and_says_so(scene: Scene) -> None:
    """What a request without reuse, or several at a time, leaves the comparison without is not another router's."""
    scene.ask(chat(user(f"At 10:00. {WORDS}")))
    gone = Location(f"{ROUTER}999", 64)
    scene.ask(chat(user(f"At 10:01. {WORDS}")), reason="history_changed", location=gone)
    found = await scene.explain()
    assert "no longer kept" in found.why
    assert "another router" not in found.why
    scene.ask(chat(user(f"At 10:02. {WORDS}")), reason="history_changed", location=Location("r2-7", 64))
    assert "another router" in (await scene.explain()).why


async def test_the_request_that_left_it_is_found_among_the_last(scene: Scene) -> None:
    first = scene.ask(chat(user(f"At 10:00. {WORDS}")))
    left = Location(first.key, 64)
    scene.ask(chat(user(f"Another. {WORDS}")), reason="off", location=left)
    scene.ask(chat(user(f"And one. {WORDS}")), reason="off", location=left)
    scene.ask(chat(user(f"At 10:01. {WORDS}")), reason="history_changed", location=left)
    found = await scene.explain()
    assert found.why == ""
    assert found.parting is not None
    assert found.parting.held.startswith(" 10:00")


async def test_a_branch_is_compared_with_what_its_parent_left(scene: Scene) -> None:
    scene.ask(chat(user(f"At 10:00. {WORDS}")), "plan")
    scene.ask(chat(user(f"At 10:01. {WORDS}")), "plan/a", reason="history_changed", parent="plan")
    found = await scene.explain("plan/a")
    assert (found.why, codes(found)) == ("", ["message_changed"])


CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent. " * 6,
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "look", "parameters": {}}]},
    ],
    "store": False,
}  # fmt: skip


def codex(*items: dict[str, Any]) -> dict[str, Any]:
    """A request of Codex: all items each time."""
    parts = [{"type": "input_text", "text": "<env>"}, {"type": "input_text", "text": "cwd=/sea</env>"}]
    front = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WORDS}]},
    ]
    return {**CODEX, "input": [*front, *items]}


REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": ["ls"]}'}
PATCH = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"}
LOOK = {"type": "function_call", "call_id": "c3", "namespace": "mcp", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "boat.py"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}


def engines_chat(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of that: written here once more, from its code."""
    function = {"name": "shell", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
    text = {"type": "string", "description": "The freeform text payload for this tool."}
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    patch = {"name": "apply_patch", "description": "Edits.", "parameters": schema}
    look = {"name": "mcp__look", "parameters": {}}

    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": each} for each in texts]

    return {
        "messages": [
            {"role": "system", "content": body["instructions"]},
            {"role": "developer", "content": parts("Ask first.")},
            {"role": "user", "content": parts("<env>", "cwd=/sea</env>")},
            {"role": "user", "content": parts(WORDS)},
            {
                "role": "assistant", "reasoning": "Hm.",
                "tool_calls": [
                    call("c1", "shell", '{"command": ["ls"]}'),
                    call("c2", "apply_patch", '{"input": "*** Begin"}'),
                    call("c3", "mcp__look", "{}"),
                ],
            },
            {"role": "tool", "content": "boat.py", "tool_call_id": "c1"},
            {"role": "tool", "content": "done", "tool_call_id": "c2"},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [{"type": "function", "function": each} for each in (function, patch, look)],
    }  # fmt: skip


async def test_codex_is_compared_by_tokens(scene: Scene) -> None:
    seen: list[dict[str, Any]] = []

    async def listened(path: str, data: bytes) -> bytes:
        if path == "/tokenize":
            seen.append(json.loads(data))
        return await engine(path, data)

    items: list[dict[str, Any]] = [REASONING, CALL, PATCH, LOOK, OUTPUT, PATCHED, said("Done.")]
    body = codex(*items)
    expected = engines_chat(body)
    count = len(prompts_of(CHAT, expected)[0].tokens)
    scene.ask(body, path=RESPONSES, prompt=count)
    moved = json.loads(json.dumps(body).replace("cwd=/sea", "cwd=/air"))
    scene.ask(moved, path=RESPONSES, prompt=count, reason="history_changed", outcome="partial", found=96)
    found = await scene.explain(ask=listened)
    assert seen[0] == expected
    assert (found.compared, found.why) == ("tokens", "")
    assert codes(found) == ["message_changed"]
    assert found.parting is not None
    assert (found.parting.message, found.parting.held[:5], found.parting.new[:5]) == (1, "=/sea", "=/air")


async def test_codex_is_compared_by_what_its_items_say_where_an_engine_cannot_be_asked(scene: Scene) -> None:
    """Sealed reasoning, calls of the model's own tools, an answer in several items: nothing is shown as empty."""

    async def deaf(path: str, data: bytes) -> bytes:
        raise CannotAsk(f"{path}: the engine answered with status 400")

    answer = {"output": [REASONING, CALL]}
    scene.ask(codex(), path=RESPONSES, prompt=300, answer=answer)
    again = codex({**CALL, "arguments": '{"command": ["rm"]}'}, OUTPUT)
    scene.ask(again, path=RESPONSES, prompt=330, reason="history_changed", outcome="partial", found=288)
    found = await scene.explain(ask=deaf)
    assert found.compared == "messages"
    assert found.parting is not None
    assert "ls" in found.parting.held
    assert "rm" in found.parting.new
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "boats"}}
    scene.ask(codex(search, said("Two.")), "u", path=RESPONSES, prompt=300)
    other = {**search, "action": {"query": "ships"}}
    scene.ask(
        codex(other, said("Two."), user("?")), "u", path=RESPONSES, prompt=330, reason="history_changed", found=96
    )  # fmt: skip
    found = await scene.explain("u", ask=deaf)
    assert found.parting is not None
    assert (found.parting.held[:5], found.parting.new[:5]) == ("boats", "ships")
    scene.ask({**codex(), "tools": CODEX["tools"][:1]}, "v", path=RESPONSES, prompt=300)
    scene.ask(codex(), "v", path=RESPONSES, prompt=330, reason="history_changed")
    found = await scene.explain("v", ask=deaf)
    assert found.parting is not None
    assert found.parting.where == "the tools"
    assert "apply_patch" in found.parting.new


# -- what was found


async def test_a_beginning_that_another_conversation_has(scene: Scene) -> None:
    rules = system("You help sailors. " * 30)
    known = whole(tokens_of(rules)) - BLOCK
    scene.ask(chat(rules, user("Which way?")), "mine")
    scene.ask(chat(system("Other rules. " * 40), user("Which way?")), "theirs")
    scene.ask(chat(rules, user("Which way?"), tools=[{"type": "function"}]), "with tools")  # in front of it
    scene.ask(chat(rules, user("How deep?")), "t", reason="verified", outcome="hit", found=known)
    found = await scene.explain()
    assert (found.left_tokens, found.found_tokens, found.holder) == (None, known, "d0")
    assert (found.shared_tokens, found.shared_with) == (known, "mine")
    assert f"A decode engine (d0) had the first {known} of them." in scene.says(found)
    assert "Conversation mine begins in the same way." in scene.says(found)


async def test_whose_beginning_it_is_may_not_be_known(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)), reason="verified", outcome="hit", found=64)
    found = await scene.explain()
    assert (found.shared_tokens, found.shared_with) == (64, "")
    assert "Another conversation or branch" in scene.says(found)


async def test_what_a_request_that_broke_off_had_left_is_nobody_elses(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)))
    del scene.left["t"]
    scene.ask(chat(user(WORDS)), reason="verified", outcome="hit", found=64)
    found = await scene.explain()
    assert (found.found_tokens, found.shared_tokens) == (64, 0)


async def test_a_beginning_that_others_of_the_name_left_is_found_past_where_the_last_one_parts(
    scene: Scene,
) -> None:
    history = [user(WORDS), said("It is."), user("Left or right? " * 9)]
    scene.ask(chat(*history))
    other = [user(WORDS), said("It is."), user("Up or down? " * 9)]
    known = whole(tokens_of(*other))
    scene.ask(chat(*other), reason="history_changed", outcome="partial", found=known)
    found = await scene.explain()
    assert found.parting is not None
    assert found.parting.token is not None
    assert found.parting.token < known
    assert found.shared_tokens == known
    assert codes(found) == ["message_changed"]


async def test_what_was_overwritten_besides(scene: Scene) -> None:
    """The history is changed late, and the decode engine has lost more than that."""
    history = [user(WORDS), said("It is."), user("Left or right?")]
    scene.ask(chat(*history))
    changed = [user(WORDS), said("It is."), user("Up or down?")]
    scene.ask(chat(*changed), reason="history_changed", outcome="partial", found=2 * BLOCK)
    found = await scene.explain()
    assert codes(found) == ["message_changed", "overwritten"]
    assert found.parting is not None
    assert f"From token 32 to {found.parting.token}" in found.causes[1].what


async def test_what_was_overwritten_alone_has_no_cause_in_the_prompt(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)))
    more = chat(user(WORDS), said("It is."), user("Why?"))
    scene.ask(more, reason="overwritten", outcome="partial", found=2 * BLOCK)
    found = await scene.explain()
    assert (found.compared, found.causes, found.why, found.parting) == ("nothing", [], "", None)
    assert found.left_tokens is not None
    assert (
        f"had the first 32 of them; the conversation's last request had left {found.left_tokens}"
        in scene.says(found)
    )
    assert "overwritten" in found.means


async def test_a_salt_parts_what_is_the_same(scene: Scene) -> None:
    scene.ask(chat(user(WORDS)))
    scene.ask(chat(user(WORDS), said("It is."), user("Why?"), cache_salt="x"), reason="history_changed")
    found = await scene.explain()
    assert codes(found) == ["cache_salt_changed"]
    assert found.parting is not None
    assert (found.parting.token, found.parting.until) == (0, BLOCK)


async def test_what_is_behind_a_url_may_have_changed(scene: Scene) -> None:
    parts = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": "http://sea/a.png"}}]
    scene.ask(chat(user(parts)))
    known = 2 * BLOCK
    scene.ask(
        chat(user(parts), said("It is."), user("?")), reason="history_changed", outcome="partial", found=known
    )
    found = await scene.explain()
    assert codes(found) == ["kv_differs"]


@pytest.mark.parametrize("reason", ["off", "engine_lost", "no_answer", "too_many_leases", "load_failed"])
async def test_what_no_prompt_is_to_blame_for_is_not_compared(scene: Scene, reason: str) -> None:
    scene.ask(chat(user(f"At 10:00. {WORDS}")))
    scene.ask(chat(user(f"At 10:01. {WORDS}")), reason=reason)
    found = await scene.explain()
    assert (found.compared, found.causes, found.why) == ("nothing", [], "")
    assert found.means
    assert found.do


async def test_the_same_answer_in_other_tokens(scene: Scene) -> None:
    """The engine says in which block; the text does not tell the token."""
    scene.ask(chat(user(WORDS)), answer="It is very calm today, and it will be so for all of the week. " * 3)
    text = "It is very calm today, and it will be so for all of the week. " * 3
    more = chat(user(WORDS), said(text), user("Why?"))
    known = whole(tokens_of(user(WORDS))) + BLOCK
    scene.ask(more, reason="history_changed", outcome="partial", found=known)
    found = await scene.explain()
    assert codes(found) == ["respelled"]
    assert found.parting is not None
    assert (found.parting.token, found.parting.until) == (known, known + BLOCK)
    assert found.shared_tokens == 0


async def test_a_plain_report_is_explained_as_well(scene: Scene) -> None:
    """Of a request that no prefill engine did."""
    kept = scene.ask(chat(user(WORDS)))
    kept.reuse = Reuse("miss", 0, "several_answers")
    found = await scene.explain()
    assert (found.asked, found.holder, found.prompt_tokens) == (0, "", 0)
    assert "several answers" in scene.says(found)


def test_three_requests_of_a_conversation_are_kept_if_there_is_room() -> None:
    scene = Scene()
    scene.explanations = Explanations(20_000, ROUTER)
    first = scene.ask(chat(user("x" * 1800)))
    left = Location(first.key, 64)
    for number in range(3):
        scene.ask(chat(user(f"{number}" + "x" * 1800)), location=left)
    kept = scene.explanations.get("default", "t")
    assert [each.key for each in kept] == [f"{ROUTER}0", f"{ROUTER}3"]
