"""What `carryback explain` says, against what real engines reused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from pair import BLOCK, NAME, Answer, Client, Pair, document
from test_reuse import TOOLS
from tiny_model import no_whitespace

ON = {"explain_bytes": 2**26}
# As Qwen3's: where thinking is switched off, an empty block stands for it, in front of the newest answer alone.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"
    "{%- endif -%}"
)


async def explained(client: Client, conversation: str) -> Any:
    """What the router says of the conversation's last request; some of it checked."""
    path = f"/admin/conversations/default/{conversation}/explain"
    async with client.session.get(client.admin_url + path) as response:
        assert response.status == 200
        return await response.json()


def check(found: Any, answer: Answer) -> None:
    """The comparison names a token in the block where the engine found the difference."""
    reuse = answer.reuse
    assert reuse is not None
    assert (found["outcome"], found["reason"]) == (reuse.outcome, reuse.reason)
    assert (found["reused_tokens"], found["prompt_tokens"]) == (reuse.tokens, reuse.prompt_tokens)
    assert found["compared"] == "tokens", found["why"]
    if reuse.reason == "history_changed":
        assert found["found_tokens"] == reuse.found
        assert reuse.found <= found["parting"]["token"] < reuse.found + BLOCK
        assert found["left_tokens"] > found["found_tokens"]
        assert found["shared_tokens"] == 0
        assert found["causes"]


async def test_an_edited_system_prompt(pair: Pair) -> None:
    def system(minute: int) -> dict[str, Any]:
        return {"role": "system", "content": f"{document(40, 4)} It is 10:0{minute}. {document(41, 4)}"}

    asked = {"role": "user", "content": document(42, 3)}
    async with pair.router(**ON) as client:
        first = await client.chat([system(0), asked], "t")
        said = {"role": "assistant", "content": first.text}
        more = {"role": "user", "content": "Go on."}
        second = await client.chat([system(0), asked, said, more], "t")
        assert second.reuse is not None
        assert second.reuse.outcome == "hit"
        assert (await explained(client, "t"))["causes"] == []
        history = [system(5), asked, said, more, {"role": "assistant", "content": second.text}, more]
        third = await client.chat(history, "t")
        found = await explained(client, "t")
        check(found, third)
        assert [each["code"] for each in found["causes"]] == ["system_prompt_changed"]
        assert "a time" in found["causes"][0]["what"]
        assert found["parting"]["before"].endswith(" It is 10:0")
        assert found["parting"]["held"].startswith("0. Item 41")
        assert found["parting"]["new"].startswith("5. Item 41")
        assert found["parting"]["where"] == "message 0 (system)"


async def test_an_answer_that_was_cut(pair: Pair) -> None:
    asked = {"role": "user", "content": document(43, 12)}
    async with pair.router(**ON) as client:
        first = await client.chat([asked], "t", tokens=120)
        cut = {"role": "assistant", "content": first.text[:70]}
        second = await client.chat([asked, cut, {"role": "user", "content": "Go on."}], "t")
        found = await explained(client, "t")
        check(found, second)
        assert [each["code"] for each in found["causes"]] == ["answer_changed"]
        assert found["parting"]["message"] == 1
        assert first.text[:70].endswith(found["parting"]["before"])
        assert found["parting"]["held"] == first.text[70 : 70 + len(found["parting"]["held"])]
        assert found["parting"]["new"].startswith("<|im_end|>\n<|im_start|>user\nGo on.")


async def test_tool_arguments_that_were_written_anew(pair: Pair) -> None:
    asked = [{"role": "user", "content": document(44, 12)}]
    body: dict[str, Any] = {
        "model": NAME, "messages": asked, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
        "max_tokens": 300, "logit_bias": no_whitespace(),
    }  # fmt: skip
    async with pair.router(**ON) as client:
        headers = {"X-Conversation-ID": "t"}
        body["cache_salt"] = client.salt
        first = await client.post("/v1/chat/completions", body, headers)
        assert first.status == 200, first.raw
        message = first.body["choices"][0]["message"]
        call = message["tool_calls"][0]
        swapped = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
        call["function"]["arguments"] = swapped
        result = {"role": "tool", "tool_call_id": call["id"], "content": document(45, 3)}
        said = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}
        second = await client.chat([*asked, said, result], "t", tools=TOOLS, tool_choice="none")
        found = await explained(client, "t")
        check(found, second)
        assert [each["code"] for each in found["causes"]] == ["arguments_respelled"]
        assert found["parting"]["where"] == "the answer, message 1 (assistant)"


