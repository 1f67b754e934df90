"""The road of a request: identify, place, ask, prefill, decode, hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web
from carryback import wire

from carryback_server.access_log import AccessLog, Entry
from carryback_server.answer import Answer
from carryback_server.chains import Chains
from carryback_server.endpoints import ENDPOINTS
from carryback_server.engine_client import Refused
from carryback_server.errors import ApiError, foreign
from carryback_server.explain import Explanations, Kept
from carryback_server.live import Step
from carryback_server.one_hop import OneHop
from carryback_server.pipeline.context import Identified, RequestContext, Shared
from carryback_server.pipeline.decode import Decoding
from carryback_server.pipeline.hops import carry
from carryback_server.pipeline.identify import Identify
from carryback_server.pipeline.prefill import Prefilled
from carryback_server.pipeline.relay import Relay
from carryback_server.pool import Pool
from carryback_server.reading import Bodies
from carryback_server.state import State, StateDown
from carryback_server.tenants import Tenants
from carryback_server.tracing import Tracer


@dataclass(frozen=True)
class Pipeline:
    """Takes clients' requests through both hops.

    Attributes:
        in_flight: requests of each conversation, by its tenant and id, that are on their way.
    """

    shared: Shared
    identify: Identify
    tenants: Tenants
    bodies: Bodies
    state: State
    chains: Chains
    explanations: Explanations
    tracer: Tracer
    access_log: AccessLog
    pool: Pool
    one_hop: OneHop
    in_flight: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def start(self) -> None:
        """Connect to the state and the engines."""
        await self.state.start()
        await self.pool.start()

    async def stop(self) -> None:
        """Give up what is pinned for conversations that cannot come back, then disconnect."""
        await self.shared.holding.stop()
        await self.pool.stop()
        await self.state.stop()
        await self.bodies.stop()
        await self.tracer.stop()
        self.access_log.stop()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request to an endpoint of `ENDPOINTS`."""
        endpoint, path = ENDPOINTS[request.path], request.path
        trace = self.tracer.request(request.headers, path)
        request_id = request.headers.get("X-Request-Id", "")
        entry = Entry(endpoint=path, request_id=request_id, trace_id=trace.trace_id)
        context = RequestContext(endpoint, trace, entry, Step(entry))
        self.shared.metrics.in_flight.inc()
        try:
            response = await self._travel(request, context)
            entry.status = response.status
        except ApiError as error:
            entry.status, entry.error = error.status, error.code
            response = endpoint.error(error, context.headers)
        except (asyncio.CancelledError, ConnectionResetError):
            entry.client_gone = True
            raise
        except Exception:
            entry.status, entry.error = 500, "router_failed"
            raise
        finally:
            self.shared.metrics.in_flight.dec()
            context.blame.settle()
            entry.duration_s = context.elapsed_s
            self.shared.metrics.observe_request(entry)
            self.shared.live.end(context.step)
            self.access_log.write(entry)
            trace.end(entry)
        return response

    async def _travel(self, request: web.Request, context: RequestContext) -> web.StreamResponse:
        """The steps.

        Raises:
            ApiError: the request is malformed or not allowed, or no engine can serve it.
        """
        tenant = self.tenants.sender(request)
        context.entry.tenant = tenant.name
        async with tenant.admit(), self.bodies.room(tenant) as room:
            with context.trace.step("identify"):
                context.asked = await self.identify(request, tenant, room, context)
            report, relay = partial(self._report, context), partial(self._relay, request, context)
            try:
                with self._counted(context):
                    return await carry(self.shared, context, report, relay)
            except Refused as refused:
                return _refused(context, refused)
            finally:
                await self._close(context)

    @contextmanager
    def _counted(self, context: RequestContext) -> Iterator[None]:
        """A request is on its way, and shown."""
        self.shared.live.begin(context.step)
        conversation = context.asked.conversation
        name = conversation.tenant, conversation.id
        self.in_flight[name] += 1
        of_tenant = self.shared.metrics.in_flight_of(context.entry.tenant)
        of_tenant.inc()
        try:
            yield
        finally:
            of_tenant.dec()
            self.in_flight[name] -= 1
            if not self.in_flight[name]:
                del self.in_flight[name]

    def _report(self, context: RequestContext, prefilled: Prefilled) -> None:
        """Say what was reused."""
        asked, reuse, holder, engine = context.asked, prefilled.reuse, prefilled.holder, prefilled.kv.engine
        conversation = asked.conversation
        context.entry.reuse = reuse
        context.headers[wire.CARRYBACK_REUSE] = conversation.reuse = reuse.header()
        context.step.holder = holder.name if holder is not None else ""
        self.shared.live.changed(context.step)
        if self.explanations.is_on and conversation.id and asked.prompt.body.is_light:
            context.kept = Kept(
                conversation.tenant,
                conversation.id,
                asked.identity.turn,
                asked.identity.step,
                context.endpoint,
                asked.prompt.body,
                reuse,
                holder=context.step.holder,
                block_size=engine.block_size if engine is not None else 0,
                prefill_engine=context.entry.prefill_engine,
                named_by=asked.identity.named_by,
            )
            self.explanations.begin(context.kept, conversation.location, conversation.parent or "")

    async def _relay(
        self,
        request: web.Request,
        context: RequestContext,
        decoding: Decoding,
        answer: Answer,
    ) -> web.StreamResponse:
        """Send an answer to the client."""
        conversation, chain = context.asked.conversation, context.asked.chain
        entry, kept, metrics = context.entry, context.kept, self.shared.metrics

        def on_end(data: bytes) -> None:
            conversation.boundary = boundary = context.endpoint.boundary(data, streamed=answer.is_stream)
            self.shared.holding.ended(decoding.key, boundary, context.had)

        async def before_end(data: bytes) -> None:
            if chain is not None:
                await self.chains.remember(chain, conversation.id, data, streamed=answer.is_stream)

        relay = Relay(
            request,
            context.endpoint,
            context.headers,
            on_end=on_end,
            before_end=before_end,
            idle_timeout_s=self.shared.config.idle_timeout_s,
        )
        if answer.status < 400 and answer.error is None:
            conversation.boundary = "unfinished"  # until its end is there
            if kept is not None:
                kept.is_streamed, relay.keep = answer.is_stream, kept.keep
        entry.streamed = answer.is_stream
        metrics.streams.inc(answer.is_stream)
        try:
            response = await relay.send(answer.settled())
        finally:
            metrics.streams.dec(answer.is_stream)
            entry.bytes_out, entry.error = relay.bytes_out, relay.error_code
        if answer.status >= 500 or relay.error_code:
            decoding.visit.fail()
        return response

    async def _close(self, context: RequestContext) -> None:
        """After a request: keep what is known of its conversation, or forget it if it has ended."""
        if context.kept is not None:
            self.explanations.settle(context.kept)
        if not context.asked.conversation.id:
            return
        if self.shared.config.is_shared:
            self.shared.holding.spawn(self._settle(context.asked))
        else:
            await self._settle(context.asked)

    async def _settle(self, asked: Identified) -> None:
        with suppress(StateDown):
            if asked.identity.ends:
                await self.delete(asked.conversation.tenant, asked.conversation.id)
            else:
                await self.state.save(asked.conversation)

    async def delete(self, tenant: str, conversation_id: str) -> bool:
        """End a conversation and give up what is pinned for it; whether it was known.

        Raises:
            StateDown: nobody knows.
        """
        self.explanations.forget(tenant, conversation_id)
        known = await self.state.delete(tenant, conversation_id)
        self.shared.holding.drop(tenant, conversation_id, known.location if known is not None else None)
        return known is not None


def _refused(context: RequestContext, refused: Refused) -> web.Response:
    """A prefill engine's error that is the client's goes through as it is."""
    content_type, body = refused.content_type, refused.body
    if (problem := foreign(refused.status, content_type)) is not None:
        content_type, body = "application/json", context.endpoint.error_body(problem)
    headers = {**context.headers, "Content-Type": content_type}
    return web.Response(status=refused.status, body=body, headers=headers)
