"""Redis, if routers share their state."""

from __future__ import annotations

import asyncio
from time import time

from carryback_server.config import RouterConfig
from carryback_server.doctor.asking import why
from carryback_server.doctor.finding import Finding, fail, ok, skip, warn


async def shared_state(config: RouterConfig, timeout_s: float, max_offset_s: float) -> Finding:
    """It answers, takes writes, and its clock is right, and it evicts nothing by itself."""
    if not config.is_shared:
        return skip(
            "redis", "state is memory: no Redis (CARRYBACK_STATE or --config, if the routers have one)"
        )
    try:
        import redis.asyncio
    except ModuleNotFoundError:
        return fail("redis", "its client is not installed here", "pip install 'carryback[redis]'")
    fix = "start it, or correct state (--state, CARRYBACK_STATE); without it routers remember nothing"
    try:
        async with asyncio.timeout(timeout_s), redis.asyncio.Redis.from_url(config.state) as client:
            seconds, microseconds = await client.time()
            role = (await client.role())[0]
            memory = await client.info("memory")
    except (redis.RedisError, OSError, ValueError) as error:  # a timeout is an OSError
        reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else why(error)
        return fail("redis", f"the routers' state does not answer: {reason}", fix)
    if role != b"master":
        return fail(
            "redis", "the routers' state is a replica, which takes no writes", "point state at the primary"
        )
    offset = seconds + microseconds / 1e6 - time()
    if abs(offset) > max_offset_s:
        return fail(
            "redis",
            f"the clock of Redis is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} ours",
            "synchronise the machines' clocks (NTP, e.g. chrony)",
        )
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        return warn(
            "redis",
            f"Redis evicts what it likes once it is full (maxmemory-policy {policy}), whichever tenant has it",
            "maxmemory-policy noeviction: the routers bound what each tenant keeps there",
        )
    return ok("redis", f"Redis answers, and its clock is within {max(abs(offset), 0.1):.1f} s of ours")
