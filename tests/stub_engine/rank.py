"""One engine, or one rank of several: its KV, and what carryback's plug-in does with it.

The rules are those of `carryback_vllm.connector`, told again in as few words as a test needs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from carryback.wire.events import Declined, Held, Prefilled, Released, ReleaseReason
from carryback_vllm.seal import SEALED_FIELDS, Sealer

from stub_engine import side_channel
from stub_engine.blocks import BlockPool
from stub_engine.prompts import BLOCK_SIZE, Answer, Prompt, block_hashes, compute_kv
from stub_engine.publisher import Publisher

T = TypeVar("T")


class LoadFailed(Exception):
    """A decode engine cannot read the prompt's KV; stock policy is to fail the request."""


@dataclass(frozen=True)
class Settings:
    """What the engine's command line says.

    Attributes:
        plugin: with carryback's plug-in; else as stock vLLM with bidirectional transfer.
        threshold: tokens below which a prefill engine recomputes rather than reads.
        lease_s: how long a prefill engine holds a prompt's KV unless the request says.
        ttl_s: the same for what a decode engine holds.
        grace_s: how much longer than it says a decode engine holds, so that reads begun in time can end.
        read_margin_s: a read must begin so long before what is held expires.
        max_pinned: the share of the blocks that a decode engine holds at most.
    """

    plugin: bool = True
    threshold: int = 64
    lease_s: float = 30.0
    ttl_s: float = 480.0
    grace_s: float = 10.0
    read_margin_s: float = 5.0
    max_pinned: float = 0.9


