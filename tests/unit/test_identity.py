"""Conversations told from their messages: they keep their id, and never get another's."""

from __future__ import annotations

import itertools
import json
import random
import threading
from typing import Any

import msgspec
import pytest
from carryback.identity import History, Identifier, Identity, derived_id, digest, turn_of
from hypothesis import given, settings
from hypothesis import strategies as st

Message = dict[str, Any]

SYSTEM: Message = {"role": "system", "content": "You are a helpful agent."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: str, id: str = "call_1") -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(text: str, id: str = "call_1") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def talk(name: str, turns: int) -> list[Message]:
    """A history that ends with the user's message of turn `turns`."""
    messages = [SYSTEM]
    for turn in range(1, turns + 1):
        messages.append(user(f"{name} asks {turn}"))
        if turn < turns:
            messages.append(answer(f"{name} hears {turn}"))
    return messages


# Growing conversations


def test_a_growing_conversation_keeps_its_id() -> None:
    identifier = Identifier()
    seen = [identifier.identify(talk("ann", turns)) for turns in range(1, 6)]
    assert len({one.conversation for one in seen}) == 1
    assert [one.is_new for one in seen] == [True, False, False, False, False]
    assert [one.turn for one in seen] == ["1", "2", "3", "4", "5"]
    assert not any(one.parent or one.is_edited for one in seen)


def test_a_shared_system_prompt_is_no_conversation() -> None:
    identifier = Identifier()
    prompt_only = identifier.identify([SYSTEM])
    first = identifier.identify([SYSTEM, user("a")])
    second = identifier.identify([SYSTEM, user("b")])
    greeted = identifier.identify([SYSTEM, answer("Hello."), user("c")])
    ids = {one.conversation for one in (prompt_only, first, second, greeted)}
    assert len(ids) == 4
    assert all(one.parent is None for one in (first, second, greeted))


def test_prompts_that_share_their_first_messages_are_no_conversation() -> None:
    identifier = Identifier()
    first = identifier.identify([SYSTEM, user("The manual: ...")])
    second = identifier.identify([SYSTEM, user("The manual: ..."), user("What is a flange?")])
    assert second.is_new
    assert second.conversation != first.conversation


def test_a_turn_whose_answer_was_cut_off_keeps_the_conversation() -> None:
    identifier = Identifier()
    identifier.identify(talk("ann", 1))
    before = identifier.identify(talk("ann", 2))
    after = identifier.identify([*talk("ann", 2), user("never mind, do this")])
    assert after.conversation == before.conversation


def test_scopes_and_groups_never_meet() -> None:
    identifier = Identifier()
    places = [("k1", ""), ("k2", ""), ("k1", "g"), ("", "k1"), ("", "")]
    ids = []
    for scope, group in places:
        identities = [identifier.identify(talk("ann", n), scope=scope, group=group) for n in (1, 2, 3, 4)]
        assert len({one.conversation for one in identities}) == 1
        ids.append(identities[0].conversation)
    trimmed = [SYSTEM, *talk("ann", 5)[3:]]
    assert identifier.identify(trimmed, scope="k3").is_new
    assert len(set(ids)) == len(places)


def test_changed_tools_keep_the_conversation() -> None:
    identifier = Identifier()
    first = identifier.identify(talk("ann", 1), [{"name": "search"}])
    second = identifier.identify(talk("ann", 2), [{"name": "search"}, {"name": "read"}])
    assert second.conversation == first.conversation


def test_tools_tell_apart_agents_with_equal_messages() -> None:
    identifier = Identifier()
    reader = identifier.identify(talk("ann", 1), [{"name": "read"}])
    writer = identifier.identify(talk("ann", 1), [{"name": "write"}])
    assert writer.conversation != reader.conversation
    assert identifier.identify(talk("ann", 2), [{"name": "write"}]).conversation == writer.conversation
    assert identifier.identify(talk("ann", 2), [{"name": "read"}]).conversation == reader.conversation


# Forks


def test_a_second_continuation_is_a_fork() -> None:
    identifier = Identifier()
    identifier.identify(talk("ann", 1))
    trunk = identifier.identify(talk("ann", 2))
    branch = identifier.identify([*talk("ann", 1), answer("ann hears 1"), user("something else")])
    assert branch.is_new
    assert branch.parent == trunk.conversation
    assert branch.conversation != trunk.conversation
    assert branch.turn == "2"
    # Both go on under their own ids.
    assert identifier.identify(talk("ann", 3)).conversation == trunk.conversation
    grown = [*talk("ann", 1), answer("ann hears 1"), user("something else"), answer("yes"), user("more")]
    assert identifier.identify(grown).conversation == branch.conversation


