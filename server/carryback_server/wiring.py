"""Puts a router's parts together: the only place that knows all of them."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable

from carryback.identity import Identifier
from carryback.wire import events

from carryback_server.access_log import AccessLog
from carryback_server.chains import Chains
from carryback_server.config import RouterConfig
from carryback_server.costs import Costs
from carryback_server.engines import Engine
from carryback_server.explain import Explanations
from carryback_server.live import Live
from carryback_server.metrics import Metrics
from carryback_server.one_hop import OneHop
from carryback_server.pipeline.context import Shared
from carryback_server.pipeline.hold import Holding
from carryback_server.pipeline.identify import Identify
from carryback_server.pipeline.request import Pipeline
from carryback_server.pool import Pool
from carryback_server.reading import Bodies
from carryback_server.state import make_state
from carryback_server.tenants import Tenants
from carryback_server.tracing import make_tracer
from carryback_server.trust import Trust


def build(
    config: RouterConfig, metrics: Metrics, tenants: Tenants, on_message: Callable[[bytes], None]
) -> Pipeline:
    """A router's parts.

    Args:
        tenants: who may ask for what.
        on_message: called with each message that a router broadcast to those that share its state.

    Raises:
        ConfigError: the state, or the tracer, cannot be what the settings say.
    """
    # Keys are unique for ever: engines use them as request ids, and events come back under them.
    router_id = f"cb{uuid.uuid4().hex[:12]}."

    def new_key() -> str:
        """A request's name at an engine. Who can guess it could tell the request how it goes on."""
        return f"{router_id}{secrets.token_hex(8)}"

    def on_event(engine: Engine, event: events.Told) -> None:
        if isinstance(event, events.Held):
            live.generated(event.key, event.generated)
        holding.on_event(engine, event)

    state = make_state(
        config,
        on_message=on_message,
        observe=metrics.observe_state,
        on_junk=metrics.state_junk.inc,
        on_refused=metrics.messages_refused.inc,
    )
    pool = Pool(
        config, metrics, router_id=router_id, on_event=on_event, on_lost=lambda engine: holding.lost(engine)
    )
    holding = Holding(config, state, metrics, pool)
    costs = Costs()
    live = Live(costs.saved_s)
    bodies = Bodies(config, metrics.body_workers_lost.inc)
    trust = Trust(config.pass_fields, lambda name: metrics.fields_dropped.labels(name).inc())
    chains = Chains(
        state,
        ttl_s=config.response_ttl_s,
        max_bytes=config.max_response_bytes,
        on_junk=metrics.state_junk.inc,
    )
    identifier = Identifier(config.identity_capacity)
    return Pipeline(
        Shared(config, pool, holding, metrics, costs, live, new_key),
        Identify(config, bodies, chains, trust, identifier, state, time.time),
        tenants,
        bodies,
        state,
        chains,
        Explanations(config.explain_bytes, router_id),
        make_tracer(config, metrics),
        AccessLog(config.log_format, metrics.log_lines_dropped),
        pool,
        OneHop(config, tenants, bodies, trust, pool, new_key),
    )
