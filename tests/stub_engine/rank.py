"""One engine, or one rank of several: its KV, and what carryback's plug-in does with it.

The rules are those of `carryback_vllm.scheduler`, told again in as few words as a test needs. Who has what for how long
(`Holds`) and who is asked (`Peers`) is the plug-in's own code, which needs no vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carryback.wire.events import (
    HASH_BYTES,
    LEASE_S,
    Ask,
    Command,
    Declined,
    Done,
    Forget,
    Found,
    Held,
    Keep,
    Leased,
    Prefilled,
    Release,
    Released,
    ReleaseReason,
    transfer_params,
)
from carryback_vllm.holds import LEASE, MAX_LEASED, MAX_LEASED_BY_ALL, Holds
from carryback_vllm.peers import TIMEOUT_S, Peers, Question
from carryback_vllm.seal import Sealer

from stub_engine import side_channel
from stub_engine.blocks import Block, BlockPool
from stub_engine.prompts import BLOCK_SIZE, Answer, Prompt, block_hashes, compute_kv
from stub_engine.publisher import Publisher

T = TypeVar("T")

_ANSWER_POLL_S = 0.002


class LoadFailed(Exception):
    """A decode engine cannot read the prompt's KV; stock policy is to fail the request."""


@dataclass(frozen=True)
class Settings:
    """What the engine's command line says.

    Attributes:
        plugin: with carryback's plug-in; else as stock vLLM, prompts to decode engines only.
        caching: whether it finds what it has computed, by content; None: a decode engine does, a prefill engine does not.
        threshold: tokens below which a prefill engine recomputes rather than reads.
        lease_s: how long a prefill engine holds a prompt's KV unless the request says.
        ttl_s: how long a decode engine says that it holds; what it does hold, requests say.
        grace_s: how much longer than it was told a decode engine pins, to see who lets go.
        max_pinned: the share of the blocks that a decode engine pins at most.
        max_leased, max_leased_by_all: the share that one prefill engine may lease, and that all may.
        reader_lease_s: after so long without a word of its reader a lease ends.
        ask_timeout_s: how long a prefill engine waits for what decode engines have.
    """

    plugin: bool = True
    caching: bool | None = None
    threshold: int = 64
    lease_s: float = 30.0
    ttl_s: float = 480.0
    grace_s: float = 0.0
    max_pinned: float = 0.9
    max_leased: float = MAX_LEASED
    max_leased_by_all: float = MAX_LEASED_BY_ALL
    reader_lease_s: float = LEASE_S
    ask_timeout_s: float = 5 * TIMEOUT_S  # the machine that tests run on is slow at times


@dataclass
class Log:
    """What is remembered over restarts.

    Attributes:
        journal: a file to which all of it is written too, a line each, since a process may be killed.
        violations: what a correct router never causes.
    """

    journal: Path | None = None
    violations: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        """A correct router would not have caused this."""
        self.violations.append(text)
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(f"violation {text}\n")


@dataclass
class Match:
    """What a request may read, and what it read, in tokens; as the plug-in's.

    Attributes:
        blocks: leading blocks of the prompt that it may read or has.
        expected: what the conversation's last request left.
        is_changed: the prompt does not begin with that.
        reason: why not more is read; empty where all is.
        found, holder, asked: what decode engines said.
        cached, read: where it came from.
    """

    blocks: int = 0
    expected: int = 0
    is_changed: bool = False
    reason: str = ""
    found: int = 0
    holder: str = ""
    asked: int = 0
    cached: int = 0
    read: int = 0

    def report(self, count: int) -> dict[str, Any]:
        """`carryback_reuse` of a prompt of so many tokens."""
        reused = self.read + self.cached
        reason = self.reason
        if reason == "nothing" and self.cached:
            reason = "local_cache"
        if reason in ("", "nothing", "local_cache"):
            if self.is_changed:
                reason = "history_changed"
            elif reused < self.expected:
                reason = "overwritten"
            elif not reused:
                reason = "new"
            else:
                reason = reason or "verified"
        is_whole = reason in ("verified", "local_cache")
        return {
            "outcome": "miss" if not reused else "hit" if is_whole else "partial",
            "tokens": self.read,
            "cached": self.cached,
            "recomputed": count - reused,
            "reason": reason,
            "found": self.found,
            "holder": self.holder,
            "asked": self.asked,
        }


