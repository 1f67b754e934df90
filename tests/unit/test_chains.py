"""Chains of the Responses API: a continued response reaches the engines whole, and only its tenant's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from carryback_server.body import Body
from carryback_server.chains import Chain, Chains
from carryback_server.errors import ApiError
from carryback_server.state import MemoryState

USER = {"role": "user", "content": "hi"}
TEXT = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "1e2 \u2028", "annotations": [], "logprobs": None}]}  # fmt: skip
THOUGHT = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "?"}],
}
CALL = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


@pytest.fixture
def state() -> MemoryState:
    return MemoryState(
        max_conversations=10,
        responses_max_bytes=10**6,
        on_message=lambda message: None,
    )


@pytest.fixture
def chains(state: MemoryState) -> Chains:
    return Chains(state, ttl_s=60, max_bytes=10_000)


def of(**fields: Any) -> Body:
    return Body(json.dumps(fields).encode())


def answer(id: str, *output: dict[str, Any], status: str = "completed") -> bytes:
    return json.dumps({"object": "response", "id": id, "output": output, "status": status}).encode()


def streamed(response: bytes) -> bytes:
    return b'\nevent: response.completed\ndata: {"response":%b,"sequence_number":7}\n\n' % response


async def ask(
    chains: Chains, id: str, conversation: str = "", *output: dict[str, Any], tenant: str = "t", **fields: Any
) -> tuple[dict[str, Any], Chain]:
    """One request, answered with `output` under `id`; what the engines were sent."""
    body = of(**fields)
    chain = await chains.resolve(tenant, body)
    response = answer(id, *output)
    assert await chains.remember(chain, conversation or chain.conversation, response, False) == ""
    return json.loads(body.encode({})), chain


async def test_a_chain_reaches_the_engines_whole(chains: Chains) -> None:
    sent, first = await ask(chains, "r1", "c1", THOUGHT, CALL, input="hi", instructions="once")
    assert sent == {"input": "hi", "instructions": "once", "store": False}
    assert (first.conversation, first.parent) == ("", None)
    sent, second = await ask(chains, "r2", "", TEXT, input=[RESULT], previous_response_id="r1")
    assert sent == {"input": [USER, THOUGHT, CALL, RESULT], "store": False}
    assert (second.conversation, second.parent) == ("c1", None)
    sent, third = await ask(chains, "r3", "", previous_response_id="r2", input="more", model="m")
    more = {"role": "user", "content": "more"}
    assert sent == {"input": [USER, THOUGHT, CALL, RESULT, TEXT, more], "model": "m", "store": False}
    assert (third.conversation, third.parent) == ("c1", None)


async def test_items_keep_their_spelling(chains: Chains) -> None:
    body = Body(
        b'{"input": [{"role": "user", "content": "\\u00e9", "x": 1e2}], "previous_response_id": null}'
    )
    chain = await chains.resolve("t", body)
    spelled = b'{"id": "r1", "status": "completed", "output": [{"type": "x", "n": 1.0}]}'
    assert await chains.remember(chain, "c1", streamed(spelled), True) == ""
    body = Body(b'{"input": "\\u2028", "previous_response_id": "r1"}')
    await chains.resolve("t", body)
    items = b'{"role": "user", "content": "\\u00e9", "x": 1e2}', b'{"type": "x", "n": 1.0}'
    assert body.raw("input") == b"[%b,%b,%b]" % (*items, b'{"role":"user","content":"\\u2028"}')
    assert await chains.get("t", "r1") == spelled


async def test_a_second_continuation_is_a_fork(chains: Chains) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi")
    _, second = await ask(chains, "r2", "", TEXT, previous_response_id="r1", input="a")
    _, fork = await ask(chains, "r3", "", TEXT, previous_response_id="r1", input="b")
    assert second.conversation == "c1"
    assert fork.conversation != "c1"
    assert fork.parent == "c1"
    _, on = await ask(chains, "r4", "", previous_response_id="r3", input="c")
    assert (on.conversation, on.parent) == (fork.conversation, None)
    _, on = await ask(chains, "r5", "", previous_response_id="r2", input="d")
    assert (on.conversation, on.parent) == ("c1", None)


async def test_without_a_sign_of_another_it_is_no_fork(chains: Chains, state: MemoryState) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi")
    await state.put_response("t", "\0c1", b"", ttl_s=0)  # which one is the newest is forgotten
    _, second = await ask(chains, "r2", "", previous_response_id="r1", input="a")
    assert (second.conversation, second.parent) == ("c1", None)


async def test_a_failed_continuation_leaves_no_mark(chains: Chains) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi")
    failed = await chains.resolve("t", of(previous_response_id="r1", input="a"))
    assert await chains.remember(failed, "c1", answer("r2", status="failed"), False) == "not_complete"
    assert await chains.remember(failed, "c1", b"data: {", True) == "not_complete"
    again = await chains.resolve("t", of(previous_response_id="r1", input="a"))
    assert (again.conversation, again.parent) == ("c1", None)


async def test_unknown_and_others_responses_look_the_same(chains: Chains) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi", tenant="theirs")
    errors = set()
    for tenant, id in (
        ("mine", "r1"),
        ("theirs", "r2"),
        ("theirs", "\0c1"),
        ("theirs", ""),
        ("theirs", "x" * 9999),
    ):
        with pytest.raises(ApiError) as caught:
            await chains.resolve(tenant, of(previous_response_id=id, input="x"))
        errors.add((caught.value.status, caught.value.body().replace(json.dumps(id).encode(), b"")))
        with pytest.raises(ApiError):
            await chains.get(tenant, id)
        assert caught.value.status == 404
    # The id apart, which the message repeats.
    assert len({status for status, _ in errors}) == 1
    assert b"theirs" not in b"".join(body for _, body in errors)


async def test_a_response_that_was_not_to_be_stored_cannot_be_continued(chains: Chains) -> None:
    body = of(input="hi", store=False)
    chain = await chains.resolve("t", body)
    assert await chains.remember(chain, "c1", answer("r1", TEXT), False) == "not_asked"
    with pytest.raises(ApiError):
        await chains.get("t", "r1")
    assert body.raw("store") == b"false"


async def test_a_response_that_is_too_large_cannot_be_continued(chains: Chains) -> None:
    chain = await chains.resolve("t", of(input="x" * 10_000))
    assert await chains.remember(chain, "c1", answer("r1", TEXT), False) == "too_large"
    with pytest.raises(ApiError):
        await chains.get("t", "r1")


async def test_a_message_without_content_is_left_out(chains: Chains) -> None:
    await ask(chains, "r1", "c1", {**TEXT, "content": []}, input="hi")
    body = of(previous_response_id="r1", input="more")
    await chains.resolve("t", body)
    assert json.loads(body.raw("input") or b"") == [USER, {"role": "user", "content": "more"}]


async def test_without_an_input_of_its_own(chains: Chains) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi")
    body = of(previous_response_id="r1")
    await chains.resolve("t", body)
    assert json.loads(body.raw("input") or b"") == [USER, TEXT]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 7, "input": "x"}, "previous_response_id"),
        ({"previous_response_id": "r1", "input": 7}, "input"),
        ({"previous_response_id": "r1", "input": {"role": "user"}}, "input"),
    ],
)
async def test_wrong_types_are_named(chains: Chains, fields: dict[str, Any], param: str) -> None:
    await ask(chains, "r1", "c1", TEXT, input="hi")
    with pytest.raises(ApiError) as caught:
        await chains.resolve("t", of(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_an_input_that_the_engine_will_refuse_goes_on(chains: Chains) -> None:
    body = of(input=7)
    chain = await chains.resolve("t", body)
    assert body.raw("input") == b"7"
    assert await chains.remember(chain, "c1", answer("r1"), False) == "not_complete"
