"""What an engine tells routers and other engines about its KV, and what those ask it, over ZMQ.

An engine publishes (XPUB). A message has two frames: the topic, and one version byte followed by a msgpack-encoded
event. The topic of a `Hello` is `hello`; of all others it is the event's key: the one that a router gave the request,
or, of a `Leased`, the one that another engine asks under. So each router and each engine subscribes to its own keys.

Commands go the other way, from an XSUB socket to the engine's XPUB, in one frame each, behind a byte that is none of a
subscription's: routers send `Go`, `Release` and `Forget`, prefill engines `Ask`, `Keep` and `Done`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec

from carryback.wire.outside import Fields, Malformed, Scalar
from carryback.wire.outside import decode as decode_with

T = TypeVar("T")

VERSION = 3
HELLO_TOPIC = b"hello"
# No frame is longer, either way: of 1,000,000 tokens in blocks of 16, ids and digests take 2 MB. The peer that
# sends more is disconnected.
MAX_FRAME_BYTES = 8 * 1024 * 1024
# Of the keys in commands; those of routers have 32 characters, those of engines 40.
MAX_KEY_LENGTH = 128
# Of a block hash, in bytes: vLLM's `sha256_cbor`.
HASH_BYTES = 32

ReleaseReason = Literal["expired", "asked", "covered", "void"]

_NOTHING = msgspec.Raw(msgspec.msgpack.encode({}))


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Sent twice a second when there is nothing else, so that routers notice a restart (a new engine id) and lost events.

    Attributes:
        engine: the engine's id, new with every start.
        seq: number of the last other event that the engine has published.
        pinned: KV blocks that it holds for absent readers now.
        capacity: KV blocks that it has.
        takes_go: requests can be sent to it to wait for a `Go`.
        about: what the engine is, in msgpack; see `about_of`. It stays as it is while the engine runs.
        time_ns: the engine's wall clock, in nanoseconds since 1970; 0 from engines that do not say.
        faults: exceptions of the plug-in's own code since the engine's start; it went on without.
        is_paused: it is well, and computes nothing until an operator has it go on (`/pause`, `/sleep`).
        leased: KV blocks under prefill engines' leases now.
    """

    engine: str
    seq: int
    pinned: int
    capacity: int
    takes_go: bool = False
    about: msgspec.Raw = _NOTHING
    time_ns: int = 0
    faults: int = 0
    is_paused: bool = False
    leased: int = 0


class Held(msgspec.Struct, tag="held", frozen=True):
    """What a decode engine has of a request that has ended, prompt and answer. It is found by content.

    Attributes:
        engine: the engine's id.
        seq: number of this event; consecutive within one engine id.
        key: the router's key of the request (`kv_transfer_params["carryback_key"]`); a `Release` names it.
        tokens: tokens in full blocks, whether they are pinned or not.
        blocks: KV blocks pinned; 0: they can be overwritten at any time.
        hold_s: seconds, from now, after which the engine unpins them by itself; 0 where nothing is pinned.
        tip: the keyed digest of the hash of the last full block, 16 bytes, by which a later request's prefill engine
            knows whether its prompt begins with all of this; empty if there is none.
        pinned: KV blocks that the engine holds for absent readers now, these included.
        generated: tokens that the request generated.
    """

    engine: str
    seq: int
    key: str
    tokens: int
    blocks: int
    hold_s: float
    tip: bytes
    pinned: int
    generated: int = 0


class Released(msgspec.Struct, tag="released", frozen=True):
    """The engine unpinned what a `Held` event announced. It may be found still.

    Attributes:
        reason: a `ReleaseReason`, or one that a later release knows: what was let go of must be heard of.
        pinned: KV blocks that it still holds for absent readers.
    """

    engine: str
    seq: int
    key: str
    reason: str
    pinned: int


class Declined(msgspec.Struct, tag="declined", frozen=True):
    """A decode engine computed a prompt itself: what it was told to read was not the prompt's KV.

    Attributes:
        reason: `unverified` (no valid seal), `prompt_differs` (the two hops' prompts differ).
    """

    engine: str
    seq: int
    key: str
    reason: str


