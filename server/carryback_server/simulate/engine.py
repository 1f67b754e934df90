"""Engines as they spend time and KV blocks: prefill in chunks, decode in a batch, reads between them.

They are what the router's pipeline takes for engines (`EngineClient`), without a network. What carryback's plug-in does in
them (`carryback_vllm.scheduler`) is told again here: what a prefill engine asks, reads and reports, what a decode engine
leases, pins and says.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast

from carryback.wire.events import Held, Released, ReleaseReason
from carryback_vllm.holds import MAX_LEASED, MAX_LEASED_BY_ALL
from carryback_vllm.line import Line
from carryback_vllm.match import Match

from carryback_server.answer import Answer
from carryback_server.engine_client import Blame, Prompt, Role, Visit, Why
from carryback_server.simulate.kv import Blocks, KvCache, Segment, Text
from carryback_server.simulate.loop import VirtualLoop
from carryback_server.simulate.profile import Profile
from carryback_server.upstream import Reply

# Of a body, whose size is all that there is of it: what the router takes a token to be before it has learned more.
_BYTES_PER_TOKEN = 4


T = TypeVar("T")


class TooLong(Exception):
    """A request that an engine has not blocks enough for, however long it waits."""


class SimulatedPrompt(Prompt):
    """A request, of which there is no text.

    Attributes:
        text: prompt and answer.
        prompt_tokens, output_tokens: of these.
    """

    def __init__(self, text: Text, prompt_tokens: int, output_tokens: int) -> None:
        self.text = text
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.size = _BYTES_PER_TOKEN * prompt_tokens
        self.is_streamed = True

    @property
    def changes_tools(self) -> bool:
        """See `Prompt`."""
        return False

    def drop(self) -> None:
        """There is nothing to drop."""


class _Link:
    """Reads of one engine: so many at once, each at its full rate, the others after them."""

    def __init__(self, loop: VirtualLoop, profile: Profile) -> None:
        self._loop = loop
        self._profile = profile
        self._free_at = [0.0] * profile.parallel_reads

    def read(self, tokens: int, done: Callable[[T], None], what: T) -> None:
        """Read the KV of so many tokens, then call `done`."""
        end = max(self._free_at[0], self._loop.time()) + self._profile.read_s(tokens)
        heapq.heapreplace(self._free_at, end)
        self._loop.after(end + self._profile.transfer_s - self._loop.time(), done, what)


class _Processor:
    """Something that is busy for a time, which gets longer while what it shares a processor with is busy.

    Attributes:
        busy_s: for how long it was, up to now.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.neighbour: PrefillEngine | DecodeEngine | None = None
        self._is_busy = False
        self._busy_since = 0.0
        self._busy_before = 0.0

    @property
    def is_busy(self) -> bool:
        """It computes."""
        return self._is_busy

    @property
    def busy_s(self) -> float:
        now = self.loop.time()
        return self._busy_before + (now - self._busy_since if self._is_busy else 0.0)

    def set_busy(self, is_busy: bool) -> None:
        """It begins to compute, or ends."""
        if is_busy == self._is_busy:
            return
        now = self.loop.time()
        if is_busy:
            self._busy_since = now
        else:
            self._busy_before += now - self._busy_since
        self._is_busy = is_busy
        if self.neighbour is not None:
            self.neighbour.neighbour_changed()