def test_an_identical_request_is_a_fork() -> None:
    identifier = Identifier()
    first = identifier.identify(talk("ann", 1))
    second = identifier.identify(talk("ann", 1))
    assert second.parent == first.conversation
    assert second.conversation != first.conversation


def test_the_same_agent_run_twice_in_a_row_keeps_one_id_for_each_run() -> None:
    identifier = Identifier()
    runs = [[identifier.identify(talk("ann", n)).conversation for n in (1, 2, 3)] for _ in range(2)]
    assert [len(set(run)) for run in runs] == [1, 1]
    assert runs[0][0] != runs[1][0]


def test_two_that_cannot_be_told_apart_get_new_ids() -> None:
    identifier = Identifier()
    first, second = (identifier.identify([SYSTEM, user("hi")]) for _ in range(2))
    one = identifier.identify([SYSTEM, user("hi"), answer("Hello!"), user("I am Ann")])
    other = identifier.identify([SYSTEM, user("hi"), answer("Hello!"), user("I am Bob")])
    ids = {x.conversation for x in (first, second, one, other)}
    assert len(ids) == 4
    assert one.parent in {first.conversation, second.conversation}
    # From here on they differ, and keep their ids.
    more = [answer("Nice to meet you."), user("Thanks")]
    ann = [SYSTEM, user("hi"), answer("Hello!"), user("I am Ann"), *more]
    assert identifier.identify(ann).conversation == one.conversation


# Edits and trims


def test_dropping_the_oldest_messages_keeps_the_conversation() -> None:
    identifier = Identifier()
    ids = [identifier.identify(talk("ann", n)).conversation for n in range(1, 7)]
    trimmed = identifier.identify([SYSTEM, *talk("ann", 7)[5:]])
    assert trimmed.conversation == ids[0]
    assert trimmed.is_edited
    assert trimmed.turn == "7", "turns are counted on"
    assert not trimmed.is_new
    again = identifier.identify([SYSTEM, *talk("ann", 8)[7:]])
    assert (again.conversation, again.turn) == (ids[0], "8")


@pytest.mark.parametrize("at", range(7))
def test_an_edit_in_the_middle_keeps_the_conversation(at: int) -> None:
    identifier = Identifier()
    ids = [identifier.identify(talk("ann", n)).conversation for n in range(1, 7)]
    messages = talk("ann", 7)
    messages[at] = messages[at] | {"content": "[shortened]"}
    edited = identifier.identify(messages)
    assert edited.conversation == ids[0]
    assert edited.is_edited


def test_a_summary_in_place_of_old_messages_keeps_the_conversation() -> None:
    identifier = Identifier()
    ids = [identifier.identify(talk("ann", n)).conversation for n in range(1, 9)]
    messages = [SYSTEM, user("Summary of what was said: ..."), *talk("ann", 9)[7:]]
    assert identifier.identify(messages).conversation == ids[0]


def test_an_edit_of_the_newest_question_is_a_fork() -> None:
    identifier = Identifier()
    ids = [identifier.identify(talk("ann", n)).conversation for n in range(1, 7)]
    messages = talk("ann", 6)
    messages[-1] = user("I meant something else")
    fork = identifier.identify(messages)
    assert fork.parent == ids[0]


def test_another_conversation_with_a_similar_end_is_not_an_edit() -> None:
    identifier = Identifier()
    small_talk = [user("thanks"), answer("You're welcome!"), user("bye"), answer("Bye!"), user("one more")]
    one = [SYSTEM, user("ann"), answer("a"), user("x"), answer("1"), *small_talk]
    identifier.identify(one)
    heads = [user("bob"), answer("b"), user("y"), answer("2"), user("z"), answer("3")]
    other = identifier.identify([SYSTEM, *heads, *small_talk, answer("Yes?"), user("?")])
    assert other.is_new


# What counts as equal


def continues(first: list[Message], known_as: list[Message]) -> bool:
    """Whether a request whose history begins with `known_as` continues the request `first`."""
    identifier = Identifier()
    one = identifier.identify(first)
    two = identifier.identify([*known_as, answer("next answer"), user("next question")])
    return one.conversation == two.conversation


