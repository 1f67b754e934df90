"""What an engine tells the routers about the KV it holds, over ZMQ PUB.

A message has two frames: the topic, and one version byte followed by a msgpack-encoded event. The
topic of all others but `Hello` is the key that the router gave the request, so that a router
subscribes to its own keys; the topic of `Hello` is `hello`.

One message goes the other way, from an XSUB socket to the engine's XPUB: `Go`, in one frame, behind a byte that
is none of a subscription's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")

VERSION = 2
HELLO_TOPIC = b"hello"

ReleaseReason = Literal["read", "expired", "asked"]

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
    """

    engine: str
    seq: int
    pinned: int
    capacity: int
    takes_go: bool = False
    about: msgspec.Raw = _NOTHING
    time_ns: int = 0


class Held(msgspec.Struct, tag="held", frozen=True):
    """The engine holds the KV of a finished request; or none of it, with `blocks` 0.

    Attributes:
        engine: the engine's id.
        seq: number of this event; consecutive within one engine id.
        key: the router's key of the request (`kv_transfer_params["carryback_key"]`).
        request: the engine's own id of the request; a release names it.
        tokens: tokens in the full blocks held (what a later prompt can reuse).
        blocks: KV blocks pinned.
        hold_s: seconds, from now, after which the engine lets go by itself.
        record: the `kv_transfer_params`, JSON, that let a prefill engine read the blocks once, but for
            `carryback.digests`.
        digests: those, as bytes: 16 for each block. JSON wants them in base64.
        pinned: KV blocks that the engine holds for absent readers now, these included.
        generated: tokens that the request generated.
    """

    engine: str
    seq: int
    key: str
    request: str
    tokens: int
    blocks: int
    hold_s: float
    record: bytes
    digests: bytes
    pinned: int
    generated: int = 0


class Released(msgspec.Struct, tag="released", frozen=True):
    """The engine let go of what a `Held` event announced.

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


Told = Held | Released | Declined | Prefilled
Event = Hello | Told


class Go(msgspec.Struct, tag="go", frozen=True):
    """To a decode engine where a request waits (`kv_transfer_params["carryback_await"]`): go on.

    Attributes:
        key: the router's key of the request.
        params: the `kv_transfer_params`, JSON, with which it goes on.
    """

    key: str
    params: bytes


# The first byte of a `Go`; subscriptions have 0 and 1.
_UPSTREAM = b"\x02"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_go_decoder = msgspec.msgpack.Decoder(Go)


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
    - `key`: a fingerprint of the key of the seals; empty: there is none
    - `hash_seed`: a fingerprint of `PYTHONHASHSEED`, from which block hashes start; empty: it is not set
    - `hold_s`: how long, in seconds, a decode engine holds KV unless a request says; `lease_s`: a prefill engine
    - `side_channel_host`, `side_channel_port`: where other engines ask it before they read
    - `backends`: NIXL's; `kv_buffer_device`; `tensor_parallel_size`; `pipeline_parallel_size`
    - `kv_heads`: of the model, as many as tensor-parallel ranks split; missing if they all have the same
    - `ucx`: the variables `UCX_...` of its environment that choose transports
    """
    try:
        return msgspec.msgpack.decode(hello.about, type=dict[str, Any])
    except msgspec.DecodeError:
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
        ValueError: another version, or not an event.
    """
    return _decoded(_decoder, payload)


def encode_go(go: Go) -> bytes:
    """The one frame of a `Go`."""
    return _UPSTREAM + bytes([VERSION]) + _encoder.encode(go)


def decode_go(frame: bytes) -> Go | None:
    """What came in from a subscriber; None if that is a subscription.

    Raises:
        ValueError: another version, or not a `Go`.
    """
    return _decoded(_go_decoder, frame[1:]) if frame[:1] == _UPSTREAM else None


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    if payload[:1] != bytes([VERSION]):
        raise ValueError(
            f"an engine event of version {payload[0] if payload else None}; this is {VERSION}: engine and router "
            "are of releases of carryback that do not know each other's events"
        )
    try:
        return decoder.decode(payload[1:])
    except msgspec.DecodeError as error:
        raise ValueError(f"not an engine event: {error}") from error
