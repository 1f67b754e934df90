"""Engines as they spend time and KV blocks: prefill in chunks, decode in a batch, reads between them.

What carryback's plug-in does in them (`carryback_vllm.connector`) is told again here: what it holds and for
how long, what it reads, when it lets go.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from carryback.wire import Outcome
from carryback.wire.events import Held, Released, ReleaseReason
from carryback_vllm.line import Line

from carryback_server.simulate.loop import VirtualLoop
from carryback_server.simulate.profile import Profile

# As the plug-in has them: a decode engine holds this much longer than it says,
READ_GRACE_S = 10.0
# and a prefill engine does not begin a read so shortly before what is held expires.
READ_MARGIN_S = 5.0


class TooLong(Exception):
    """A request that an engine has not blocks enough for, however long it waits."""


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way through the engines.

    Attributes:
        key: the router's, and its name at the engines.
        prompt_tokens: of its prompt.
        common_tokens: leading ones of them that are the conversation's last prompt and answer.
        output_tokens: of its answer.
        hold_s: how long a decode engine is to hold its KV; 0: not at all.
        read_tokens, cached_tokens: what a prefill engine had not to compute.
        outcome, reason: why not less.
        first_token: when its answer began, on the loop's clock.
        finished: set when the engine that has it is done.
        source: the prefill engine that holds its prompt's KV.
        left: tokens that a prefill engine still has to compute.
        threshold: tokens below which it recomputes rather than reads; None: as the engine would.
        read_s, compute_s: how long the prefill engine read and computed,
        scheduled: and how many tokens it computed meanwhile, of this prompt and of others.
    """

    key: str
    conversation: str
    prompt_tokens: int
    common_tokens: int
    output_tokens: int
    hold_s: float = 0.0
    read_tokens: int = 0
    cached_tokens: int = 0
    outcome: Outcome = "miss"
    reason: str = "no_record"
    first_token: float = math.nan
    finished: asyncio.Future[None] | None = None
    source: PrefillEngine | None = None
    left: int = 0
    threshold: int | None = None
    read_s: float = 0.0
    compute_s: float = 0.0
    scheduled: int = 0

    @property
    def recomputed_tokens(self) -> int:
        """What the prefill engine computed of the prompt."""
        return self.prompt_tokens - self.read_tokens - self.cached_tokens

    def finish(self) -> None:
        """The engine that has it is done with it."""
        assert self.finished is not None
        self.finished.set_result(None)


@dataclass(frozen=True, slots=True)
class Offer:
    """A record, to the prefill engine that may read what it stands for.

    Attributes:
        tokens: in the full blocks held.
        deadline: on the loop's clock.
    """

    holder: DecodeEngine
    key: str
    tokens: int
    deadline: float


class KvCache:
    """An engine's KV blocks: those in use, and free ones in which conversations' prefixes may still be.

    Args:
        has_prefixes: what was in free blocks is found again. The least recently freed is overwritten first.

    Attributes:
        used: blocks of requests that run, or are held.
    """

    def __init__(self, capacity: int, *, has_prefixes: bool) -> None:
        self.capacity = capacity
        self.used = 0
        self._has_prefixes = has_prefixes
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_blocks = 0

    def prefix(self, conversation: str) -> int:
        """Blocks in which the beginning of a conversation still is."""
        return self._kept.get(conversation, 0)

    def take(self, blocks: int, conversation: str) -> bool:
        """Take blocks for a conversation's request, those of its prefix first; False if there are too few.

        Raises:
            TooLong: there are never enough.
        """
        if blocks > self.capacity:
            raise TooLong(
                f"a request of conversation {conversation} needs {blocks} KV blocks, and an engine has "
                f"{self.capacity}: want shorter prompts, or larger engines"
            )
        if self.used + blocks > self.capacity:
            return False
        self.used += blocks
        self._kept_blocks -= self._kept.pop(conversation, 0)
        while (excess := self.used + self._kept_blocks - self.capacity) > 0:
            oldest = next(iter(self._kept))
            gone = min(excess, self._kept[oldest])  # its end first
            self._kept[oldest] -= gone
            self._kept_blocks -= gone
            if not self._kept[oldest]:
                del self._kept[oldest]
        return True

    def give_back(self, blocks: int, conversation: str = "", full: int = 0) -> None:
        """Blocks are in use no more.

        Args:
            full: those of them that are full, and so can be found again.
        """
        self.used -= blocks
        if self._has_prefixes and full:
            self._kept_blocks += full - self._kept.pop(conversation, 0)
            self._kept[conversation] = full


class _Link:
    """Reads of one engine: so many at once, each at its full rate, the others after them."""

    def __init__(self, loop: VirtualLoop, profile: Profile) -> None:
        self._loop = loop
        self._profile = profile
        self._free_at = [0.0] * profile.parallel_reads

    def read(self, tokens: int, done: Callable[[Job], None], job: Job) -> None:
        """Read the KV of so many tokens, then call `done`."""
        end = max(self._free_at[0], self._loop.time()) + self._profile.read_s(tokens)
        heapq.heapreplace(self._free_at, end)
        self._loop.after(end + self._profile.transfer_s - self._loop.time(), done, job)


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


