"""What differs between the endpoints: the two hops' bodies, how an answer streams, ends and fails.

Formats: https://platform.openai.com/docs/api-reference (chat, completions, responses) and
https://docs.anthropic.com/en/api/messages, as vLLM serves them (`vllm/entrypoints/openai`, `.../anthropic`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from aiohttp import web
from carryback.wire.outside import Malformed, decode

from carryback_server.body import Body
from carryback_server.errors import ApiError

Boundary = Literal["mid_turn", "turn_end", "unfinished"]
"Where an answer leaves its turn: a tool is called; it is over; or the answer did not come to its end."

Messages = list[dict[str, Any]]

_T = TypeVar("_T")

# Of a stream, what is looked at for how it ended: the newest pieces that came, and bytes of them at most.
TAIL_PIECES = 8
TAIL_BYTES = 16 * 1024
# Of a last event with the whole answer in it; one that is longer is passed on, and not looked at.
LAST_BYTES = 16 * 1024 * 1024
# An event ends with an empty line. Lines end with LF, CR LF or CR.
_BLANK = re.compile(rb"\n\r?\n|\r\r")

# What only matters for the answer, and costs the prefill engine work or is refused beside one token.
_ANSWER_ONLY = frozenset(
    {
        "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens",
        "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", "logprob_token_ids",
        "response_format", "structured_outputs", "parallel_tool_calls", "return_token_ids",
        "return_prompt_text",
    }
)  # fmt: skip

_UNFINISHED = (None, "", "abort", "error")


class _Call(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _Call | None = None
    message: _Call | None = None


class _Choices(msgspec.Struct):
    """A chat or text completion, or a chunk of one."""

    choices: list[_Choice] = []


class _Item(msgspec.Struct):
    type: str = ""


class _Response(msgspec.Struct):
    status: str = ""
    output: list[_Item] = []


class _Stop(msgspec.Struct):
    stop_reason: str | None = None


class _MessageDelta(msgspec.Struct):
    delta: _Stop


class Endpoint:
    """One endpoint that generates text. Shared by all its requests.

    Attributes:
        path: of its URL.
        keeps_last: all of a stream's last event is remembered, since the whole answer is in it.
    """

    path: ClassVar[str]
    keeps_last: ClassVar[bool] = False
    # How it spells the number of tokens to generate.
    _limit: ClassVar[str]
    _answer_only: ClassVar[frozenset[str]] = _ANSWER_ONLY
    # The line that begins a stream's last event, and words of it that are quicker to look for.
    _last_line: ClassVar[re.Pattern[bytes]]
    _last_words: ClassVar[tuple[bytes, ...]]

    # -- the request

    def alone(self, body: Body) -> str:
        """Why a request goes to a decode engine alone; empty if it goes through both hops.

        What it asks for needs the whole prompt computed there, or several answers, which one transfer
        cannot feed.

        Raises:
            ApiError: 400, the request asks for what cannot be served at all.
        """
        return ""

    def messages(self, body: Body) -> tuple[Messages, Messages | None] | None:
        """What was said, and the tools, as `carryback.identity` reads them; None if the request has no
        messages, or malformed ones.

        Raises:
            ApiError: 400, invalid JSON.
        """
        return None

    def for_prefill(self, body: Body, params: Mapping[str, Any]) -> bytes:
        """The prefill hop's body: the same prompt, one token, not streamed, no grammar.

        Args:
            params: its `kv_transfer_params`.
        """
        changes = {self._limit: 1, **self._prefill_changes(body), "kv_transfer_params": params}
        return body.encode(changes, self._answer_only)

    def _prefill_changes(self, body: Body) -> dict[str, Any]:
        return {}

    def changes_tools(self, body: Body) -> bool:
        """Whether the prefill hop asks for another choice of tools than the client: one that an engine may
        refuse, though it would serve the client's."""
        return "tool_choice" in self._prefill_changes(body)

    def for_decode(self, body: Body, params: Mapping[str, Any]) -> bytes:
        """The decode hop's body: the client's, with these `kv_transfer_params`."""
        return body.encode({"kv_transfer_params": params})

    # -- a streamed answer

    def watch(self) -> Watch:
        """Something that looks for the end of one streamed answer."""
        return Watch(self._last_line, self._last_words, keeps_last=self.keeps_last)

    def is_preliminary(self, head: bytes) -> bool:
        """Whether the first bytes of a stream say nothing yet.

        Engines greet before they know whether the request will work: only what comes after is an answer.
        """
        return all(self._is_greeting(name, data) for name, data in events(head))

    def _is_greeting(self, name: bytes, data: bytes) -> bool:
        raise NotImplementedError

    def stream_error(self, head: bytes) -> bytes | None:
        """The error, as this endpoint's error object (JSON), of a stream that begins with one."""
        if b"error" not in head and b"failed" not in head:
            return None
        for name, data in events(head):
            if (error := self._error(name, data)) is not None:
                return error
            if not self._is_greeting(name, data):
                break
        return None

    def _error(self, name: bytes, data: bytes) -> bytes | None:
        raise NotImplementedError

    # -- an answer's end

    def boundary(self, data: bytes, streamed: bool) -> Boundary:
        """Where a complete answer leaves its turn.

        Args:
            data: all of it, or `Watch.tail` of a streamed one.
        """
        raise NotImplementedError

    # -- errors of the router's own

    def error_body(self, error: ApiError) -> bytes:
        """An error object, JSON, as clients of this endpoint expect it."""
        return error.body()

    def error(self, error: ApiError, headers: Mapping[str, str]) -> web.Response:
        """A whole answer that says so, with these headers and the error's own."""
        return web.Response(
            status=error.status,
            body=self.error_body(error),
            content_type="application/json",
            headers={**headers, **error.headers},
        )

    def error_event(self, error: ApiError, tail: bytes = b"") -> bytes:
        """The event that ends a stream with an error.

        Args:
            tail: what `Watch.tail` has of the stream, which may have broken off within an event.
        """
        return _after(tail) + b"data: " + self.error_body(error) + b"\n\n"


