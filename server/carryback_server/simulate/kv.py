"""KV blocks by content, without content: what prompts are made of, and what an engine's cache has of them.

A *segment* is tokens that follow one another, and all that is before the first of them is part of what they are. A text
is a beginning of a segment, goes on in another one where its history changed or another text went on from the same
place, and so on. So a block is known by the segment of its last token and its number, as vLLM knows it by a hash of
all tokens up to that one; and where a segment's blocks begin and end says all that there is to say of them, however
many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

_numbers = count(1)


class Segment:
    """Tokens that follow one another.

    Attributes:
        start: tokens before it.
        end: and with it, as far as any text has come in it.
    """

    __slots__ = ("end", "number", "start")

    def __init__(self, start: int, end: int) -> None:
        self.number = next(_numbers)
        self.start = start
        self.end = end


class Text:
    """A prompt and its answer.

    Args:
        parts: segments, each with the number of tokens with which the text leaves it.
        block_size: tokens in a block.

    Attributes:
        spans: segments that full blocks end in: each with its first block, and the one after its last.
    """

    __slots__ = ("_parts", "_size", "spans")

    def __init__(self, parts: tuple[tuple[Segment, int], ...], block_size: int) -> None:
        self._parts = parts
        self._size = block_size
        self.spans = [
            (segment, segment.start // block_size, end // block_size)
            for segment, end in parts
            if segment.start // block_size < end // block_size
        ]

    @classmethod
    def of(cls, tokens: int, block_size: int) -> Text:
        """One that has nothing in common with any other."""
        return cls(((Segment(0, tokens), tokens),), block_size)

    @property
    def tokens(self) -> int:
        """How many it is."""
        return self._parts[-1][1]

    def then(self, common: int, tokens: int) -> Text:
        """Another one of so many tokens, of which so many leading ones are this one's too."""
        common = min(common, self.tokens)
        parts = [(segment, min(end, common)) for segment, end in self._parts if segment.start < common]
        if parts and parts[-1][0].end == common:  # nobody went on from there yet
            segment = parts.pop()[0]
            segment.end = max(tokens, common)
        else:
            segment = Segment(common, max(tokens, common))
        return Text((*parts, (segment, segment.end)), self._size)

    def digest(self, blocks: int) -> bytes:
        """What so many leading blocks are, in 16 bytes; they are the text's."""
        return self.segment_of(blocks).number.to_bytes(8) + blocks.to_bytes(8)

    def segment_of(self, blocks: int) -> Segment:
        """Where the last one of so many leading blocks ends; they are the text's."""
        return next(segment for segment, first, end in self.spans if first < blocks <= end)


class Blocks:
    """Leading blocks of texts, held by whoever holds them, each counted once.

    Attributes:
        count: of the blocks.
    """

    def __init__(self) -> None:
        self.count = 0
        # Of each segment, where holds of it end.
        self._ends: dict[Segment, list[int]] = {}

    def more(self, text: Text, blocks: int) -> int:
        """How many more there would be with so many leading blocks of a text."""
        more = 0
        for segment, first, end in text.spans:
            if first < blocks:
                more += max(min(end, blocks) - max(self._ends.get(segment, ()), default=first), 0)
        return more

    def hold(self, text: Text, blocks: int) -> None:
        """Hold so many leading blocks of a text."""
        for segment, first, end in text.spans:
            if first >= blocks:
                return
            end, ends = min(end, blocks), self._ends.setdefault(segment, [])
            top = max(ends, default=first)
            ends.append(end)
            if end > top:
                self.count += end - top
                self._taken(segment, top, end)

    def release(self, text: Text, blocks: int) -> None:
        """Undo `hold`."""
        for segment, first, end in reversed(text.spans):
            if first >= blocks:
                continue
            end, ends = min(end, blocks), self._ends[segment]
            ends.remove(end)
            top = max(ends, default=first)
            if not ends:
                del self._ends[segment]
            if top < end:
                self.count -= end - top
                self._freed(segment, top, end)

    def _taken(self, segment: Segment, first: int, end: int) -> None:
        """Blocks of a segment are held that were not."""

    def _freed(self, segment: Segment, first: int, end: int) -> None:
        """Blocks of a segment are held no more."""