@dataclass
class Job:
    """One request in the engine.

    Attributes:
        name: the engine's own id of it.
        limit: most tokens that its answer may have.
        kv_transfer: `kv_transfer_params` as they came.
        fails_load: its read fails.
        load_delay_s: before its read.
        held: `never`: no `Held` event; `lost`: sent, and lost on the way; else after so many seconds.
        blocks: that it has.
        match: what it may read.
        work: how long it took.
        epoch: in which its KV was begun.
        generated: tokens of its answer so far.
        is_computed: its prompt's KV is there.
    """

    name: str
    prompt: Prompt
    limit: int = 1
    salt: str = ""
    kv_transfer: dict[str, Any] | None = None
    fails_load: bool = False
    load_delay_s: float = 0.0
    held: str | float = 0.0
    blocks: list[Block] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    match: Match = field(default_factory=Match)
    work: dict[str, Any] = field(default_factory=dict)
    epoch: str = ""
    generated: list[int] = field(default_factory=list)
    is_computed: bool = False
    is_processed: bool = False
    is_over: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """`kv_transfer_params`, if there are any."""
        return self.kv_transfer or {}

    @property
    def key(self) -> str | None:
        """The router's key of it."""
        key = self.params.get("carryback_key")
        return key if isinstance(key, str) else None

    @property
    def is_prefill(self) -> bool:
        """It is a prompt whose KV a decode engine will read."""
        return bool(self.params.get("do_remote_decode"))


@dataclass
class _Prompt:
    """A prompt's KV that waits for a decode engine."""

    key: str | None
    blocks: list[Block]
    timer: asyncio.TimerHandle