class Engine:
    """An engine, to the router's pipeline: always up, and heard. See `EngineClient`."""

    takes_go: bool
    is_up: bool
    is_heard = True

    def __init__(self, role: Role, loop: VirtualLoop, profile: Profile, name: str, kv: KvCache) -> None:
        self.role = role
        self.takes_go = self.is_up = True
        self.name = self.run = self.url = self.events_address = name
        self.load = self.in_flight = self.pinned = 0
        self.capacity = kv.capacity
        self.block_size = profile.block_size
        self.kv = kv
        self.processor = _Processor(loop)
        self._loop = loop
        self._profile = profile
        self._link = _Link(loop, profile)
        self._order = count()

    async def prefill(
        self,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        key: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, Any]:
        """See `EngineClient.prefill`."""
        raise NotImplementedError

    async def decode(
        self, prompt: Prompt, params: dict[str, Any], *, key: str, headers: Mapping[str, str]
    ) -> Answer:
        """See `EngineClient.decode`."""
        raise NotImplementedError

    def go(self, key: str, params: Mapping[str, Any]) -> None:
        """See `EngineClient.go`."""
        raise NotImplementedError

    def release(self, *keys: str) -> None:
        """See `EngineClient.release`."""
        for key in keys:
            self._loop.after(self._profile.control_s, self.let_go, key)

    def let_go(self, key: str) -> None:
        """A `release` has come."""
        raise NotImplementedError

    async def forget(self) -> bool:
        """See `EngineClient.forget`."""
        raise NotImplementedError

    def busy(self, tokens: int, blame: Blame | None = None) -> Visit:
        """See `EngineClient.busy`."""
        return Visit(self, tokens, blame)

    def within(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """See `EngineClient.within`. There is time enough."""
        return nullcontext()

    def failed(self, why: Why) -> None:
        """See `EngineClient.failed`."""

    def doubt(self, why: Why) -> None:
        """See `EngineClient.doubt`."""

    def succeeded(self) -> None:
        """See `EngineClient.succeeded`."""

    def _blocks(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        blocks = -(-tokens // self.block_size)
        if blocks > self.capacity:
            raise TooLong(
                f"a request needs {blocks} KV blocks, and {self.role} engines have {self.capacity}: want shorter "
                "prompts, or larger engines"
            )
        return blocks


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt at a prefill engine.

    Attributes:
        usable: leading blocks that need not be computed: one token's logits are the answer.
        ask: the decode engines to ask,
        may_ask_again: once more when its turn has come, if too much was leased before.
        threshold: tokens below which it recomputes rather than reads.
        match: what it may read, and has read.
        arrived: when it came, on the loop's clock.
        holder: the decode engine of which it may read.
        held: blocks that it holds as found (`KvCache.fill`).
        left: tokens that are still to be computed.
        compute_s: how long it was computed, and `match.scheduled` how many tokens the engine computed meanwhile.
        done: once it is computed.
    """

    key: str
    text: Text
    tokens: int
    usable: int
    ask: list[DecodeEngine]
    threshold: int
    done: asyncio.Future[None]
    may_ask_again: bool = True
    match: Match = field(default_factory=Match)
    arrived: float = 0.0
    holder: DecodeEngine | None = None
    held: int = 0
    left: int = 0
    compute_s: float = 0.0


class PrefillEngine(Engine):
    """Computes prompts, in chunks, in the order that the plug-in gives them.

    Args:
        decodes: the decode engines, by the address at which it can ask them.
    """

    def __init__(
        self, loop: VirtualLoop, profile: Profile, name: str, decodes: Mapping[str, DecodeEngine]
    ) -> None:
        kv = KvCache(profile.prefill_blocks, has_prefixes=profile.prefill_prefix_caching)
        super().__init__("prefill", loop, profile, name, kv)
        self._decodes = decodes
        self._line: Line[_Prefill] = Line(profile.patience_s)
        # What is computed in part, and what was read and can be computed now, in the order in which it came.
        self._running: list[_Prefill] = []
        self._loaded: list[tuple[int, _Prefill]] = []
        # Prompts whose KV waits for a decode engine.
        self._computed: dict[str, _Prefill] = {}
        self._inside = 0
        self._batch: list[tuple[_Prefill, int]] = []
        self._scheduled = 0
        self._is_stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = 0.0
        self._since = 0.0
        self._factor = 1.0

    @property
    def queue(self) -> int:
        """Requests that wait for blocks or for room in the batch."""
        return len(self._line)

    async def prefill(
        self,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        key: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, Any]:
        """See `EngineClient.prefill`. The prompt's KV stays until `let_go`."""
        assert isinstance(prompt, SimulatedPrompt)
        profile, tokens = self._profile, prompt.prompt_tokens
        job = _Prefill(
            key,
            prompt.text,
            tokens,
            (tokens - 1) // self.block_size,
            [self._decodes[address] for address in params["carryback_ask"]],
            params.get("carryback_threshold", profile.kv_recompute_threshold),
            self._loop.create_future(),
        )
        if (tip := params.get("carryback_tip")) is not None:
            left = tip["tokens"] // self.block_size
            job.match.expected = min(left, job.usable) * self.block_size
            is_there = left <= tokens // self.block_size
            job.match.is_changed = prompt.text.digest(left).hex() != tip["digest"] if is_there else None
        seconds = profile.prefill_request_s + profile.prefill_request_s_per_token * tokens
        self._loop.after(seconds, self._arrive, job)
        await job.done
        return {
            "remote_engine_id": self.name,
            "remote_request_id": key,
            "remote_block_ids": [[key]],
            "carryback_reuse": job.match.report(tokens),
            "carryback_work": {
                "read_s": job.match.read_s,
                "compute_s": job.compute_s,
                "computed": job.match.scheduled,
            },
        }

    def let_go(self, key: str) -> None:
        """A decode engine has read a prompt's KV, or none will."""
        if (job := self._computed.pop(key, None)) is not None:
            self.kv.give_back(job.text, job.held, self._blocks(job.tokens))
            self._wake()

    def neighbour_changed(self) -> None:
        """What shares this engine's processor has begun to compute, or ended."""
        if self._is_stepping and self._profile.prefill_slowdown > 1:
            assert self._timer is not None
            self._timer.cancel()
            self._work(self._left_s - (self._loop.time() - self._since) / self._factor)

    # -- what may it read?

    def _arrive(self, job: _Prefill) -> None:
        job.arrived = self._loop.time()
        if job.ask:
            self._ask(job)
        else:
            job.match.reason = "off"
            self._line_up(job, job.tokens)

    def _ask(self, job: _Prefill) -> None:
        """A question goes to decode engines, and its answers come back."""
        self._loop.after(2 * self._profile.control_s, self._answered, job)

    def _line_up(self, job: _Prefill, tokens: int) -> None:
        """A prompt, of which so many tokens are likely to be computed, can go when its turn comes."""
        self._line.join(job.key, job, tokens, job.arrived)
        self._wake()

    def _answered(self, job: _Prefill) -> None:
        size, match = self.block_size, job.match
        answers = [(engine.kv.find(job.text, job.usable), engine) for engine in job.ask]
        answers.sort(key=lambda answer: -answer[0])
        most, engine = answers[0]
        match.asked, match.found = len(answers), most * size
        match.holder = engine.run if most else ""
        match.reason = "too_short" if job.tokens <= size else "too_many_leases" if most else "nothing"
        for blocks, engine in answers:
            if blocks and engine.lease(job.key, self.name, job.text, blocks):
                match.blocks, match.found, match.holder, match.reason = blocks, blocks * size, engine.run, ""
                job.holder = engine
                break
        here = self.kv.find(job.text, job.usable)
        self._line_up(job, job.tokens - max(match.blocks, here) * size)

    def _may_read(self, job: _Prefill) -> bool:
        """Whether a prompt reads what was found beyond what is here already."""
        match = job.match
        if job.holder is None:
            return False
        tokens = match.blocks * self.block_size - match.cached_tokens
        if tokens > 0 and tokens >= job.threshold:
            match.read_tokens = tokens
            return True
        match.reason = "below_threshold" if tokens > 0 else "local_cache"
        job.holder.end_lease(job.key)
        return False

    # -- steps

    def _wake(self) -> None:
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        """Between two steps of the engine: see what it computes next, as vLLM's scheduler does."""
        profile = self._profile
        budget = profile.max_num_batched_tokens
        seconds = profile.prefill_step_s
        batch = self._batch
        running, self._running = self._running, []
        for job in running:
            tokens = min(job.left, budget)
            batch.append((job, tokens))
            budget -= tokens
        # Others only while there is room for tokens: where the engine has enough to do, reads wait as well.
        while budget and (begun := self._next()) is not None:
            tokens = min(begun.left, budget)
            batch.append((begun, tokens))
            budget -= tokens
            begun.compute_s, begun.match.scheduled = -self._loop.time(), -self._scheduled
        self._scheduled += profile.max_num_batched_tokens - budget
        self._is_stepping = bool(batch)
        self.processor.set_busy(self._is_stepping)
        if batch:
            for job, tokens in batch:
                seconds += profile.chunk_s(tokens, job.tokens - job.left)
            self._work(seconds)

    def _next(self) -> _Prefill | None:
        """The next request that can be computed; reads begin for those before it that may read."""
        if self._loaded:
            return heapq.heappop(self._loaded)[1]
        while self._inside < self._profile.max_num_seqs and (first := self._line.first()) is not None:
            job = self._line[first]
            if job.match.reason == "too_many_leases" and job.may_ask_again:
                job.may_ask_again = False
                self._line.leave(first)
                self._ask(job)
                continue
            found = self.kv.find(job.text, job.usable)
            if not self.kv.take(job.text, found, self._blocks(job.tokens)):
                return None
            job.held, job.match.cached_tokens = found, found * self.block_size
            self._line.leave(first)
            self._inside += 1
            if not self._may_read(job):
                job.left = job.tokens - job.match.cached_tokens
                return job
            job.match.allocated = self._loop.time()
            self._link.read(job.match.read_tokens, self._read, (next(self._order), job))
        return None

    def _read(self, loaded: tuple[int, _Prefill]) -> None:
        job = loaded[1]
        assert job.holder is not None
        job.holder.end_lease(job.key)
        job.match.read_s = self._loop.time() - job.match.allocated
        job.left = job.tokens - job.match.cached_tokens - job.match.read_tokens
        heapq.heappush(self._loaded, loaded)
        self._wake()

    def _work(self, seconds: float) -> None:
        neighbour = self.processor.neighbour
        is_slow = neighbour is not None and neighbour.processor.is_busy
        self._factor = self._profile.prefill_slowdown if is_slow else 1.0
        self._left_s, self._since = seconds, self._loop.time()
        self._timer = self._loop.call_later(max(seconds, 0.0) * self._factor, self._step_over)

    def _step_over(self) -> None:
        batch, self._batch = self._batch, []
        for job, tokens in batch:
            job.left -= tokens
            if job.left:
                self._running.append(job)
                continue
            self._inside -= 1
            job.compute_s += self._loop.time()
            job.match.scheduled += self._scheduled
            self._line.learn(job.compute_s, job.match.scheduled)
            job.held = self.kv.fill(job.text, job.held, job.tokens // self.block_size)
            self._computed[job.key] = job
            job.done.set_result(None)
        self._step()


@dataclass(eq=False, slots=True)
class Generation:
    """A request at a decode engine, and what there is of a connection to it.

    Attributes:
        sent: when it was sent there, on the loop's clock.
        hold_s: how long its KV is to be pinned, in seconds; 0: not at all.
        begun: with its first token.
        ended: with its last.
        source: the prefill engine that has its prompt's KV,
        source_key: and under which key.
        held: blocks that it holds as found (`KvCache.fill`).
    """

    key: str
    prompt: SimulatedPrompt
    sent: float
    hold_s: float
    begun: asyncio.Future[None]
    ended: asyncio.Future[None]
    source: str = ""
    source_key: str = ""
    held: int = 0

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt.prompt_tokens + self.prompt.output_tokens

    def close(self) -> None:
        """See `Reply.close`. It has ended."""


@dataclass(frozen=True, slots=True)
class _Pin:
    text: Text
    blocks: int
    until: float


class DecodeEngine(Engine):
    """Generates answers, all of its batch a token a step, and lets others read what it has of them.

    Nothing of interest happens in most steps, so they are not gone through: a batch's next steps are summed
    up to the one in which an answer ends or begins.

    Args:
        prefills: the prefill engines, by their names.
        publish: called with each event, once it arrives.

    Attributes:
        running: answers in the batch.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        profile: Profile,
        name: str,
        prefills: Mapping[str, PrefillEngine],
        publish: Callable[[DecodeEngine, Held | Released], None],
    ) -> None:
        super().__init__("decode", loop, profile, name, KvCache(profile.decode_blocks))
        self.running = 0
        self._prefills = prefills
        self._publish = publish
        self._seq = count(1)
        # What others are waited for with: pins by the router's key, and by the segment of their last block; leases by
        # the prefill engine's key, and blocks by who has them.
        self._pins: dict[str, _Pin] = {}
        self._pins_in: dict[Segment, dict[str, int]] = {}
        self._pinned = Blocks()
        self._leases: dict[str, tuple[str, Text, int]] = {}
        self._leased: defaultdict[str, Blocks] = defaultdict(Blocks)
        self._told_to_wait: dict[str, Generation] = {}
        self._waiting: deque[Generation] = deque()
        self._reading = 0
        # The batch, as it was at the end of a step.
        self._joining: list[Generation] = []
        self._ends: list[tuple[int, int, Generation]] = []
        self._steps = 0
        self._context = 0
        self._since = 0.0
        self._next = 0
        self._factor = 1.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def queue(self) -> int:
        """Requests that wait for blocks or for room in the batch."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Blocks that it pins for absent conversations now."""
        return self._pinned.count

    async def decode(
        self, prompt: Prompt, params: dict[str, Any], *, key: str, headers: Mapping[str, str]
    ) -> Answer:
        """See `EngineClient.decode`."""
        assert isinstance(prompt, SimulatedPrompt)
        future = self._loop.create_future
        decoding = Generation(key, prompt, self._loop.time(), params["hold_s"], future(), future())
        if "carryback_await" in params:
            self._told_to_wait[key] = decoding
        else:
            self._take_in(decoding, params, self._profile.decode_request_s)
        await decoding.begun
        return Answer(200, "text/event-stream", b"", True, cast(Reply, decoding))

    def go(self, key: str, params: Mapping[str, Any]) -> None:
        """See `EngineClient.go`."""
        if (decoding := self._told_to_wait.pop(key, None)) is not None:
            since_s = self._loop.time() - decoding.sent
            seconds = max(self._profile.decode_request_s - since_s, self._profile.decode_go_s)
            self._take_in(decoding, params, seconds)

    def _take_in(self, decoding: Generation, params: Mapping[str, Any], seconds: float) -> None:
        decoding.source, decoding.source_key = params["remote_engine_id"], params["remote_request_id"]
        self._loop.after(seconds, self._arrive, decoding)

    def _arrive(self, decoding: Generation) -> None:
        self._waiting.append(decoding)
        self._admit()

    def _admit(self) -> None:
        """Begin what there are blocks for; room for the whole answer is taken at once."""
        size = self.block_size
        while self._waiting and self.running + self._reading < self._profile.max_num_seqs:
            decoding = self._waiting[0]
            text, tokens = decoding.prompt.text, decoding.prompt.prompt_tokens
            found = self.kv.find(text, (tokens - 1) // size)
            if not self.kv.take(text, found, self._blocks(decoding.tokens)):
                return
            decoding.held = found
            self._waiting.popleft()
            self._reading += 1
            self._link.read(tokens - found * size, self._read, decoding)

    def _read(self, decoding: Generation) -> None:
        self._prefills[decoding.source].let_go(decoding.source_key)
        prompt = decoding.prompt
        decoding.held = self.kv.fill(prompt.text, decoding.held, prompt.prompt_tokens // self.block_size)
        self._reading -= 1
        self.running += 1
        self._joining.append(decoding)
        self._interrupt()

    # -- the batch

    def neighbour_changed(self) -> None:
        """What shares this engine's processor has begun to compute, or ended."""
        if self._profile.decode_slowdown > 1 and self._ends:
            self._interrupt()

    def _interrupt(self) -> None:
        """Look at the batch at the end of the step that is under way."""
        if not self._ends:
            if self._timer is None:
                self._begin(0)
            return
        steps = self._steps_in(self._loop.time() - self._since)
        if steps < self._next:
            self._begin(steps)

    def _begin(self, steps: int) -> None:
        """Look at the batch again after so many steps from the last time."""
        if self._timer is not None:
            self._timer.cancel()
        self._next = steps
        self._timer = self._loop.call_at(
            self._since + self._seconds(steps) if steps else self._loop.time(), self._look
        )

    def _look(self) -> None:
        """A step has ended: answers end, others begin."""
        profile = self._profile
        self._timer = None
        self._steps += self._next
        self._context += self._next * len(self._ends)
        self._since = self._loop.time()
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            ended.append(heapq.heappop(self._ends)[2])
        joined, self._joining = self._joining, []
        for decoding in joined:
            heapq.heappush(
                self._ends, (self._steps + decoding.prompt.output_tokens, next(self._order), decoding)
            )
            self._context += decoding.prompt.prompt_tokens
        for decoding in ended:
            self.running -= 1
            self._context -= decoding.tokens
            self._end(decoding)
        neighbour = self.processor.neighbour
        is_slow = neighbour is not None and neighbour.processor.is_busy
        self._factor = profile.decode_slowdown if is_slow else 1.0
        if self._ends:
            for decoding in joined:
                self._loop.after(self._seconds(1), decoding.begun.set_result, None)
            self._begin(self._ends[0][0] - self._steps)
        self.processor.set_busy(bool(self._ends))
        if ended:
            self._admit()

    def _rates(self) -> tuple[float, float]:
        """Of the batch: `k` steps take `k * first + k * (k - 1) * growth` seconds."""
        profile, batch = self._profile, len(self._ends)
        first = (
            profile.decode_step_s
            + profile.decode_sequence_s * batch
            + profile.decode_context_s * self._context
        )
        return self._factor * first, self._factor * profile.decode_context_s * batch / 2

    def _seconds(self, steps: int) -> float:
        first, growth = self._rates()
        return steps * first + steps * (steps - 1) * growth

    def _steps_in(self, seconds: float) -> int:
        """The fewest steps that take at least so many seconds, and at least one."""
        first, growth = self._rates()
        if growth > 0:
            base = first - growth
            steps = math.ceil((math.sqrt(base * base + 4 * growth * seconds) - base) / (2 * growth))
        else:
            steps = math.ceil(seconds / first)
        # The root is not exact.
        steps = max(steps - 1, 1)
        while self._since + self._seconds(steps) < self._since + seconds:
            steps += 1
        return steps

    # -- what others may read

    def lease(self, key: str, asker: str, text: Text, blocks: int) -> bool:
        """Keep leading blocks of a text for a prefill engine's prompt; whether that is within the limits."""
        for who, share in ((asker, MAX_LEASED), ("", MAX_LEASED_BY_ALL)):
            leased = self._leased[who]
            if leased.count + leased.more(text, blocks) > int(share * self.capacity):
                return False
        for held in (self.kv, self._leased[asker], self._leased[""]):
            held.hold(text, blocks)
        self._leases[key] = asker, text, blocks
        return True

    def end_lease(self, key: str) -> None:
        """A prefill engine has read, or does not."""
        asker, text, blocks = self._leases.pop(key)
        for held in (self.kv, self._leased[asker], self._leased[""]):
            held.release(text, blocks)
        self._admit()

    def _end(self, decoding: Generation) -> None:
        text, computed = decoding.prompt.text, decoding.tokens - 1  # the last token's KV is not
        full = computed // self.block_size
        decoding.held = self.kv.fill(text, decoding.held, full)
        blocks = full if self._pin(decoding, full) else 0
        self.kv.give_back(text, decoding.held, self._blocks(decoding.tokens))
        held = Held(
            self.run,
            next(self._seq),
            decoding.key,
            full * self.block_size,
            blocks,
            decoding.hold_s if blocks else 0.0,
            text.digest(full) if full else b"",
            self.held,
            decoding.prompt.output_tokens,
        )
        self._say(held)
        decoding.ended.set_result(None)

    def _pin(self, decoding: Generation, blocks: int) -> bool:
        """Keep what a request leaves, as long as the router wants it; whether there is room for that."""
        key, text, hold_s = decoding.key, decoding.prompt.text, decoding.hold_s
        most = int(self._profile.max_pinned * self.capacity)
        if not hold_s or not blocks or self.held + self._pinned.more(text, blocks) > most:
            return False
        until = self._loop.time() + hold_s
        self.kv.hold(text, blocks)
        self._pinned.hold(text, blocks)
        self._pins[key] = _Pin(text, blocks, until)
        # Who has all their blocks too, and no less long.
        covered = [
            other
            for segment, _, end in text.spans
            for other, last in self._pins_in.get(segment, {}).items()
            if last <= min(end, blocks) and self._pins[other].until <= until
        ]
        self._pins_in.setdefault(text.segment_of(blocks), {})[key] = blocks
        for other in covered:
            self._unpin(other, "covered")
        self._loop.after(hold_s, self._unpin, key, "expired")
        return True

    def let_go(self, key: str) -> None:
        """A `release` has come."""
        self._unpin(key, "asked")

    def _unpin(self, key: str, reason: ReleaseReason) -> None:
        if (pin := self._pins.pop(key, None)) is None:
            return
        pins_there = self._pins_in[segment := pin.text.segment_of(pin.blocks)]
        del pins_there[key]
        if not pins_there:
            del self._pins_in[segment]
        self._pinned.release(pin.text, pin.blocks)
        self.kv.release(pin.text, pin.blocks)
        self._say(Released(self.run, next(self._seq), key, reason, self.held))
        self._admit()

    def _say(self, event: Held | Released) -> None:
        self._loop.after(self._profile.control_s, self._publish, self, event)
