"""A request is at its decode engine while its prompt is computed, and waits there to be told how it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from carryback_server.pipeline import hold
from service import TEXT, Serve, Service, request_to, said, until, user
from stub_engine import expected_text
from stub_engine.prompts import CHAT

FIRST = [user(TEXT)]
LATE_S = 0.3


async def turn(service: Service, messages: list[Any], name: str = "c", **fields: Any) -> list[Any]:
    """One turn, with the right answer; the messages of the next."""
    got = await service.chat(messages, name, **fields)
    assert (got.status, got.text) == (200, expected_text(messages))
    return [*messages, said(got.text), user("And then?")]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_waits_there_and_goes_on_with_the_prompts_kv(serve: Serve, stream: bool) -> None:
    service = await serve()
    service.prefill.fault(hop="prefill", first_delay_s=LATE_S)
    asked = asyncio.create_task(turn(service, FIRST, stream=stream))
    await until(lambda: service.decode.running, "the decode engine has it")
    assert service.prefill.running
    assert not asked.done()
    second = await asked
    before = len(service.decode.requests)
    answered = await service.chat(second, "c", stream=stream)
    assert (answered.text, answered.reuse.outcome) == (expected_text(second), "hit")
    assert len(service.decode.requests) == before + 1
    assert "carryback_await" in service.decode.requests[-1].params
    await service.finish()


async def test_with_the_setting_off_it_comes_when_its_prompt_is_computed(serve: Serve) -> None:
    service = await serve(admit_early=False)
    service.prefill.fault(hop="prefill", first_delay_s=LATE_S)
    asked = asyncio.create_task(turn(service, FIRST))
    await until(lambda: service.prefill.running, "the prefill engine has it")
    assert not service.decode.requests
    await asked
    assert "remote_block_ids" in service.decode.requests[-1].params
    await service.finish()


async def test_a_prefill_engine_that_refuses_leaves_nothing_waiting(serve: Serve) -> None:
    service = await serve(engine={"max_model_len": 400})
    service.prefill.fault(hop="prefill", status=422, status_delay_s=LATE_S)
    asked = asyncio.create_task(service.chat(FIRST, "c"))
    await until(lambda: service.decode.running, "the decode engine has it")
    refused = await asked
    assert (refused.status, refused.error["message"]) == (422, "told to fail")
    await service.idle()
    await turn(service, FIRST)
    await service.finish()


async def test_a_router_that_stops_does_not_wait_for_what_never_went_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "EVENT_WAIT_S", 600)
    service = await serve()
    service.prefill.fault(hop="prefill", status=422, status_delay_s=LATE_S)
    asked = asyncio.create_task(service.chat(FIRST, "c"))
    await until(lambda: service.decode.running, "the decode engine has it")
    assert (await asked).status == 422
    async with asyncio.timeout(60):
        await service.stop_router()


@pytest.mark.parametrize("fault", [{"drop": "before_status"}, {"status": 500}])
async def test_without_a_prefill_engine_it_goes_on_by_itself(serve: Serve, fault: dict[str, Any]) -> None:
    service = await serve()
    service.prefill.fault(hop="prefill", status_delay_s=LATE_S, **fault)
    before = len(service.decode.requests)
    got = await service.chat(FIRST, "c")
    assert (got.text, got.reuse.reason) == (expected_text(FIRST), "prefill_failed")
    assert len(service.decode.requests) == before + 1
    await service.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_goes_on_by_itself_leaves_a_record(
    serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve()
    publisher = service.decode.ranks[0].publisher
    wait = publisher.told
    monkeypatch.setattr(publisher, "told", lambda key, timeout_s: wait(key, 0.0))
    service.prefill.fault(hop="prefill", status_delay_s=LATE_S)
    service.decode.fault(hop="decode", held=LATE_S)
    second = await turn(service, FIRST, stream=stream)
    assert (await service.chat(second, "c")).reuse.outcome == "hit"
    await service.finish()


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"drop": "before_status"}, {"drop": "before_first_byte"}, {"status": 429}]
)
async def test_what_breaks_off_while_it_waits_costs_no_reuse(serve: Serve, fault: dict[str, Any]) -> None:
    service = await serve(1, 2)
    second = await turn(service, FIRST, stream=True)
    holder = next(each for each in service.decodes if each.pinned)
    holder.fault(hop="decode", **fault)
    service.prefill.fault(hop="prefill", first_delay_s=LATE_S)
    got = await service.chat(second, "c", stream=True)
    assert got.reuse.outcome == "hit"
    if fault == {"status": 429}:
        assert got.status == 429
    else:
        assert got.text == expected_text(second)
        other = next(each for each in service.decodes if each is not holder)
        assert "remote_block_ids" in other.requests[-1].params
    await service.finish()


async def test_a_decode_engine_that_dies_while_it_waits(serve: Serve) -> None:
    service = await serve(1, 2)
    service.prefill.fault(hop="prefill", first_delay_s=LATE_S)
    asked = asyncio.create_task(turn(service, FIRST, stream=True))
    await until(lambda: any(each.running for each in service.decodes), "one of them has it")
    dead = next(each for each in service.decodes if each.running)
    await dead.kill()
    await asked
    await service.finish()


async def test_what_is_said_too_early_is_said_in_time(serve: Serve) -> None:
    """The prefill engine is done before the decode engine has read the request."""
    service = await serve()
    service.decode.fault(hop="decode", status_delay_s=LATE_S)
    await turn(service, FIRST)
    assert service.router.metrics.declined._metrics == {}
    await service.finish()


async def test_what_is_lost_on_the_way_is_said_again(serve: Serve) -> None:
    service = await serve()
    publisher = service.decode.ranks[0].publisher
    publisher.deaf = True
    asked = asyncio.create_task(turn(service, FIRST, stream=True))
    await until(lambda: service.prefill.pinned, "the prompt is computed")
    await asyncio.sleep(LATE_S)
    assert not asked.done()
    publisher.deaf = False
    await asked
    await service.finish()


async def test_an_engine_that_is_not_heard_gets_it_when_its_prompt_is_computed(serve: Serve) -> None:
    service = await serve()
    for each in service.engines:
        each.ranks[0].publisher.dropped = 10**6
        each.ranks[0].publisher._hello.cancel()
    engines = service.router.pipeline.pool.engines
    await until(lambda: not any(each.is_heard for each in engines), "they are not heard any more")
    await turn(service, FIRST)
    assert "carryback_await" not in service.decode.requests[-1].params
    await service.finish()


async def test_an_answer_is_not_waited_for_once_the_event_is_there(serve: Serve) -> None:
    service = await serve(probe_timeout_s=1.0)
    await turn(service, FIRST, "warm")  # the router hears the engine
    service.prefill.fault(hop="prefill", answer_delay_s=3600)
    await turn(service, FIRST, "c")
    # Without the event, the answer says it.
    service.prefill.ranks[0].publisher.dropped = 1
    await turn(service, FIRST, "lost")
    await service.finish()


async def test_many_at_once_all_go_on(serve: Serve) -> None:
    service = await serve(2, 3)
    histories = await asyncio.gather(*(turn(service, [user(f"{n} {TEXT}")], f"c{n}") for n in range(40)))
    await asyncio.gather(*(turn(service, each, f"c{n}", stream=True) for n, each in enumerate(histories)))
    text = await service.metrics()
    assert 'carryback_reuse_total{outcome="hit",reason="verified"} 40.0' in text
    await service.finish()


async def test_it_counts_at_both_engines_while_it_waits(serve: Serve) -> None:
    service = await serve()
    service.prefill.fault(hop="prefill", first_delay_s=60)
    task = asyncio.create_task(service.post(CHAT, request_to(CHAT), conversation="c"))
    engines = service.router.pipeline.pool.engines
    await until(lambda: all(each.in_flight == 1 and each.load > 0 for each in engines), "both are busy")
    task.cancel()
    await until(lambda: not any(each.in_flight or each.load for each in engines), "nobody is")
    await service.finish()