class Prefilled(msgspec.Struct, tag="prefilled", frozen=True):
    """A prefill engine has a prompt's first token. It says so here before its answer has left, if it was asked
    to (`kv_transfer_params["carryback_tell"]`).

    Attributes:
        params: the answer's `kv_transfer_params`, JSON.
    """

    engine: str
    seq: int
    key: str
    params: bytes


class Found(msgspec.Struct, tag="found", frozen=True):
    """What a decode engine has in its own prefix cache of a request's prompt, when the request comes to its scheduler.

    Attributes:
        prompt_tokens: of the whole prompt.
        cached_tokens: of its beginning, in full blocks.
    """

    engine: str
    seq: int
    key: str
    prompt_tokens: int
    cached_tokens: int


class Leased(msgspec.Struct, tag="leased", frozen=True):
    """A decode engine's answer to an `Ask`: what it has of a prompt, under a lease.

    Attributes:
        key: who asked (`Ask.asker`).
        lease: the `Ask`'s.
        tokens: of the prompt's beginning that it has, in full blocks, whether they can be leased or not.
        record: the `kv_transfer_params`, JSON, that let the asker read them, but for `carryback.digests`; empty if
            there is no lease.
        digests: those, as bytes: 16 for each block.
        reason: why there is no lease: `nothing` (no block is here), `too_many_leases`, `paused`, `unsupported` (nothing
            can be leased here, e.g. without prefix caching), `layouts_differ`.
    """

    engine: str
    key: str
    lease: str
    tokens: int
    record: bytes = b""
    digests: bytes = b""
    reason: str = ""


Told = Held | Released | Declined | Prefilled | Found
"What a router hears of its requests."
Event = Hello | Told | Leased

Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY_LENGTH)]


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """From a prefill engine to a decode engine: what do you have of this prompt? Answered by a `Leased`.

    A block hash stands for all tokens before it, images, adapter and cache salt: who has it knows the prompt.

    Attributes:
        asker: the topic that the asker subscribes to.
        lease: the lease's name, new with each `Ask`, which nobody can guess.
        hashes: of the prompt's full blocks, in order, `HASH_BYTES` each.
        block_size: tokens of each.
        max_tokens: of the prompt, the most that the asker can use.
    """

    asker: Key
    lease: Key
    hashes: bytes
    block_size: int
    max_tokens: int


class Keep(msgspec.Struct, tag="keep", frozen=True):
    """From a prefill engine: these leases are needed still. A lease of which this does not come ends after `LEASE_S`."""

    leases: list[Key]


class Done(msgspec.Struct, tag="done", frozen=True):
    """From a prefill engine: these leases are over. All was read, or nothing will be."""

    leases: list[Key]


# A lease ends so long after the last that was heard of its asker, in seconds,
LEASE_S = 12.0
# which says this often that it is there.
KEEP_INTERVAL_S = 3.0


class Go(msgspec.Struct, tag="go", frozen=True):
    """To a decode engine where a request waits (`kv_transfer_params["carryback_await"]`): go on.

    Attributes:
        key: the router's key of the request.
        params: the `kv_transfer_params`, JSON, with which it goes on; of them only `TransferParams` count.
    """

    key: Key
    params: bytes


class Release(msgspec.Struct, tag="release", frozen=True):
    """From a router: let go of what is held for these requests: of a decode engine's pins, and of prompts at a prefill
    engine that no decode engine will read."""

    keys: list[Key]


class Forget(msgspec.Struct, tag="forget", frozen=True):
    """From a router: all that the engine has made until now is void, since its weights were changed."""


Command = Go | Ask | Keep | Done | Release | Forget


class TransferParams(TypedDict, total=False):
    """All that a `Go` or a record may say: where KV is that can be read, the seal, and what usage says was cached.

    What a request may do besides (wait, hold, ask) comes with the request alone.
    """

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    remote_num_tokens: int
    remote_blocks_expiry_time: int | float | None
    remote_registration_generation: Scalar
    remote_prefill_cached_tokens: int
    tp_size: int
    dcp_size: int
    pp_size: int
    transfer_mode: str
    carryback: dict[str, Scalar | dict[str, Scalar]]
    carryback_cached: int