@dataclass
class Log:
    """What is remembered over restarts.

    Attributes:
        journal: a file to which all of it is written too, a line each, since a process may be killed.
        violations: what a correct router never causes.
        offered: the records that were offered, by their holders and requests there, in order.
    """

    journal: Path | None = None
    violations: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        """A correct router would not have caused this."""
        self.violations.append(text)
        self._write(f"violation {text}")

    def offer(self, record: str) -> None:
        """A record was offered."""
        self.offered.append(record)
        self._write(f"offered {record}")

    def _write(self, line: str) -> None:
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(f"{line}\n")


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
        reuse: what a prefill reused, and why not more.
        work: how long it took.
    """

    name: str
    prompt: Prompt
    limit: int = 1
    salt: str = ""
    kv_transfer: dict[str, Any] | None = None
    fails_load: bool = False
    load_delay_s: float = 0.0
    held: str | float = 0.0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    reuse: dict[str, Any] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)
    is_processed: bool = False
    is_over: bool = False
    refused: str = "no_record"
    reads: str = ""


@dataclass
class _Pin:
    key: str | None
    blocks: list[int]
    expires: float
    timer: asyncio.TimerHandle


class Rank:
    """One scheduler with its KV cache.

    Args:
        engine: its id for transfers, new with every start.
        address: host and port of the side channel.

    Attributes:
        running: requests in it.
    """

    def __init__(
        self, engine: str, address: tuple[str, int], publisher: Publisher, pool: BlockPool,
        sealer: Sealer, settings: Settings, log: Log,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.pool = pool
        self.publisher = publisher
        self._log = log
        self.running: set[str] = set()
        self._address = address
        self._sealer = sealer
        self._settings = settings
        self.reads, self.read_s, self.read_bytes = 0, 0.0, 0
        self._pins: dict[str, _Pin] = {}
        self._spent: set[str] = set()
        self._readers: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pinned(self) -> int:
        """Blocks held for absent readers."""
        return sum(len(pin.blocks) for pin in self._pins.values())

    @property
    def held(self) -> list[str]:
        """The requests whose blocks are held."""
        return list(self._pins)

    def stop(self) -> None:
        """Forget all."""
        for pin in self._pins.values():
            pin.timer.cancel()
        for task in self._tasks:
            task.cancel()

    # -- a request comes

    async def begin(self, job: Job, size: int) -> list[bytes]:
        """Take a request in, and get its prompt's KV: read, and computed.

        Args:
            size: blocks for the prompt and the answer.

        Returns:
            What the prompt's blocks hold.

        Raises:
            LoadFailed: a decode engine could not read.
        """
        self.running.add(job.name)
        job.hashes = block_hashes(job.prompt.tokens, job.salt)
        await self._wait(job)
        self._arrive(job)
        job.blocks = await self.pool.take(size)
        began = time.perf_counter()
        known = await self._load(job)
        read = time.perf_counter()
        kv = compute_kv(job.prompt.tokens, known)
        job.work = {
            "read_s": read - began if job.reuse["tokens"] else 0.0,
            "compute_s": time.perf_counter() - read,
            "computed": job.reuse["recomputed"],
        }
        if kv != compute_kv(job.prompt.tokens):
            self._log.violation(f"{job.name} read KV that is not its prompt's")
        self._fill(job, kv)
        return [self.pool.kv[block] for block in job.blocks[: len(kv)]]

    async def _wait(self, job: Job) -> None:
        """A request that was sent early waits to be told how it goes on."""
        params = job.kv_transfer
        if not params or not self._settings.plugin:
            return
        wait_s = params.pop("carryback_await", None)
        if isinstance(wait_s, int | float):
            told = await self.publisher.told(params["carryback_key"], wait_s)
            params.update({**msgspec.json.decode(told), **params})

    def reject(self, params: dict[str, Any] | None, name: str) -> None:
        """A request that is refused before it gets here: whose KV it was to read, hears of it."""
        if params and params.get("do_remote_prefill"):
            job = Job(name, Prompt([0]), kv_transfer=params)
            self._arrive(job)
            self.abort(job)

    def abort(self, job: Job) -> None:
        """A request ends before its answer does: nothing is held, and what it was to read is let go of.

        Called for a finished one, does nothing.
        """
        if job.is_over:
            return
        self._leave(job)
        params = job.kv_transfer
        if params and params.get("remote_block_ids") and not job.is_processed:
            self._spawn(self._notify(params))
        self.pool.give_back(job.blocks)

    def _leave(self, job: Job) -> None:
        job.is_over = True
        self.running.discard(job.name)
        self._readers.pop(job.reads, None)

    def _fill(self, job: Job, kv: list[bytes]) -> None:
        for block, content in zip(job.blocks, kv, strict=False):
            self.pool.kv[block] = content

    # -- may it read?

    def _arrive(self, job: Job) -> None:
        params = job.kv_transfer
        if not params or not self._settings.plugin:
            return
        if isinstance(record := params.pop("carryback_record", None), dict):
            params.update({**record, **params})
        asked = params.pop("carryback_release", None)
        for request in asked if isinstance(asked, list) else ():
            self.let_go(str(request), "asked")
        if params.pop("carryback_forget", False):
            for request in list(self._pins):
                self.let_go(request, "asked")
        if not self._sealer.is_authentic(params):
            if params.get("do_remote_prefill") and params.get("remote_block_ids"):
                self._declined(params, "unverified")
            self._forget_remote(job, "unverified")
        elif params.get("do_remote_decode") and params.get("remote_block_ids"):
            self._offer(job, params)

    def _offer(self, job: Job, params: dict[str, Any]) -> None:
        record = f"{params['remote_engine_id']} {params['remote_request_id']}"
        is_first = record not in self._spent
        self._spent.add(record)
        if not params.pop("carryback_withdraw", False):
            self._log.offer(record)
            if is_first:
                job.reads = record
                self._readers[record] = job
            else:
                self._log.violation(f"record {record} was offered again, with {job.name}")
                self._forget_remote(job, "spent")
            return
        reader = self._readers.get(record)
        if reader is not None and not reader.is_processed:
            self._forget_remote(reader, "withdrawn")
        elif not is_first:
            self._forget_remote(job, "spent")

    def _forget_remote(self, job: Job, reason: str) -> None:
        params = job.kv_transfer or {}
        if params.get("remote_block_ids"):
            job.refused = reason
        for name in SEALED_FIELDS:
            if name.startswith("remote_"):
                params.pop(name, None)
        params.pop("carryback", None)

    async def _load(self, job: Job) -> list[bytes]:
        """What the leading blocks hold, as far as they can be read from elsewhere."""
        params = job.kv_transfer or {}
        if job.load_delay_s:
            await asyncio.sleep(job.load_delay_s)
        is_prefill = bool(params.get("do_remote_decode"))
        blocks, is_whole, reason = self._match(job, params, is_prefill)
        job.is_processed = True
        margin_s = self._settings.read_margin_s if is_prefill else 1.0
        known: list[bytes] = []
        if params.get("remote_block_ids"):
            expires = params.get("remote_blocks_expiry_time") or math.inf
            try:
                if blocks and (job.fails_load or time.perf_counter() + margin_s >= expires):
                    raise side_channel.ReadFailed("expired, or told to fail")
                began = time.perf_counter()
                known = await self._read(params, params["remote_block_ids"][0][:blocks])
                self.reads += bool(known)
                self.read_s += time.perf_counter() - began
                self.read_bytes += sum(map(len, known))
            except side_channel.ReadFailed as error:
                if blocks and not is_prefill:
                    raise LoadFailed(str(error)) from error
                if blocks:
                    is_whole, reason = False, "load_failed"
        count = len(job.prompt.tokens)
        tokens = min(len(known) * BLOCK_SIZE, count)
        job.reuse = {
            "outcome": "hit" if is_whole else "partial" if tokens else "miss",
            "tokens": tokens,
            "cached": 0,
            "recomputed": count - tokens,
            "reason": reason,
        }
        return known

    def _match(self, job: Job, params: dict[str, Any], is_prefill: bool) -> tuple[int, bool, str]:
        """Blocks to read, whether that is all that could be, and why."""
        if not params.get("remote_block_ids"):
            return 0, False, job.refused
        count = len(job.prompt.tokens)
        if not self._settings.plugin:
            blocks = min(params.get("remote_num_tokens") or 0, count) // BLOCK_SIZE
            return (blocks, True, "") if is_prefill else (-(-count // BLOCK_SIZE), True, "")
        common, held = self._sealer.common_blocks(params, job.hashes)
        if not is_prefill:
            tokens = params.get("remote_num_tokens") or 0
            tail = self._sealer.tail(job.prompt.tokens[tokens // BLOCK_SIZE * BLOCK_SIZE : tokens])
            if (
                tokens == count
                and common == held == tokens // BLOCK_SIZE
                and tail == params["carryback"]["tail"]
            ):
                return -(-count // BLOCK_SIZE), True, "verified"
            self._declined(params, "prompt_differs")
            return 0, False, "prompt_differs"
        if params["carryback"].get("block_size") != BLOCK_SIZE or params.get("tp_size") != 1:
            return 0, False, "layouts_differ"
        usable = min(held, (count - 1) // BLOCK_SIZE)
        if usable == 0:
            return 0, False, "too_short"
        blocks = min(common, usable)
        if 0 < blocks * BLOCK_SIZE < params.get("carryback_threshold", self._settings.threshold):
            return 0, False, "below_threshold"
        return blocks, blocks == usable, "verified" if blocks == usable else "history_changed"

    async def _read(self, params: dict[str, Any], blocks: list[int]) -> list[bytes]:
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

    def _declined(self, params: dict[str, Any], reason: str) -> None:
        if isinstance(key := params.get("carryback_key"), str):
            self.publisher.send(Declined(self.engine, self.publisher.next(), key, reason))

    # -- others read

    def read(self, request: str, blocks: list[int]) -> list[bytes]:
        """Another engine reads what is held for a request; then it is held no more. What is not held is
        served all the same, as by real hardware."""
        if blocks and request not in self._pins:
            self._log.violation(f"{request} was read and is not held")
        contents = [self.pool.kv[block] for block in blocks]
        self.let_go(request, "read")
        return contents

    def let_go(self, request: str, reason: ReleaseReason) -> None:
        """Hold a request's blocks no more, if they are held."""
        if (pin := self._pins.pop(request, None)) is None:
            return
        pin.timer.cancel()
        self.pool.give_back(pin.blocks)
        if pin.key is not None:
            if reason == "read" and time.perf_counter() >= pin.expires:
                reason = "expired"
            self.publisher.send(Released(self.engine, self.publisher.next(), pin.key, reason, self.pinned))

    # -- a request is finished

    def finish(self, job: Job, answer: Answer) -> dict[str, Any] | None:
        """A request has its answer: hold its KV or free it, and say so; the answer's
        `kv_transfer_params`."""
        self._leave(job)
        params = job.kv_transfer
        tokens = [*job.prompt.tokens, *answer.tokens]
        if not params:
            self.pool.give_back(job.blocks)
            return None
        is_prefill = bool(params.get("do_remote_decode"))
        # The last token's KV is never computed; a prefill's answer is of no use.
        tokens = job.prompt.tokens if is_prefill else tokens[:-1]
        full = len(job.prompt.tokens) // BLOCK_SIZE
        self._fill(job, compute_kv(tokens, [self.pool.kv[block] for block in job.blocks[:full]]))
        used = -(-len(tokens) // BLOCK_SIZE)
        self.pool.give_back(job.blocks[used:])
        job.blocks = job.blocks[:used]
        hashes = block_hashes(tokens, job.salt)
        settings = self._settings
        hold_s = params.get("hold_s")
        if not isinstance(hold_s, int | float) or not math.isfinite(hold_s) or not settings.plugin:
            hold_s = settings.lease_s if is_prefill else settings.ttl_s
        has_room = self.pinned + used <= settings.max_pinned * self.pool.capacity
        record: dict[str, Any] = {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
        }
        key = params.get("carryback_key")
        digests = b""
        if hold_s > 0 and (is_prefill or (hashes and (has_room or not settings.plugin))):
            digests = self._hold(job, record, tokens, hashes, hold_s, is_prefill)
        else:
            self.pool.give_back(job.blocks)
            hold_s = 0.0
        if not settings.plugin:
            return record
        if is_prefill:
            record["carryback_reuse"] = job.reuse
            record["carryback_work"] = job.work
            if params.get("carryback_tell") and isinstance(key, str):
                self.publisher.send(
                    Prefilled(self.engine, self.publisher.next(), key, msgspec.json.encode(record))
                )
            return record
        if not isinstance(key, str):
            return record
        seal = record.get("carryback")
        if seal is not None:
            del seal["digests"]
        self._announce(
            job.held,
            lambda seq: Held(
                self.engine, seq, key, job.name, record.get("remote_num_tokens", 0),
                used if digests else 0, float(hold_s), msgspec.json.encode(record) if digests else b"",
                digests, self.pinned, len(answer.tokens),
            ),
        )  # fmt: skip
        return None

    def _hold(
        self, job: Job, record: dict[str, Any], tokens: list[int], hashes: list[bytes], hold_s: float,
        is_prefill: bool,
    ) -> bytes:  # fmt: skip
        assert job.kv_transfer is not None
        key = job.kv_transfer.get("carryback_key")
        has_listener = not is_prefill and isinstance(key, str) and self._settings.plugin
        grace_s = 0.0 if is_prefill or not self._settings.plugin else self._settings.grace_s
        deadline = time.perf_counter() + hold_s
        timer = asyncio.get_running_loop().call_later(hold_s + grace_s, self.let_go, job.name, "expired")
        self._pins[job.name] = _Pin(key if has_listener else None, job.blocks, deadline + grace_s, timer)
        # Of a decode engine's, only full blocks have a hash to verify them by.
        is_cut = self._settings.plugin and not is_prefill
        record.update(
            remote_block_ids=[job.blocks[: len(hashes)] if is_cut else job.blocks],
            remote_engine_id=self.engine,
            remote_request_id=job.name,
            remote_host=self._address[0],
            remote_port=self._address[1],
            remote_num_tokens=len(hashes) * BLOCK_SIZE if is_cut else len(tokens),
            remote_blocks_expiry_time=deadline if self._settings.plugin or not is_prefill else None,
        )
        digests = self._sealer.digests(hashes)
        if self._settings.plugin:
            tail = self._sealer.tail(tokens[len(hashes) * BLOCK_SIZE :]) if is_prefill else ""
            self._sealer.seal(record, digests=digests, tail=tail, block_size=BLOCK_SIZE)
        return digests

    def _announce(self, how: str | float, event: Callable[[int], Held]) -> None:
        if how == "never":
            return
        if how == "lost":
            self.publisher.next()
        elif how:
            self._spawn(self._later(float(how), event))
        else:
            self.publisher.send(event(self.publisher.next()))

    async def _later(self, delay_s: float, event: Callable[[int], Held]) -> None:
        await asyncio.sleep(delay_s)
        self.publisher.send(event(self.publisher.next()))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
