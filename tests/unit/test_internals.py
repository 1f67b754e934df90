"""What is used of other packages that is not their public interface: a canary for each.

Such a name may change with any version, so pyproject.toml gives these packages an upper bound. A canary that fails says
which internal of which package is no longer as our code takes it to be, and which file of ours to change. (The plug-in
lives inside vLLM: what it uses there is in test_vllm_internals.py, and it refuses versions that were not tried.)
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import httptools
import openai
import pytest
from aiohttp import web
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from private_names import defined, uses

ROOT = Path(__file__).parents[2]
PLACES = (
    "sdk/carryback",
    "server/carryback_server",
    "integrations/carryback_langgraph",
    "integrations/carryback_agents",
)

# Files of ours, the private names that they use, and whose those are. A canary below has each.
PRIVATE = {
    ("connections.py", "_ErrInfo"): "aiohttp",
    ("connections.py", "_current_request"): "aiohttp",
    ("connections.py", "_kwargs"): "aiohttp",
    ("connections.py", "_make_server"): "aiohttp",
    ("_client.py", "openai._models"): "openai",
    ("_client.py", "_process_response"): "openai",
    ("_servers.py", "openai._models"): "openai",
    ("_servers.py", "openai._types"): "openai",
    ("_chat_model.py", "_get_request_payload"): "langchain-openai",
    ("_chat_model.py", "_generate"): "langchain-openai",
    ("_chat_model.py", "_agenerate"): "langchain-openai",
    ("_chat_model.py", "_stream"): "langchain-openai",
    ("_chat_model.py", "_astream"): "langchain-openai",
    ("_calls.py", "agents.models._run_context"): "openai-agents",
    ("loop.py", "_set_running_loop"): "Python",
}
# Of aiohttp's protocol of a connection, in connections.py: what it has, and its parts.
HANDLER = (
    "_current_request", "_force_close", "_loop", "_max_msg_queue_size", "_messages", "_msg_queue_resume_size",
    "_request_count", "_waiter",
)  # fmt: skip
# Without an underscore, or overridden, or a text that we repeat.
BOUNDED = {*PRIVATE.values(), "httptools", "langchain-core", "langgraph", "limits"} - {"Python"}


def test_each_use_of_an_internal_has_a_canary() -> None:
    files = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    ours = {name for path in files for name in defined(path)} | {"_replace"}  # of named tuples, and public
    found = {(path.name, name) for path in files for name in uses(path, ours)}
    assert found == PRIVATE.keys()


def test_packages_whose_internals_are_used_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    bounded = {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, asked)
        if any(each.operator in ("<", "<=", "==") for each in requirement.specifier)
    }
    assert bounded >= BOUNDED


def parameters(function: Any) -> dict[str, Any]:
    return {name: each.kind for name, each in inspect.signature(function).parameters.items()}


# -- openai: sdk/carryback/_client.py


def test_openai_final_request_options() -> None:
    options = import_module("openai._models").FinalRequestOptions.construct(
        method="post", url="/chat/completions", json_data={"a": 1}, headers={"X": "y"}
    )
    copied = copy.copy(options)
    copied.headers = {"X": "z"}
    assert options.headers == {"X": "y"}, "openai._models.FinalRequestOptions: a copy shares its headers"
    for name in ("method", "url", "json_data", "extra_json", "headers"):
        assert hasattr(options, name), f"openai._models.FinalRequestOptions has no {name}"


def test_openai_has_one_class_of_answers() -> None:
    answer = import_module("openai._types").Response(200, headers={"X": "y"})
    assert (answer.status_code, answer.headers["x"]) == (200, "y"), "openai._types.Response"


@pytest.mark.parametrize("client", [openai.OpenAI, openai.AsyncOpenAI])
def test_openai_request_and_process_response(client: Any) -> None:
    first, *_ = list(parameters(client.request).items())[1:]
    assert first[0] == "cast_to", "openai: request() no longer takes cast_to first"
    found = parameters(client._process_response)
    for name in ("options", "response"):
        assert found.get(name) is inspect.Parameter.KEYWORD_ONLY, f"openai: _process_response has no {name}="
    assert inspect.iscoroutinefunction(client._process_response) == (client is openai.AsyncOpenAI)


def test_openai_calls_process_response_once_an_answer() -> None:
    text = inspect.getsource(openai.OpenAI.request)
    assert text.count("self._process_response(") == 1, (
        "openai: request() no longer ends with _process_response"
    )


# -- aiohttp: server/carryback_server/relay.py, errors.py


def test_aiohttp_sends_headers_with_the_first_piece() -> None:
    name = "_send_headers_immediately"
    assert getattr(web.StreamResponse, name, None) is True, f"aiohttp: StreamResponse has no {name}"
    assert getattr(web.Response, name, None) is False, f"aiohttp: Response has no {name}"


def test_aiohttp_names_what_it_could_not_read() -> None:
    errors = import_module("aiohttp.http_exceptions")
    assert issubclass(errors.HttpProcessingError, Exception), "aiohttp.http_exceptions.HttpProcessingError"
    assert issubclass(web.RequestPayloadError, Exception)


async def test_aiohttp_writes_to_the_transport_at_once() -> None:
    """The relay writes pieces beneath aiohttp's own writer, in whose order they have to be with its own."""

    class Stream(web.StreamResponse):
        _send_headers_immediately = False

    async def handle(request: web.Request) -> web.StreamResponse:
        response = Stream()
        await response.prepare(request)
        await response.write(b"first")
        assert response.headers.get("Transfer-Encoding") == "chunked", (
            "aiohttp: a stream is no longer chunked"
        )
        assert request.transport is not None
        request.transport.write(b"6\r\nsecond\r\n")
        await response.write_eof(b"third")
        return response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    finally:
        await runner.cleanup()
    body = answer.partition(b"\r\n\r\n")[2]
    assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n5\r\nthird\r\n0\r\n\r\n", (
        "aiohttp buffers what a stream writes"
    )


