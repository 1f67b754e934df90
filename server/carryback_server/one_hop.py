"""What a single engine, any, answers at once, since it needs no KV: tokens of texts, and texts of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from carryback_server.config import RouterConfig
from carryback_server.engine_client import EngineDown
from carryback_server.errors import ApiError, foreign
from carryback_server.explain import CannotAsk
from carryback_server.pipeline.place import less_loaded
from carryback_server.pool import Pool
from carryback_server.reading import Bodies
from carryback_server.tenants import Tenants
from carryback_server.trust import Trust, check_media
from carryback_server.upstream import Reply


@dataclass(frozen=True)
class OneHop:
    """Passes requests on to an engine, as they are."""

    config: RouterConfig
    tenants: Tenants
    bodies: Bodies
    trust: Trust
    pool: Pool
    new_key: Callable[[], str]

    async def pass_on(self, request: web.Request) -> web.Response:
        """Answer a client's request.

        Raises:
            ApiError: it is malformed or not allowed, or no engine is up.
        """
        tenant = self.tenants.sender(request)
        async with tenant.admit(), self.bodies.room(tenant) as room:
            read = await self.bodies.read(request, room)
            body, looked = await self.bodies.parse(read, request.path, tenant)
            tenant.check_model(body.get("model"))
            if not tenant.is_alone and looked is None:
                check_media(body)
            self.trust.apply(body, None if tenant.is_alone else tenant.own)
            reply, content = await self._any(request.path, body.encode({}))
        return web.Response(status=reply.status, body=content, headers={"Content-Type": reply.content_type})

    async def ask(self, path: str, data: bytes) -> bytes:
        """An engine's answer to a question of our own, as `explain` has them.

        Raises:
            CannotAsk: there is none.
        """
        try:
            reply, content = await self._any(path, data)
        except ApiError as error:
            raise CannotAsk(f"{path}: {error.message}") from error
        if reply.status != 200:
            raise CannotAsk(f"{path}: the engine answered with status {reply.status}")
        return content

    async def _any(self, path: str, data: bytes) -> tuple[Reply, bytes]:
        """What an engine, any, answers.

        Raises:
            ApiError: none is up, or it did not answer.
        """
        engine = less_loaded(self.pool.of("prefill")) or less_loaded(self.pool.of("decode"))
        if engine is None:
            raise ApiError(503, "no engine is up", code="no_engine")
        try:
            async with engine.within(self.config.prefill_timeout_s):
                reply = await engine.post(path, data, request_id=self.new_key())
                content = await reply.read()
            if (problem := foreign(reply.status, reply.content_type)) is not None:
                raise problem
            return reply, content
        except EngineDown as error:
            raise ApiError(502, "the engine did not answer", code="engine_failed") from error