class PrefillEngine:
    """Computes prompts, in chunks, in the order that the plug-in gives them."""

    def __init__(self, loop: VirtualLoop, profile: Profile) -> None:
        self.kv = KvCache(profile.prefill_blocks, has_prefixes=profile.prefill_prefix_caching)
        self.processor = _Processor(loop)
        self._loop = loop
        self._profile = profile
        self._link = _Link(loop, profile)
        self._order = count()
        self._line: Line[tuple[Job, Offer | None]] = Line(profile.patience_s)
        # What is computed in part, and what was read and can be computed now, in the order in which it came.
        self._running: list[Job] = []
        self._loaded: list[tuple[int, Job]] = []
        self._inside = 0
        self._batch: list[tuple[Job, int]] = []
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

    async def compute(self, job: Job, offer: Offer | None) -> None:
        """Compute a request's prompt, less what can be read; the KV stays until `read_over`."""
        job.finished = self._loop.create_future()
        profile = self._profile
        seconds = profile.prefill_request_s + profile.prefill_request_s_per_token * job.prompt_tokens
        self._loop.after(seconds, self._arrive, job, offer)
        await job.finished

    def read_over(self, job: Job) -> None:
        """A decode engine has read a prompt's KV: let go of it."""
        size = self._profile.block_size
        self.kv.give_back(-(-job.prompt_tokens // size), job.conversation, job.prompt_tokens // size)
        self._wake()

    def neighbour_changed(self) -> None:
        """What shares this engine's processor has begun to compute, or ended."""
        if self._is_stepping and self._profile.prefill_slowdown > 1:
            assert self._timer is not None
            self._timer.cancel()
            self._work(self._left_s - (self._loop.time() - self._since) / self._factor)

    def _arrive(self, job: Job, offer: Offer | None) -> None:
        tokens = job.prompt_tokens
        if offer is not None:
            size = self._profile.block_size
            matching = size * min(job.common_tokens // size, offer.tokens // size, self._most_blocks(job))
            tokens -= matching if matching >= self._threshold(job) else 0
        self._line.join(job.key, (job, offer), tokens, self._loop.time())
        self._wake()

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
            begun.compute_s, begun.scheduled = -self._loop.time(), -self._scheduled
        self._scheduled += profile.max_num_batched_tokens - budget
        self._is_stepping = bool(batch)
        self.processor.set_busy(self._is_stepping)
        if batch:
            for job, tokens in batch:
                seconds += profile.chunk_s(tokens, job.prompt_tokens - job.left)
            self._work(seconds)

    def _next(self) -> Job | None:
        """The next request that can be computed; reads begin for those before it that may read."""
        if self._loaded:
            return heapq.heappop(self._loaded)[1]
        while self._inside < self._profile.max_num_seqs and (first := self._line.first()) is not None:
            job, offer = self._line[first]
            if not self._take_blocks(job):
                return None
            self._line.leave(first)
            self._inside += 1
            if offer is None or not self._match(job, offer):
                job.left = job.recomputed_tokens
                return job
            job.read_s = -self._loop.time()
            self._link.read(job.read_tokens, partial(self._read, next(self._order), offer), job)
        return None

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
            else:
                self._inside -= 1
                job.compute_s += self._loop.time()
                job.scheduled += self._scheduled
                self._line.learn(job.compute_s, job.scheduled)
                job.source = self
                job.finish()
        self._step()

    # -- what may it read?

    def _take_blocks(self, job: Job) -> bool:
        size = self._profile.block_size
        cached = min(self.kv.prefix(job.conversation), job.common_tokens // size, self._most_blocks(job))
        if not self.kv.take(-(-job.prompt_tokens // size), job.conversation):
            return False
        job.cached_tokens = cached * size
        return True

    def _threshold(self, job: Job) -> int:
        return self._profile.kv_recompute_threshold if job.threshold is None else job.threshold

    def _most_blocks(self, job: Job) -> int:
        """Blocks of a prompt that need not be computed: one token's logits are the answer."""
        return (job.prompt_tokens - 1) // self._profile.block_size

    def _match(self, job: Job, offer: Offer) -> bool:
        """Decide what is read of a record; whether anything is."""
        size = self._profile.block_size
        usable = min(offer.tokens // size, self._most_blocks(job))
        matching = min(job.common_tokens // size, usable)
        tokens = matching * size - job.cached_tokens
        is_whole = matching == usable
        if usable == 0:
            job.reason = "too_short"
        elif tokens <= 0:
            job.reason = "local_cache" if matching else "history_changed"
            job.outcome = "hit" if is_whole else "miss"
        elif tokens < self._threshold(job):
            job.reason = "below_threshold"
        elif self._loop.time() + READ_MARGIN_S >= offer.deadline:
            job.reason = "load_failed"  # its holder is not told
            return False
        else:
            job.outcome = "hit" if is_whole else "partial"
            job.reason = "verified" if is_whole else "history_changed"
            job.read_tokens = tokens
            return True
        # An empty read: the holder is told that there will be no other.
        self._loop.after(self._profile.transfer_s, offer.holder.let_go, offer.key, "read")
        return False

    def _read(self, order: int, offer: Offer, job: Job) -> None:
        offer.holder.let_go(offer.key, "read")
        job.read_s += self._loop.time()
        job.left = job.recomputed_tokens
        heapq.heappush(self._loaded, (order, job))
        self._wake()


@dataclass(slots=True)
class _Held:
    blocks: int
    full: int
    conversation: str


class DecodeEngine:
    """Generates answers, all of its batch a token a step, and holds their KV.

    Nothing of interest happens in most steps, so they are not gone through: a batch's next steps are summed
    up to the one in which an answer ends or begins.

    Args:
        engine: its id.
        publish: called with each event, once it arrives.

    Attributes:
        pinned: blocks that it holds for absent conversations.
        running: answers in the batch.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        profile: Profile,
        engine: str,
        publish: Callable[[Held | Released], None],
    ) -> None:
        self.kv = KvCache(profile.decode_blocks, has_prefixes=profile.decode_prefix_caching)
        self.processor = _Processor(loop)
        self.pinned = 0
        self.running = 0
        self._loop = loop
        self._profile = profile
        self._engine = engine
        self._publish = publish
        self._link = _Link(loop, profile)
        self._order = count()
        self._seq = count(1)
        self._held: dict[str, _Held] = {}
        self._waiting: deque[Job] = deque()
        self._reading = 0
        # The batch, as it was at the end of a step.
        self._joining: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
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

    async def generate(self, job: Job, *, began: float | None = None) -> None:
        """Read a prompt's KV, and generate its answer.

        Args:
            began: when the request was sent here, if it has waited here for its prompt's KV.
        """
        job.finished = self._loop.create_future()
        seconds = self._profile.decode_request_s
        if began is not None:
            seconds = max(began + seconds - self._loop.time(), self._profile.decode_go_s)
        self._loop.after(seconds, self._arrive, job)
        await job.finished

    def _arrive(self, job: Job) -> None:
        self._waiting.append(job)
        self._admit()

    def _admit(self) -> None:
        """Begin what there are blocks for; room for the whole answer is taken at once."""
        size = self._profile.block_size
        while self._waiting and self.running + self._reading < self._profile.max_num_seqs:
            job = self._waiting[0]
            blocks = -(-(job.prompt_tokens + job.output_tokens) // size)
            cached = min(self.kv.prefix(job.conversation), job.common_tokens // size)
            if not self.kv.take(blocks, job.conversation):
                return
            self._waiting.popleft()
            self._reading += 1
            self._link.read(max(job.prompt_tokens - cached * size, 0), self._read, job)

    def _read(self, job: Job) -> None:
        assert job.source is not None
        job.source.read_over(job)
        self._reading -= 1
        self.running += 1
        self._joining.append(job)
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
        for job in joined:
            heapq.heappush(self._ends, (self._steps + job.output_tokens, next(self._order), job))
            self._context += job.prompt_tokens
        for job in ended:
            self.running -= 1
            self._context -= job.prompt_tokens + job.output_tokens
            self._end(job)
        neighbour = self.processor.neighbour
        is_slow = neighbour is not None and neighbour.processor.is_busy
        self._factor = profile.decode_slowdown if is_slow else 1.0
        if self._ends:
            first_token = self._since + self._seconds(1)
            for job in joined:
                job.first_token = first_token
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

    # -- what it holds

    def _end(self, job: Job) -> None:
        profile = self._profile
        tokens = job.prompt_tokens + job.output_tokens - 1  # the last token's KV is not computed
        used, full = -(-tokens // profile.block_size), tokens // profile.block_size
        taken = -(-(tokens + 1) // profile.block_size)
        if job.hold_s > 0 and full and self.pinned + used <= int(profile.max_pinned * self.kv.capacity):
            self.kv.give_back(taken - used)
            self.pinned += used
            self._loop.after(job.hold_s + READ_GRACE_S, self.let_go, job.key, "expired")
            self._held[job.key] = _Held(used, full, job.conversation)
            held = used, job.hold_s
        else:
            self.kv.give_back(taken, job.conversation, full)
            held = 0, 0.0
        if job.hold_s > 0:
            event = Held(
                engine=self._engine,
                seq=next(self._seq),
                key=job.key,
                request=job.key,
                tokens=full * profile.block_size,
                blocks=held[0],
                hold_s=held[1],
                record=b"",
                digests=b"",
                pinned=self.pinned,
            )
            self._say(event)
        job.finish()

    def let_go(self, key: str, reason: ReleaseReason) -> None:
        """Hold a request's blocks no more, if they are held."""
        if (held := self._held.pop(key, None)) is None:
            return
        self.pinned -= held.blocks
        self.kv.give_back(held.blocks, held.conversation, held.full)
        self._say(
            Released(engine=self._engine, seq=next(self._seq), key=key, reason=reason, pinned=self.pinned)
        )
        self._admit()

    def _say(self, event: Held | Released) -> None:
        self._loop.after(self._profile.control_s, self._publish, event)
