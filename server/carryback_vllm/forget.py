"""What voids all KV that an engine has made: a reset, a pause, other weights; and how those who read it notice.

An engine is in an *epoch*, a random name, and begins another whenever what it holds is let go of before its readers
have said that they are through. Each record is sealed with its epoch. Reading is one-sided: the holder does not know
of it. So the reader asks once it has read, over NIXL's side channel, whether the holder is still in that epoch. If it
is, the blocks were the record's all the time; else what was read is thrown away.

vLLM calls a connector for none of this (`reset_cache` only if a reset asks for it, and then after the reset has failed
for what the connector holds). So `watch` wraps the few methods of its scheduler and core through which all of it goes.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.logger import init_logger
from vllm.lora.utils import get_adapter_absolute_path
from vllm.utils.network_utils import make_zmq_path
from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.carryback")

# What is asked for over the side channel in the place of a rank's metadata, with what a record names.
EPOCH = "carryback_epoch"
# A holder that says nothing for so long is not waited for: what was read of it is computed instead.
ASK_TIMEOUT_S = 3.0
# Holders asked at a time.
_ASKERS = 4
# What is asked of the workers that leaves the weights as they are. All else may change them: trainers bring
# methods of their own, whose names nobody knows.
HARMLESS_RPCS = frozenset(
    {"compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"}
    | {"synchronize_device", "list_loras", "profile", "save_sharded_state"}
)
# The files of an adapter that vLLM reads.
_ADAPTER_FILES = {".json", ".safetensors", ".bin", ".pt"}


class Epoch:
    """Which epoch an engine is in.

    Attributes:
        name: 16 hex digits, new with every epoch.
        began: on this process's `time.perf_counter`; None for the first, before which there is nothing.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.name = secrets.token_hex(8)

    def change(self) -> None:
        """Begin another one: no record from before is good any more. Before the blocks are let go of."""
        self.began = time.perf_counter()
        self.name = secrets.token_hex(8)


class Answers(dict[Any, Any]):
    """What the side channel answers: the ranks' metadata, and the engine's epoch as it is then.

    Args:
        is_kept: whether what a record names, by its request or lease, was let go of by nobody but its reader.
    """

    def __init__(self, metadata: Mapping[Any, Any], epoch: Epoch, is_kept: Callable[[str], bool]) -> None:
        super().__init__(metadata)
        self._epoch = epoch
        self._is_kept = is_kept

    def __missing__(self, key: Any) -> bytes:
        what, name = key
        if what != EPOCH:
            raise KeyError(key)
        # In this order: what is kept when the epoch has been read was kept in that epoch.
        epoch = self._epoch.name
        return epoch.encode() if self._is_kept(name) else b""


@dataclass(frozen=True)
class Sealed:
    """What a record says of itself.

    Attributes:
        epoch: its holder's, when it was made.
        made: when, on its holder's clock.
        name: the lease under which it may be read, or the request whose prompt it is.
    """

    epoch: str
    made: float
    name: str = ""


class Asker:
    """Asks the holders of what was read which epoch they are in."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_ASKERS, thread_name_prefix="carryback-epoch")
        self._context = zmq.Context()

    def ask(self, host: str, port: int, sealed: Sealed) -> Future[float | None]:
        """Whether a record is good still: when it was made, on our clock, at the earliest; None if it is not."""
        return self._threads.submit(self._ask, host, port, sealed)

    def close(self) -> None:
        """Wait for nobody's answer any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    def _ask(self, host: str, port: int, sealed: Sealed) -> float | None:
        with self._context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVTIMEO, int(ASK_TIMEOUT_S * 1000))
            socket.connect(make_zmq_path("tcp", host, port))
            asked = time.perf_counter()
            socket.send(msgspec.msgpack.encode((GET_META_MSG, EPOCH, sealed.name)))
            # vLLM adds its clock to every answer, for the readers' deadlines.
            name, clock = socket.recv_multipart()
            now = msgspec.msgpack.decode(clock, type=float)
        if name != sealed.epoch.encode():
            return None
        return asked - (now - sealed.made)