class Watch:
    """Looks for the end of one streamed answer, in whatever pieces it comes."""

    def __init__(self, last_line: re.Pattern[bytes], words: tuple[bytes, ...], *, keeps_last: bool) -> None:
        self._last_line = last_line
        self._words = words
        self._keeps_last = keeps_last
        # The newest pieces, put together so that each begins with an event.
        self._pieces: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self._is_whole = True  # the newest ends with an event
        # The last event from its name on, once it has begun, and where in it its end may be.
        self._last = bytearray()
        self._most = LAST_BYTES if keeps_last else TAIL_BYTES
        self._look_from = 0

    @property
    def tail(self) -> bytes:
        """The newest bytes; from the answer's end on, if the endpoint `keeps_last`, its last event."""
        if self._keeps_last and self._last:
            return bytes(self._last)
        return b"".join(self._pieces)[-TAIL_BYTES:]

    def ends(self, piece: bytes) -> bool:
        """Take the next piece; whether the answer is complete with it.

        What a model says cannot be taken for an end: it has no line ends in it.
        """
        if self._last:
            self._last += piece
            is_over = self._has_last_end()
            if len(self._last) > self._most:
                del self._last[:-3]
                self._look_from = 0
            return is_over
        if not self._is_whole:
            before = self._pieces.pop()
            if len(before) > TAIL_BYTES:
                # No more than that is copied again with each piece. What is left does not begin a line.
                before = b"." + before[-TAIL_BYTES:]
            piece = before + piece
        self._is_whole = piece.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
        self._pieces.append(piece)
        for word in self._words:
            if word in piece:
                break
        else:
            return False
        piece = b"\n" + piece
        if (match := self._last_line.search(piece)) is None:
            return False
        self._last += piece[match.start() :]
        self._look_from = match.end() - match.start()
        return self._has_last_end()

    def _has_last_end(self) -> bool:
        is_over = _BLANK.search(self._last, self._look_from) is not None
        self._look_from = max(self._look_from, len(self._last) - 3)
        return is_over


class _Choosing(Endpoint):
    """What chat and text completions have in common."""

    _last_line = re.compile(rb"[\r\n]data: ?\[DONE\]")
    _last_words = (b"[DONE]",)

    def alone(self, body: Body) -> str:
        """See `Endpoint.alone`."""
        if not _is_one(body, "n") or not _is_one(body, "best_of") or body.flag("use_beam_search"):
            return "several_answers"
        if body.flag("echo") or body.has("prompt_logprobs"):
            return "prompt_logprobs"
        return ""

    def _error(self, name: bytes, data: bytes) -> bytes | None:
        fields = _object(data)
        return data if fields is not None and fields.get("error") else None

    def boundary(self, data: bytes, streamed: bool) -> Boundary:
        """See `Endpoint.boundary`."""
        calls = False
        reason = None
        for _, part in events(data) if streamed else [(b"", data)]:
            if (chunk := _decoded(part, _Choices)) is None:
                continue
            for choice in chunk.choices:
                said = choice.delta or choice.message
                # A call that was forced by name ends with `stop`.
                calls = calls or bool(said and said.tool_calls)
                reason = choice.finish_reason or reason
        if reason in _UNFINISHED:
            return "unfinished"
        is_call = reason in ("tool_calls", "function_call") or (reason == "stop" and calls)
        return "mid_turn" if is_call else "turn_end"


