"""What engines say of themselves, and what the router makes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from service import TEXT, Serve, Service, said, until, user
from stub_engine import StubEngine
from stub_engine.prompts import BLOCK_SIZE


async def views(service: Service) -> dict[str, dict[str, Any]]:
    """`GET /admin/engines`, by role."""
    async with service.session.get(f"{service.router.admin_url}/admin/engines") as response:
        return {each["role"]: each for each in (await response.json())["data"]}


async def test_an_operator_sees_what_engines_are(serve: Serve) -> None:
    service = await serve(engine={"version": "0.33.0", "model": "served"})
    seen = await views(service)
    for role, view in seen.items():
        about = view["about"]
        assert (about["role"], about["vllm"], about["model"]) == (role, "0.33.0", "served")
        assert about["block_size"] == BLOCK_SIZE
        assert len(about["key"]) == 8
        assert abs(view["clock_offset_s"]) < 60
        assert view["mismatches"] == {}
        assert view["events_address"].startswith("tcp://127.0.0.1:")
    assert seen["prefill"]["about"]["key"] == seen["decode"]["about"]["key"]
    assert "the key of the tests" not in str(seen)


@pytest.mark.parametrize(
    ("other", "what", "fix"),
    [
        ({"key": "another"}, "key", "CARRYBACK_KEY"),
        ({"about": {"block_size": 32}}, "block size", "--block-size"),
        ({"about": {"model": "another"}}, "model", "--model"),
        ({"about": {"hash_seed": "1234"}}, "hash seed", "PYTHONHASHSEED"),
        (
            {"about": {"tensor_parallel_size": 4, "kv_heads": 2}},
            "tensor parallel size",
            "--tensor-parallel-size",
        ),
    ],
)
async def test_engines_that_cannot_read_each_other_are_named(
    serve: Serve, caplog: pytest.LogCaptureFixture, other: dict[str, Any], what: str, fix: str
) -> None:
    async with StubEngine("decode", name="odd", **other) as odd:
        with caplog.at_level(logging.WARNING, "carryback"):
            service = await serve(decode=0, engines=[odd.config()])
            await until(lambda: "have not the same" in caplog.text, caplog.text)
        [line] = [each.getMessage() for each in caplog.records if "have not the same" in each.getMessage()]
        assert f"decode engine odd have not the same {what}: nothing is reused" in line
        assert fix in line
        [why] = (await views(service))["prefill"]["mismatches"]["odd"]
        assert what in why
        assert fix in why
        await until(lambda: service.router.pipeline.pool.engines[0].mismatches)

        async def mismatched() -> bool:
            return 'carryback_engine_mismatched{engine="odd",role="decode"} 1.0' in await service.metrics()

        for _ in range(100):
            if await mismatched():
                break
        assert await mismatched()
        await service.stop_router()


async def test_engines_of_before_that_say_nothing_work(serve: Serve) -> None:
    service = await serve(engine={"about": None})
    assert {role: view["about"] for role, view in (await views(service)).items()} == {
        "prefill": {},
        "decode": {},
    }
    messages = [user(TEXT)]
    for outcome in ("miss", "hit"):
        answer = await service.chat(messages, "c")
        assert answer.reuse.outcome == outcome
        messages += [said(answer.text), user("And then?")]