# The first byte of a command; subscriptions have 0 and 1.
_UPSTREAM = b"\x02"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_about_decoder = msgspec.msgpack.Decoder(Fields)
_params_decoder = msgspec.json.Decoder(TransferParams)


def encode(event: Event) -> tuple[bytes, bytes]:
    """The two frames of an event."""
    topic = HELLO_TOPIC if isinstance(event, Hello) else event.key.encode()
    return topic, bytes([VERSION]) + _encoder.encode(event)


def about(facts: Mapping[str, Any]) -> msgspec.Raw:
    """What an engine is, for its `Hello`s: encoded once, and not with each of them."""
    return msgspec.Raw(_encoder.encode(facts))


def about_of(hello: Hello) -> dict[str, Any]:
    """What an engine is. Any key may be missing, and there may be more; empty from engines that do not say.

    - `carryback`, `vllm`, `nixl`: versions
    - `role`: `prefill`, `decode` or `both`
    - `model`: as the engine was told to load it; `served_model`: its name in requests
    - `max_model_len`, `block_size`: in tokens
    - `dtype`, `kv_cache_dtype`
    - `prefix_caching`: whether it has a prefix cache, without which nothing is read back from a decode engine
    - `key`: a fingerprint of the key of the seals; empty: there is none
    - `hash_seed`: a fingerprint of `PYTHONHASHSEED`, from which block hashes start; empty: it is not set
    - `hold_s`: how long, in seconds, a decode engine holds KV unless a request says; `lease_s`: a prefill engine
    - `side_channel_host`, `side_channel_port`: where other engines ask it before they read
    - `events`: where other engines reach its events, a ZMQ address
    - `backends`: NIXL's; `kv_buffer_device`; `tensor_parallel_size`; `pipeline_parallel_size`
    - `kv_heads`: of the model, as many as tensor-parallel ranks split; missing if they all have the same
    - `ucx`: the variables `UCX_...` of its environment that choose transports
    """
    try:
        return decode_with(_about_decoder.decode, hello.about, "what an engine is")
    except Malformed:
        return {}


def ranks_fit(reader: int, holder: int, kv_heads: int | None) -> bool:
    """Whether an engine of so many tensor-parallel ranks can read from one of so many, as vLLM's NIXL connector reads.

    Args:
        kv_heads: of the model; None if ranks do not split them.
    """
    fewer, more = sorted((reader, holder))
    # Each rank of the reader reads what is its own of one rank or several. Where the holder has more ranks than
    # the model has KV heads, several have the same, and those that are not read would wait for it.
    is_copied = kv_heads is not None and holder > max(kv_heads, reader)
    return fewer > 0 and more % fewer == 0 and not is_copied


def decode(payload: bytes) -> Event:
    """The event in a message's second frame.

    Raises:
        Malformed: another version, or not an event.
    """
    return _decoded(_decoder.decode, payload)


def encode_command(command: Command) -> bytes:
    """The one frame of a command."""
    return _UPSTREAM + bytes([VERSION]) + _encoder.encode(command)


def decode_command(frame: bytes) -> Command | None:
    """What came in from a subscriber; None if that is a subscription.

    Raises:
        Malformed: another version, or not a command.
    """
    return _decoded(_command_decoder.decode, frame[1:]) if frame[:1] == _UPSTREAM else None


def transfer_params(said: bytes | dict[str, Any]) -> dict[str, Any]:
    """What a `Go` (JSON) or a record says of a transfer; all else is left out.

    Raises:
        Malformed: it is none, or nested too deep to be passed on.
    """
    if isinstance(said, bytes):
        return dict(decode_with(_params_decoder.decode, said, "kv_transfer_params"))
    return dict(decode_with(_converted, said, "a record"))


def _converted(record: dict[str, Any]) -> TransferParams:
    return msgspec.convert(record, TransferParams)


def _decoded(decoder: Callable[[bytes], T], payload: bytes) -> T:
    if payload[:1] != bytes([VERSION]):
        raise Malformed(
            f"an engine event of version {payload[0] if payload else None}; this is {VERSION}: engine and router "
            "are of releases of carryback that do not know each other's events"
        )
    return decode_with(decoder, payload[1:], "an engine event")