class Adapters:
    """Which weights each LoRA adapter has, by the content of its files.

    vLLM's block hashes know an adapter by its name, and from 0.31 on by its path; one whose files have changed is
    the same to them. Two engines load the same files to other paths, perhaps, and number them differently.
    """

    def __init__(self) -> None:
        self._prints: dict[int, str] = {}

    def print_of(self, adapter: Any) -> str:
        """What an adapter's weights are known by, equal for equal files."""
        if (known := self._prints.get(adapter.lora_int_id)) is None:
            known = self._prints[adapter.lora_int_id] = fingerprint(adapter.lora_path)
        return known

    def load(self, adapter: Any) -> bool:
        """It is being loaded; whether that replaces its weights."""
        is_known = adapter.lora_int_id in self._prints
        if is_known and not adapter.load_inplace:
            return False  # vLLM keeps what it has
        self._prints[adapter.lora_int_id] = fingerprint(adapter.lora_path)
        return is_known

    def spoil(self, adapter_id: int) -> None:
        """Loading it failed: nobody knows what its weights are now."""
        self._prints[adapter_id] = secrets.token_hex(16)

    def unload(self, adapter_id: int) -> bool:
        """It is taken out; whether it was there."""
        return self._prints.pop(adapter_id, None) is not None


def fingerprint(path: str) -> str:
    """32 hex digits of an adapter's files; of files that cannot be read, never the same twice."""
    digest = hashlib.blake2b(digest_size=16, person=b"carryback lora")
    try:
        files = sorted(
            each for each in Path(get_adapter_absolute_path(path)).iterdir() if each.suffix in _ADAPTER_FILES
        )
        for each in files:
            with each.open("rb") as file:
                content = hashlib.file_digest(file, "sha256")
            digest.update(each.name.encode() + b"\0" + content.digest())
    except OSError as error:
        logger.warning("carryback: the adapter at %s cannot be read (%s): its KV is not reused", path, error)
        return secrets.token_hex(16)
    return digest.hexdigest()


class Forgets(Protocol):
    """The scheduler's side of a connector that holds KV.

    Attributes:
        lock: held while vLLM's scheduler does anything, so that other threads can look up and keep blocks meanwhile.
    """

    lock: AbstractContextManager[Any]

    def scheduling(self, scheduler: Scheduler, is_scheduling: bool) -> None:
        """vLLM begins to schedule a step, or has scheduled it."""

    def step_ended(self, output: Any) -> None:
        """All workers have done the step with this `SchedulerOutput`."""

    def forget(self, why: str, *, weights_changed: bool = False) -> None:
        """Void all that was made until now, and let go of it."""

    def pause(self, is_paused: bool) -> None:
        """The engine is paused, or goes on."""


ADAPTERS = Adapters()
"Those of the engine whose scheduler runs in this process."


# What vLLM's core calls of its scheduler, and what touches blocks. Besides, there are reads of one number.
LOCKED = (
    "add_request", "finish_requests", "update_draft_token_ids", "update_draft_token_ids_in_output", "make_stats",
    "set_pause_state", "reset_prefix_cache",
)  # fmt: skip


