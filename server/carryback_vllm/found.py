"""What a decode engine has of a prompt: vLLM's own prefix cache, and which of its blocks can be read over the network.

A block has its hash before it has its KV: vLLM hashes a block when it schedules the step that fills it. A request of
the same engine may rely on that, since it runs after that step. A reader over the network may not: it would read
garbage under a valid hash. So each hashed block is stamped with the newest step that may write it, and counts as found
only once that step has ended. A step has ended when vLLM has the output of all its workers. The output of a
tensor-parallel step needs every rank's attention in the last layer, and so every rank's KV.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Found:
    """The longest beginning of a prompt whose KV is there.

    Attributes:
        tokens: in full blocks.
        groups: for each KV cache group, its blocks from the prompt's first token on; vLLM's null block where a later
            token needs none.
        made: when the oldest of them was computed or received, on this process's `time.perf_counter`.
    """

    tokens: int
    groups: Sequence[Sequence[KVCacheBlock]]
    made: float

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All of them, without null blocks, the first ones of each group first."""
        return [block for group in self.groups for block in group if not block.is_null]


class PrefixCache:
    """vLLM's prefix cache, without what is not computed yet. All calls under the scheduler's lock.

    Args:
        manager: of the scheduler in this process. Its pool is watched from now on: nothing may be cached yet.
        is_held_back: whether a request that waits is not scheduled in this step. vLLM looks up what it has of each
            request that waits, in each step; of those it does not.

    Attributes:
        skipped: the request that was not looked up last.
    """

    def __init__(self, manager: KVCacheManager, is_held_back: Callable[[Request], bool]) -> None:
        self._manager = manager
        self._is_held_back = is_held_back
        self.skipped = ""
        managers = manager.coordinator.single_type_managers
        self._block_sizes = [each.block_size for each in managers]
        pool = manager.block_pool
        self._is_one_pool = all(each.block_pool is pool for each in managers)
        # Of each block, by its id: the newest step that may write it, and when it was hashed.
        self._steps = array("q", [0]) * pool.num_gpu_blocks
        self._made = array("d", [0.0]) * pool.num_gpu_blocks
        self._begun = self._ended = 0
        self._is_scheduling = False
        self._watch(pool)
        for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
            if hasattr(manager, name):
                setattr(manager, name, functools.partial(self._look_up, getattr(manager, name)))

    @property
    def is_on(self) -> bool:
        """Whether the engine caches prefixes, in one pool of blocks."""
        return bool(self._manager.enable_caching) and self._is_one_pool

    def scheduling(self, is_scheduling: bool) -> None:
        """vLLM begins to schedule a step, or has scheduled it."""
        self._is_scheduling = is_scheduling

    def step_begins(self) -> int:
        """A step is scheduled, and goes to the workers; its number."""
        self._begun += 1
        return self._begun

    def step_ended(self, number: int) -> None:
        """All workers have done a step, and all before it."""
        self._ended = max(self._ended, number)

    def find(self, hashes: Sequence[bytes], max_tokens: int, *, is_settled: bool = True) -> Found:
        """The longest beginning of a prompt, of at most so many tokens, whose KV is there.

        Args:
            hashes: of the prompt's full blocks.
            is_settled: not what will be there only when the steps under way have ended.
        """
        while True:
            groups, tokens, *_ = self._manager.coordinator.find_longest_cache_hit(list(hashes), max_tokens)
            settled = self._settled(groups, tokens) if is_settled else tokens
            if settled == tokens:
                return Found(tokens, groups, self._oldest(groups))
            max_tokens = settled

    def skip(self, request: Request) -> None:
        """Hash no further block of a request that runs: what they depend on was made with other weights."""
        for manager in self._manager.coordinator.single_type_managers:
            if request.request_id in manager.num_cached_block:
                manager.num_cached_block[request.request_id] = 1 << 40

    def evict_all(self) -> None:
        """Find nothing that was made until now."""
        self._manager.evict_blocks(set(range(self._manager.block_pool.num_gpu_blocks)))

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep blocks from being overwritten, until they are freed as often."""
        self._manager.block_pool.touch(blocks)

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Undo `touch`. The last ones are overwritten first."""
        self._manager.block_pool.free_blocks(reversed(blocks))

    def _look_up(self, look_up: Callable[[Request], Any], request: Request) -> Any:
        if request.skip_reading_prefix_cache or not self._is_held_back(request):
            return look_up(request)
        self.skipped = request.request_id
        request.skip_reading_prefix_cache = True
        try:
            return look_up(request)
        finally:
            request.skip_reading_prefix_cache = False

    def _settled(self, groups: Sequence[Sequence[KVCacheBlock]], tokens: int) -> int:
        for group, size in zip(groups, self._block_sizes, strict=True):
            for index, block in enumerate(group):
                if self._steps[block.block_id] > self._ended and not block.is_null:
                    tokens = min(tokens, index * size)
                    break
        return tokens

    def _oldest(self, groups: Sequence[Sequence[KVCacheBlock]]) -> float:
        times = (self._made[block.block_id] for group in groups for block in group if not block.is_null)
        return min(times, default=time.perf_counter())

    def _watch(self, pool: BlockPool) -> None:
        def stamp(blocks: Sequence[KVCacheBlock]) -> None:
            step, now = self._begun + self._is_scheduling, time.perf_counter()
            for block in blocks:
                self._steps[block.block_id], self._made[block.block_id] = step, now

        cache_full_blocks = pool.cache_full_blocks

        def full(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            stamp(blocks[num_cached_blocks:num_full_blocks])
            cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

        pool.cache_full_blocks = full
        # Only some versions of vLLM have these, for state snapshots in the middle of a block.
        if (partial := getattr(pool, "cache_partial_block", None)) is not None:

            def part(request: Request, block: KVCacheBlock, *args: Any, **kwargs: Any) -> Any:
                stamp([block])
                return partial(request, block, *args, **kwargs)

            pool.cache_partial_block = part
        if (move := getattr(pool, "move_block_hashes", None)) is not None:

            def moved(src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
                stamp([dst_block])
                move(src_block, dst_block)

            pool.move_block_hashes = moved
