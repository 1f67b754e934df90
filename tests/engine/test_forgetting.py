"""Nothing that was made before is read after it: resets, pauses, sleep, other weights, adapters that are loaded again.

On a pair of its own, since all of that is open in vLLM's development mode only. What a turn's answer has to be is what
the same pair says with reuse off and nothing in its prefix caches, or, after a change of weights, a pair with those.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from carryback_server import model
from pair import Answer, Client, Pair, commands_for, document, eventually, running
from tiny_model import make_tiny_adapter, make_tiny_model

# As RL trainers have one: what it is named nobody knows.
EXTENSION = """
class Trainer:
    # What a trainer adds to vLLM's workers; what it does twice is undone.

    def turn_weights(self):
        for name, weights in self.model_runner.model.named_parameters():
            if "post_attention_layernorm" in name:
                weights.data.neg_()
"""
RESETS = {
    "decode": ("decode", ""),
    "prefill": ("prefill", ""),
    "reset_running_requests": ("decode", "?reset_running_requests=true"),
    "connector": ("decode", "?reset_external=true"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models and adapters of two seeds."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for seed in (0, 1):
        made[f"model {seed}"] = make_tiny_model(folder / f"model{seed}", model.CHAT_TEMPLATE, seed=seed)
        made[f"adapter {seed}"] = make_tiny_adapter(folder / f"adapter{seed}", made["model 0"], seed=seed)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A pair in development mode, with prefix caching and adapters, and a trainer's method in its workers."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "trainer_of_tests.py").write_text(EXTENSION)
    commands = commands_for(
        models["model 0"],
        "--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8", "--enforce-eager",
        "--worker-extension-cls", "trainer_of_tests.Trainer",
    )  # fmt: skip
    for command in commands:
        command.argv.remove("--no-enable-prefix-caching")
        command.env.update(
            VLLM_SERVER_DEV_MODE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
            PYTHONPATH=":".join([str(folder), *sys.path]),
        )
    async with running(commands, tmp_path_factory.mktemp("logs")) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def client(trained: Pair) -> AsyncIterator[Client]:
    async with trained.router() as client:
        yield client


class Trainer:
    """What a trainer, or an operator, tells the engines."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    async def tell(self, role: str, path: str, body: Any = None) -> Any:
        """An engine's answer."""
        async with self.pair.session.post(self.pair.url(role) + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, (path, response.status, text)
        return json.loads(text) if text.startswith("{") else text

    async def tell_both(self, path: str, body: Any = None) -> None:
        for role in ("decode", "prefill"):
            await self.tell(role, path, body)

    async def clear(self) -> None:
        """Nothing is held, and nothing in the prefix caches.

        A reset says so if it succeeds: vLLM counts the blocks in use. (Its metric of them changes with its steps only.)
        """
        for role in ("decode", "prefill"):
            await eventually(lambda role=role: self._is_reset(role), 30, f"{role} has blocks in use")

    async def _is_reset(self, role: str) -> bool:
        return bool((await self.tell(role, "/reset_prefix_cache"))["success"])

    async def turn_weights(self) -> None:
        """Change both engines' weights in place, or back, without telling them anything else."""
        await self.tell_both("/collective_rpc", {"method": "turn_weights"})


@pytest.fixture
def trainer(trained: Pair) -> Trainer:
    return Trainer(trained)


class Talk:
    """A conversation of two turns.

    Args:
        seed: of what it is about; one of its own for each test.
    """

    def __init__(self, client: Client, seed: int, **fields: Any) -> None:
        self._client = client
        self._name = f"forgetting-{seed}"
        self._fields = fields
        self.messages = [{"role": "user", "content": document(seed, 12)}]

    async def first(self) -> None:
        """The first turn; afterwards its KV is held."""
        answer = await self._client.chat(self.messages, self._name, **self._fields)
        assert answer.status == 200, answer.raw
        self.messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "and then?"},
        ]
        await eventually(self._is_held, 30, "nothing is held")

    async def second(self) -> Answer:
        return await self._client.chat(self.messages, self._name, **self._fields)

    async def alone(self, client: Client | None = None) -> Answer:
        """The second turn, by nobody's conversation."""
        return await (client or self._client).chat(self.messages, reuse=False, **self._fields)

    async def _is_held(self) -> bool:
        return (await self._client.engine("decode"))["pinned_blocks"] > 0

    async def assert_let_go(self) -> None:
        """Assert that the decode engine says that it holds nothing."""
        await eventually(self._is_let_go, 10, "it is held still")

    async def _is_let_go(self) -> bool:
        return not await self._is_held()


