"""When a read is worth it: what the router is told, learns and shows."""

from __future__ import annotations

from typing import Any

import pytest
from service import TEXT, Serve, Service, said, until, user
from stub_engine import expected_text


async def turns(service: Service, count: int, name: str = "c") -> list[str]:
    """So many turns of a conversation; the reasons of their reuse."""
    messages: list[Any] = [user(TEXT)]
    reasons = []
    for _ in range(count):
        answer = await service.chat(messages, name)
        assert answer.text == expected_text(messages)
        reasons.append(answer.reuse.reason)
        messages += [said(answer.text), user("And then?")]
    return reasons


async def costs(service: Service) -> list[dict[str, Any]]:
    """What the router has learned."""
    async with service.session.get(f"{service.router.admin_url}/admin/costs") as response:
        listing = await response.json()
        return list(listing["data"])


async def test_what_reads_and_computing_take_is_learned_and_shown(serve: Serve) -> None:
    service = await serve()
    assert await costs(service) == []
    assert await turns(service, 12) == ["new", *["verified"] * 11]
    [pair] = await costs(service)
    assert pair["samples"] == {"prefill": 12, "read": 10}
    assert pair["read_s"] + pair["read_s_per_token"] > 0
    assert isinstance(pair["break_even_tokens"], int)
    value = f'carryback_break_even_tokens{{decode="{pair["decode"]}",prefill="{pair["prefill"]}"}}'
    assert f"{value} {float(pair['break_even_tokens'])}" in await service.metrics()
    await service.finish()


@pytest.mark.parametrize(("threshold", "reason"), [(10**6, "below_threshold"), (0, "verified")])
async def test_the_threshold_is_the_routers_if_it_has_one(serve: Serve, threshold: int, reason: str) -> None:
    service = await serve(kv_recompute_threshold=threshold)
    assert await turns(service, 3) == ["new", reason, reason]
    await until(lambda: len(service.decode.ranks[0].held) == 1, "what was not read was let go of")
    await service.finish()


async def test_where_a_read_never_pays_the_prompt_is_computed(serve: Serve) -> None:
    service = await serve(kv_recompute_threshold="auto")
    # A read takes long, and to compute takes the stub next to nothing.
    service.prefill.fault(hop="prefill", load_delay_s=0.1, times=None)
    reasons = await turns(service, 12)
    assert reasons[:7] == ["new", *["verified"] * 6]  # the first shakes hands, five are learned from
    assert set(reasons[7:]) == {"below_threshold"}
    [pair] = await costs(service)
    assert pair["break_even_tokens"] == -1 or pair["break_even_tokens"] > 1000
    await service.finish()