def watch() -> None:
    """Have vLLM's scheduler and core say what voids KV and which steps have ended, and hold our lock meanwhile. Called
    again, does nothing.

    Raises:
        AttributeError: this vLLM has not what is to be watched.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    _before(Scheduler, "set_pause_state", _on_pause)
    _before(Scheduler, "reset_prefix_cache", _on_reset)
    for name in LOCKED:
        _around(Scheduler, name, _locked)
    _around(Scheduler, "schedule", _scheduling)
    _around(Scheduler, "update_from_output", _ended)
    _before(EngineCore, "collective_rpc", _on_rpc)
    _before(EngineCore, "add_lora", _on_adapter, failed=_on_no_weights)
    _before(EngineCore, "remove_lora", _on_no_adapter)
    stock = kv_cache_utils._gen_lora_extra_hash_keys
    if not hasattr(stock, "carryback"):
        kv_cache_utils._gen_lora_extra_hash_keys = _adapter_keys
        _adapter_keys.carryback = True  # type: ignore[attr-defined]


def _before(
    owner: type[Any], name: str, hook: Callable[..., None], *, failed: Callable[..., None] | None = None
) -> None:
    """Call a hook with a method's arguments each time before the method, and another if that raises."""

    def around(self: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            hook(self, *args, **kwargs)
        except Exception:
            # The epoch is over by then: what could not be let go of is not read, and goes when its time is over.
            logger.exception("carryback: %s: not all was let go of", name)
        try:
            return stock(*args, **kwargs)
        except Exception:
            if failed is not None:
                failed(self, *args, **kwargs)
            raise

    _around(owner, name, around)


def _around(owner: type[Any], name: str, around: Callable[..., Any]) -> None:
    """Have a method called by `around`, which gets the object, the method and the arguments; each `around` once."""
    stock = getattr(owner, name)
    done = getattr(stock, "carryback", ())
    if getattr(around, "__qualname__", "") in done:
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(stock, self), *args, **kwargs)

    method.carryback = (*done, around.__qualname__)  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _locked(scheduler: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    holder = _holder(scheduler)
    with holder.lock if holder is not None else nullcontext():
        return stock(*args, **kwargs)


def _scheduling(scheduler: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (holder := _holder(scheduler)) is None:
        return stock(*args, **kwargs)
    with holder.lock:
        holder.scheduling(scheduler, True)
        try:
            return stock(*args, **kwargs)
        finally:
            holder.scheduling(scheduler, False)


def _ended(scheduler: Any, stock: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
    if (holder := _holder(scheduler)) is None:
        return stock(output, *args, **kwargs)
    with holder.lock:
        holder.step_ended(output)
        return stock(output, *args, **kwargs)


def _holder(scheduler: Any) -> Forgets | None:
    # (`isinstance` of a protocol takes longer than all else here, and this is called several times a step.)
    side: Forgets | None = getattr(getattr(scheduler, "connector", None), "connector_scheduler", None)
    return side if hasattr(side, "step_ended") else None


def _on_pause(scheduler: Any, pause_state: PauseState) -> None:
    if (holder := _holder(scheduler)) is not None:
        holder.pause(pause_state.name != "UNPAUSED")


def _on_reset(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if (holder := _holder(scheduler)) is not None:
        holder.forget("the prefix cache is reset")


def _on_rpc(core: Any, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    name = method if isinstance(method, str) else getattr(method, "__name__", "?")
    if name not in HARMLESS_RPCS and (holder := _holder(core.scheduler)) is not None:
        holder.forget(f"{name} may change the weights", weights_changed=True)


def _on_adapter(core: Any, lora_request: Any) -> None:
    if ADAPTERS.load(lora_request):
        _replaced(core, lora_request.lora_int_id, f"adapter {lora_request.lora_name} is loaded again")


def _on_no_weights(core: Any, lora_request: Any) -> None:
    ADAPTERS.spoil(lora_request.lora_int_id)


def _on_no_adapter(core: Any, lora_id: int) -> None:
    if ADAPTERS.unload(lora_id):
        _replaced(core, lora_id, f"adapter {lora_id} is taken out")


def _replaced(core: Any, adapter_id: int, why: str) -> None:
    scheduler = core.scheduler
    if (holder := _holder(scheduler)) is not None:
        holder.forget(why)
    # Those that wait were hashed when they came. What has begun has mixed KV, and hashes that nobody else's equal.
    for request in list(scheduler.requests.values()):
        if (
            request.lora_request is not None
            and request.lora_request.lora_int_id == adapter_id
            and not request.num_computed_tokens
            and not request.is_finished()
        ):
            request.block_hashes.clear()
            request.update_block_hashes()


def _adapter_keys(request: Any) -> list[tuple[str, str, str]]:
    """What vLLM's block hashes cover of an adapter: its name, and its weights in the place of its path."""
    adapter = request.lora_request
    return [] if adapter is None else [("lora", adapter.lora_name, ADAPTERS.print_of(adapter))]