async def assert_fresh(talk: Talk, trainer: Trainer) -> Answer:
    """Assert that the second turn reuses nothing from the decode engine, and is what a fresh pair says."""
    answer = await talk.second()
    assert answer.reuse is not None
    assert answer.reuse.tokens == 0, answer.reuse
    await assert_same_as_fresh(answer, talk, trainer)
    return answer


async def assert_same_as_fresh(answer: Answer, talk: Talk, trainer: Trainer) -> None:
    await trainer.clear()
    answer.assert_same(await talk.alone())


async def test_without_a_change_the_second_turn_reads(client: Client, trainer: Trainer) -> None:
    """What the others would have, had nothing been reset."""
    await trainer.clear()
    talk = Talk(client, 1)
    await talk.first()
    await trainer.tell("prefill", "/collective_rpc", {"method": "compute_weight_checksums"})
    await trainer.tell("decode", "/collective_rpc", {"method": "compute_weight_checksums"})
    answer = await talk.second()
    assert answer.reuse is not None
    assert answer.reuse.tokens + answer.reuse.cached > 100


@pytest.mark.parametrize("what", RESETS)
async def test_a_reset_works_and_voids(client: Client, trainer: Trainer, what: str) -> None:
    await trainer.clear()
    role, query = RESETS[what]
    talk = Talk(client, 10 + list(RESETS).index(what))
    await talk.first()
    assert await trainer.tell(role, f"/reset_prefix_cache{query}") == {"success": True}
    if role == "decode":
        await talk.assert_let_go()
    await assert_fresh(talk, trainer)


async def test_sleep_returns_and_voids(client: Client, trainer: Trainer) -> None:
    await trainer.clear()
    talk = Talk(client, 20)
    await talk.first()
    async with asyncio.timeout(60):
        await trainer.tell("decode", "/sleep?level=1")
        await talk.assert_let_go()
        await trainer.tell("decode", "/wake_up")
    await assert_fresh(talk, trainer)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_returns_and_voids(client: Client, trainer: Trainer, mode: str) -> None:
    await trainer.clear()
    talk = Talk(client, 30 + len(mode))
    await talk.first()
    async with asyncio.timeout(60):
        await trainer.tell("decode", f"/pause?mode={mode}&clear_cache=true")
        assert (await client.engine("decode"))["state"] in ("up", "paused")
        await eventually(lambda: is_paused(client), 10, "the router does not know")
        # A turn that comes meanwhile waits.
        answer = asyncio.create_task(talk.second())
        await eventually(lambda: client.is_busy("decode"), 30, "it did not get there")
        await trainer.tell("decode", "/resume")
    got = await answer
    assert got.reuse is not None
    assert got.reuse.tokens == 0
    await assert_same_as_fresh(got, talk, trainer)


async def test_a_release_during_a_pause_has_nothing_left_to_let_go_of(
    client: Client, trainer: Trainer
) -> None:
    await trainer.clear()
    talk = Talk(client, 35)
    await talk.first()
    async with asyncio.timeout(60):
        await trainer.tell("decode", "/pause?mode=keep&clear_cache=false")
        await talk.assert_let_go()
        async with client.session.delete(f"{client.url}/v1/conversations/{talk._name}") as response:
            assert response.status == 200
        await trainer.tell("decode", "/resume")
    await assert_fresh(talk, trainer)


async def is_paused(client: Client) -> bool:
    return bool((await client.engine("decode"))["state"] == "paused")


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_a37_a_client_leaves_while_an_engine_is_paused(
    client: Client, trainer: Trainer, role: str, mode: str
) -> None:
    await trainer.clear()
    held = [Talk(client, 40 + at) for at in range(2)]
    for each in held:
        await each.first()
    staying, leaving = (
        asyncio.create_task(client.chat(each.messages, each._name, tokens=150, stop=["\x00"]))
        for each in held
    )
    await eventually(lambda: client.is_busy("decode", 2), 30, "they did not get there")
    pausing = asyncio.create_task(trainer.tell(role, f"/pause?mode={mode}&clear_cache=false"))
    leaving.cancel()
    async with asyncio.timeout(60):
        await pausing
        await trainer.tell(role, "/resume")
        answer = await staying
    if mode != "abort":
        assert answer.status == 200
        assert len(answer.tokens) == 150
        expected = await client.chat(held[0].messages, tokens=150, reuse=False)
        answer.assert_same(expected)
    async with client.session.delete(f"{client.url}/v1/conversations/{held[0]._name}"):
        pass
    await trainer.clear()
    assert (await held[1].alone()).status == 200  # both engines live


