"""Models and engine settings whose KV is laid out differently, and the conversations tried with each.

`test_models.py` tries some of them, `benchmarks/support.py` all.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from carryback_server.model import CHAT_TEMPLATE
from carryback_server.supervisor import Engines
from pair import Answer, Client, Pair, commands_for, document
from tiny_model import make_tiny_model

Messages = list[dict[str, Any]]

TOKENS = 40


@dataclass(frozen=True)
class Layout:
    """A model, and settings of the two engines.

    Attributes:
        name: unique; for the command line.
        title: what a reader calls it.
        kind: of tiny model, one of `tiny_model.KINDS`.
        both, prefill, decode: arguments for vLLM, of both engines and of one.
        env: variables of both engines.
        tolerance: how far log-probabilities of equal KV may be apart: sums in another order.
    """

    name: str
    title: str
    kind: str = "qwen3"
    both: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.001

    @property
    def caches(self) -> bool:
        """The engines have prefix caches."""
        return "--enable-prefix-caching" in self.both


def _tp(size: int) -> tuple[str, str]:
    return "--tensor-parallel-size", str(size)


_NO_HYBRID = ("--disable-hybrid-kv-cache-manager",)
_CACHES = ("--enable-prefix-caching",)
# Without it, vLLM's NIXL connector takes no model with such states.
_STATES = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}

LAYOUTS = [
    Layout("gqa", "Full attention, grouped KV heads (Qwen3)"),
    Layout("mqa", "Full attention, one KV head of another size (Llama)", "llama-mqa"),
    Layout("moe", "Full attention, experts (Qwen3-MoE)", "qwen3-moe"),
    Layout("bf16", "bfloat16 (Qwen3)", both=("--dtype", "bfloat16"), tolerance=0.004),
    Layout("fp16", "float16 (Qwen3)", both=("--dtype", "float16"), tolerance=0.004),
    Layout("fp8-kv", "KV in fp8 (Qwen3)", both=("--kv-cache-dtype", "fp8"), tolerance=0.004),
    Layout("caches", "Prefix caches in both engines (Qwen3)", both=_CACHES),
    Layout("block-sizes", "Blocks of 32 and of 64 tokens (Qwen3)", decode=("--block-size", "64")),
    Layout("gemma2", "Windows and full attention in turn (Gemma 2)", "gemma2"),
    Layout("gemma2-no-hybrid", "The same, one KV cache group", "gemma2", both=_NO_HYBRID),
    Layout("gemma2-caches", "The same, prefix caches in both engines", "gemma2", both=_CACHES),
    Layout("gemma3", "Mostly windows (Gemma 3)", "gemma3"),
    Layout("gemma3-no-hybrid", "The same, one KV cache group", "gemma3", both=_NO_HYBRID),
    Layout("mistral", "Windows only (Mistral 7B v0.1)", "mistral-window"),
    Layout("mistral-no-hybrid", "The same, with that flag", "mistral-window", both=_NO_HYBRID),
    Layout("mla2", "Latent attention, MLA (DeepSeek-V2)", "deepseek-v2"),
    Layout("mla3", "Latent attention, MLA (DeepSeek-V3)", "deepseek-v3"),
    Layout("granite", "Mamba-2 and attention (Granite 4 hybrid)", "granite-hybrid", env=_STATES),
    Layout(
        "qwen3-next",
        "Gated DeltaNet and attention (Qwen3-Next)",
        "qwen3-next",
        both=("--dtype", "bfloat16"),
        env=_STATES,
        tolerance=0.1,
    ),
    Layout("lfm2", "Short convolutions and attention (LFM2)", "lfm2", env=_STATES),
    Layout("mamba2", "Mamba-2 only", "mamba2", env=_STATES),
    Layout("tp2-tp2", "Tensor parallel 2 and 2 (Qwen3)", both=_tp(2)),
    Layout("tp1-tp2", "Tensor parallel 1 and 2 (Qwen3)", decode=_tp(2)),
    Layout("tp2-tp1", "Tensor parallel 2 and 1 (Qwen3)", prefill=_tp(2)),
    Layout("mqa-tp2-tp2", "Tensor parallel 2 and 2, one KV head (Llama)", "llama-mqa", both=_tp(2)),
    Layout("mqa-tp1-tp2", "Tensor parallel 1 and 2, one KV head (Llama)", "llama-mqa", decode=_tp(2)),
    Layout("mqa-tp2-tp1", "Tensor parallel 2 and 1, one KV head (Llama)", "llama-mqa", prefill=_tp(2)),
    Layout("gemma2-tp2-tp2", "Tensor parallel 2 and 2, windows (Gemma 2)", "gemma2", both=_tp(2)),
    Layout("gemma2-tp1-tp2", "Tensor parallel 1 and 2, windows (Gemma 2)", "gemma2", decode=_tp(2)),
    Layout("gemma2-tp2-tp1", "Tensor parallel 2 and 1, windows (Gemma 2)", "gemma2", prefill=_tp(2)),
    Layout("mla2-tp2-tp2", "Tensor parallel 2 and 2, MLA (DeepSeek-V2)", "deepseek-v2", both=_tp(2)),
    Layout("mla2-tp1-tp2", "Tensor parallel 1 and 2, MLA (DeepSeek-V2)", "deepseek-v2", decode=_tp(2)),
    Layout("mla2-tp2-tp1", "Tensor parallel 2 and 1, MLA (DeepSeek-V2)", "deepseek-v2", prefill=_tp(2)),
    # (Stages on a CPU get the buffer between them when vLLM compiles the model.)
    Layout(
        "pp2-pp1",
        "Pipeline parallel 2 and 1 (Qwen3)",
        both=("--no-enforce-eager",),
        prefill=("--pipeline-parallel-size", "2"),
    ),
]


class NoAnswerError(Exception):
    """An engine gives no answer at all."""


@dataclass(frozen=True)
class Tried:
    """One request, and the same request computed in full.

    Attributes:
        name: what it did to its conversation.
        answer: what the client got, and from what.
        apart: by how much the log-probabilities of its first token differ from a full recompute's at most;
            infinite if that is another token.
        is_same: all of its tokens are those of a full recompute.
        telling: by how much those of the unchanged conversation would; 0 where nothing was changed.
    """

    name: str
    answer: Answer
    apart: float
    is_same: bool
    telling: float = 0.0


@asynccontextmanager
async def running(layout: Layout, folder: Path, session: aiohttp.ClientSession) -> AsyncIterator[Pair]:
    """A pair of engines of a layout, until the block ends."""
    model_path = make_tiny_model(folder / "model", CHAT_TEMPLATE, kind=layout.kind)
    commands = commands_for(
        model_path,
        "--kv-cache-memory-bytes", str(256 << 20), *layout.both,
        prefill_args=list(layout.prefill), decode_args=list(layout.decode),
    )  # fmt: skip
    commands = [replace(command, env={**command.env, **layout.env}) for command in commands]
    async with Engines(commands, log_dir=folder) as engines:
        await engines.wait_ready()
        yield Pair(engines, commands, session)


class Trial:
    """Conversations on one pair of engines, each answer compared with a full recompute's.

    That is the decode engine's, alone: nothing comes to it from another.
    """

    def __init__(self, pair: Pair, client: Client, layout: Layout) -> None:
        self._client = client
        self._alone = Client(pair.session, pair.url("decode"), client.admin_url)
        self._other = Client(pair.session, pair.url("prefill"), client.admin_url)
        self._caches = layout.caches
        self.tried: list[Tried] = []

    async def all(self) -> list[Tried]:
        """Growth, edits, a repetition and branches."""
        await self.growth()
        for where in ("first", "middle", "last"):
            await self.edit(where)
        await self.repetition()
        await self.branches()
        return self.tried

    async def is_steady(self) -> bool:
        """Whether the decode engine alone gives the same answers one by one and at once.

        Raises:
            NoAnswerError: it gives none, or the prefill engine alone.
        """
        prompts = [[{"role": "user", "content": document(seed, 16)}] for seed in range(2)]
        single = [await self._recompute(prompt) for prompt in prompts]
        at_once = await asyncio.gather(*(self._recompute(prompt) for prompt in prompts))
        other = await self._other.chat(prompts[0], tokens=TOKENS)
        for answer in (*single, *at_once, other):
            if answer.status != 200:
                raise NoAnswerError(answer.raw)
        return all(_apart(one, other) < 0.5 for one, other in zip(single, at_once, strict=True))

    async def growth(self) -> None:
        """Three turns of a conversation."""
        conversation, messages, answer = await self._begin(1)
        for turn in (2, 3):
            messages = _go_on(messages, answer, f"And what about number {turn}?")
            answer = await self._try(f"turn {turn}", messages, conversation)

    async def edit(self, where: str) -> None:
        """A second turn with a history that was changed in its `first`, `middle` or `last` message."""
        conversation, messages, answer = await self._begin({"first": 2, "middle": 3, "last": 4}[where])
        intact = _go_on(messages, answer, document(99, 2))
        edited = [dict(message) for message in intact]
        at, cut = {"first": (0, 0.2), "middle": (1, 0.5), "last": (2, 0.95)}[where]
        text = edited[at]["content"]
        place = int(len(text) * cut)
        edited[at]["content"] = text[:place] + "#!" + text[place + 2 :]
        await self._try(f"edited {where}", edited, conversation, intact)

    async def repetition(self) -> None:
        """The same request again."""
        conversation, messages, _ = await self._begin(5)
        await self._try("repeated", messages, conversation)

    async def branches(self) -> None:
        """Two continuations of one state at once."""
        conversation, messages, answer = await self._begin(6)
        forks = [_go_on(messages, answer, f"Question {n}: {document(n, 3)}") for n in range(2)]
        await asyncio.gather(*(self._try("branch", fork, conversation) for fork in forks))

    async def _begin(self, seed: int) -> tuple[str, Messages, Answer]:
        conversation = uuid.uuid4().hex
        messages = [
            {"role": "system", "content": document(seed + 100, 4)},
            {"role": "user", "content": document(seed, 16)},
        ]
        answer = await self._client.chat(messages, conversation, tokens=TOKENS)
        if answer.status != 200:
            raise NoAnswerError(answer.raw)
        return conversation, messages, answer

    async def _try(
        self, name: str, messages: Messages, conversation: str, intact: Messages | None = None
    ) -> Answer:
        answer = await self._client.chat(messages, conversation, tokens=TOKENS)
        recomputed = await self._recompute(messages)
        telling = _apart(recomputed, await self._recompute(intact)) if intact is not None else 0.0
        apart = _apart(answer, recomputed)
        self.tried.append(Tried(name, answer, apart, answer.tokens == recomputed.tokens, telling))
        return answer

    async def _recompute(self, messages: Messages) -> Answer:
        salt = {"cache_salt": uuid.uuid4().hex} if self._caches else {}
        return await self._alone.chat(messages, reuse=False, tokens=TOKENS, **salt)


def _go_on(messages: Messages, answer: Answer, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def _apart(one: Answer, other: Answer) -> float:
    assert one.status == other.status == 200, (one.raw, other.raw)
    common = one.first.keys() & other.first.keys()
    if not common or one.tokens[0] != other.tokens[0]:
        return math.inf
    return max(abs(one.first[token] - other.first[token]) for token in common)


def by_name(names: Sequence[str]) -> list[Layout]:
    """Layouts by their names; all of them for none."""
    known: dict[str, Any] = {layout.name: layout for layout in LAYOUTS}
    return [known[name] for name in names] or LAYOUTS
