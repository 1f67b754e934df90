"""Answers in the shapes that vLLM 0.32 gives them, whole and as streams of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Answer, Prompt, tokenize

DONE = "data: [DONE]\n\n"


class Shape(Protocol):
    """How one endpoint says an answer."""

    def whole(self, answers: Sequence[Answer], params: dict[str, Any] | None) -> dict[str, Any]:
        """Not streamed; `params` are the `kv_transfer_params`."""

    def start(self) -> Iterator[str]:
        """Events that come before the first token."""

    def piece(self, index: int, number: int, answer: Answer) -> Iterator[str]:
        """Events for a part of an answer, by its number in `parts`."""

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Events that come once the answers are complete."""

    def failed(self, message: str) -> Iterator[str]:
        """Events that say that the engine failed; none: vLLM breaks off here."""


def parts(answer: Answer) -> list[str]:
    """What of an answer is streamed piece by piece: its text, or the arguments of its call."""
    return tokenize(answer.call[1]) if answer.call else answer.pieces


def error_object(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """vLLM's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def dump(value: object) -> str:
    """JSON as pydantic writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _data(value: object) -> str:
    return f"data: {dump(value)}\n\n"


def _named(value: dict[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {dump(value)}\n\n"


class _OpenAI:
    """What chat completions and completions have in common."""

    kind: str
    chunk_kind: str

    def __init__(self, name: str, model: str, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        self._body = body
        self._prompts = prompts
        self._n = body.get("n") or 1
        self._head = {"id": name, "object": self.chunk_kind, "created": int(time.time()), "model": model}
        options = body.get("stream_options") or {}
        self._wants_usage = bool(options.get("include_usage"))
        self._is_continuous = self._wants_usage and bool(options.get("continuous_usage_stats"))

    def _usage(self, completion: int) -> dict[str, Any]:
        prompt = sum(len(each.tokens) for each in self._prompts)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
        }

    def _whole(
        self, choices: list[dict[str, Any]], answers: Sequence[Answer], params: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(sum(len(answer.tokens) for answer in answers)),
            "prompt_logprobs": None,
            "kv_transfer_params": params,
        }

    def _chunk(self, choice: dict[str, Any], completion: int) -> str:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._is_continuous:
            chunk["usage"] = self._usage(completion)
        return _data(chunk)

    def _last(self, answers: Sequence[Answer]) -> Iterator[str]:
        if self._wants_usage:
            usage = self._usage(sum(len(answer.tokens) for answer in answers))
            yield _data({**self._head, "choices": [], "usage": usage})
        yield DONE

    def failed(self, message: str) -> Iterator[str]:
        yield _data(error_object(500, message, "InternalServerError"))
        yield DONE


class Chat(_OpenAI):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, answers: Sequence[Answer], params: dict[str, Any] | None) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            message: dict[str, Any] = {
                "role": "assistant", "content": answer.text, "refusal": None, "annotations": None,
                "audio": None, "function_call": None, "reasoning": None,
            }  # fmt: skip
            if answer.call:
                name, arguments = answer.call
                function = {"name": name, "arguments": arguments}
                message["tool_calls"] = [{"id": _call_id(), "type": "function", "function": function}]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.pieces),
                    "finish_reason": answer.finish,
                    "stop_reason": None,
                    "token_ids": None,
                }
            )
        return self._whole(choices, answers, params)

    def start(self) -> Iterator[str]:
        for index in range(self._n):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, 0)

    def piece(self, index: int, number: int, answer: Answer) -> Iterator[str]:
        text = parts(answer)[number]
        delta: dict[str, Any] = {"content": text}
        if answer.call:
            call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
            if number == 0:
                call = {"id": _call_id(), "type": "function", "index": 0}
                call["function"] = {"name": answer.call[0], "arguments": ""}
                yield self._choice(index, {"tool_calls": [call]}, 1)
                call = {"index": 0, "function": {"arguments": text}}
            delta = {"tool_calls": [call]}
        yield self._choice(index, delta, number + 1, self._logprobs([text]))

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        for index, answer in enumerate(answers):
            choice = {"index": index, "delta": {"content": ""}, "logprobs": None}
            choice |= {"finish_reason": answer.finish, "stop_reason": None, "token_ids": None}
            yield self._chunk(choice, len(answer.tokens))
        yield from self._last(answers)

    def _choice(
        self, index: int, delta: dict[str, Any], completion: int, logprobs: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        return self._chunk({**choice, "finish_reason": None, "token_ids": None}, completion)

    def _logprobs(self, pieces: Sequence[str]) -> dict[str, Any] | None:
        if not self._body.get("logprobs"):
            return None
        top = self._body.get("top_logprobs") or 0
        content = []
        for piece in pieces:
            entry = {"token": piece, "logprob": -0.5, "bytes": list(piece.encode())}
            content.append({**entry, "top_logprobs": [entry] if top else []})
        return {"content": content}


class Completion(_OpenAI):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def whole(self, answers: Sequence[Answer], params: dict[str, Any] | None) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self._echo(index) + answer.text,
                "logprobs": self._logprobs(answer.pieces),
                "finish_reason": answer.finish,
                "stop_reason": None,
                "prompt_logprobs": None,
            }
            for index, answer in enumerate(answers)
        ]
        return self._whole(choices, answers, params)

    def start(self) -> Iterator[str]:
        yield from ()

    def piece(self, index: int, number: int, answer: Answer) -> Iterator[str]:
        text = parts(answer)[number]
        choice = {"index": index, "text": (self._echo(index) if number == 0 else "") + text}
        choice |= {"logprobs": self._logprobs([text]), "finish_reason": None, "stop_reason": None}
        yield self._chunk(choice, number + 1)

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        for index, answer in enumerate(answers):
            choice = {"index": index, "text": "", "logprobs": None}
            yield self._chunk(
                {**choice, "finish_reason": answer.finish, "stop_reason": None}, len(answer.tokens)
            )
        yield from self._last(answers)

    def _echo(self, index: int) -> str:
        return self._prompts[index // self._n].text if self._body.get("echo") else ""

    def _logprobs(self, pieces: Sequence[str]) -> dict[str, Any] | None:
        if self._body.get("logprobs") is None:
            return None
        return {
            "text_offset": [0] * len(pieces),
            "token_logprobs": [-0.5] * len(pieces),
            "tokens": list(pieces),
            "top_logprobs": [{piece: -0.5} for piece in pieces],
        }


class Responses:
    """`/v1/responses`."""

    def __init__(self, name: str, model: str, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        self._prompt = prompts[0]
        self._number = 0
        self._item: dict[str, Any] = {}
        self._head: dict[str, Any] = {
            "id": name, "created_at": int(time.time()), "incomplete_details": None,
            "instructions": body.get("instructions"), "metadata": body.get("metadata"), "model": model,
            "object": "response", "output": [], "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature", 1.0), "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [], "top_p": body.get("top_p", 1.0), "background": False,
            "max_output_tokens": body.get("max_output_tokens"), "max_tool_calls": None,
            "previous_response_id": None, "prompt": None, "reasoning": body.get("reasoning"),
            "service_tier": "auto", "status": "in_progress", "text": body.get("text"), "top_logprobs": None,
            "truncation": body.get("truncation", "disabled"), "usage": None, "user": body.get("user"),
            "kv_transfer_params": None,
        }  # fmt: skip

    def whole(self, answers: Sequence[Answer], params: dict[str, Any] | None) -> dict[str, Any]:
        [answer] = answers
        prompt, completion = len(self._prompt.tokens), len(answer.tokens)
        is_cut = answer.finish == "length"
        return {
            **self._head,
            "output": [self._done(answer)],
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
                "total_tokens": prompt + completion,
            },
            "kv_transfer_params": params,
        }

    def start(self) -> Iterator[str]:
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def piece(self, index: int, number: int, answer: Answer) -> Iterator[str]:
        if number == 0:
            yield from self._open(answer)
        where = {"item_id": self._item["id"], "output_index": 0}
        delta = parts(answer)[number]
        if answer.call:
            yield self._event("response.function_call_arguments.delta", **where, delta=delta)
        else:
            text = {"content_index": 0, "delta": delta, "logprobs": []}
            yield self._event("response.output_text.delta", **where, **text)

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        [answer] = answers
        done = self._done(answer)
        where = {"item_id": done["id"], "output_index": 0}
        if answer.call:
            name, arguments = answer.call
            yield self._event(
                "response.function_call_arguments.done", **where, name=name, arguments=arguments
            )
        else:
            text = {"content_index": 0, "text": answer.text, "logprobs": []}
            yield self._event("response.output_text.done", **where, **text)
            yield self._event("response.content_part.done", **where, content_index=0, part=done["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=done)
        # vLLM ends with this one whatever the status in it is.
        yield self._event("response.completed", response=self.whole(answers, None))

    def failed(self, message: str) -> Iterator[str]:
        yield from ()

    def _open(self, answer: Answer) -> Iterator[str]:
        empty: dict[str, Any] = {"arguments": ""} if answer.call else {"content": []}
        item = {**self._done(answer), **empty, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=0, item=item)
        if not answer.call:
            part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
            yield self._event("response.content_part.added", **where, part=part)

    def _done(self, answer: Answer) -> dict[str, Any]:
        """The one item of the output, complete."""
        if not self._item:
            self._item = {"id": f"{'fc' if answer.call else 'msg'}_{uuid.uuid4().hex[:16]}"}
            if answer.call:
                self._item |= {"type": "function_call", "call_id": _call_id(), "name": answer.call[0]}
            else:
                self._item |= {"type": "message", "role": "assistant"}
        if answer.call:
            return {**self._item, "arguments": answer.call[1], "status": "completed"}
        part: dict[str, Any] = {
            "annotations": [],
            "text": answer.text,
            "type": "output_text",
            "logprobs": None,
        }
        return {**self._item, "content": [part], "status": "completed"}

    def _event(self, kind: str, **fields: Any) -> str:
        event = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        return _named(event)


class Messages:
    """`/v1/messages`, Anthropic's."""

    def __init__(self, name: str, model: str, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        self._prompt = prompts[0]
        self._head: dict[str, Any] = {
            "id": name, "type": "message", "role": "assistant", "content": [], "model": model,
        }  # fmt: skip

    def whole(self, answers: Sequence[Answer], params: dict[str, Any] | None) -> dict[str, Any]:
        [answer] = answers
        block: dict[str, Any] = {"type": "text", "text": answer.text}
        if answer.call:
            name, arguments = answer.call
            block = {"type": "tool_use", "id": _call_id(), "name": name, "input": json.loads(arguments)}
        whole = {
            **self._head,
            "content": [block],
            "stop_reason": _stop_reason(answer),
            "usage": {"input_tokens": len(self._prompt.tokens), "output_tokens": len(answer.tokens)},
        }
        return whole if params is None else {**whole, "kv_transfer_params": params}

    def start(self) -> Iterator[str]:
        message = {**self._head, "stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": len(self._prompt.tokens), "output_tokens": 0}
        yield _named({"type": "message_start", "message": message})

    def piece(self, index: int, number: int, answer: Answer) -> Iterator[str]:
        text = parts(answer)[number]
        if number == 0:
            block: dict[str, Any] = {"type": "text", "text": ""}
            if answer.call:
                block = {"type": "tool_use", "id": _call_id(), "name": answer.call[0], "input": {}}
            yield _named({"type": "content_block_start", "content_block": block, "index": 0})
        delta = {"type": "text_delta", "text": text}
        if answer.call:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield _named({"type": "content_block_delta", "delta": delta, "index": 0})

    def end(self, answers: Sequence[Answer]) -> Iterator[str]:
        [answer] = answers
        yield _named({"type": "content_block_stop", "index": 0})
        usage = {"input_tokens": len(self._prompt.tokens), "output_tokens": len(answer.tokens)}
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        yield _named({"type": "message_delta", "delta": delta, "usage": usage})
        yield _named({"type": "message_stop"})

    def failed(self, message: str) -> Iterator[str]:
        error = {"type": "internal_error", "message": message}
        yield _named({"type": "error", "error": error})


def _stop_reason(answer: Answer) -> str:
    if answer.finish == "length":
        return "max_tokens"
    return "tool_use" if answer.call else "end_turn"


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


SHAPES: dict[str, type[Chat] | type[Completion] | type[Responses] | type[Messages]] = {
    CHAT: Chat,
    COMPLETIONS: Completion,
    RESPONSES: Responses,
    MESSAGES: Messages,
}