async def test_aiohttp_connection() -> None:
    """What server/carryback_server/connections.py takes to be in aiohttp's protocol, and how it gets its own there."""
    protocol, servers = import_module("aiohttp.web_protocol"), import_module("aiohttp.web_server")
    runner = web.AppRunner(web.Application())
    assert inspect.iscoroutinefunction(runner._make_server), "aiohttp: AppRunner._make_server"
    await runner.setup()
    try:
        server: Any = runner.server
        assert type(server) is servers.Server
        for name in ("_kwargs", "_loop", "request_handler", "request_factory", "handler_cancellation"):
            assert hasattr(server, name), f"aiohttp: Server has no {name}"
        handler = server()
        assert type(handler) is protocol.RequestHandler, "aiohttp: Server.__call__ makes something else"
        for name in HANDLER:
            assert hasattr(handler, name), f"aiohttp: RequestHandler has no {name}"
            assert name in inspect.getsource(protocol), f"aiohttp: RequestHandler no longer uses {name}"
        assert (handler._request_count, [*handler._messages]) == (0, [])
        for name in ("force_close", "finish_response", "handle_error", "data_received", "eof_received"):
            assert callable(getattr(handler, name, None)), f"aiohttp: RequestHandler has no {name}"
    finally:
        await runner.cleanup()
    error = import_module("aiohttp.http_exceptions").LineTooLong(b"")
    assert protocol._ErrInfo(431, error, "").status == 431, "aiohttp.web_protocol._ErrInfo"
    assert import_module("aiohttp.streams").EMPTY_PAYLOAD.is_eof(), "aiohttp.streams.EMPTY_PAYLOAD"


# -- httptools: server/carryback_server/upstream.py


def test_httptools_passes_on_what_a_callback_raises() -> None:
    class Protocol:
        def on_body(self, body: bytes) -> None:
            raise ZeroDivisionError("ours")

    with pytest.raises(httptools.HttpParserError) as raised:
        httptools.HttpResponseParser(Protocol()).feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert isinstance(raised.value.__context__, ZeroDivisionError), (
        "httptools: __context__ of an HttpParserError"
    )


# -- limits: server/carryback_server/tenants.py


async def test_limits_connection_can_be_closed() -> None:
    storage: Any = import_module("limits.aio.storage").RedisStorage(
        "async+redis://127.0.0.1:1", implementation="redispy"
    )
    connection = storage.bridge.get_connection()
    assert hasattr(connection, "aclose"), (
        "limits: RedisStorage.bridge.get_connection() gives no client of redis"
    )
    await connection.aclose()