@pytest.mark.parametrize(("path", "number"), [("/v1/responses", 46), ("/v1/messages", 146)])
async def test_endpoints_that_engines_turn_into_chats(pair: Pair, path: str, number: int) -> None:
    """Tools and calls in them are rendered as the engine renders them, or else it is said."""
    tool = TOOLS[0]["function"]
    if path == "/v1/responses":
        field, limit, own, tools = (
            "input",
            "max_output_tokens",
            "instructions",
            # As Codex sends them.
            [
                {"type": "function", **tool},
                {"type": "custom", "name": "apply_patch", "description": "Edits files."},
                {"type": "web_search"},
            ],
        )
        parts = [{"type": "input_text", "text": each} for each in ("<env>", "cwd=/sea</env>")]
        thought = {"type": "reasoning_text", "text": "Look first."}
        calls: list[Any] = [
            {"type": "message", "role": "user", "content": parts},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
            {"type": "function_call", "call_id": "1", "name": tool["name"], "arguments": '{"query": "x"}'},
            {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "1", "output": document(number, 3)},
            {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
        ]
    else:
        field, limit, own = "messages", "max_tokens", "system"
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        ]
        use = {"type": "tool_use", "id": "1", "name": tool["name"], "input": {"query": "x"}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": document(number, 3)}
        calls = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {
        "model": NAME, field: [{"role": "user", "content": document(number + 1, 8)}, *calls], "tools": tools,
        "temperature": 0, limit: 32, own: f"It is 10:00. {document(number + 2, 6)}",
    }  # fmt: skip
    async with pair.router(**ON) as client:
        headers = {"X-Conversation-ID": "t"}
        first = await client.post(path, body, headers)
        assert first.status == 200, first.raw
        second = await client.post(path, {**body, own: f"It is 10:05. {document(number + 2, 6)}"}, headers)
        found = await explained(client, "t")
        assert found["compared"] == "tokens", found["why"]
        check(found, second)
        assert [each["code"] for each in found["causes"]] == ["system_prompt_changed"]
        assert found["parting"]["where"] == "the system prompt"
        assert found["parting"]["held"].startswith(f"0. Item {number + 2}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinking(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A second pair of engines, with a template that has a switch for thinking."""
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "template.jinja").write_text(TEMPLATE)
    async with pair.beside(folder, "--chat-template", str(folder / "template.jinja")) as thinking:
        yield thinking


@pytest.mark.parametrize(
    ("first", "switches"), [(50, [False] * 3), (60, [True] * 3), (70, [False, True, False])]
)
async def test_a_template_that_rewrites_old_turns(thinking: Pair, first: int, switches: list[bool]) -> None:
    async with thinking.router(**ON) as client:
        history: list[dict[str, Any]] = []
        before: bool | None = None
        for turn, switch in enumerate(switches):
            history.append({"role": "user", "content": document(first + turn, 4)})
            fields = {"chat_template_kwargs": {"enable_thinking": switch}}
            answer = await client.chat(history, "t", tokens=80, **fields)
            answer.assert_same(await client.chat(history, None, reuse=False, tokens=80, **fields))
            reuse = answer.reuse
            assert reuse is not None
            if before is True:
                assert reuse.outcome == "hit"
            elif before is False:
                assert reuse.outcome == "partial"
                found = await explained(client, "t")
                check(found, answer)
                code = "template_drops_reasoning" if switch is False else "chat_template_kwargs_changed"
                assert [each["code"] for each in found["causes"]] == [code]
                assert found["parting"]["before"].endswith("<|im_start|>assistant\n")
                assert found["parting"]["held"].startswith("<think>\n\n</think>\n\n")
                assert found["parting"]["new"].startswith(history[-2]["content"][:20])
                assert found["parting"]["message"] == len(history) - 2
            before = switch
            history.append({"role": "assistant", "content": answer.text})
