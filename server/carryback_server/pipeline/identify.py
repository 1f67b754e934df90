"""Step 1: what a request asks, and which conversation it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web
from carryback import wire
from carryback.identity import Identifier

from carryback_server.chains import Chain, Chains
from carryback_server.config import RouterConfig
from carryback_server.endpoints import Responses
from carryback_server.engine_client import Prompt
from carryback_server.errors import ApiError
from carryback_server.hints import RequestIdentity, identify
from carryback_server.pipeline.context import Identified, RequestContext
from carryback_server.pipeline.hold import hold_s
from carryback_server.reading import Bodies, Room, is_light
from carryback_server.state import Conversation, State, StateDown
from carryback_server.tenants import Tenant
from carryback_server.trust import Trust, check_media


@dataclass(frozen=True)
class Identify:
    """Reads requests, and tells where they belong."""

    config: RouterConfig
    bodies: Bodies
    chains: Chains
    trust: Trust
    identifier: Identifier
    state: State
    clock: Callable[[], float]

    async def __call__(
        self, request: web.Request, tenant: Tenant, room: Room, context: RequestContext
    ) -> Identified:
        """What a request asks.

        Raises:
            ApiError: it is malformed, or not allowed.
        """
        came, headers, path, entry = self.clock(), request.headers, request.path, context.entry
        body, looked = await self.bodies.parse(await self.bodies.read(request, room), path, tenant)
        entry.bytes_in = body.size
        model = body.get("model")
        tenant.check_model(model)
        entry.model = model if isinstance(model, str) else ""
        if (salt := tenant.salt(body.get("cache_salt"))) is not None:
            body.put("cache_salt", salt)
        if not tenant.is_alone and looked is None:
            check_media(body)
        chain: Chain | None = None
        if isinstance(context.endpoint, Responses):
            chain = await self.chains.resolve(tenant.name, body)
            if chain.conversation and not (looked is None and is_light(chain.input)):
                looked = await self.bodies.look(body, path, tenant)
        identity = identify(
            headers,
            body,
            context.endpoint,
            self.identifier,
            tenant=tenant.name,
            chain=chain,
            hints=self.config.conversation_headers,
            looked=looked,
        )
        self.trust.apply(body, None if tenant.is_alone else tenant.own)
        entry.conversation, entry.turn, entry.step = identity.conversation, identity.turn, identity.step
        context.headers.update(_echoed(headers, identity))
        use = _reuse_switch(headers)
        alone = context.endpoint.alone(body) if looked is None else looked.alone
        leaves = bool(use and not alone and identity.conversation and not identity.ends)
        return Identified(
            Prompt(path, context.endpoint, body, room.free),
            identity,
            await self._open(tenant, identity),
            came,
            chain,
            use,
            alone,
            leaves,
            hold_s(self.config, identity) if leaves else 0.0,
        )

    async def _open(self, tenant: Tenant, identity: RequestIdentity) -> Conversation:
        if not identity.conversation:  # it has none: one that nothing is kept of
            return Conversation.new(tenant.name, "", None)
        try:
            conversation = await self.state.open(tenant.name, identity.conversation, identity.parent)
        except StateDown:
            conversation = Conversation.new(tenant.name, identity.conversation, identity.parent)
        conversation.turn, conversation.step = identity.turn, identity.step
        return conversation


def _reuse_switch(headers: Mapping[str, str]) -> bool:
    value = headers.get(wire.CARRYBACK_REUSE, "on").strip().lower()
    if value not in ("on", "off"):
        raise ApiError(
            400,
            f"{wire.CARRYBACK_REUSE} must be 'on' or 'off'",
            code="invalid_header",
            param=wire.CARRYBACK_REUSE,
        )
    return value == "on"


def _echoed(headers: Mapping[str, str], identity: RequestIdentity) -> dict[str, str]:
    """Headers of the answer that say which request it is for."""
    echoed = {}
    if identity.conversation:
        echoed[wire.CARRYBACK_CONVERSATION] = identity.conversation
    if identity.turn:
        echoed[wire.CARRYBACK_TURN] = identity.turn
    with suppress(ValueError):  # one that cannot be sent back is left out
        echoed["X-Request-Id"] = wire.check_id(headers.get("X-Request-Id", ""), "X-Request-Id")
    return echoed
