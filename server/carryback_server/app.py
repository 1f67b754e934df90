"""The router's HTTP server: routes, and errors as OpenAI error objects."""

from __future__ import annotations

import logging
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from carryback_server.config import RouterConfig
from carryback_server.errors import ApiError
from carryback_server.metrics import CONTENT_TYPE, Metrics
from carryback_server.pipeline import ENDPOINTS, Pipeline
from carryback_server.records import Conversation

logger = logging.getLogger("carryback")


class Router:
    """A router for prefill and decode engines, with a server of its own.

    Args:
        config: where the engines are, and all limits.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.pipeline = Pipeline(config, self.metrics)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Connect to the engines and listen. Sets `url`.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application(client_max_size=self.config.max_body_bytes, middlewares=[self._errors])
        for path in ENDPOINTS:
            app.router.add_post(path, self.pipeline.handle)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/conversations", self._list)
        app.router.add_get("/v1/conversations/{id}", self._get)
        app.router.add_delete("/v1/conversations/{id}", self._delete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        await self.pipeline.start()
        # A client that goes away cancels its handler, and with it both hops.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self.config.host, self.config.port)
            await site.start()
        except OSError:
            await self.stop()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, release what is held, disconnect."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self.pipeline.stop()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        status = 499  # the client went away
        try:
            response: web.StreamResponse = await handler(request)
            status = response.status
        except ApiError as error:
            response, status = error.response(), error.status
        except web.HTTPException as error:
            status = error.status
            problem = {404: "there is no such endpoint", 405: "the endpoint does not take this method"}
            message = f"{request.method} {request.path}: {problem.get(status, error.reason)}"
            response = ApiError(status, message, code="unknown_endpoint").response()
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            raise
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            status = 500
            response = ApiError(500, "the router failed; its log says why", code="router_failed").response()
        finally:
            self.metrics.requests.labels(endpoint, str(status)).inc()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        for engine in [*self.pipeline.pool.of("decode"), *self.pipeline.pool.of("prefill")]:
            status, content_type, content = await engine.get("/v1/models")
            return web.Response(status=status, body=content, headers={"Content-Type": content_type})
        raise ApiError(503, "no engine is up", code="no_engine")

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        engines = [
            {"role": engine.role, "name": engine.name, "up": engine.is_up, "events": engine.is_heard}
            for engine in self.pipeline.pool.engines
        ]
        roles = {engine.role for engine in self.pipeline.pool.engines if engine.is_up}
        is_ready = roles == {"prefill", "decode"}
        return _json(
            {"status": "ready" if is_ready else "not ready", "engines": engines}, 200 if is_ready else 503
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _list(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_view(each) for each in self.pipeline.records]})

    async def _get(self, request: web.Request) -> web.Response:
        conversation = self.pipeline.records.get(request.match_info["id"])
        if conversation is None:
            raise _unknown(request)
        return _json(_view(conversation))

    async def _delete(self, request: web.Request) -> web.Response:
        if not await self.pipeline.delete(request.match_info["id"]):
            raise _unknown(request)
        return _json({"id": request.match_info["id"], "object": "conversation.deleted", "deleted": True})


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def _unknown(request: web.Request) -> ApiError:
    return ApiError(
        404, f"no conversation {request.match_info['id']!r}", code="conversation_not_found", param="id"
    )


def _view(conversation: Conversation) -> dict[str, Any]:
    record = conversation.record
    return {
        "id": conversation.id,
        "object": "conversation",
        "parent": conversation.parent,
        "created": int(conversation.created),
        "last_seen": int(conversation.last_seen),
        "turn": conversation.turn,
        "step": conversation.step,
        "requests": conversation.requests,
        "in_flight": conversation.in_flight,
        "last_reuse": conversation.reuse.header() if conversation.reuse else None,
        "held": record
        and {
            "engine": record.engine.name,
            "tokens": record.held.tokens,
            "blocks": record.held.blocks,
            "expires_in_s": round(max(record.expires - time.monotonic(), 0), 1),
        },
    }
