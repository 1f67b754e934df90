"""The engines: are they up, how busy are they, and what do they say they hold."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from carryback.wire import events
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from carryback_server.config import EngineConfig, RouterConfig
from carryback_server.errors import ApiError
from carryback_server.metrics import Metrics

logger = logging.getLogger("carryback")

PROBE_TIMEOUT_S = 10.0
PROBES_FAILED = 3
RELEASE_TIMEOUT_S = 30.0
# uvicorn, under vLLM, closes an idle connection after 5 s; ours must be closed before.
KEEPALIVE_S = 4.0
HELLO_LOST_S = 5.0


class EngineDown(Exception):
    """An engine could not be reached, failed, broke off, or took longer than it may.

    Attributes:
        is_timeout: it took longer than it may.
        is_over: the engine does nothing for the request, for certain: it never got it, or has ended it.
    """

    def __init__(
        self, engine: Engine, message: str, *, is_timeout: bool = False, is_over: bool = False
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.name}: {message}")
        self.is_timeout = is_timeout
        self.is_over = is_over


class Engine:
    """One vLLM engine.

    Attributes:
        run: the engine's id for its connector, new with every start; empty until it said one.
        is_up: it answered the last probe, and no request failed to connect since.
        is_gone: nothing listens at its address: its process has ended.
        load: bytes of request bodies at the engine now, the measure of how busy it is.
    """

    def __init__(self, config: EngineConfig, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self.role = config.role
        self.url = config.url.rstrip("/")
        self.events = config.events
        self.name = config.name or urlsplit(config.url).netloc
        self.run = ""
        self.models: list[str] = []
        self.load = 0
        self.last_event = -math.inf
        self._session = session
        self._metrics = metrics
        self.is_gone = False
        self.is_up = False
        self._failed_probes = 0
        metrics.engine_up.labels(self.role, self.name).set(0)

    @property
    def is_heard(self) -> bool:
        """Its events arrive. What it holds is of no use otherwise, so it is not asked to hold anything."""
        return time.monotonic() - self.last_event < HELLO_LOST_S

    @contextmanager
    def busy(self, size: int) -> Iterator[None]:
        """Count a request of this many bytes as being at the engine."""
        gauge = self._metrics.engine_in_flight.labels(self.role, self.name)
        self.load += size
        gauge.inc()
        try:
            yield
        finally:
            self.load -= size
            gauge.dec()

    async def post(
        self, path: str, data: bytes, *, request_id: str, timeout_s: float
    ) -> aiohttp.ClientResponse:
        """Send a request; return when the answer's status and headers are there.

        Args:
            timeout_s: for that, in seconds.

        Raises:
            EngineDown: no connection, broken off, or too late.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._session.post(
                    self.url + path,
                    data=data,
                    headers={"Content-Type": "application/json", "X-Request-Id": request_id},
                )
        except aiohttp.ClientConnectorError as error:
            self.mark_down(error)
            raise EngineDown(self, "cannot connect", is_over=True) from error
        except TimeoutError as error:
            raise EngineDown(self, f"no answer within {timeout_s:g} s", is_timeout=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDown(self, f"broke off ({type(error).__name__})") from error

    async def get(self, path: str) -> tuple[int, str, bytes]:
        """A small GET: status, content type, body.

        Raises:
            ApiError: 502, the engine did not answer.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            async with self._session.get(self.url + path, timeout=timeout) as response:
                return response.status, response.headers.get("Content-Type", ""), await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(502, f"engine {self.name} did not answer", code="engine_failed") from error

    async def release(self, request_ids: list[str]) -> bool:
        """Make the engine let go of what it holds for these requests; whether it was told."""
        return await self._tell({"carryback_release": request_ids})

    async def withdraw(self, record: bytes) -> bool:
        """Make a prefill engine not read a record that it was given, and tell its holder; whether it was
        told."""
        return await self._tell({**msgspec.json.decode(record), "carryback_withdraw": True})

    async def _tell(self, params: dict[str, Any]) -> bool:
        """Have the engine's plug-in act on `kv_transfer_params`, by a completion of one token that carries
        them; see `carryback_vllm.connector`."""
        body: dict[str, Any] = {
            "model": self.models[0] if self.models else "",
            "prompt": [0],
            "max_tokens": 1,
            "kv_transfer_params": {**params, "hold_s": 0},
        }
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(3),
                wait=wait_exponential(0.2),
                retry=retry_if_exception_type((aiohttp.ClientError, OSError)),
                reraise=True,
            ):
                with attempt:
                    timeout = aiohttp.ClientTimeout(total=RELEASE_TIMEOUT_S)
                    async with self._session.post(
                        f"{self.url}/v1/completions", json=body, timeout=timeout
                    ) as response:
                        response.raise_for_status()
        except (aiohttp.ClientError, OSError) as error:
            logger.warning("%s engine %s: cannot let go of KV (%s)", self.role, self.name, error)
            self._metrics.releases.labels(self.role, "failed").inc()
            return False
        self._metrics.releases.labels(self.role, "done").inc()
        return True

    async def probe(self) -> bool:
        """Ask the engine whether it is well; whether nothing listens there any more."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._session.get(f"{self.url}/health", timeout=timeout) as response:
                response.raise_for_status()
            if not self.models:
                async with self._session.get(f"{self.url}/v1/models", timeout=timeout) as response:
                    listing = await response.json()
                self.models = [model["id"] for model in listing["data"]]
        except aiohttp.ClientConnectorError as error:
            self.mark_down(error)
            return self.is_gone
        except (aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as error:
            self._failed_probes += 1
            if self._failed_probes >= PROBES_FAILED:
                self.mark_down(error)
            return False
        self._failed_probes = 0
        self.is_gone = False
        if not self.is_up:
            logger.info("%s engine %s is up", self.role, self.name)
            self.is_up = True
            self._metrics.engine_up.labels(self.role, self.name).set(1)
        return False

    def mark_down(self, why: Exception) -> None:
        """Place nothing here until a probe succeeds."""
        self.is_gone = isinstance(why, aiohttp.ClientConnectorError) and why.errno == errno.ECONNREFUSED
        if self.is_up:
            logger.warning("%s engine %s is down: %s %s", self.role, self.name, type(why).__name__, why)
            self.is_up = False
            self._metrics.engine_up.labels(self.role, self.name).set(0)


class Pool:
    """All engines, probed and listened to.

    Args:
        router_id: the prefix of this router's request keys.
        on_event: called with each `Held`, `Released` or `Declined` event for this router.
        on_lost: called when an engine's KV is gone: it stopped, or is a new run (whose id is given).
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: Metrics,
        *,
        router_id: str,
        on_event: Callable[[Engine, events.Held | events.Released | events.Declined], None],
        on_lost: Callable[[Engine, str | None], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._router_id = router_id
        self._on_event = on_event
        self._on_lost = on_lost
        self._tasks: list[asyncio.Task[None]] = []
        self.engines: list[Engine] = []

    def of(self, role: str) -> list[Engine]:
        """The engines of a role that are up."""
        return [engine for engine in self.engines if engine.role == role and engine.is_up]

    async def start(self) -> None:
        """Connect, probe each engine once, and wait a moment for those that are up to be heard."""
        key = self._config.engine_api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._config.connect_timeout_s,
                sock_read=self._config.idle_timeout_s,
            ),
            auto_decompress=False,
            read_bufsize=2**18,
        )
        self._context = zmq.asyncio.Context()
        self.engines = [Engine(each, self._session, self._metrics) for each in self._config.engines]
        self._tasks = [asyncio.create_task(self._listen(engine)) for engine in self.engines]
        await asyncio.gather(*(engine.probe() for engine in self.engines))
        self._tasks += [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        with suppress(TimeoutError):
            async with asyncio.timeout(HELLO_LOST_S):
                while not all(engine.is_heard for engine in self.engines if engine.is_up):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        for engine in self.engines:
            if engine.is_up and not engine.is_heard:
                logger.error(
                    "%s engine %s: no events from %s; nothing will be reused",
                    engine.role, engine.name, engine.events,
                )  # fmt: skip

    async def stop(self) -> None:
        """End the probes and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        await self._session.close()

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._config.probe_interval_s)
            if await engine.probe():
                self._on_lost(engine, None)

    async def _listen(self, engine: Engine) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, 0)
        # In this order: once a hello arrives, so does what is for us.
        socket.subscribe(self._router_id.encode())
        socket.subscribe(events.HELLO_TOPIC)
        socket.connect(engine.events)
        while True:
            frames = await socket.recv_multipart()
            try:
                event = events.decode(frames[-1])
            except ValueError as error:
                logger.warning("%s engine %s: %s", engine.role, engine.name, error)
                continue
            engine.last_event = time.monotonic()
            if event.engine != engine.run:
                engine.run = event.engine
                self._on_lost(engine, event.engine)
            if not isinstance(event, events.Hello):
                self._on_event(engine, event)