BASE = [SYSTEM, user("go"), call("search", '{"q": "x", "n": 1}'), result("found")]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (1, {"role": "user", "content": [{"type": "text", "text": "go"}]}),
        (1, {"role": "user", "content": [{"type": "input_text", "text": "go"}]}),
        (1, {"role": "user", "content": "go", "name": None}),
        (1, {"content": "go", "role": "user"}),
        (1, {"type": "message", "role": "user", "content": "go"}),
        (2, call("search", '{"n":1,"q":"x"}')),
        (2, call("search", '{"q": "x", "n": 1}') | {"content": ""}),
        (2, call("search", '{"q": "x", "n": 1}') | {"refusal": None, "annotations": [], "audio": None}),
        (2, call("search", '{"q": "x", "n": 1}') | {"reasoning_content": "hm", "function_call": None}),
        (2, {k: v for k, v in call("search", '{"q": "x", "n": 1}').items() if k != "content"}),
        (3, {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]}),
        (3, result("found") | {"name": None}),
    ],
)
def test_spellings_of_one_message_are_equal(at: int, message: Message) -> None:
    spelt = [*BASE]
    spelt[at] = message
    assert continues(BASE, spelt)
    assert continues(spelt, BASE)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, {"role": "developer", "content": SYSTEM["content"]}),
        (1, user("go ")),
        (1, {"role": "user", "content": "go", "name": "ann"}),
        (1, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,go"}}]}),
        (2, call("search", '{"q": "y", "n": 1}')),
        (2, call("read", '{"q": "x", "n": 1}')),
        (2, call("search", '{"q": "x", "n": 1}', id="call_2")),
        (2, call("search", '{"q": "x", "n": 1')),
        (2, call("search", '{"q": "x", "n": 1}') | {"content": "Let me look."}),
        (3, result("found", id="call_2")),
    ],
)
def test_other_messages_are_not_equal(at: int, message: Message) -> None:
    other = [*BASE]
    other[at] = message
    assert not continues(BASE, other)


def test_responses_items_of_one_conversation() -> None:
    identifier = Identifier()
    first = [{"role": "user", "content": "go"}]
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    one = identifier.identify(first)
    two = identifier.identify([*first, *items])
    said = {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "42"}]}
    three = identifier.identify([*first, *items[1:], said, user("thanks")])
    assert one.conversation == two.conversation == three.conversation
    assert [(x.turn, x.step) for x in (one, two, three)] == [("1", 1), ("1", 2), ("2", 1)]


def test_anthropic_messages_of_one_conversation() -> None:
    identifier = Identifier()
    mark = {"cache_control": {"type": "ephemeral"}}
    first = [{"role": "user", "content": [{"type": "text", "text": "go"} | mark]}]
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "...", "signature": "s"}
    gone = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}
    marked = gone | mark | {"content": [{"type": "text", "text": "42"} | mark]}
    one = identifier.identify(first)
    history = [user("go"), {"role": "assistant", "content": [thought, used]}]
    two = identifier.identify([*history, {"role": "user", "content": [marked]}])
    history = [user("go"), {"role": "assistant", "content": [used]}, {"role": "user", "content": [gone]}]
    three = identifier.identify([*history, answer("42"), user("thanks")])
    assert one.conversation == two.conversation == three.conversation
    assert [(x.turn, x.step) for x in (one, two, three)] == [("1", 1), ("1", 2), ("2", 1)]


deep: Any = None
for _ in range(100_000):
    deep = [deep]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [None],
        [1, "x", []],
        [{}],
        [{"role": None, "content": None}],
        [{"role": 1, "content": {"a": 1}}],
        [{"role": "user", "content": [1, None, {"type": "text"}]}],
        [{"role": "user", "content": "\ud800"}],
        [
            {
                "role": "assistant",
                "tool_calls": [1, {"function": 2}, {"function": {"arguments": "[" * 100_000}}],
            }
        ],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "user", "content": [{"type": "image", "data": deep}]}],
        [{"role": "user", "content": "x", 1: 2}],
    ],
)
def test_malformed_messages_are_no_error(messages: list[Any]) -> None:
    identifier = Identifier()
    assert identifier.identify(messages).conversation != identifier.identify(messages).conversation
    turn_of(messages)


# Turns and steps


def test_turns_and_steps() -> None:
    messages = [SYSTEM, user("go")]
    assert turn_of(messages) == ("1", 1)
    for step in (2, 3, 4):
        messages += [call("f", "{}", id=f"c{step}"), result("1", id=f"c{step}")]
        assert turn_of(messages) == ("1", step)
    messages += [answer("done"), user("again")]
    assert turn_of(messages) == ("2", 1)
    assert turn_of([]) == ("0", 1)


def test_several_results_of_one_call_are_one_step() -> None:
    both = call("f", "{}", id="a")
    both["tool_calls"] += call("g", "{}", id="b")["tool_calls"]
    assert turn_of([user("go"), both, result("1", id="a"), result("2", id="b")]) == ("1", 2)


