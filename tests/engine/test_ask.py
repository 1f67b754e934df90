"""What a prefill engine asks decode engines, on real engines, without the router."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from carryback.wire import events
from carryback_server.launch import EngineCommand
from carryback_server.supervisor import Engines
from pair import BLOCK, NAME, Pair, document

WITHIN_S = 60
COMPLETIONS = "/v1/completions"


class Hops:
    """Both hops of a completion, by hand.

    Args:
        decode: the decode engine; the pair's if none is given.
    """

    def __init__(self, pair: Pair, decode: EngineCommand | None = None) -> None:
        self.pair = pair
        self.urls = {
            each.role: each.url for each in (*pair.commands, *([decode] if decode is not None else []))
        }
        self.address = (decode or next(each for each in pair.commands if each.role == "decode")).events
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.XSUB)
        self._events.connect(self.address)
        self._events.send(b"\x01")

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def post(self, role: str, body: dict[str, Any], **params: Any) -> Any:
        """A completion at one engine; its answer."""
        body = {"model": NAME, "temperature": 0, "logprobs": 5, **body, "kv_transfer_params": params}
        async with self.pair.session.post(self.urls[role] + COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def prefill(
        self, prompt: str, *, ask: bool = True, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The prefill hop: what the decode engine is to be given, and what was reused."""
        answer = await self.post(
            "prefill", {"prompt": prompt, "max_tokens": 1, **fields},
            do_remote_decode=True, do_remote_prefill=False,
            carryback_ask=[self.address] if ask else [],
        )  # fmt: skip
        report = answer["kv_transfer_params"].pop("carryback_reuse")
        answer["kv_transfer_params"].pop("carryback_work", None)
        report["choice"] = answer["choices"][0]
        return answer["kv_transfer_params"], report

    async def complete(
        self, prompt: str, *, ask: bool = True, tokens: int = 16, **fields: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Both hops: the answer's choice, and what was reused."""
        params, report = await self.prefill(prompt, ask=ask, **fields)
        answer = await self.post("decode", {"prompt": prompt, "max_tokens": tokens, **fields}, **params)
        return answer["choices"][0], report

    async def next(self, kind: type[Any]) -> Any:
        """The next event of a kind from the decode engine."""
        while await self._events.poll(WITHIN_S * 1000):
            event = events.decode((await self._events.recv_multipart())[-1])
            if isinstance(event, kind):
                return event
        pytest.fail(f"no {kind.__name__}")


@pytest_asyncio.fixture(loop_scope="session")
async def hops(pair: Pair) -> AsyncIterator[Hops]:
    await pair.assert_unpinned()
    hops = Hops(pair)
    yield hops
    hops.close()
    await pair.assert_unpinned()


def salt() -> str:
    """New content, whatever was said before."""
    return uuid.uuid4().hex


def same(one: Any, other: Any) -> None:
    """Assert that two choices were computed from the same KV."""
    assert one["text"] == other["text"]
    for a, b in zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
        assert a.keys() == b.keys()
        for token, value in a.items():
            assert value == pytest.approx(b[token], abs=0.001)


async def test_what_the_decode_engine_has_is_read_whatever_it_is_called(hops: Hops) -> None:
    """Later turns, branches, edits, trims, new conversations: all blocks that are there, several times."""
    own = salt()
    first = document(1, 40)
    choice, report = await hops.complete(first, cache_salt=own)
    assert (report["tokens"], report["reason"], report["asked"]) == (0, "new", 1)
    history = first + choice["text"]
    for prompt, shared in (
        (f"{history} {document(2, 3)}", history),
        (f"{history} {document(3, 3)}", history),
        (f"{history[: len(history) // 2]} {document(4, 3)}", history[: len(history) // 2]),
        (f"{first} {document(5, 2)}", first),
    ):
        choice, report = await hops.complete(prompt, cache_salt=own)
        alone, none = await hops.complete(prompt, ask=False, cache_salt=own)
        assert none["tokens"] == 0
        same(choice, alone)
        tokens = await count(hops, shared)
        assert tokens // BLOCK * BLOCK - BLOCK <= report["tokens"] == report["found"], (report, tokens)
        assert report["outcome"] == "hit"
    _, report = await hops.complete(history, cache_salt=salt())
    assert report["tokens"] == 0


async def count(hops: Hops, prompt: str) -> int:
    """Tokens of a prompt."""
    async with hops.pair.session.post(
        hops.pair.url("decode") + "/tokenize", json={"model": NAME, "prompt": prompt}
    ) as response:
        return len((await response.json())["tokens"])


# Decode engines of `unsettled.py`: what they are started with.
SLOW = {
    "sync": ("SlowConnector", "--no-async-scheduling"),
    "async, two ranks": ("SlowConnector", "--async-scheduling", "--tensor-parallel-size", "2"),
    "mutant": ("UnsettledConnector", "--async-scheduling"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slow(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, EngineCommand]]:
    """Decode engines whose steps take long, beside the pair."""
    commands = {
        name: pair.another(
            "decode", name, "--max-num-batched-tokens", "512", *args, connector=("unsettled", connector)
        )
        for name, (connector, *args) in SLOW.items()
    }
    with pair.paused("decode"):
        async with Engines([*commands.values()], log_dir=tmp_path_factory.mktemp("slow")) as engines:
            await engines.wait_ready()
            yield commands


async def wrong_reads(hops: Hops) -> tuple[int, int]:
    """Ask all through a long prompt at the decode engine, and through its decoding: reads, and wrong ones of them."""
    own = salt()
    prompt = document(7, 70)
    said: list[str] = []

    async def stream() -> None:
        body = {
            "model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 40, "min_tokens": 40,
            "ignore_eos": True, "stream": True, "cache_salt": own,
        }  # fmt: skip
        async with hops.pair.session.post(hops.urls["decode"] + COMPLETIONS, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    said.append(json.loads(line[6:])["choices"][0]["text"])

    reads: list[tuple[str, dict[str, Any]]] = []
    streaming = asyncio.create_task(stream())
    while not streaming.done():
        # A little more than is there: what is asked for ends in what is being computed.
        text = (
            prompt + "".join(said) + " and so on"
            if said
            else prompt[: len(prompt) * (len(reads) % 4 + 1) // 4]
        )
        _, report = await hops.prefill(text, cache_salt=own)
        reads.append((text, report))
    await streaming
    read = [each for each in reads if each[1]["tokens"]]
    wrong = 0
    for text, report in read:
        _, alone = await hops.prefill(text, ask=False, cache_salt=own)
        (got,), (right,) = (each["choice"]["logprobs"]["top_logprobs"] for each in (report, alone))
        is_same = got.keys() == right.keys() and all(abs(got[each] - right[each]) < 0.001 for each in got)
        wrong += not is_same
    return len(read), wrong


@pytest.mark.parametrize("name", SLOW)
async def test_nothing_is_read_before_it_is_written(
    pair: Pair, slow: dict[str, EngineCommand], name: str
) -> None:
    hops = Hops(pair, slow[name])
    reads, wrong = await wrong_reads(hops)
    hops.close()
    assert reads > 5
    # The check fails where hashes are trusted.
    assert (wrong > 0) == (name == "mutant")