class Chat(_Choosing):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    _limit = "max_completion_tokens"

    def messages(self, body: Body) -> tuple[Messages, Messages | None] | None:
        """See `Endpoint.messages`."""
        return _said([], body.get("messages"), body)

    def _prefill_changes(self, body: Body) -> dict[str, Any]:
        # Neither costs a grammar, and with both the tools render as they do for the client's own choice.
        is_forced = body.starts("tool_choice") not in (b"", b"null", b'"auto"', b'"none"')
        return {"tool_choice": "auto"} if is_forced else {}

    def _is_greeting(self, name: bytes, data: bytes) -> bool:
        chunk = _object(data)
        if chunk is None or chunk.get("error") or not isinstance(choices := chunk.get("choices"), list):
            return False
        return all(isinstance(choice, dict) and _says_nothing(choice) for choice in choices)


class Completions(_Choosing):
    """`/v1/completions`: a text or token ids."""

    path = "/v1/completions"
    _limit = "max_tokens"

    def alone(self, body: Body) -> str:
        """See `Endpoint.alone`."""
        if body.has("prompt_embeds"):
            return "prompt_embeds"
        return super().alone(body) or ("several_prompts" if _are_several(body) else "")

    def _is_greeting(self, name: bytes, data: bytes) -> bool:
        return False


class Responses(Endpoint):
    """`/v1/responses`. `previous_response_id` is resolved before (`carryback_server.chains`)."""

    path = "/v1/responses"
    keeps_last = True
    _limit = "max_output_tokens"
    _answer_only = _ANSWER_ONLY | {
        "background", "include", "max_tool_calls", "text", "enable_response_messages",
    }  # fmt: skip
    _last_line = re.compile(rb"[\r\n]event: ?response\.(?:completed|incomplete|failed)")
    _last_words = (b"response.completed", b"response.incomplete", b"response.failed")

    def alone(self, body: Body) -> str:
        """See `Endpoint.alone`."""
        if body.flag("background"):
            raise ApiError(
                400,
                "background responses are not served: nothing runs on without its request",
                code="background_not_served",
                param="background",
            )
        return ""

    def messages(self, body: Body) -> tuple[Messages, Messages | None] | None:
        """See `Endpoint.messages`."""
        instructions, said = body.get("instructions"), body.get("input")
        if isinstance(said, str):
            said = [{"role": "user", "content": said}]
        return _said([{"role": "system", "content": instructions}] if instructions else [], said, body)

    def _prefill_changes(self, body: Body) -> dict[str, Any]:
        is_forced = body.starts("tool_choice") not in (b"", b"null", b'"auto"', b'"none"')
        return {"store": False} | ({"tool_choice": "auto"} if is_forced else {})

    def _is_greeting(self, name: bytes, data: bytes) -> bool:
        return name in (b"response.created", b"response.queued", b"response.in_progress")

    def _error(self, name: bytes, data: bytes) -> bytes | None:
        fields = _object(data)
        if fields is None:
            return None
        error: Any = None
        if name == b"response.failed" and isinstance(response := fields.get("response"), dict):
            error = response.get("error") or {}
        elif name == b"error" or fields.get("error"):
            error = fields.get("error") or fields
        if not isinstance(error, dict):
            return None
        names = ("message", "type", "param", "code")
        return msgspec.json.encode(
            {
                "error": {
                    "message": "the engine failed",
                    **{each: error[each] for each in names if each in error},
                }
            }
        )

    def boundary(self, data: bytes, streamed: bool) -> Boundary:
        """See `Endpoint.boundary`."""
        response = _decoded(final_response(data, streamed), _Response)
        if response is None or response.status not in ("completed", "incomplete"):
            return "unfinished"
        # What the client has to do; other calls the server has done itself.
        theirs = ("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call",
                  "apply_patch_call", "mcp_approval_request")  # fmt: skip
        return "mid_turn" if any(item.type in theirs for item in response.output) else "turn_end"

    def error_event(self, error: ApiError, tail: bytes = b"") -> bytes:
        """See `Endpoint.error_event`. Flat, as documented, and with `error`, which the official client raises."""
        # Not what a model says: its quotes have a backslash.
        numbers = re.findall(rb'"sequence_number"\s*:\s*(\d{1,18})(?!\d)', tail)
        fields: dict[str, Any] = msgspec.json.decode(error.body())
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            "error": fields["error"],
        }
        return _after(tail) + b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