# -- langchain-openai, langchain-core, langgraph: integrations/carryback_langgraph


def test_langchain_openai_makes_its_clients_and_its_payload() -> None:
    base = import_module("langchain_openai.chat_models.base").BaseChatOpenAI
    model = import_module("langchain_openai").ChatOpenAI(
        model="m", api_key="none", base_url="http://127.0.0.1:1"
    )
    assert type(model.root_client) is openai.OpenAI, "langchain-openai: root_client"
    assert type(model.root_async_client) is openai.AsyncOpenAI, "langchain-openai: root_async_client"
    payload = model._get_request_payload([("user", "Hello")], extra_headers={"X": "y"})
    assert payload["messages"][0]["content"] == "Hello", "langchain-openai: _get_request_payload"
    assert payload["extra_headers"] == {"X": "y"}, (
        "langchain-openai: _get_request_payload drops extra_headers"
    )
    for name in ("_generate", "_agenerate", "_stream", "_astream"):
        assert "self._get_request_payload(" in inspect.getsource(getattr(base, name)), (
            f"langchain-openai: {name} no longer makes its request with _get_request_payload"
        )


def test_langgraph_says_which_tasks_send_made() -> None:
    graphs, types = import_module("langgraph.graph"), import_module("langgraph.types")
    push = import_module("carryback_langgraph._sends")._PUSH
    seen: list[Any] = []
    graph = graphs.StateGraph(dict)
    graph.add_node("start", lambda state: {})
    graph.add_node("branch", lambda state, config: seen.append(config["metadata"]))
    graph.add_edge(graphs.START, "start")
    graph.add_conditional_edges("start", lambda state: [types.Send("branch", {}), types.Send("branch", {})])
    graph.compile().invoke({})
    paths = [metadata["langgraph_path"] for metadata in seen]
    assert [path[0] for path in paths] == [push, push], "langgraph: langgraph_path of a task made by Send"
    assert sorted(path[1] for path in paths) == [0, 1]
    assert all("branch:" in metadata["langgraph_checkpoint_ns"] for metadata in seen)


def test_langchain_core_has_handlers_that_every_run_has() -> None:
    context = import_module("langchain_core.tracers.context")
    assert [*parameters(context.register_configure_hook)][:2] == ["context_var", "inheritable"]
    assert callable(import_module("langchain_core.runnables.config").ensure_config)


# -- openai-agents: integrations/carryback_agents


def test_agents_names_its_runs() -> None:
    run_context = import_module("agents.models._run_context")
    owner = object()
    assert run_context.get_model_run_owner() is None
    with run_context.model_run_context(owner):
        assert run_context.get_model_run_owner() is owner, "openai-agents: get_model_run_owner"


@pytest.mark.parametrize("name", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_agents_models_have_a_client_and_a_cache_key(name: str) -> None:
    client = openai.AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:1")
    model = getattr(import_module("agents"), name)("m", client)
    assert model._client is client, f"openai-agents: {name}._client"
    assert hasattr(model, "_supports_default_prompt_cache_key"), f"openai-agents: {name}"
    keys = inspect.getsource(import_module("agents.run_internal.prompt_cache_key"))
    assert "_supports_default_prompt_cache_key" in keys, "openai-agents: asks for another name"
    assert '"agents-sdk:' in keys, "openai-agents: the runner's key has another beginning"


# -- Python: server/carryback_server/simulate/loop.py


def test_asyncio_handles() -> None:
    loop: Any = asyncio.new_event_loop()
    try:
        called: list[int] = []
        handle: Any = loop.call_soon(called.append, 1)
        timer: Any = loop.call_later(60, called.append, 2)
        handle._run()
        timer.cancel()
        assert (called, handle._cancelled, timer._cancelled) == ([1], False, True), (
            "asyncio: Handle._run, _cancelled"
        )
        assert timer._scheduled is True, "asyncio: TimerHandle._scheduled"
        assert callable(loop._timer_handle_cancelled), "asyncio: _timer_handle_cancelled of a loop"
    finally:
        loop.close()
    assert callable(asyncio._set_running_loop), "asyncio: _set_running_loop"  # type: ignore[attr-defined]