async def test_weights_that_change_in_place(
    client: Client, trainer: Trainer, models: dict[str, Path]
) -> None:
    await trainer.clear()
    talk = Talk(client, 60)
    await talk.first()
    before = await talk.alone()
    try:
        await trainer.turn_weights()
        await trainer.tell_both("/reset_prefix_cache")
        answer = await assert_fresh(talk, trainer)
        assert answer.first != before.first
    finally:
        await trainer.turn_weights()


async def test_weights_that_change_without_a_reset(
    client: Client, trainer: Trainer, models: dict[str, Path]
) -> None:
    """The plug-in takes a worker's method that it does not know for a change of weights."""
    await trainer.clear()
    talk = Talk(client, 61)
    await talk.first()
    try:
        await trainer.turn_weights()
        await talk.assert_let_go()
        await assert_fresh(talk, trainer)
    finally:
        await trainer.turn_weights()


async def test_an_operator_makes_an_engine_forget(client: Client, trainer: Trainer) -> None:
    await trainer.clear()
    talk = Talk(client, 62)
    await talk.first()
    name = (await client.engine("decode"))["name"]
    async with client.session.post(f"{client.admin_url}/admin/engines/{name}/forget") as response:
        assert response.status == 200, await response.text()
    await talk.assert_let_go()
    await assert_fresh(talk, trainer)


@pytest.mark.parametrize("how", ["again", "in place", "decode only", "prefill only"])
async def test_a36_an_adapter_that_is_loaded_again_is_another(
    client: Client, trainer: Trainer, models: dict[str, Path], how: str
) -> None:
    at = ["again", "in place", "decode only", "prefill only"].index(how)
    name = f"adapter-{at}"
    await trainer.clear()
    old = {"lora_name": name, "lora_path": str(models["adapter 0"])}
    new = {"lora_name": name, "lora_path": str(models["adapter 1"])}
    await trainer.tell_both("/v1/load_lora_adapter", old)
    try:
        talk = Talk(client, 70 + at, model=name)
        await talk.first()
        # What a pair says that never had the old one.
        await trainer.tell_both("/v1/load_lora_adapter", {**new, "lora_name": f"fresh-{at}"})
        before = await talk.alone()
        talk._fields = {"model": f"fresh-{at}"}
        fresh = await talk.alone()
        talk._fields = {"model": name}
        assert fresh.first != before.first
        roles = {"decode only": ["decode"], "prefill only": ["prefill"]}.get(how, ["decode", "prefill"])
        for role in roles:
            if how == "again":
                await trainer.tell(role, "/v1/unload_lora_adapter", {"lora_name": name})
            await trainer.tell(
                role, "/v1/load_lora_adapter", {**new, **({} if how == "again" else {"load_inplace": True})}
            )
        answer = await talk.second()
        assert answer.reuse is not None
        assert answer.reuse.tokens == 0
        # The decode engine answers with the adapter that it has.
        # Where one engine has the new one, neither reads from the other, and the decode engine computes with its own.
        answer.assert_same(before if how == "prefill only" else fresh)
    finally:
        for role in ("decode", "prefill"):
            for each in (name, f"fresh-{at}"):
                await trainer.tell(role, "/v1/unload_lora_adapter", {"lora_name": each})


async def test_a36_an_adapter_that_is_unloaded(
    client: Client, trainer: Trainer, models: dict[str, Path]
) -> None:
    await trainer.clear()
    adapter = {"lora_name": "gone", "lora_path": str(models["adapter 0"])}
    await trainer.tell_both("/v1/load_lora_adapter", adapter)
    talk = Talk(client, 80, model="gone")
    await talk.first()
    await trainer.tell_both("/v1/unload_lora_adapter", {"lora_name": "gone"})
    answer = await talk.second()
    assert answer.status == 404
    assert "gone" in json.dumps(answer.body)  # the engine's own words
    await trainer.clear()