class AnthropicMessages(Endpoint):
    """`/v1/messages`."""

    path = "/v1/messages"
    _limit = "max_tokens"
    _answer_only = _ANSWER_ONLY | {"stop_sequences"}
    _last_line = re.compile(rb"[\r\n]event: ?message_stop")
    _last_words = (b"message_stop",)

    def messages(self, body: Body) -> tuple[Messages, Messages | None] | None:
        """See `Endpoint.messages`."""
        system = body.get("system")
        if isinstance(system, list):
            # Claude Code's first block has a digest of the request in it. No engine renders it.
            system = [part for part in system if not _is_billing(part)]
        return _said([{"role": "system", "content": system}] if system else [], body.get("messages"), body)

    def _prefill_changes(self, body: Body) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        choice, output = body.get("tool_choice"), body.get("output_config")
        if isinstance(choice, dict) and choice.get("type") != "none":
            changes["tool_choice"] = {"type": "auto"}
        if isinstance(output, dict) and "format" in output:
            # The effort renders into the prompt.
            changes["output_config"] = {name: value for name, value in output.items() if name != "format"}
        return changes

    def _is_greeting(self, name: bytes, data: bytes) -> bool:
        return name in (b"message_start", b"ping")

    def _error(self, name: bytes, data: bytes) -> bytes | None:
        return data if name == b"error" else None

    def boundary(self, data: bytes, streamed: bool) -> Boundary:
        """See `Endpoint.boundary`."""
        reason = None
        if streamed:
            for name, part in events(data):
                if name == b"message_delta" and (event := _decoded(part, _MessageDelta)) is not None:
                    reason = event.delta.stop_reason or reason
        elif (message := _decoded(data, _Stop)) is not None:
            reason = message.stop_reason
        if reason in _UNFINISHED:
            return "unfinished"
        return "mid_turn" if reason in ("tool_use", "pause_turn") else "turn_end"

    def error_body(self, error: ApiError) -> bytes:
        """See `Endpoint.error_body`."""
        kind = _ANTHROPIC_TYPES.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})

    def error_event(self, error: ApiError, tail: bytes = b"") -> bytes:
        """See `Endpoint.error_event`."""
        return _after(tail) + b"event: error\ndata: " + self.error_body(error) + b"\n\n"


# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint for endpoint in (Chat(), Completions(), Responses(), AnthropicMessages())
}

# One engine, any, answers these at once: they need no KV.
FORWARDED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")

# Served by engines of other kinds.
REFUSED = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip


def refused(path: str) -> ApiError:
    """The error for a path of `REFUSED`: a 404, which clients do not try again."""
    return ApiError(
        404,
        f"{path} is not served here: this router is for text generation. Send it to an engine that serves it.",
        code="endpoint_not_served",
    )


def error_response(path: str, error: ApiError, headers: Mapping[str, str]) -> web.Response:
    """An error of the router's own, as clients of this path expect it."""
    spoken = "/v1/messages" if path.startswith("/v1/messages") else "/v1/chat/completions"
    return ENDPOINTS[spoken].error(error, headers)


def final_response(data: bytes, streamed: bool) -> bytes:
    """The response object, JSON, of a complete answer of `/v1/responses`; empty if there is none.

    Args:
        data: all of it, or `Watch.tail` of a streamed one.
    """
    if not streamed:
        return data
    for _, part in events(data):
        fields = _decoded(part, dict[str, msgspec.Raw])
        if fields is not None and (response := fields.get("response")) is not None:
            return bytes(response)
    return b""


def events(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The events, name and data, that end within a part of a stream.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """
    name, lines = b"", list[bytes]()
    for line in data.splitlines():
        if not line:
            if lines:
                yield name, b"\n".join(lines)
            name, lines = b"", []
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].removeprefix(b" ")


def _after(tail: bytes) -> bytes:
    """What a new event has to begin with."""
    return b"" if not tail.strip() or _BLANK.search(tail, len(tail) - 3) else b"\n\n"


def _decoded(data: bytes, type: type[_T]) -> _T | None:
    """Some of the fields of a JSON object; None if it is not one like that."""
    try:
        return decode(msgspec.json.Decoder(type).decode, data, "an answer")
    except Malformed:
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    return _decoded(data, dict[str, Any])


def _said(before: Messages, said: object, body: Body) -> tuple[Messages, Messages | None] | None:
    if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
        return None
    tools = body.get("tools")
    return before + said, tools if isinstance(tools, list) else None


def _says_nothing(choice: dict[str, Any]) -> bool:
    """A chunk that only says the role."""
    delta = choice.get("delta")
    rest = {name: value for name, value in choice.items() if name not in ("delta", "index")}
    said = {name: value for name, value in delta.items() if name != "role"} if isinstance(delta, dict) else {}
    return not any(rest.values()) and not any(said.values())


def _is_one(body: Body, name: str) -> bool:
    return body.starts(name) in (b"", b"null", b"1")


def _are_several(body: Body) -> bool:
    """Whether a completion has several prompts. Token ids, a list too, are one."""
    start = re.match(rb"\[\s*(.)", body.starts("prompt", 64), re.DOTALL)
    if start is None or start[1] not in b'"[':
        return False
    return len(msgspec.json.decode(body.raw("prompt") or b"[]", type=list[msgspec.Raw])) != 1


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")