# Bounds and threads


def test_memory_is_bounded() -> None:
    identifier = Identifier(capacity=50)
    for number in range(500):
        for turns in (1, 2, 3, 4):
            identifier.identify(talk(f"user {number}", turns))
        assert len(identifier) <= 50
    assert len(identifier._tails) <= 50
    assert not identifier.identify(talk("user 499", 5)).is_new
    assert identifier.identify(talk("user 1", 5)).is_new, "forgotten: a new conversation, never another's id"


def test_the_least_recently_used_is_forgotten_first() -> None:
    identifier = Identifier(capacity=3)
    kept = identifier.identify(talk("ann", 1))
    identifier.identify(talk("bob", 1))
    assert identifier.identify(talk("ann", 2)).conversation == kept.conversation
    for name in ("cat", "dan"):
        identifier.identify(talk(name, 1))
    assert identifier.identify(talk("ann", 3)).conversation == kept.conversation
    assert identifier.identify(talk("bob", 2)).is_new


def test_one_scope_does_not_push_out_anothers_history() -> None:
    identifier = Identifier(capacity=100)
    said = [{"role": "user", "content": "Hello"}]
    first = identifier.identify(said, scope="quiet")
    for number in range(520):
        identifier.identify([{"role": "user", "content": f"one-off {number}"}], scope="busy")
        assert len(identifier) <= 100
    said += [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And then?"}]
    again = identifier.identify(said, scope="quiet")
    assert (again.conversation, again.is_new) == (first.conversation, False)
    # Each has a share: one that comes later takes its part from the one that has most.
    for number in range(60):
        identifier.identify([{"role": "user", "content": f"late {number}"}], scope="late")
    for name, kept in (("late 59", True), ("late 20", True), ("late 0", False)):
        said = [{"role": "user", "content": name}, {"role": "assistant", "content": "Yes"}, *said[-1:]]
        assert identifier.identify(said, scope="late").is_new is not kept, name
    said = [{"role": "user", "content": "one-off 519"}, {"role": "assistant", "content": "Yes"}, *said[-1:]]
    assert not identifier.identify(said, scope="busy").is_new


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Identifier(0)


def test_threads_share_an_identifier() -> None:
    identifier = Identifier()
    ids: dict[str, set[str]] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(16)

    def run(thread: int) -> None:
        try:
            start.wait()
            for turns in range(1, 9):
                for number in range(20):
                    name = f"{thread}.{number}"
                    ids.setdefault(name, set()).add(identifier.identify(talk(name, turns)).conversation)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(ids) == 320
    assert all(len(one) == 1 for one in ids.values())
    assert len(set().union(*ids.values())) == 320


# Random interleavings


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), conversations=st.integers(1, 300), tools=st.booleans())
def test_interleaved_conversations_keep_their_ids(seed: int, conversations: int, tools: bool) -> None:
    rng = random.Random(seed)
    identifier = Identifier()
    histories = {n: [SYSTEM, user(f"I am {n}")] for n in range(conversations)}
    identities: dict[int, list[Identity]] = {n: [] for n in histories}
    for _ in range(4 * conversations):
        n = rng.randrange(conversations)
        identities[n].append(identifier.identify(histories[n]))
        if tools and rng.random() < 0.6:  # answers that all conversations share
            histories[n] += [call("f", json.dumps({"step": len(histories[n])})), result("ok")]
        else:
            histories[n] += [answer("Done."), user("Go on.")]
    seen = {n: {one.conversation for one in ones} for n, ones in identities.items() if ones}
    assert all(len(ids) == 1 for ids in seen.values())
    assert len(set().union(*seen.values())) == len(seen)
    for ones in identities.values():
        assert [one.is_new for one in ones] == [True] * bool(ones) + [False] * (len(ones) - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # which conversation goes on
            st.sampled_from(["yes", "no"]),  # what it was answered
            st.sampled_from(["go on", "stop"]),  # what its user says then
        ),
        max_size=80,
    )
)
def test_conversations_with_equal_messages_never_share_an_id(
    moves: list[tuple[int, str, str]],
) -> None:
    identifier = Identifier()
    histories: dict[int, list[Message]] = {}
    owners: dict[str, int] = {}
    for number, answered, asked in moves:
        if number not in histories:
            histories[number] = [SYSTEM, user("hi")]
        else:
            histories[number] += [answer(answered), user(asked)]
        identity = identifier.identify(histories[number])
        assert owners.setdefault(identity.conversation, number) == number
        assert identity.parent is None or identity.parent in owners


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=12), st.data())
def test_a_turn_changes_with_a_user_message_only(roles: list[str], data: st.DataObject) -> None:
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    turns = [turn_of(messages[:n])[0] for n in range(len(messages) + 1)]
    for (before, after), role in zip(itertools.pairwise(turns), roles, strict=True):
        assert (before != after) == (role == "user")


