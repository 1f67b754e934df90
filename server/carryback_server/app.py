"""The router's two HTTP servers: one for clients, one for operators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web
from carryback import wire
from pydantic import TypeAdapter, ValidationError

from carryback_server import background, browsers, dashboard, live, workers
from carryback_server.address import in_url
from carryback_server.chains import busy
from carryback_server.config import ConfigError, Engines, RouterConfig
from carryback_server.connections import (
    LINGER_S,
    Connections,
    Limits,
    Port,
    affordable,
    head_too_large,
    raise_open_files,
)  # fmt: skip
from carryback_server.endpoints import ENDPOINTS, FORWARDED, REFUSED, error_response, refused
from carryback_server.engines import Engine
from carryback_server.errors import ApiError, HideMalformed
from carryback_server.explain import explain
from carryback_server.metrics import CONTENT_TYPE, Metrics
from carryback_server.state import Conversation, StateBusy, StateDown, StateFailed
from carryback_server.tenants import Tenant, Tenants
from carryback_server.wiring import build

logger = logging.getLogger("carryback")
logging.getLogger("aiohttp.server").addFilter(HideMalformed())

_engines = TypeAdapter(Engines)
MAX_LISTED = 1000
# The resource of all paths that there are not.
_ANY = "/{path}"
# A part of a path that may have any characters: aiohttp's own does not match braces. Percent-encoded slashes are part
# of it.
_ID = "{id:[^/]+}"
_TENANT = "{tenant:[^/]+}"
_NAME = "{name:[^/]+}"


class Router:
    """A router for prefill and decode engines, with servers of its own.

    Args:
        config: where the engines are, and all limits.
        reload: reads the configuration anew, for SIGHUP and `POST /admin/reload`; raises `ConfigError`.
        share_ports: other processes listen on the same ports.

    Raises:
        ConfigError: the tenants' file or the address of the state is wrong.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        reload: Callable[[], RouterConfig] | None = None,
        share_ports: bool = False,
    ) -> None:
        self.config = config
        self._read_config = reload
        self._share_ports = share_ports
        self.metrics = Metrics()
        self.tenants = Tenants(
            config.tenants_file,
            config.api_keys,
            redis_url=config.state if config.is_shared else None,
            redis_prefix=config.state_prefix,
            redis_timeout_s=config.state_timeout_s,
            on_uncounted=self.metrics.rate_uncounted.inc,
        )
        self.pipeline = build(config, self.metrics, self.tenants, self._on_message)
        self._page = dashboard.load()
        self._hosts = {each.lower() for each in (*config.allowed_hosts, config.host, config.admin_host)}
        self._applying: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._runners: list[web.AppRunner] = []
        self.connections: dict[str, Connections] = {}
        self.is_draining = False
        self.url = ""
        self.admin_url = ""

    async def start(self) -> None:
        """Connect to the engines and listen. Sets `url` and `admin_url`.

        Raises:
            OSError: a port is taken.
        """
        config = self.config
        open_files = raise_open_files()
        most = affordable(config.max_connections, open_files)
        expect: dict[str, Any] = {"expect_handler": _expect}
        clients = web.Application(
            client_max_size=config.max_body_bytes, middlewares=[self._errors, self._from_here]
        )
        clients.on_response_prepare.append(_introduce)
        for path in ENDPOINTS:
            clients.router.add_post(path, self.pipeline.handle, **expect)
        for path in REFUSED:
            clients.router.add_post(path, self._refuse, **expect)
        for path in FORWARDED:
            clients.router.add_post(path, self.pipeline.one_hop.pass_on, **expect)
        clients.router.add_get("/v1/responses", self._websocket, **expect)
        clients.router.add_get(f"/v1/responses/{_ID}", self._response, **expect)
        clients.router.add_get("/v1/models", self._models, **expect)
        clients.router.add_get("/v1/conversations", self._list, **expect)
        clients.router.add_get(f"/v1/conversations/{_ID}", self._get, **expect)
        clients.router.add_delete(f"/v1/conversations/{_ID}", self._delete, **expect)
        clients.router.add_get("/", self._health, **expect)
        admin = web.Application(middlewares=[self._errors, self._from_operators])
        admin.router.add_get("/metrics", self._metrics, **expect)
        admin.router.add_get("/admin/engines", self._engines, **expect)
        admin.router.add_post("/admin/engines", self._set_engines, **expect)
        admin.router.add_get("/admin/costs", self._costs, **expect)
        admin.router.add_get("/admin/live", self._live, **expect)
        admin.router.add_get("/dashboard", self._dashboard, **expect)
        admin.router.add_post(f"/admin/engines/{_NAME}/drain", self._drain, **expect)
        admin.router.add_post(f"/admin/engines/{_NAME}/undrain", self._undrain, **expect)
        admin.router.add_post(f"/admin/engines/{_NAME}/forget", self._forget, **expect)
        admin.router.add_post("/admin/reload", self._reload, **expect)
        admin.router.add_get("/admin/conversations", self._list_all, **expect)
        admin.router.add_delete(f"/admin/conversations/{_TENANT}/{_ID}", self._delete_any, **expect)
        admin.router.add_get(f"/admin/conversations/{_TENANT}/{_ID}/explain", self._explain, **expect)
        for each in (clients, admin):
            each.router.add_get("/health", self._health, **expect)
            each.router.add_get("/ready", self._ready, **expect)
            each.router.add_route("*", "/{path:.*}", self._elsewhere, **expect)
            each.on_response_prepare.append(_without_versions)
        await self.pipeline.start()
        self.pipeline.shared.holding.pins.shares = _shares(self.tenants)
        try:
            self.url = await self._listen(
                "clients", clients, config.host, config.port, most, config.max_connections_per_address
            )
            admin_port = config.admin_port
            if admin_port is None:
                admin_port = config.port + 1 if config.port else 0
            self.admin_url = await self._listen(
                "operators", admin, config.admin_host, admin_port, config.max_admin_connections
            )
        except OSError:
            await self.stop()
            raise

    async def _listen(
        self, name: str, app: web.Application, host: str, port: int, most: int, per_address: int | None = None
    ) -> str:
        limits = Limits(
            connections=most,
            per_address=per_address,
            head_bytes=self.config.max_head_bytes,
            head_timeout_s=self.config.head_timeout_s,
            send_timeout_s=self.config.send_timeout_s,
        )
        self.connections[name] = limited = Connections(
            limits,
            on_closed=lambda reason: self.metrics.connections_closed.labels(reason).inc(),
            on_malformed=lambda status: self.metrics.requests.labels("unknown", str(status)).inc(),
        )
        # A client that goes away cancels its handler, and with it both hops.
        runner = Port(
            app,
            limited,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self.config.shutdown_timeout_s,
            max_line_size=self.config.max_header_bytes,
            max_field_size=self.config.max_header_bytes,
            keepalive_timeout=self.config.keepalive_timeout_s,
            lingering_time=LINGER_S,
            # Whose body it is, comes first (`carryback_server.reading`).
            auto_decompress=False,
        )
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_port=self._share_ports or None).start()
        host, port = runner.addresses[0][:2]
        return f"http://{in_url(host)}:{port}"

    async def stop(self) -> None:
        """Finish what is under way, release what is held, disconnect.

        `/ready` says no for `shutdown_wait_s`, so that a load balancer sends nothing more; then nothing new
        is accepted; requests that still run after `shutdown_timeout_s` are broken off.
        """
        self.is_draining = True
        if self.url:
            await asyncio.sleep(self.config.shutdown_wait_s)
        for runner in self._runners:
            await runner.cleanup()
        await self.pipeline.stop()
        await self.tenants.stop()

    async def reload(self) -> bool:
        """Read the tenants' file and the configured engines again; whether all of it was right."""
        async with self._reloading:
            # A large file takes PyYAML seconds, in which streams go on.
            is_good = await asyncio.to_thread(self.tenants.reload)
            self.pipeline.shared.holding.pins.shares = _shares(self.tenants)
            if self._read_config is None:
                return is_good
            try:
                config = await asyncio.to_thread(self._read_config)
                await self.pipeline.pool.apply(config.engines)
            except ConfigError as error:
                logger.error("engines are as before: %s", error)
                return False
            return is_good

    # -- errors

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        is_counted = request.method == "POST" and request.path in ENDPOINTS  # by the pipeline
        status = 499  # the client went away
        try:
            if (
                sum(len(name) + len(value) for name, value in request.raw_headers)
                > self.config.max_head_bytes
            ):
                raise head_too_large(self.config.max_head_bytes)
            response: web.StreamResponse = await handler(request)
            status = response.status
        except (ApiError, StateDown, StateBusy) as error:
            if isinstance(error, StateBusy):
                error = busy()
            elif isinstance(error, StateFailed):
                error = ApiError(
                    500, "the state refused this; the router's log says why", code="state_failed"
                )
            elif isinstance(error, StateDown):
                error = ApiError(503, "the router's state cannot be reached", code="state_unavailable")
            response, status = error_response(request.path, error, {}), error.status
        except web.HTTPException as error:
            status = error.status
            problems = {404: "there is no such endpoint", 405: "the endpoint does not take this method"}
            message = f"{request.method} {request.path}: {problems.get(status, error.reason)}"
            allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
            problem = ApiError(status, message, code="unknown_endpoint", headers=allowed)
            response = error_response(request.path, problem, {})
        except ConnectionResetError:
            # Nobody reads it; but what is raised here, aiohttp logs as an error of ours.
            response = web.Response(status=status)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            status = 500
            problem = ApiError(500, "the router failed; its log says why", code="router_failed")
            response = error_response(request.path, problem, {})
        finally:
            if not is_counted:
                self.metrics.requests.labels(await _endpoint(request), str(status)).inc()
        return response

    @web.middleware
    async def _from_operators(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Pages of other sites, in an operator's browser, may link to the dashboard and nothing else."""
        browsers.check(request, self._hosts, pages=("/dashboard",))
        response: web.StreamResponse = await handler(request)
        return response

    @web.middleware
    async def _from_here(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Where nobody needs a key, a page of another site would need none either."""
        if self.tenants.are_open:
            browsers.check(request, self._hosts)
        response: web.StreamResponse = await handler(request)
        return response

    async def _elsewhere(self, request: web.Request) -> web.Response:
        """A path that there is not, or a method that its path does not take."""
        allowed = set[str]()
        for resource in request.app.router.resources():
            if resource.canonical != _ANY:
                allowed |= (await resource.resolve(request))[1]
        raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound

    # -- for clients

    async def _websocket(self, request: web.Request) -> web.Response:
        """`GET /v1/responses`, which is how Codex asks for a websocket: only a 426 makes it send plain requests at once.

        Raises:
            ApiError: 426; 405 for a plain GET.
        """
        if request.headers.get("Upgrade", "").strip().lower() != "websocket":
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        raise ApiError(
            426,
            "websockets are not served: send a plain POST to /v1/responses",
            code="websocket_not_served",
            headers={"Upgrade": "HTTP/1.1", "Connection": "Upgrade"},
        )

    async def _refuse(self, request: web.Request) -> web.Response:
        self.tenants.sender(request)
        raise refused(request.path)

    async def _response(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/responses/{id}`: a response that can be continued.

        Raises:
            ApiError: 404, there is none with this id.
        """
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            found = await self.pipeline.chains.get(tenant.name, request.match_info["id"])
        return web.Response(body=found, content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            return await self._models_of(tenant)

    async def _models_of(self, tenant: Tenant) -> web.Response:
        for engine in [*self.pipeline.pool.of("decode"), *self.pipeline.pool.of("prefill")]:
            status, content_type, content = await engine.get("/v1/models")
            if status == 200:
                content = tenant.visible(content)
            return web.Response(status=status, body=content, headers={"Content-Type": content_type})
        raise ApiError(503, "no engine is up", code="no_engine")

    async def _list(self, request: web.Request) -> web.Response:
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            return await self._listing(request, tenant.name)

    async def _listing(
        self, request: web.Request, tenant: str | None, *, with_engines: bool = False
    ) -> web.Response:
        limit = _whole(request.query.get("limit", "100"), "limit", MAX_LISTED)
        try:
            page = await self.pipeline.state.page(tenant, limit, request.query.get("after", ""))
        except ValueError as error:
            raise ApiError(400, f"after: {error}", code="invalid_query", param="after") from error
        views = [self._view(each, with_engine=with_engines) for each in page.items]
        return _json(
            {"object": "list", "data": views, "has_more": bool(page.after), "after": page.after or None}
        )

    async def _get(self, request: web.Request) -> web.Response:
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            found = await self.pipeline.state.get(tenant.name, request.match_info["id"])
        if found is None:
            raise _unknown(request)
        return _json(self._view(found))

    async def _delete(self, request: web.Request) -> web.Response:
        tenant = self.tenants.sender(request)
        async with tenant.admit():
            return await self._delete_of(request, tenant.name)

    async def _delete_of(self, request: web.Request, tenant: str) -> web.Response:
        conversation_id = request.match_info["id"]
        if not await self.pipeline.delete(tenant, conversation_id):
            raise _unknown(request)
        return _json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    # -- for both

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        pool = self.pipeline.pool
        missing = [role for role in ("prefill", "decode") if not pool.of(role)]
        status = "draining" if self.is_draining else f"no {missing[0]} engine" if missing else "ready"
        return _json({"status": status}, 200 if status == "ready" else 503)

    # -- for operators

    async def _metrics(self, request: web.Request) -> web.Response:
        exposition = await asyncio.to_thread(self.metrics.exposition)
        return web.Response(body=exposition, headers={"Content-Type": CONTENT_TYPE})

    async def _engines(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [each.view() for each in self.pipeline.pool.engines]})

    async def _costs(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self.pipeline.shared.costs.view()})

    async def _live(self, request: web.Request) -> web.Response:
        try:
            changes = self.pipeline.shared.live.since(request.query.get("after", ""))
        except ValueError as error:
            raise ApiError(400, f"after: {error}", code="invalid_query", param="after") from error
        return _json(
            {
                "object": "list",
                **changes,
                "now": time.time(),
                "url": self.url,
                "worker": workers.number(),
                "pin_budget": self.config.pin_budget,
                "limits": {
                    "conversations": live.MAX_CONVERSATIONS,
                    "steps": live.MAX_STEPS,
                    "steps_each": live.MAX_STEPS_EACH,
                },
            }
        )

    async def _dashboard(self, request: web.Request) -> web.Response:
        page, headers = self._page
        return web.Response(body=page, headers=headers)

    async def _set_engines(self, request: web.Request) -> web.Response:
        try:
            data = await request.read()
            engines = _engines.validate_python(msgspec.json.decode(data, type=dict[str, Any])["engines"])
        except (
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, web.RequestPayloadError
        ) as error:  # fmt: skip
            message = 'want {"engines": [{"role": ..., "url": ..., "events": ...}, ...]}'
            raise ApiError(400, message, code="invalid_engines", param="engines") from error
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(["engines", *map(str, first["loc"])])
            raise ApiError(400, f"{where}: {first['msg']}", code="invalid_engines", param=where) from error
        if not any(engine.role == "decode" for engine in engines):
            raise ApiError(400, "no decode engine among them", code="invalid_engines", param="engines")
        if self.config.is_shared and self.config.state_key is None:
            message = "routers that share a state tell each other of engines only with a state_key, one for all of them"
            raise ApiError(409, message, code="no_state_key", param="state_key")
        await self.pipeline.state.broadcast(data)
        return _json({"object": "engines.accepted", "count": len(engines)}, 202)

    def _on_message(self, message: bytes) -> None:
        """Engines that an operator gave to this router or to one that shares its state."""
        try:
            engines = _engines.validate_python(msgspec.json.decode(message)["engines"])
        except (msgspec.MsgspecError, KeyError, TypeError, ValidationError) as error:
            logger.error("engines are as before: %s", type(error).__name__)
            return
        self._applying.add(task := asyncio.create_task(self.pipeline.pool.apply(engines)))
        task.add_done_callback(self._applying.discard)
        background.watch("engines", task, self.metrics.background_faults)

    async def _drain(self, request: web.Request) -> web.Response:
        return self._set_drained(request, True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return self._set_drained(request, False)

    async def _forget(self, request: web.Request) -> web.Response:
        """Void all that an engine has made: its weights were changed, and it cannot know.

        Raises:
            ApiError: 404; 502, the engine was not told.
        """
        name = request.match_info["name"]
        holding = self.pipeline.shared.holding
        told = await asyncio.gather(*(holding.forget(each) for each in self._named(request)))
        if not all(is_told for _, is_told in told):
            raise ApiError(
                502,
                f"engine {name!r} was not told, since its events do not arrive: what it has may still be read",
                code="engine_failed",
                param="name",
            )
        return _json({"name": name, "object": "engine.forgotten", "pins": sum(count for count, _ in told)})

    def _named(self, request: web.Request) -> list[Engine]:
        name, role = request.match_info["name"], request.query.get("role")
        engines = [
            each for each in self.pipeline.pool.engines if each.name == name and role in (None, each.role)
        ]
        if not engines:
            whose = f"{role} engine" if role is not None else "engine"
            raise ApiError(404, f"no {whose} {name!r}", code="engine_not_found", param="name")
        return engines

    def _set_drained(self, request: web.Request, is_drained: bool) -> web.Response:
        engines = self._named(request)
        name = request.match_info["name"]
        roles = {each.role for each in engines}
        if len(roles) > 1:
            raise ApiError(
                409,
                f"{name!r} is the name of a prefill and of a decode engine: add ?role=prefill or ?role=decode",
                code="engine_ambiguous",
                param="role",
            )
        for each in engines:
            each.is_drained = is_drained
        return _json({"name": name, "role": roles.pop(), "state": "draining" if is_drained else "up"})

    async def _reload(self, request: web.Request) -> web.Response:
        if not await self.reload():
            raise ApiError(
                400, "something is wrong; the log says what. It stays as it was", code="bad_config"
            )
        return _json({"status": "reloaded"})

    async def _list_all(self, request: web.Request) -> web.Response:
        return await self._listing(request, request.query.get("tenant"), with_engines=True)

    async def _delete_any(self, request: web.Request) -> web.Response:
        return await self._delete_of(request, request.match_info["tenant"])

    async def _explain(self, request: web.Request) -> web.Response:
        """Why a conversation's last request reused what it reused.

        Raises:
            ApiError: 404, nothing of it is kept here.
        """
        explanations, tenant, name = (
            self.pipeline.explanations, request.match_info["tenant"], request.match_info["id"],
        )  # fmt: skip
        if not explanations.is_on:
            message = "explanations are off: set explain_bytes, e.g. to 67108864, and start the router again"
            raise ApiError(404, message, code="explain_off", param="explain_bytes")
        if not (requests := explanations.get(tenant, name)):
            raise ApiError(
                404,
                f"no request of conversation {name!r} of tenant {tenant!r} is kept here: it was never "
                "sent, was deleted, or had to make room (explain_bytes); of several routers or workers, each "
                "knows only what it served itself",
                code="conversation_not_found",
                param="id",
            )
        return _json(await explain(requests, self.pipeline.one_hop.ask, explanations.newest(tenant)))

    def _view(self, conversation: Conversation, *, with_engine: bool = False) -> dict[str, Any]:
        name, location = (conversation.tenant, conversation.id), conversation.location
        view: dict[str, Any] = {
            "id": conversation.id,
            "object": "conversation",
            "tenant": conversation.tenant,
            "parent": conversation.parent,
            "created": int(conversation.created),
            "last_seen": int(conversation.last_seen),
            "turn": conversation.turn,
            "step": conversation.step,
            "boundary": conversation.boundary or None,
            "requests": conversation.requests,
            "in_flight": self.pipeline.in_flight[name],
            "last_reuse": conversation.reuse or None,
            "location": None,
        }
        if location is not None:
            pinned_s = round(self.pipeline.shared.holding.pinned_s(location), 1)
            view["location"] = {"tokens": location.tokens, "turn": location.turn, "pinned_s": pinned_s}
            if with_engine:  # addresses are not for clients
                view["location"]["engine"] = location.engine
        return view


async def _expect(request: web.Request) -> None:
    """What a request expects is passed over, as RFC 9110, 10.1.1, lets a server do, but for `100-continue`.

    aiohttp's own refuses it in plain text, and fails if it is no UTF-8.
    """
    if request.headers["Expect"].lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun


async def _endpoint(request: web.Request) -> str:
    """A request's path as metrics have it, where each id is one; `unknown` if there is no such path."""
    resource = request.match_info.route.resource
    if resource is not None and resource.canonical != _ANY:
        return resource.canonical
    for each in request.app.router.resources():
        if each.canonical != _ANY and (await each.resolve(request))[1]:
            return each.canonical  # with another method
    return "unknown"


async def _without_versions(request: web.Request, response: web.StreamResponse) -> None:
    """aiohttp would name itself and Python, with their versions."""
    response.headers["Server"] = "carryback"


def _shares(tenants: Tenants) -> dict[str, float]:
    return {tenant.name: tenant.pin_share for tenant in tenants if tenant.pin_share < 1}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def _introduce(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[wire.CARRYBACK_ROUTER] = "1"


def _whole(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= most and len(text) < 9):
        raise ApiError(400, f"{name} must be 1 to {most}", code="invalid_query", param=name)
    return int(text)


def _unknown(request: web.Request) -> ApiError:
    return ApiError(
        404, f"no conversation {request.match_info['id']!r}", code="conversation_not_found", param="id"
    )