class Rank:
    """One scheduler with its KV cache.

    Args:
        engine: its id for transfers, new with every start.
        address: host and port of the side channel.
        caches: whether it finds what it has computed.
        secret: of the events.

    Attributes:
        running: requests in it.
        leases: what prefill engines are about to read.
        answers: what becomes of their questions: `never` answered, or so many seconds late, or refused for this reason;
            empty: they are answered.
        asked: how many there were.
        expired: leases and prompts that ended because their time was over: nobody has said that they were.
    """

    def __init__(
        self, engine: str, address: tuple[str, int], publisher: Publisher, pool: BlockPool,
        sealer: Sealer, settings: Settings, log: Log, *, caches: bool, secret: str | None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.pool = pool
        self.publisher = publisher
        self.answers: str | float = ""
        self.asked = self.expired = 0
        self.running: set[str] = set()
        self.reads, self.read_s, self.read_bytes = 0, 0.0, 0
        self._log = log
        self._address = address
        self._sealer = sealer
        self._settings = settings
        self._caches = caches
        self._secret = secret
        self._epoch = secrets.token_hex(8)
        self._is_stopped = False

        def holds(each: float, all: float) -> Holds:
            # (The plug-in's are of vLLM's own blocks.)
            touch: Any = pool.touch
            free: Any = pool.give_back
            return Holds(touch, free, each=int(each * pool.capacity), all=int(all * pool.capacity))

        self._pins = holds(settings.max_pinned, settings.max_pinned)
        self._pin_names: dict[str, None] = {}
        # What is to be said of requests whose `Held` is late: after it.
        self._late: dict[str, list[Callable[[int], Any]]] = {}
        self.leases = holds(settings.max_leased, settings.max_leased_by_all)
        self._prompts: dict[str, _Prompt] = {}
        self._peers: Peers | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        publisher.on_command = self._on_command

    @property
    def pinned(self) -> int:
        """Blocks held for absent readers."""
        return self._pins.blocks + sum(len(each.blocks) for each in self._prompts.values())

    @property
    def held(self) -> list[str]:
        """The keys of the requests whose blocks are pinned, and the names of the prompts that were not read yet."""
        return [*self._pin_names, *self._prompts]

    def stop(self) -> None:
        """Forget all, as a process that is killed."""
        self._is_stopped = True
        for prompt in self._prompts.values():
            prompt.timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._peers is not None:
            self._peers.close()

    # -- a request comes

    async def begin(self, job: Job, size: int) -> list[bytes]:
        """Take a request in, and get its prompt's KV: found, read, and computed.

        Args:
            size: blocks for the prompt and the answer.

        Returns:
            What the prompt's blocks hold.

        Raises:
            LoadFailed: a decode engine could not read.
        """
        self.running.add(job.name)
        job.hashes = block_hashes(job.prompt.tokens, job.salt)
        addresses = self._look(job)
        await self._wait(job)
        self._take_in(job)
        await self._decide(job, addresses)
        # The last token is always computed.
        most = (len(job.prompt.tokens) - 1) // BLOCK_SIZE
        job.blocks, cached = await self.pool.take(size, job.hashes[:most] if self._caches else ())
        job.epoch = self._epoch
        if job.match.reason == "too_many_leases":
            await self._decide(job, addresses)  # once more, now that its turn has come
        began = time.perf_counter()
        known = await self._load(job, cached)
        read = time.perf_counter()
        kv = compute_kv(job.prompt.tokens, known)
        job.work = {
            "read_s": read - began if job.match.read else 0.0,
            "compute_s": time.perf_counter() - read,
            "computed": len(job.prompt.tokens) - job.match.read - job.match.cached,
        }
        if kv != compute_kv(job.prompt.tokens):
            self._log.violation(f"{job.name} read KV that is not its prompt's")
        self._fill(job, kv, job.hashes)
        job.is_computed = True
        return [block.kv for block in job.blocks[: len(kv)]]

    def _look(self, job: Job) -> list[str]:
        """Whom to ask what they have of a prompt; or look here, for a router that wants to know."""
        params = job.params
        addresses = params.pop("carryback_ask", None)
        if job.is_prefill:
            _forget_remote(params)  # what it reads it asks for
            return (
                [each for each in addresses if isinstance(each, str)] if isinstance(addresses, list) else []
            )
        if params.pop("carryback_find", False) is True and self._settings.plugin and job.key is not None:
            count = len(job.prompt.tokens)
            found = len(self._find(job.hashes, count - 1)) * BLOCK_SIZE
            self._send(lambda seq: Found(self.engine, seq, job.key or "", count, found))
        return []

    async def _wait(self, job: Job) -> None:
        """A request that was sent early waits to be told how it goes on."""
        params = job.params
        if not params or not self._settings.plugin:
            return
        wait_s = params.pop("carryback_await", None)
        if isinstance(wait_s, int | float):
            told = await self.publisher.told(params["carryback_key"], wait_s)
            params.update({**transfer_params(told), **params})

    def reject(self, params: dict[str, Any] | None, name: str) -> None:
        """A request that is refused before it gets here: whose KV it was to read, hears of it."""
        if params and params.get("do_remote_prefill"):
            job = Job(name, Prompt([0]), kv_transfer={**params, "carryback_key": None})
            self._take_in(job)
            self.abort(job)

    def abort(self, job: Job) -> None:
        """A request ends before its answer does: nothing is pinned, and what it was to read is let go of.

        Called for a finished one, does nothing.
        """
        if job.is_over:
            return
        self._leave(job)
        params = job.params
        if params.get("do_remote_prefill") and params.get("remote_block_ids") and not job.is_processed:
            self._spawn(self._notify(params))
        if job.is_computed and not job.is_prefill:
            self._fill_answer(job)
        if not self._is_stopped and not job.is_prefill:
            self._pin(job, has_ended=False)
        self.pool.give_back(job.blocks)

    def _leave(self, job: Job) -> None:
        job.is_over = True
        self.running.discard(job.name)
        if self._peers is not None and not self._is_stopped:
            self._peers.end(job.name)

    def _fill(self, job: Job, kv: list[bytes], hashes: list[bytes]) -> None:
        finds = self._caches and job.epoch == self._epoch
        for index, (block, content) in enumerate(zip(job.blocks, kv, strict=False)):
            self.pool.fill(block, content, hashes[index] if finds and index < len(hashes) else b"")

    def _fill_answer(self, job: Job) -> None:
        """The KV of what was generated, but for the last token: that is never computed."""
        tokens = [*job.prompt.tokens, *job.generated[:-1]]
        full = len(job.prompt.tokens) // BLOCK_SIZE
        job.hashes = block_hashes(tokens, job.salt)
        self._fill(job, compute_kv(tokens, [block.kv for block in job.blocks[:full]]), job.hashes)

    def _find(self, hashes: list[bytes], most_tokens: int) -> list[Block]:
        return self.pool.find(hashes[: most_tokens // BLOCK_SIZE])

    # -- what may it read?

    def _take_in(self, job: Job) -> None:
        """Verify what a request came with."""
        params = job.params
        if not params or not self._settings.plugin or job.is_prefill:
            return
        if not self._sealer.is_authentic(params):
            if params.get("do_remote_prefill") and params.get("remote_block_ids"):
                self._declined(job, "unverified")
            _forget_remote(params)

    async def _decide(self, job: Job, addresses: list[str]) -> None:
        """What a request may read: as much as it was handed, or as decode engines say that they have."""
        params = job.params
        if params.get("do_remote_prefill") and params.get("remote_block_ids"):
            job.match = self._match_prompt(job, params)
        elif job.is_prefill and self._settings.plugin:
            tip = params.pop("carryback_tip", None)
            match = self._expect(job, tip) if tip else Match(0, job.match.expected, job.match.is_changed)
            job.match = match
            if addresses:
                self._take_found(job, await self._ask(job, addresses))
            else:
                match.reason = "off"

    async def _ask(self, job: Job, addresses: list[str]) -> Question:
        if self._peers is None:
            self._peers = Peers(self.engine, secret=self._secret, timeout_s=self._settings.ask_timeout_s)
        most = len(job.prompt.tokens) - 1
        self._peers.end(job.name)
        self._peers.ask(job.name, addresses, job.hashes, block_size=BLOCK_SIZE, max_tokens=most)
        while (question := self._peers.answer(job.name)) is None:  # noqa: ASYNC110
            await asyncio.sleep(_ANSWER_POLL_S)
        return question

    def _expect(self, job: Job, tip: dict[str, Any]) -> Match:
        full = tip["tokens"] // BLOCK_SIZE
        if not full:
            return Match()
        own = self._sealer.digests(job.hashes[full - 1 : full]).hex()
        usable = (len(job.prompt.tokens) - 1) // BLOCK_SIZE
        return Match(expected=min(full, usable) * BLOCK_SIZE, is_changed=own != tip["digest"])

    def _take_found(self, job: Job, question: Question) -> None:
        match = job.match
        match.asked = len(question.answers)
        most = max(question.answers.values(), key=lambda each: each.tokens, default=None)
        if most is None:
            match.reason = "no_answer"
        else:
            match.found, match.holder = most.tokens, most.engine if most.tokens else ""
            match.reason = "unsupported_layout" if most.reason == "unsupported" else most.reason
        if len(job.prompt.tokens) <= BLOCK_SIZE:
            match.reason = "too_short"
        if (best := question.best) is not None:
            match.found, match.holder = best.tokens, best.engine
            match.reason = self._take_record(job, best)
            if not match.reason:
                match.blocks = best.tokens // BLOCK_SIZE
        if not match.blocks and self._peers is not None:
            self._peers.end(job.name)

    def _take_record(self, job: Job, best: Leased) -> str:
        """Why what a decode engine has must not be read, or empty."""
        record = msgspec.json.decode(best.record)
        record["carryback"]["digests"] = base64.b64encode(best.digests).decode()
        record = transfer_params(record)
        if not self._sealer.is_authentic(record):
            return "unverified"
        if record["carryback"].get("block_size") != BLOCK_SIZE or record.get("tp_size") != 1:
            return "layouts_differ"
        common, held = self._sealer.common_blocks(record, job.hashes)
        is_ours = common == held == best.tokens // BLOCK_SIZE and best.tokens < len(job.prompt.tokens)
        if not is_ours or not str(record.get("remote_request_id")).startswith(LEASE):
            return "unverified"
        job.params.update(record)
        return ""

    def _match_prompt(self, job: Job, params: dict[str, Any]) -> Match:
        """A decode engine reads a prompt's KV whole, or computes the prompt itself."""
        count = len(job.prompt.tokens)
        whole = Match(-(-count // BLOCK_SIZE))
        if not self._settings.plugin:
            return whole
        common, held = self._sealer.common_blocks(params, job.hashes)
        tokens = params.get("remote_num_tokens") or 0
        tail = self._sealer.tail(job.prompt.tokens[tokens // BLOCK_SIZE * BLOCK_SIZE : tokens])
        if tokens == count and common == held == tokens // BLOCK_SIZE and tail == params["carryback"]["tail"]:
            return whole
        self._declined(job, "prompt_differs")
        return Match(reason="prompt_differs")

    async def _load(self, job: Job, cached: int) -> list[bytes]:
        """What the leading blocks hold: those in its own cache, and then as far as they can be read from elsewhere."""
        match, params = job.match, job.params
        if job.load_delay_s:
            await asyncio.sleep(job.load_delay_s)
        job.is_processed = True
        known = [block.kv for block in job.blocks[:cached]]
        match.cached = cached * BLOCK_SIZE
        count = max(match.blocks - cached, 0)
        threshold = params.get("carryback_threshold", self._settings.threshold)
        if job.is_prefill and match.blocks and count * BLOCK_SIZE < max(threshold, 1):
            match.reason = "below_threshold" if count else "local_cache"
        elif params.get("remote_block_ids"):
            try:
                read = await self._read_of(job, cached, count)
                known += read
                match.read = min(len(read) * BLOCK_SIZE, len(job.prompt.tokens) - match.cached)
            except side_channel.ReadFailed as error:
                if count and not job.is_prefill:
                    raise LoadFailed(str(error)) from error
                if count:
                    match.reason = "load_failed"
        if self._peers is not None:
            self._peers.end(job.name)
        return known

    async def _read_of(self, job: Job, first: int, count: int) -> list[bytes]:
        """Some blocks of what a record names.

        Raises:
            ReadFailed: there is nobody who has them, or what was read is void.
        """
        params = job.params
        expires = params.get("remote_blocks_expiry_time") or math.inf
        if count and (job.fails_load or time.perf_counter() + 1.0 >= expires):
            raise side_channel.ReadFailed("expired, or told to fail")
        began = time.perf_counter()
        found = await self._read(params, params["remote_block_ids"][0][first : first + count])
        seal = params.get("carryback") or {}
        if count and (not found.is_held or found.epoch != seal.get("epoch", found.epoch)):
            raise side_channel.ReadFailed("what was read may have been overwritten")
        if count:
            self.reads += 1
            self.read_s += time.perf_counter() - began
            self.read_bytes += sum(map(len, found.kv))
        return found.kv

    async def _read(self, params: dict[str, Any], blocks: list[int]) -> side_channel.Contents:
        # A read once begun is completed, even if the request is aborted meanwhile.
        return await asyncio.shield(
            self._spawn(
                side_channel.read(
                    params["remote_host"], params["remote_port"], params["remote_engine_id"],
                    params["remote_request_id"], blocks,
                )
            )
        )  # fmt: skip

    async def _notify(self, params: dict[str, Any]) -> None:
        with suppress(side_channel.ReadFailed):  # whoever holds it lets go when its time is over
            await self._read(params, [])

    def _declined(self, job: Job, reason: str) -> None:
        if (key := job.key) is not None:
            self._send(lambda seq: Declined(self.engine, seq, key, reason))

    # -- others ask, and read

    def _on_command(self, command: Command | None) -> None:
        now = time.perf_counter()
        if self._is_stopped:
            return
        if isinstance(command, Ask):
            self.asked += 1
            if self.answers != "never":
                delay_s = self.answers if isinstance(self.answers, int | float) else 0.0
                self._after(delay_s, lambda: self._answer(command))
        elif isinstance(command, Keep):
            self.leases.extend(command.leases, now + self._settings.reader_lease_s)
        elif isinstance(command, Done):
            self.leases.end(command.leases)
        elif isinstance(command, Release):
            self._unpin(self._pins.end(command.keys), "asked")
            for name in [name for name, each in self._prompts.items() if each.key in command.keys]:
                self._let_go(name)
        elif isinstance(command, Forget):
            self.forget()
        else:
            self._unpin(self._pins.end_late(now), "expired")
            self.expired += len(self.leases.end_late(now))

    def _answer(self, ask: Ask) -> None:
        if not self._is_stopped:
            self.publisher.send(self._lease(ask))

    def _lease(self, ask: Ask) -> Leased:
        """What it has of a prompt, under a lease."""

        def no(reason: str, tokens: int = 0) -> Leased:
            return Leased(self.engine, ask.asker, ask.lease, tokens, reason=reason)

        if not self._caches:
            return no("unsupported")
        if isinstance(self.answers, str) and self.answers:
            return no(self.answers)
        if ask.block_size != BLOCK_SIZE or len(ask.hashes) % HASH_BYTES:
            return no("layouts_differ")
        if self.publisher.is_paused:
            return no("paused")
        hashes = [ask.hashes[at : at + HASH_BYTES] for at in range(0, len(ask.hashes), HASH_BYTES)]
        blocks: Any = self._find(hashes, ask.max_tokens)
        tokens = len(blocks) * BLOCK_SIZE
        if not blocks:
            return no("nothing")
        until = time.perf_counter() + self._settings.reader_lease_s
        if not self.leases.take(ask.lease, blocks, until, ask.asker):
            return no("too_many_leases", tokens)
        record = self._record(ask.lease, blocks, tokens, is_prompt=False)
        digests = self._sealer.digests(hashes[: len(blocks)])
        self._seal(record, digests, "")
        del record["carryback"]["digests"]
        return Leased(self.engine, ask.asker, ask.lease, tokens, msgspec.json.encode(record), digests)

    def _record(self, name: str, blocks: list[Block], tokens: int, *, is_prompt: bool) -> dict[str, Any]:
        return {
            "do_remote_prefill": is_prompt,
            "do_remote_decode": not is_prompt,
            "remote_block_ids": [[block.block_id for block in blocks]],
            "remote_engine_id": self.engine,
            "remote_request_id": name,
            "remote_host": self._address[0],
            "remote_port": self._address[1],
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
        }

    def _seal(self, record: dict[str, Any], digests: bytes, tail: str) -> None:
        self._sealer.seal(
            record, digests=digests, tail=tail, block_size=BLOCK_SIZE, epoch=self._epoch,
            made=time.perf_counter(),
        )  # fmt: skip

    def read(self, name: str, blocks: list[int]) -> side_channel.Contents:
        """Another engine reads what it has a lease on, or a prompt, which is held no more then. What is not held is
        served all the same, as by real hardware."""
        is_held = name in self.leases or name in self._prompts
        if blocks and not is_held and not name.startswith(LEASE):
            self._log.violation(f"{name} was read and is not held")
        contents = side_channel.Contents(self.pool.of(blocks), self._epoch, is_held)
        self._let_go(name)
        return contents

    def _let_go(self, name: str, *, is_late: bool = False) -> None:
        """Hold a prompt's blocks no more, if they are held."""
        if (prompt := self._prompts.pop(name, None)) is not None:
            self.expired += is_late
            prompt.timer.cancel()
            self.pool.give_back(prompt.blocks)

    def _unpin(self, keys: Iterable[str], reason: ReleaseReason) -> None:
        for key in keys:
            del self._pin_names[key]

            def released(seq: int, key: str = key) -> Released:
                return Released(self.engine, seq, key, reason, self.pinned)

            if key in self._late:
                self._late[key].append(released)
            else:
                self._send(released)

    def unpin(self, reason: ReleaseReason) -> None:
        """The engine lets go of all pins by itself."""
        self._unpin(self._pins.end_all(), reason)

    def forget(self) -> None:
        """Void all that was made until now: the weights are others."""
        self._epoch = secrets.token_hex(8)
        self.pool.forget()
        self.leases.end_all()
        self.unpin("void")
        for name in list(self._prompts):
            self._let_go(name)

    # -- a request is finished

    def finish(self, job: Job, answer: Answer) -> dict[str, Any] | None:
        """A request has its answer: hold its KV or free it, and say so; the answer's
        `kv_transfer_params`."""
        self._leave(job)
        if job.is_prefill:
            return self._hand_over(job)
        job.generated = answer.tokens
        self._fill_answer(job)
        self._pin(job, has_ended=True)
        self.pool.give_back(job.blocks)
        return None

    def _hand_over(self, job: Job) -> dict[str, Any]:
        """Keep a prompt's KV for a decode engine."""
        params, tokens = job.params, job.prompt.tokens
        hold_s = params.get("hold_s")
        if not isinstance(hold_s, int | float) or not math.isfinite(hold_s) or not self._settings.plugin:
            hold_s = self._settings.lease_s
        used = -(-len(tokens) // BLOCK_SIZE)
        self.pool.give_back(job.blocks[used:])
        blocks = job.blocks[:used]
        record: dict[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False}
        if job.epoch == self._epoch:
            record = self._record(job.name, blocks, len(tokens), is_prompt=True)
            timer = asyncio.get_running_loop().call_later(
                hold_s, lambda: self._let_go(job.name, is_late=True)
            )
            self._prompts[job.name] = _Prompt(job.key, blocks, timer)
            if self._settings.plugin:
                record["remote_blocks_expiry_time"] = time.perf_counter() + hold_s
                tail = self._sealer.tail(tokens[len(job.hashes) * BLOCK_SIZE :])
                self._seal(record, self._sealer.digests(job.hashes), tail)
        else:
            self.pool.give_back(blocks)
        if self._settings.plugin:
            record["carryback_reuse"] = job.match.report(len(tokens))
            record["carryback_work"] = job.work
            if params.get("carryback_tell") and (key := job.key) is not None:
                said = msgspec.json.encode(record)
                self._send(lambda seq: Prefilled(self.engine, seq, key, said))
        return record

    def _pin(self, job: Job, *, has_ended: bool) -> None:
        """A request has ended at a decode engine: pin what it left, and say what that is."""
        key, hold_s = job.key, job.params.get("hold_s")
        if key is None or not self._settings.plugin:
            return
        blocks: Any = self.pool.find(job.hashes) if self._caches else []
        if not isinstance(hold_s, int | float) or not 0 < hold_s < math.inf:
            hold_s = 0.0
        is_pinned = False
        if hold_s and has_ended and not self.publisher.is_paused:
            held_s = hold_s + self._settings.grace_s
            is_pinned = self._pins.take(key, blocks, time.perf_counter() + held_s)
            if is_pinned:
                self._pin_names[key] = None
                self._unpin(self._pins.end(self._pins.covered(key)), "covered")
                self._after(held_s + 0.001, lambda: self._on_command(None))
        full = len(blocks)
        tip = self._sealer.digests(job.hashes[full - 1 : full]) if full else b""
        self._announce(
            key,
            job.held,
            lambda seq: Held(
                self.engine, seq, key, full * BLOCK_SIZE, full if is_pinned else 0,
                float(hold_s) if is_pinned else 0.0, tip, self.pinned, len(job.generated),
            ),
        )  # fmt: skip

    def _announce(self, key: str, how: str | float, event: Callable[[int], Held]) -> None:
        if how == "lost":
            self.publisher.next()
        elif how != "never":
            self._late[key] = [event]
            self._after(float(how), lambda: self._say_late(key))

    def _say_late(self, key: str) -> None:
        for event in self._late.pop(key):
            self._send(event)

    def _send(self, event: Callable[[int], Any]) -> None:
        if not self._is_stopped:
            self.publisher.send(event(self.publisher.next()))

    def _after(self, delay_s: float, work: Callable[[], object]) -> None:
        async def later() -> None:
            await asyncio.sleep(delay_s)
            work()

        if delay_s:
            self._spawn(later())
        else:
            work()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _forget_remote(params: dict[str, Any]) -> None:
    """Take out all that tells an engine to read."""
    for name in [each for each in params if each.startswith("remote_") or each == "carryback"]:
        del params[name]