# Conversations that a framework names


def test_what_goes_by_a_name_is_one_conversation_in_every_process() -> None:
    name = derived_id("thread-7", "agent")
    assert (
        len({name, derived_id("thread-7"), derived_id("agent", "thread-7"), derived_id("thread-7agent")}) == 4
    )
    here, there = Identifier(), Identifier()
    seen = [here.identify(talk("ann", turns), name=name) for turns in (1, 2)]
    seen.append(there.identify(talk("ann", 3), name=name))
    assert {one.conversation for one in seen} == {name}
    assert [one.parent for one in seen] == [None, None, None]
    assert [one.turn for one in seen] == ["1", "2", "3"]


def test_branches_edits_and_repeats_of_a_name_keep_it() -> None:
    identifier = Identifier()
    name = derived_id("thread-7")
    for turns in (1, 2, 3, 4):
        identifier.identify(talk("ann", turns), name=name)
    branch = [*talk("ann", 2)[:-1], user("something else")]
    edited = [SYSTEM, user("ann asks 1"), answer("she never heard"), user("ann asks 2")]
    for messages in (talk("ann", 5)[3:], branch, talk("ann", 4), talk("ann", 4), edited):
        seen = identifier.identify(messages, name=name)
        assert (seen.conversation, seen.parent) == (name, None)


def test_another_question_behind_the_same_text_keeps_its_name() -> None:
    identifier = Identifier()
    name = derived_id("thread-7", "reader")
    for question in ("What is a flange?", "And a gasket?"):
        asked = [SYSTEM, user(f"{'The manual, page 1. ' * 9} {question}")]
        assert identifier.identify(asked, name=name).conversation == name


def test_a_system_prompt_with_a_date_in_it_keeps_its_name() -> None:
    identifier = Identifier()
    name = derived_id("thread-7")
    for clock in ("12:05", "12:06", "12:07"):
        prompt = {"role": "system", "content": f"You are a helpful agent. {'Be brief. ' * 9} It is {clock}."}
        assert identifier.identify([prompt, user("hi")], name=name).conversation == name


def test_prompts_of_one_name_that_begin_differently_are_told_apart() -> None:
    name = derived_id("thread-7")
    planner = [{"role": "system", "content": "You plan."}, user("a house")]
    critic = [{"role": "system", "content": "You criticise."}, user("a house")]
    questions = [[SYSTEM, user(f"question {number}")] for number in range(3)]
    by_process = []
    for _ in range(2):
        identifier = Identifier()
        first = [identifier.identify(each, name=name) for each in (planner, critic, *questions)]
        again = [
            identifier.identify([*each, answer("well"), user("go on")], name=name)
            for each in (planner, critic, *questions)
        ]
        ids = [one.conversation for one in first]
        assert ids == [one.conversation for one in again]
        assert ids[0] == name
        assert len(set(ids)) == 5
        assert [one.parent for one in first] == [None, name, name, name, name]
        by_process.append(ids)
    assert by_process[0] == by_process[1]


def test_names_do_not_meet_each_other_or_what_has_none() -> None:
    identifier = Identifier()
    one = identifier.identify(talk("ann", 1), name=derived_id("1")).conversation
    two = identifier.identify(talk("ann", 2), name=derived_id("2")).conversation
    none = identifier.identify(talk("ann", 2)).conversation
    assert len({one, two, none}) == 3


def test_memory_of_names_is_bounded() -> None:
    identifier = Identifier(capacity=10)
    for number in range(200):
        identifier.identify(talk(f"ann {number}", 1), name=derived_id(str(number)))
    assert len(identifier._beginnings) <= 20
    assert len(identifier) <= 10


def test_messages_can_be_digested_elsewhere_and_recognised_here() -> None:
    """The work that grows with the messages needs nothing of the identifier, nor it anything of the messages."""
    here, apart = Identifier(), Identifier()
    for turns in (1, 2, 3):
        one = here.identify(talk("ann", turns), [{"name": "read"}], scope="k1", group="g")
        # As another process sends it.
        history = digest(talk("ann", turns), [{"name": "read"}], scope="k1", group="g")
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(history), type=History)
        other = apart.recognise(sent)
        assert (other.turn, other.step, other.is_new) == (one.turn, one.step, one.is_new)
    assert not other.is_new
    assert apart.recognise(digest(talk("ann", 3), scope="k2", group="g")).is_new
