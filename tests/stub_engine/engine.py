"""The stub engine: HTTP server, ranks and faults together."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import zmq
from carryback.wire.events import Event, encode
from carryback_server.config import EngineConfig
from carryback_vllm.seal import KEY_VARIABLE, Sealer

from stub_engine.blocks import BlockPool
from stub_engine.faults import NO_FAULT, Fault
from stub_engine.http_server import Connection, HttpServer, Request, framed
from stub_engine.prompts import (
    BLOCK_SIZE,
    CHAT,
    COMPLETIONS,
    LIMITS,
    MESSAGES,
    RESPONSES,
    Answer,
    Invalid,
    Prompt,
    answer,
    detokenize,
    limit_of,
    prompts_of,
)  # fmt: skip
from stub_engine.publisher import Publisher
from stub_engine.rank import Job, LoadFailed, Log, Rank, Settings
from stub_engine.received import Received
from stub_engine.shapes import SHAPES, Shape, dump, error_object, parts
from stub_engine.side_channel import Contents, SideChannel
from stub_engine.writer import Dropped, Failed, Writer

DEFAULT_KEY = "the key of the tests"
# Fields of the wrong type are refused; null is as good as absent.
_TYPES = {
    "model": str, "stream": bool, "stream_options": dict, "n": int, "min_tokens": int, "ignore_eos": bool,
    "tools": list, "top_logprobs": int, "echo": bool, "cache_salt": str, "instructions": str,
    "kv_transfer_params": dict,
}  # fmt: skip
_BIND_TRIES = 20


class StubEngine:
    """An engine for tests of the router: `async with StubEngine("prefill") as engine: ...`.

    Args:
        role: of its configuration; an engine serves both hops.
        port: of the HTTP server; 0: a free one, which it keeps over restarts.
        events_port: of rank 0's events; 0: a free one.
        capacity: KV blocks of 16 tokens of each rank.
        max_model_len: tokens of a prompt and its answer at most; what the blocks can hold unless given.
        answer_tokens: tokens of an answer that may have them.
        ttft_s: before the answer, or its first event.
        chunk_interval_s: before each further token.
        api_key: what clients must send as a bearer token; empty: nothing.
        key: the secret of the seals; `CARRYBACK_KEY` unless given.
        sealer: how it seals and verifies; another release may do that differently.
        frames: how its events are written, likewise.
        settings: of the plug-in.
        version: of vLLM, as it says.
        about: what it says that it is, where that is not the truth; None: nothing, as engines of before.
        clock_offset_s: by how much its wall clock is wrong.
        events_key: the secret of the events.
        journal: a file for violations, which outlives a process that is killed.

    Attributes:
        id: of this start, for transfers; with several ranks, of none of them.
        url, events: where it is.
        ranks: its data-parallel ranks.
        received: requests to `/v1/...`, in order.
        faults: to come; see `fault`.
    """

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        events_port: int = 0,
        model: str = "stub",
        name: str = "",
        capacity: int = 4096,
        max_model_len: int | None = None,
        answer_tokens: int = 16,
        ttft_s: float = 0.0,
        chunk_interval_s: float = 0.0,
        ranks: int = 1,
        api_key: str = "",
        key: str | None = None,
        sealer: type[Sealer] = Sealer,
        frames: Callable[[Event], tuple[bytes, bytes]] = encode,
        settings: Settings = Settings(),  # noqa: B008 -- frozen
        version: str = "0.32.0",
        about: Mapping[str, Any] | None = {},
        clock_offset_s: float = 0.0,
        events_key: str | None = None,
        journal: Path | None = None,
    ) -> None:
        self.role = role
        self.model = model
        self.name = name
        self.capacity = capacity
        self.max_model_len = max_model_len or (capacity - 1) * BLOCK_SIZE
        self.answer_tokens = answer_tokens
        self.ttft_s = ttft_s
        self.chunk_interval_s = chunk_interval_s
        self.api_key = api_key
        self.settings = settings
        self.version = version
        self._about = about
        self._clock_offset_s = clock_offset_s
        self._events_key = events_key
        self._caches = role == "decode" if settings.caching is None else settings.caching
        self.ranks: list[Rank] = []
        self.received: list[Received] = []
        self.faults: list[Fault] = []
        self._host = host
        self._bracketed = f"[{host}]" if ":" in host else host
        self._port, self._events_port, self._side_port = port, events_port, 0
        self._rank_count = ranks
        self._sealer = sealer((os.environ.get(KEY_VARIABLE) or DEFAULT_KEY if key is None else key).encode())
        self._frames = frames
        self._log = Log(journal)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Start, or start again: at the same addresses, under a new id, with an empty cache."""
        self.id = uuid.uuid4().hex
        self._side = SideChannel(self._read)
        self._side_port = await self._side.start(self._host, self._side_port)
        publishers = self._publishers()
        self._events_port = int(publishers[0].address.rpartition(":")[2])
        self.events = publishers[0].address
        self.ranks = [
            Rank(
                publisher.engine, (self._host, self._side_port), publisher, BlockPool(self.capacity),
                self._sealer, self.settings, self._log, caches=self._caches, secret=self._events_key,
            )
            for publisher in publishers
        ]  # fmt: skip
        self._http = HttpServer(self._handle)
        self._port = await self._http.start(self._host, self._port)
        self.url = f"http://{self._bracketed}:{self._port}"
        self._is_up = True

    async def kill(self) -> None:
        """End at once, as a process that is killed: ports closed, connections broken off, KV gone."""
        if not self._is_up:
            return
        self._is_up = False
        for rank in self.ranks:
            rank.stop()
        await self._http.kill()
        await self._side.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self.ranks:
            rank.publisher.close()
        self.ranks = []

    def config(self) -> EngineConfig:
        """This engine, for the router's configuration."""
        return EngineConfig(
            role=self.role, url=self.url, events=self.events, name=self.name,
            data_parallel_size=self._rank_count,
        )  # fmt: skip

    # -- what tests set and read

    def fault(self, **fields: Any) -> Fault:
        """Make something go wrong; fields as in `Fault`."""
        fault = Fault(**fields)
        self.faults.append(fault)
        return fault

    def drop_events(self, count: int, rank: int = 0) -> None:
        """Lose the next events on the way."""
        self.ranks[rank].publisher.dropped += count

    @property
    def violations(self) -> list[str]:
        """What a correct router never causes, over all restarts."""
        return self._log.violations

    @property
    def requests(self) -> list[Received]:
        """The clients' requests among those received."""
        return [each for each in self.received if each.path in SHAPES]

    @property
    def pinned(self) -> int:
        """Blocks held for absent readers."""
        return sum(rank.pinned for rank in self.ranks)

    @property
    def leased(self) -> int:
        """Blocks that prefill engines are about to read."""
        return sum(rank.leases.blocks for rank in self.ranks)

    @property
    def asked(self) -> int:
        """Questions of prefill engines, since its start."""
        return sum(rank.asked for rank in self.ranks)

    @property
    def answers(self) -> str | float:
        """What becomes of prefill engines' questions, until it is set to something else: `never` answered, or so many
        seconds late, or refused for this reason (of a `Leased`); empty: they are answered."""
        return self.ranks[0].answers

    @answers.setter
    def answers(self, how: str | float) -> None:
        for rank in self.ranks:
            rank.answers = how

    @property
    def running(self) -> int:
        """Requests in the engine, those that wait for blocks too."""
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def in_use(self) -> int:
        """Blocks that are not free; 0 once all is over and nothing is held."""
        return sum(rank.pool.capacity - rank.pool.free for rank in self.ranks)

    def state(self) -> dict[str, Any]:
        """All of it, for `GET /stub/state`."""
        return {
            "id": self.id,
            "pinned": self.pinned,
            "leased": self.leased,
            "asked": self.asked,
            "expired": sum(rank.expired for rank in self.ranks),
            "in_use": self.in_use,
            "running": self.running,
            "waiting": sum(rank.pool.waiting for rank in self.ranks),
            "starved": sum(rank.pool.starved for rank in self.ranks),
            "held": [request for rank in self.ranks for request in rank.held],
            "violations": self.violations,
            "requests": len(self.requests),
        }

    # -- ports

    def _publishers(self) -> list[Publisher]:
        """One for each rank, on consecutive ports."""
        for tries in range(_BIND_TRIES):
            made: list[Publisher] = []
            first = self._events_port
            try:
                for index in range(self._rank_count):
                    made.append(self._publisher(index, first + index if first else 0))
                    first = first or int(made[0].address.rpartition(":")[2])
            except zmq.ZMQError:
                for publisher in made:
                    publisher.close()
                if self._events_port or tries == _BIND_TRIES - 1:
                    raise
            else:
                return made
        raise AssertionError("unreachable")

    def _publisher(self, index: int, port: int) -> Publisher:
        engine = self.id if self._rank_count == 1 else f"{self.id}_dp{index}"
        address = f"tcp://{self._bracketed}:{port}"
        return Publisher(
            address, engine, lambda: self.ranks[index].pinned, self.capacity, self._facts(),
            self._clock_offset_s, self._events_key, self._frames,
            leased=lambda: self.ranks[index].leases.blocks, is_silent=not self.settings.plugin,
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """What its `Hello`s say that it is, as `carryback_vllm.about` has it."""
        if self._about is None:
            return {}
        facts = {
            "carryback": version("carryback"), "vllm": self.version, "nixl": "1.5.1", "role": self.role,
            "model": self.model, "served_model": self.model, "max_model_len": self.max_model_len,
            "dtype": "float32", "kv_cache_dtype": "auto", "block_size": BLOCK_SIZE,
            "key": self._sealer.fingerprint, "hash_seed": "", "hold_s": self.settings.ttl_s,
            "lease_s": self.settings.lease_s, "side_channel_host": self._host,
            "side_channel_port": self._side_port, "backends": ["UCX"], "kv_buffer_device": "cpu",
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "kv_heads": 2, "ucx": {},
            "prefix_caching": True,
        }  # fmt: skip
        return {**facts, **self._about}

    def _read(self, engine: str, request: str, blocks: list[int]) -> Contents:
        ranks = {rank.engine: rank for rank in self.ranks}
        return ranks[engine].read(request, blocks)

    # -- requests

    def _handle(self, request: Request, connection: Connection) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._log.violation(f"the stub engine itself failed: {error!r}")
                connection.drop()

        task = asyncio.create_task(self._serve(request, connection))
        connection.on_lost = task.cancel
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _serve(self, request: Request, connection: Connection) -> None:
        if request.path.startswith("/stub/"):
            self._control(request, connection)
            return
        try:
            body = json.loads(request.body) if request.body else {}
        except ValueError:
            body = None
        received = Received(
            request.method, request.path, request.headers, request.body,
            body if isinstance(body, dict) else None,
        )  # fmt: skip
        if request.method == "POST":
            self.received.append(received)
        fault = self._fault_for(received)
        if fault.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(fault.status_delay_s)
        if fault.drop == "before_status":
            connection.drop()
        elif fault.status:
            error = error_object(fault.status, "told to fail", "InternalServerError")
            connection.respond(fault.status, (dump(error) if fault.error is None else fault.error).encode())
        elif fault.script is not None:
            connection.begin_events()
            for delay_s, data in fault.script:
                await asyncio.sleep(delay_s)
                connection.write(framed(data))
            connection.end_events()
        else:
            await self._route(received, connection, fault)

    def _fault_for(self, received: Received) -> Fault:
        for fault in self.faults:
            is_for = received.path.startswith(fault.path) if fault.path else received.path in SHAPES
            if fault.hop:
                is_for = is_for and received.path in SHAPES and received.hop == fault.hop
            if is_for and fault.contains.encode() in received.raw:
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                return fault
        return NO_FAULT

    def _control(self, request: Request, connection: Connection) -> None:
        """`GET /stub/state`, `GET /stub/requests`, `POST /stub/faults` (an object or a list of them),
        `DELETE /stub/faults`. `{"answers": ...}` sets that."""
        reply: Any = {}
        if request.path == "/stub/state":
            reply = self.state()
        elif request.path == "/stub/requests":
            reply = [
                {"path": each.path, "headers": each.headers, "body": each.body} for each in self.received
            ]
        elif request.method == "DELETE":
            self.faults.clear()
        else:
            given = json.loads(request.body)
            for fields in given if isinstance(given, list) else [given]:
                if "drop_events" in fields:
                    self.drop_events(fields["drop_events"])
                elif "answers" in fields:
                    self.answers = fields["answers"]
                else:
                    self.faults.append(Fault.from_json(fields))
        connection.respond(200, dump(reply).encode())

    async def _route(self, received: Received, connection: Connection, fault: Fault) -> None:
        path = received.path
        if path.startswith("/v1") and self.api_key and received.headers.get("authorization") != f"Bearer {self.api_key}":  # fmt: skip
            connection.respond(401, b'{"error":"Unauthorized"}')
        elif path in ("/health", "/ping"):
            connection.respond(200, b"")
        elif path == "/version":
            connection.respond(200, dump({"version": self.version}).encode())
        elif path == "/v1/models":
            connection.respond(200, dump(self._models()).encode())
        elif path == "/metrics":
            connection.respond(200, self._metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path in SHAPES or path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            await self._checked(received, connection, fault)
        else:
            _refuse(connection, path, 404, "Not Found", "Not Found")

    async def _checked(self, received: Received, connection: Connection, fault: Fault) -> None:
        path, body = received.path, received.body
        try:
            if not received.headers.get("content-type", "").lower().startswith("application/json"):
                raise Invalid(
                    "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
                )
            if body is None:
                raise Invalid("1 validation error:\n  the body is not a JSON object", "body")
            for field, kind in _TYPES.items():
                if (value := body.get(field)) is not None and type(value) is not kind:
                    raise Invalid(f"1 validation error:\n  {field}: want {kind.__name__}", field)
            if path == "/detokenize":
                tokens = body.get("tokens")
                if not isinstance(tokens, list) or not all(isinstance(each, int) for each in tokens):
                    raise Invalid("1 validation error:\n  tokens: want integers", "tokens")
                connection.respond(200, dump({"prompt": detokenize(tokens)}).encode())
            elif path not in SHAPES:
                self._count(path, body, connection)
            elif (model := body.get("model")) and model != self.model:
                self._rank_for(received).reject(dict(received.params), "rejected")
                message = f"The model `{model}` does not exist."
                _refuse(connection, path, 404, message, "NotFoundError", "model")
            elif path == RESPONSES and (previous := body.get("previous_response_id")):
                # vLLM keeps no responses unless told to.
                message = f"Response with id '{previous}' not found."
                _refuse(connection, path, 404, message, "invalid_request_error", "response_id")
            else:
                rank, ask = self._rank_for(received), self._ask(received, body, fault)
                await self._generate(rank, ask, path, connection, fault)
        except Invalid as error:
            if path in SHAPES and not isinstance(error, _NoRank):
                self._rank_for(received).reject(dict(received.params), "rejected")
            _refuse(connection, path, 400, str(error), error.kind, error.param)

    def _count(self, path: str, body: Mapping[str, Any], connection: Connection) -> None:
        endpoint = MESSAGES if path != "/tokenize" else CHAT if "messages" in body else COMPLETIONS
        try:
            tokens = prompts_of(endpoint, body)[0].tokens
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Invalid(f"1 validation error:\n  {error!r}") from error
        counted: dict[str, Any] = {"input_tokens": len(tokens)}
        if path == "/tokenize":
            counted = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
            counted["token_strs"] = None
        connection.respond(200, dump(counted).encode())

    def _models(self) -> dict[str, Any]:
        card = {
            "id": self.model, "object": "model", "created": 1, "owned_by": "vllm", "root": self.model,
            "parent": None, "max_model_len": self.max_model_len, "permission": [],
        }  # fmt: skip
        return {"object": "list", "data": [card]}

    def _metrics(self) -> str:
        lines = []
        for index, rank in enumerate(self.ranks):
            labels = f'{{engine="{index}",model_name="{self.model}"}}'
            used = 1 - rank.pool.free / rank.pool.capacity
            waiting = rank.pool.waiting
            lines += [
                f"vllm:num_requests_running{labels} {len(rank.running) - waiting}",
                f"vllm:num_requests_waiting{labels} {waiting}",
                f"vllm:kv_cache_usage_perc{labels} {used}",
                f"vllm:nixl_xfer_time_seconds_count{labels} {rank.reads}",
                f"vllm:nixl_xfer_time_seconds_sum{labels} {rank.read_s}",
                f"vllm:nixl_bytes_transferred_sum{labels} {rank.read_bytes}",
            ]
        return "\n".join(lines) + "\n"

    # -- generation

    def _rank_for(self, received: Received) -> Rank:
        index = received.headers.get("x-data-parallel-rank")
        if index is None:
            return min(self.ranks, key=lambda rank: len(rank.running))
        if not index.isdigit() or int(index) >= len(self.ranks):
            raise _NoRank(f"data_parallel_rank {index} is out of range", None, "BadRequestError")
        return self.ranks[int(index)]

    def _prompts(self, path: str, body: Mapping[str, Any]) -> list[tuple[Prompt, int]]:
        """The prompts, and the most tokens that an answer to each may have.

        Raises:
            Invalid: the body is refused.
        """
        prompts = []
        for prompt in prompts_of(path, body):
            count = len(prompt.tokens)
            given = next((body[name] for name in LIMITS[path] if body.get(name) is not None), None)
            limit = limit_of(path, body, max(self.max_model_len - count, 1))
            if count + (limit if given is not None else 1) > self.max_model_len:
                raise Invalid(
                    f"This model's maximum context length is {self.max_model_len} tokens, and the request is for "
                    f"{count} input tokens and {limit} output tokens.",
                    "input_tokens",
                    "BadRequestError",
                )
            if not prompt.tokens:
                raise Invalid("the prompt is empty", "prompt", "BadRequestError")
            prompts.append((prompt, min(limit, self.max_model_len - count)))
        return prompts

    def _ask(self, received: Received, body: dict[str, Any], fault: Fault) -> _Ask:
        """What a body asks.

        Raises:
            Invalid: the body is refused.
        """
        path, params, n = received.path, body.get("kv_transfer_params"), body.get("n")
        if n is not None and not 1 <= n <= 128:
            raise Invalid("n must be from 1 to 128", "n", "BadRequestError")
        if body.get("stream_options") and not body.get("stream"):
            raise Invalid("1 validation error:\n  stream_options without stream", "stream_options")
        number = received.headers.get("x-request-id") or uuid.uuid4().hex
        prefix = {COMPLETIONS: "cmpl-", RESPONSES: "resp_"}.get(path, "chatcmpl-")
        name = f"{prefix}{uuid.uuid4().hex[:16] if path == RESPONSES else number}"
        try:
            prompts = self._prompts(path, body)
            shape = SHAPES[path](name, self.model, body, [prompt for prompt, _ in prompts])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Invalid(f"1 validation error:\n  {error!r}") from error
        jobs = [
            Job(
                f"{name}-{uuid.uuid4().hex[:8]}", prompt, limit, body.get("cache_salt") or "",
                None if params is None else dict(params),
                fault.fail_load, fault.load_delay_s, fault.held,
            )
            for prompt, limit in prompts
            for _ in range(n or 1)
        ]  # fmt: skip
        return _Ask(body, jobs, shape)

    async def _generate(self, rank: Rank, ask: _Ask, path: str, connection: Connection, fault: Fault) -> None:
        is_stream = bool(ask.body.get("stream"))
        writer = Writer(connection, fault)
        try:
            if is_stream:
                connection.begin_events()
                if fault.drop == "before_first_byte":
                    return
            answers = [await self._answer(rank, job, ask.body, index) for index, job in enumerate(ask.jobs)]
            await asyncio.sleep(self.ttft_s + fault.first_delay_s)
            if is_stream:
                await self._stream(rank, ask, answers, writer)
                connection.end_events()
            else:
                longest = max(len(each.tokens) for each in answers)
                await asyncio.sleep((longest - 1) * (self.chunk_interval_s + fault.chunk_delay_s))
                if fault.drop != "":
                    return
                params = [rank.finish(job, each) for job, each in zip(ask.jobs, answers, strict=True)]
                await asyncio.sleep(fault.answer_delay_s)
                connection.respond(200, dump(ask.shape.whole(answers, params[0])).encode())
        except (LoadFailed, Failed) as error:
            message = str(error) or "Internal server error"
            if not is_stream:
                _refuse(connection, path, 500, message, "InternalServerError")
            elif failure := list(ask.shape.failed(message)):
                for event in failure:
                    connection.write(framed(event.encode()))
                connection.end_events()
        except Dropped:
            pass
        finally:
            for job in ask.jobs:
                rank.abort(job)
            if not connection.is_idle:
                connection.drop()

    async def _answer(self, rank: Rank, job: Job, body: Mapping[str, Any], index: int) -> Answer:
        # As long as the right one will be, give or take a token.
        rough = answer(job.prompt, [], body, job.limit, self.answer_tokens)
        size = -(-(len(job.prompt.tokens) + len(rough.tokens) + 8) // BLOCK_SIZE)
        kv = await rank.begin(job, size)
        return answer(job.prompt, kv, body, job.limit, self.answer_tokens, index)

    async def _stream(self, rank: Rank, ask: _Ask, answers: list[Answer], writer: Writer) -> None:
        shape = ask.shape
        await writer.comments()
        for event in shape.start():
            await writer.send(event)
        for number in range(max(len(parts(each)) for each in answers)):
            if number:
                await asyncio.sleep(self.chunk_interval_s)
            for index, each in enumerate(answers):
                if number < len(parts(each)):
                    ask.jobs[index].generated = each.tokens[: number + 1]
                    for event in shape.piece(index, number, each):
                        await writer.send(event)
        await asyncio.sleep(self.chunk_interval_s)
        # The engine is done before its last words are on the way.
        for job, each in zip(ask.jobs, answers, strict=True):
            rank.finish(job, each)
        for event in shape.end(answers):
            await writer.send(event)


@dataclass
class _Ask:
    """A body that was understood."""

    body: dict[str, Any]
    jobs: list[Job]
    shape: Shape


class _NoRank(Invalid):
    """There is no such rank."""


def _refuse(
    connection: Connection, path: str, status: int, message: str, kind: str, param: str | None = None
) -> None:
    error = error_object(status, message, kind, param)
    if path.startswith(MESSAGES):
        error = {"type": "error", "error": {"type": kind, "message": message}}
    connection.respond(status, dump(error).encode(errors="replace"))
