"""What differs between two requests, and what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from carryback import wire
from carryback_server.body import Body
from carryback_server.causes import REASONS, answer_causes, differences, template_causes
from carryback_server.endpoints import ENDPOINTS
from carryback_server.said import Answered, Asked, Call, Said, asked
from hypothesis import given
from hypothesis import strategies as st

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def parsed(path: str, **fields: Any) -> Asked:
    return asked(ENDPOINTS[path], Body(json.dumps(fields).encode()))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def called(arguments: str, name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return assistant(None, tool_calls=[{"id": "1", "type": "function", "function": function}])


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


def image(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return user(parts)


def tool(name: str, description: str = "Looks.", **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


LONG = [
    user("What is a flange, and what is it for?"),
    assistant("A rim."),
    user("And a gasket?"),
    assistant("A seal."),
]
HISTORY = [system("Be kind."), *LONG, user("Thanks. Which one leaks?")]


def chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, **fields}


# name, the older request, the newer one, the code of the first cause, its message, words of what it says
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int | None, str]] = [
    ("a time", chat([system("It is 10:00. Be kind."), *LONG]), chat([system("It is 10:05. Be kind."), *LONG, user("?")]), "system_prompt_changed", 0, "a time"),
    ("a time in ISO form", chat([system("Now: 2026-01-01T10:00:59Z")]), chat([system("Now: 2026-01-01T10:01:00Z")]), "system_prompt_changed", 0, "a time"),
    ("seconds since 1970", chat([system("ts=1767225600;")]), chat([system("ts=1767225660;")]), "system_prompt_changed", 0, "a time"),
    ("a date", chat([system("Today is 2026-01-01.")]), chat([system("Today is 2026-01-02.")]), "system_prompt_changed", 0, "a date"),
    ("a date in words", chat([system("Today is January 1, 2026.")]), chat([system("Today is January 2, 2026.")]), "system_prompt_changed", 0, "a date"),
    ("a month", chat([system("It is March 2026.")]), chat([system("It is April 2026.")]), "system_prompt_changed", 0, "a date"),
    ("a weekday", chat([system("It is Monday.")]), chat([system("It is Tuesday.")]), "system_prompt_changed", 0, "a date"),
    ("a counter", chat([system("You have 9 calls left.")]), chat([system("You have 8 calls left.")]), "system_prompt_changed", 0, "a number"),
    ("an id", chat([system("run 123e4567-e89b-12d3-a456-426614174000")]), chat([system("run 323e4567-e89b-12d3-a456-426614174aaa")]), "system_prompt_changed", 0, "a random id"),
    ("other words", chat([system("Be kind."), *LONG]), chat([system("Be rude."), *LONG]), "system_prompt_changed", 0, "is not the same."),
    ("developer", chat([{**system("Be kind."), "role": "developer"}]), chat([{**system("Be rude."), "role": "developer"}]), "system_prompt_changed", 0, ""),
    ("tool added", chat(HISTORY, tools=[tool("a")]), chat(HISTORY, tools=[tool("a"), tool("b")]), "tools_changed", None, "added: b"),
    ("tool removed", chat(HISTORY, tools=[tool("a"), tool("b")]), chat(HISTORY, tools=[tool("a")]), "tools_changed", None, "taken away: b"),
    ("all tools removed", chat(HISTORY, tools=[tool("a")]), chat(HISTORY), "tools_changed", None, "taken away: a"),
    ("tools swapped", chat(HISTORY, tools=[tool("a")]), chat(HISTORY, tools=[tool("b")]), "tools_changed", None, "taken away: a, and added: b"),
    ("tools reordered", chat(HISTORY, tools=[tool("a"), tool("b")]), chat(HISTORY, tools=[tool("b"), tool("a")]), "tools_reordered", None, "another order"),
    ("tool described anew", chat(HISTORY, tools=[tool("a", "Looks.")]), chat(HISTORY, tools=[tool("a", "Sees.")]), "tool_description_changed", None, "description of tool a"),
    ("a time in a tool", chat(HISTORY, tools=[tool("a", "It is 10:00.")]), chat(HISTORY, tools=[tool("a", "It is 10:01.")]), "tool_description_changed", None, "a time"),
    ("tool's parameters", chat(HISTORY, tools=[tool("a", x={})]), chat(HISTORY, tools=[tool("a", y={})]), "tool_changed", None, "parameters of tool a"),
    ("tool's keys", chat(HISTORY, tools=[tool("a", x=1, y=2)]), chat(HISTORY, tools=[tool("a", y=2, x=1)]), "tools_respelled", None, "keys"),
    ("arguments' keys", chat([user("?"), called('{"a":1,"b":2}')]), chat([user("?"), called('{"b":2,"a":1}')]), "arguments_respelled", 1, "the same JSON"),
    ("arguments changed", chat([user("?"), called('{"a":1}')]), chat([user("?"), called('{"a":2}')]), "arguments_changed", 1, "look"),
    ("arguments no JSON", chat([user("?"), called("{")]), chat([user("?"), called("}")]), "arguments_changed", 1, "look"),
    ("another tool called", chat([user("?"), called("{}")]), chat([user("?"), called("{}", "see")]), "calls_changed", 1, ""),
    ("reasoning dropped", chat([user("?"), assistant("A.", reasoning="Hm."), user("?")]), chat([user("?"), assistant("A."), user("?")]), "reasoning_dropped", 1, "is gone"),
    ("reasoning_content", chat([user("?"), assistant("A.", reasoning_content="Hm."), user("?")]), chat([user("?"), assistant("A."), user("?")]), "reasoning_dropped", 1, "is gone"),
    ("message edited", chat(HISTORY), chat([*HISTORY[:3], user("And a nut?"), *HISTORY[4:]]), "message_changed", 3, "(user)"),
    ("tool result shortened", chat([user("?"), called("{}"), result("a" * 90), user("?")]), chat([user("?"), called("{}"), result("aaa"), user("?"), user("?")]), "message_changed", 2, "(tool)"),
    ("trimmed at the front", chat(HISTORY), chat([HISTORY[0], *HISTORY[3:], user("?")]), "history_trimmed", 1, "2 messages at the front"),
    ("trimmed without a system prompt", chat(LONG), chat([*LONG[2:], user("?")]), "history_trimmed", 0, "2 messages"),
    ("removed in the middle", chat(HISTORY), chat([*HISTORY[:2], *HISTORY[3:]]), "messages_removed", 2, "one message within"),
    ("cut back", chat(HISTORY), chat(HISTORY[:2]), "messages_removed", 2, "newest 4 messages"),
    ("summarised", chat(HISTORY), chat([HISTORY[0], user("So far: pipes."), HISTORY[5], user("?")]), "history_summarised", 1, "4 messages became 1"),
    ("inserted", chat(HISTORY), chat([HISTORY[0], system("Memory: pipes."), *HISTORY[1:]]), "messages_inserted", 1, "one message"),
    ("reordered", chat(HISTORY), chat([HISTORY[0], HISTORY[3], HISTORY[4], HISTORY[1], HISTORY[2], HISTORY[5]]), "messages_reordered", 1, "another order"),
    ("image changed", chat([image("data:image/png;base64,AAAA"), assistant("A cat.")]), chat([image("data:image/png;base64,AAAB"), assistant("A cat."), user("?")]), "media_changed", 0, "image"),
    ("another prompt", chat([system("Plan."), user("Plan the trip to the sea.")]), chat([system("Plan."), user("List all boats.")]), "other_conversation", 1, "under the same id"),
    ("another agent", chat([system("You plan."), user("A trip to the sea, for 3.")]), chat([system("Judge texts."), user("Boats float well")]), "other_conversation", 0, "under the same id"),
    ("a title", chat(HISTORY), chat([system("Write a title."), HISTORY[1]]), "other_conversation", 0, "a title's"),
    ("another mode", chat(HISTORY), chat([system("Plan it first."), *HISTORY[1:], assistant("It."), user("?")]), "system_prompt_changed", 0, ""),
    ("model", chat(HISTORY, model="a"), chat(HISTORY, model="b"), "model_changed", None, "'a'"),
    ("salt", chat(HISTORY, cache_salt="a"), chat(HISTORY), "cache_salt_changed", None, "never shared"),
    ("thinking switched", chat(HISTORY, chat_template_kwargs={"enable_thinking": True}), chat(HISTORY, chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs_changed", None, "enable_thinking"),
    ("thinking set", chat(HISTORY), chat(HISTORY, chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs_changed", None, "enable_thinking"),
    ("effort", chat(HISTORY, reasoning_effort="low"), chat(HISTORY, reasoning_effort="high"), "reasoning_effort_changed", None, "reasoning_effort"),
    ("template", chat(HISTORY), chat(HISTORY, chat_template="{{ x }}"), "chat_template_changed", None, "chat_template"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "code", "message", "words"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])  # fmt: skip
def test_what_differs(
    old: dict[str, Any], new: dict[str, Any], code: str, message: int | None, words: str
) -> None:
    causes = differences(parsed(CHAT, **old), parsed(CHAT, **new))
    assert [each.code for each in causes] == [code]
    assert causes[0].message == message
    assert words.lower() in causes[0].what.lower()
    assert causes[0].do


def test_several_differences_come_in_the_order_of_a_prompt() -> None:
    old = parsed(CHAT, model="a", tools=[tool("a")], messages=[system("10:00")])
    new = parsed(CHAT, model="b", tools=[tool("b")], messages=[system("10:01")], reasoning_effort="low")
    codes = [each.code for each in differences(old, new)]
    assert codes == ["model_changed", "reasoning_effort_changed", "tools_changed", "system_prompt_changed"]


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (CHAT, chat(HISTORY), chat([*HISTORY, assistant("The gasket."), user("Why?")])),
        (CHAT, chat([user("Hi")]), chat([user([{"type": "text", "text": "Hi"}]), assistant("Hi.")])),
        (CHAT, chat([called("{}")]), chat([{**called("{}"), "content": ""}])),
        (CHAT, chat([called('{"a": "\u00e9"}')]), chat([called('{"a":"\\u00e9"}'), result("x")])),
        (CHAT, chat(HISTORY, tools=None), chat(HISTORY, tools=[])),
        (CHAT, chat(HISTORY, temperature=1, stream=True), chat(HISTORY, max_tokens=4)),
        (COMPLETIONS, {"prompt": "Once upon"}, {"prompt": "Once upon a time"}),
        (COMPLETIONS, {"prompt": [1, 2]}, {"prompt": [1, 2, 3]}),
        (RESPONSES, {"input": "Hi"}, {"input": [user("Hi"), assistant("Hello."), user("?")]}),
    ],
)
def test_what_goes_on_does_not_differ(path: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert differences(parsed(path, **old), parsed(path, **new)) == []


@given(st.lists(st.sampled_from([*HISTORY, called("{}"), result("x")]), max_size=8), st.data())
def test_any_history_that_is_appended_to_goes_on(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    more = data.draw(st.lists(st.sampled_from(HISTORY), max_size=4))
    assert differences(parsed(CHAT, messages=messages), parsed(CHAT, messages=[*messages, *more])) == []


@given(
    st.lists(st.sampled_from([*HISTORY, called("{}"), result("x")]), max_size=8),
    st.lists(st.sampled_from([*HISTORY, called('{"a":1}'), result("y")]), max_size=8),
)
def test_any_other_history_has_one_cause_where_it_parts(
    old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> None:
    causes = differences(parsed(CHAT, messages=old), parsed(CHAT, messages=new))
    same = next(
        (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    assert [each.message for each in causes] == ([] if same == len(old) else [same])


def test_completions() -> None:
    (cause,) = differences(
        parsed(COMPLETIONS, prompt="At 10:00, go"), parsed(COMPLETIONS, prompt="At 10:01, go")
    )
    assert (cause.code, cause.message) == ("prompt_changed", 0)
    assert "a time" in cause.what
    (cause,) = differences(parsed(COMPLETIONS, prompt=[1, 2]), parsed(COMPLETIONS, prompt=[1, 23]))
    assert cause.code == "prompt_changed"
    (cause,) = differences(parsed(COMPLETIONS, prompt="1"), parsed(COMPLETIONS, prompt=[1]))
    assert cause.code == "prompt_changed"


def test_a_system_prompt_of_the_requests_own_has_no_index() -> None:
    for path, name, said in ((RESPONSES, "instructions", "input"), (MESSAGES, "system", "messages")):
        old = parsed(path, **{name: "It is 10:00.", said: [user("Hi")]})
        new = parsed(path, **{name: "It is 10:01.", said: [user("Hi")]})
        (cause,) = differences(old, new)
        assert (cause.code, cause.message) == ("system_prompt_changed", -1)
        edited = parsed(path, **{name: "It is 10:00.", said: [user("Ho")]})
        (cause,) = differences(old, edited)
        assert cause.message == 0


def test_items_of_responses() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "1", "output": "a boat"}
    old = parsed(RESPONSES, input=[user("Hi"), call, output])
    assert (
        differences(old, parsed(RESPONSES, input=[user("Hi"), {**call, "arguments": '{"a":1}'}, output]))
        == []
    )
    (cause,) = differences(old, parsed(RESPONSES, input=[user("Hi"), {**call, "namespace": "sea"}, output]))
    assert (cause.code, cause.message) == ("calls_changed", 1)
    (cause,) = differences(old, parsed(RESPONSES, input=[user("Hi"), call, {**output, "output": "a ship"}]))
    assert (cause.code, cause.message) == ("message_changed", 2)


def test_blocks_of_anthropics() -> None:
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1, "b": 2}}
    got = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a boat"}]}

    def said(*blocks: dict[str, Any]) -> Asked:
        return parsed(MESSAGES, messages=[user("Hi"), {"role": "assistant", "content": blocks}, user([got])])

    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    other = {**use, "input": {"b": 2, "a": 1}}
    assert [each.code for each in differences(said(use), said(other))] == ["arguments_respelled"]
    assert [each.code for each in differences(said(thought, use), said(use))] == ["reasoning_dropped"]
    assert differences(said(use), said(use)) == []


# -- what was generated

ASK = chat([user("Which one leaks?")])
ARGUMENTS = '{"where": "sea"}'

# name, more of the older request, the answer, what comes after the old messages, what is rendered, code, words
ANSWERS: list[tuple[str, dict[str, Any], Answered, list[dict[str, Any]], str | None, str, str]] = [
    ("left out", {}, Answered(Said("assistant", "This.")), [user("?")], "user?", "answer_left_out", "not in the next"),
    ("nothing more", {}, Answered(Said("assistant", "This.")), [], "", "prompt_repeated", "once more"),
    ("changed", {}, Answered(Said("assistant", "This.")), [assistant("That."), user("?")], "That.", "answer_changed", "changed"),
    ("stripped", {}, Answered(Said("assistant", "\n\nThis.")), [assistant("This."), user("?")], "This.", "answer_changed", "spaces"),
    ("reasoning dropped", {}, Answered(Said("assistant", "This.", "Hm.")), [assistant("This.")], "This.", "reasoning_dropped", "reasoning"),
    ("reasoning not rendered", {}, Answered(Said("assistant", "This.", "Hm.")), [assistant("This.", reasoning="Hm.")], "This.", "template_drops_reasoning", "template"),
    ("arguments respelled", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called('{"where":"sea"}'), result("x")], 'look {"where":"sea"}', "arguments_respelled", "same JSON"),
    ("arguments respelled, and rendered as they came", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called('{"where":"sea"}'), result("x")], f"look {ARGUMENTS}", "respelled", ""),
    ("arguments respelled, and nobody knows how they are rendered", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called('{"where":"sea"}'), result("x")], None, "respelled", ""),
    ("arguments' keys", {}, Answered(Said("assistant", "", "", (Call("look", '{"a":1,"b":2}'),))), [called('{"b":2,"a":1}'), result("x")], None, "arguments_respelled", "order of keys"),
    ("arguments in no JSON", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called(ARGUMENTS), result("x")], "<where>sea</where> {", "respelled", ""),
    ("arguments changed", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called("{}"), result("x")], None, "arguments_changed", "look"),
    ("arguments rendered anew", {}, Answered(Said("assistant", "", "", (Call("look", ARGUMENTS),))), [called(ARGUMENTS), result("x")], 'look { {"where":"sea"}', "arguments_rewritten", "parses them"),
    ("calls left out", {}, Answered(Said("assistant", "", "", (Call("look", "{}"),))), [assistant("")], "", "calls_changed", ""),
    ("a stop string", {"stop": ["."]}, Answered(Said("assistant", "This"), "stop", "."), [assistant("This")], "This", "stop_string", "'.'"),
    ("a grammar", {"response_format": {"type": "json_schema"}}, Answered(Said("assistant", "{}")), [assistant("{}")], "{}", "grammar_spelling", "grammar"),
    ("a forced tool", {"tool_choice": "required"}, Answered(Said("assistant", "", "", (Call("look", "{}"),))), [called("{}")], "{}", "grammar_spelling", "grammar"),
    ("a named tool", {"tool_choice": {"type": "function", "function": {"name": "look"}}}, Answered(Said("assistant", "", "", (Call("look", "{}"),))), [called("{}")], "{}", "grammar_spelling", "grammar"),
    ("other tokens", {"response_format": {"type": "text"}, "tool_choice": "auto"}, Answered(Said("assistant", "This.")), [assistant("This."), user("?")], "This.", "respelled", "spelled differently"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "answer", "more", "rendered", "code", "words"), [each[1:] for each in ANSWERS], ids=[each[0] for each in ANSWERS])  # fmt: skip
def test_what_became_of_the_answer(
    fields: dict[str, Any],
    answer: Answered,
    more: list[dict[str, Any]],
    rendered: str | None,
    code: str,
    words: str,
) -> None:
    old = parsed(CHAT, **ASK, **fields)
    new = parsed(CHAT, **chat([*ASK["messages"], *more]), **fields)
    (cause,) = answer_causes(old, new, answer, rendered)
    assert cause.code == code
    assert cause.message == 1
    assert words in cause.what


def test_an_answer_that_is_not_known() -> None:
    new = parsed(CHAT, messages=[*ASK["messages"], assistant("This.")])
    assert [each.code for each in answer_causes(parsed(CHAT, **ASK), new, None, "This.")] == ["respelled"]


def test_an_answer_in_several_items() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        assistant("So."),
        call,
    ]
    answer = Answered(Said("assistant", "So.", "Hm.", (Call("look", "{}"),)))
    old, new = parsed(RESPONSES, input="Hi"), parsed(RESPONSES, input=[user("Hi"), *items])
    assert [each.code for each in answer_causes(old, new, answer, "Hm. So. {}")] == ["respelled"]
    new = parsed(RESPONSES, input=[user("Hi"), *items[1:]])
    assert [each.code for each in answer_causes(old, new, answer, "So. {}")] == ["reasoning_dropped"]


def test_the_answer_in_a_prompt_of_a_completion() -> None:
    old, answer = parsed(COMPLETIONS, prompt="Once"), Answered(Said("assistant", " upon"))
    for prompt, code in (("Once upon a time", "respelled"), ("Once more", "answer_changed")):
        assert [
            each.code for each in answer_causes(old, parsed(COMPLETIONS, prompt=prompt), answer, None)
        ] == [code]


def test_templates() -> None:
    assert (
        template_causes("assistant\n<think>\n\n</think>\n\nA", "assistant\nA")[0].code
        == "template_drops_reasoning"
    )
    assert template_causes("assistant\nA", "assistant\nB")[0].code == "template_rewrites"


# -- reasons


def test_every_documented_reason_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "router.md").read_text()
    table = page.partition("The reasons:")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    documented = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert documented == set(REASONS)


def test_every_reason_of_the_wire_is_explained_and_no_other() -> None:
    assert set(REASONS) == {*wire.ENGINE_REASONS, *wire.ROUTER_REASONS}


def test_the_dashboard_has_words_for_every_reason_to_miss() -> None:
    script = (Path(__file__).parents[2] / "server/carryback_server/dashboard/words.js").read_text()
    table = script.partition("const REASONS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+): ", table, re.MULTILINE)) == set(REASONS) - {"verified"}


@pytest.mark.parametrize(
    ("folder", "reasons"),
    [("carryback_vllm", wire.ENGINE_REASONS), ("carryback_server", wire.ROUTER_REASONS)],
)
def test_each_reason_is_somebodys(folder: str, reasons: tuple[str, ...]) -> None:
    """Something gives it; what only explains it does not count."""
    sources = (Path(__file__).parents[2] / "server" / folder).rglob("*.py")
    text = "".join(each.read_text() for each in sources if each.name not in ("causes.py", "explain.py"))
    assert [each for each in reasons if f'"{each}"' not in text] == []
