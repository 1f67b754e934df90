"""What vLLM's engines count themselves: KV that they read over NIXL, and the size of their blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from carryback_server.bench.result import Direction, Transfers

# vLLM's histograms, by their sums and counts. An engine counts what it reads.
_COUNT = "vllm:nixl_xfer_time_seconds_count"
_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
_BYTES = "vllm:nixl_bytes_transferred_sum"
_CACHE = "vllm:cache_config_info"

_TIMEOUT = aiohttp.ClientTimeout(total=30)

_READS: Mapping[str, Direction] = {"prefill": "decode_to_prefill", "decode": "prefill_to_decode"}


class _Engine(msgspec.Struct):
    role: str
    url: str


class _Engines(msgspec.Struct):
    data: list[_Engine]


class _Version(msgspec.Struct):
    version: str


class _Costs(msgspec.Struct):
    data: list[dict[str, Any]]


@dataclass(frozen=True)
class Reads:
    """KV reads, of all engines of a role."""

    count: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Reads) -> Reads:
        return Reads(self.count + other.count, self.seconds + other.seconds, self.bytes + other.bytes)

    def __sub__(self, other: Reads) -> Reads:
        return Reads(self.count - other.count, self.seconds - other.seconds, self.bytes - other.bytes)


class EngineMetrics:
    """Reads the engines' counters, and says what each arm added to them.

    Args:
        admin_url: of the router's operators' port, which knows the engines.

    Attributes:
        block_size: tokens in a KV block of theirs; 0 if it is not known.
        versions: vLLM's, of each engine that says.
    """

    def __init__(self, session: aiohttp.ClientSession, admin_url: str) -> None:
        self._session = session
        self._admin_url = admin_url
        self._engines: list[_Engine] = []
        self._last: dict[Direction, Reads] = {}
        self._of: dict[tuple[str, Direction], Reads] = {}
        self.block_size = 0
        self.versions: set[str] = set()

    async def connect(self) -> None:
        """Ask the router for its engines, and each of them for what stays as it is.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: they cannot be reached.
            ValueError: what they say cannot be read.
        """
        found = msgspec.json.decode(await self._get(f"{self._admin_url}/admin/engines"), type=_Engines)
        # The ranks of one server count in one place.
        self._engines = list({each.url: each for each in found.data}.values())
        self._last = await self._read()
        with suppress(
            aiohttp.ClientResponseError
        ):  # not every engine that speaks as vLLM does says its version
            for engine in self._engines:
                said = msgspec.json.decode(await self._get(f"{engine.url}/version"), type=_Version)
                self.versions.add(said.version)

    async def took(self, arm: str | None) -> None:
        """What was read since the last call was read for this arm; for None of them, it is left out.

        It is left out too if an engine does not answer, or was started anew.
        """
        try:
            now = await self._read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._last = {}
            return
        for direction, last in self._last.items():
            if arm is not None and now[direction].count >= last.count:
                key = arm, direction
                self._of[key] = self._of.get(key, Reads()) + now[direction] - last
        self._last = now

    def transfers(self) -> list[Transfers]:
        """All that was read."""
        return [
            Transfers(
                arm=arm,
                direction=direction,
                count=round(reads.count),
                seconds=reads.seconds,
                bytes=reads.bytes,
            )
            for (arm, direction), reads in self._of.items()
            if reads.count
        ]

    async def costs(self) -> list[dict[str, Any]]:
        """What the router has learned of each pair of engines; nothing if it does not say."""
        return msgspec.json.decode(await self._get(f"{self._admin_url}/admin/costs"), type=_Costs).data

    async def _read(self) -> dict[Direction, Reads]:
        pages = await asyncio.gather(*(self._get(f"{each.url}/metrics") for each in self._engines))
        found = dict.fromkeys(_READS.values(), Reads())
        for engine, page in zip(self._engines, pages, strict=True):
            found[_READS[engine.role]] += self._reads(page.decode())
        return found

    def _reads(self, page: str) -> Reads:
        totals = dict.fromkeys((_COUNT, _SECONDS, _BYTES), 0.0)
        mine = (line for line in page.splitlines() if line.startswith((*totals, _CACHE)))
        for family in text_string_to_metric_families("\n".join(mine) + "\n"):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
                elif sample.name == _CACHE and (size := sample.labels.get("block_size", "")).isdigit():
                    self.block_size = int(size)
        return Reads(*totals.values())

    async def _get(self, url: str) -> bytes:
        async with self._session.get(url, timeout=_TIMEOUT) as response:
            response.raise_for_status()
            return await response.read()