class _Free:
    """Blocks of a segment that can be overwritten, and were freed together."""

    __slots__ = ("end", "first", "segment")

    def __init__(self, segment: Segment, first: int, end: int) -> None:
        self.segment = segment
        self.first = first
        self.end = end


class KvCache(Blocks):
    """An engine's KV blocks, as vLLM's cache has them: those in use, and free ones, in which it finds what is in them
    until they are overwritten. The least recently freed go first, and of one request the last ones.

    Args:
        has_prefixes: what was in free blocks is found again.
    """

    def __init__(self, capacity: int, *, has_prefixes: bool = True) -> None:
        super().__init__()
        self.capacity = capacity
        self._has_prefixes = has_prefixes
        # In use, and not full or not computed yet.
        self._unfilled = 0
        # Of each segment, the end of the blocks that are there.
        self._there: dict[Segment, int] = {}
        # What is free, in the order in which it goes; and of each segment, the first blocks first, which go last.
        self._free: OrderedDict[_Free, None] = OrderedDict()
        self._free_of: dict[Segment, list[_Free]] = {}
        self._free_count = 0

    @property
    def used(self) -> int:
        """Blocks that cannot be overwritten."""
        return self.count + self._unfilled

    def find(self, text: Text, most: int) -> int:
        """The leading blocks of a text that are there, of so many at most."""
        found = 0
        for segment, _, end in text.spans:
            there = min(self._there.get(segment, 0), end, most)
            found = max(found, there)
            if there < end:
                break
        return found

    def take(self, text: Text, found: int, blocks: int) -> bool:
        """Take so many blocks for a request, those that were found for it too; False if there are too few."""
        if self.used + self.more(text, found) + blocks - found > self.capacity:
            return False
        self.hold(text, found)
        self._unfilled += blocks - found
        self._overwrite()
        return True

    def fill(self, text: Text, found: int, blocks: int) -> int:
        """What a request took beyond what it found is computed, up to so many leading blocks, and can be found; how
        many it holds as found then."""
        if not self._has_prefixes or blocks <= found:
            return found
        for segment, first, end in text.spans:
            if first < blocks:
                self._there[segment] = max(self._there.get(segment, 0), min(end, blocks))
        self._unfilled -= blocks - found
        self.hold(text, blocks)
        self.release(text, found)
        return blocks

    def give_back(self, text: Text, found: int, blocks: int) -> None:
        """A request needs its blocks no more: so many, of which it holds so many as found."""
        self._unfilled -= blocks - found
        self.release(text, found)

    def _taken(self, segment: Segment, first: int, end: int) -> None:
        pieces = self._free_of.get(segment, [])
        while pieces and (piece := pieces[0]).first < end:
            self._free_count -= min(piece.end, end) - piece.first
            piece.first = min(piece.end, end)
            if piece.first == piece.end:
                self._forget(pieces.pop(0))

    def _freed(self, segment: Segment, first: int, end: int) -> None:
        piece = _Free(segment, first, end)
        self._free[piece] = None
        self._free_of.setdefault(segment, []).insert(0, piece)
        self._free_count += end - first

    def _overwrite(self) -> None:
        while (excess := self.used + self._free_count - self.capacity) > 0:
            piece = next(iter(self._free))
            segment, gone = piece.segment, min(excess, piece.end - piece.first)
            piece.end -= gone
            self._free_count -= gone
            self._there[segment] = piece.end
            if piece.first == piece.end:
                self._free_of[segment].pop()
                self._forget(piece)
                if segment not in self._free_of and segment not in self._ends:
                    del self._there[segment]

    def _forget(self, piece: _Free) -> None:
        del self._free[piece]
        if not self._free_of[piece.segment]:
            del self._free_of[piece.segment]
