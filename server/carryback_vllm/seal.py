"""The proof that a record's KV belongs to a prompt. No vLLM in here: bytes in, bytes out.

A record (the `kv_transfer_params` that let one engine read another's blocks) is sealed by the engine
that holds the blocks and checked by the engine that is about to read them:

- `digests`: a keyed digest of each of vLLM's own block hashes, in order. A block hash is a chain over
  all tokens before it, and also covers images, LoRA adapters and cache salts. The reader computes the
  same from its own prompt; the first digest that differs is where the prompt left the held history.
- `tail`: the same for the tokens after the last full block, which have no block hash.
- `epoch`: what the holder was in when it made the record, and `made`: when, on its own clock, in seconds
  (`carryback_vllm.forget`). Who has read asks the holder whether it is still in that epoch.
- `others`: what the reader acts on and only some versions of vLLM have; left out if there is nothing.
- `mac`: a keyed digest over everything the reader acts on (block ids, engine, address, expiry, and
  the digests), so that a record can be neither forged nor pieced together from two.

Keyed blake2b (RFC 7693); both engines get the key from the environment variable `CARRYBACK_KEY`.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

KEY_VARIABLE = "CARRYBACK_KEY"
INSECURE_VARIABLE = "CARRYBACK_INSECURE_DEV"
DIGEST_BYTES = 16
# Of what a seal says, and how. Engines of another one compute rather than read.
VERSION = 2

# What the reader acts on, and so what the mac covers besides the seal's own fields.
SEALED_FIELDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "tp_size",
    "dcp_size",
    "pp_size",
)
# And where vLLM has it: 0.33 has how often the holder has registered its KV cache.
SOME_VERSIONS_FIELDS = ("remote_registration_generation",)


class Sealer:
    """Seals records and checks seals, with one key.

    Args:
        key: the secret that all engines of one deployment share, any length.
    """

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key, person=b"carryback key").digest()
        self._has_key = bool(key)

    @classmethod
    def from_environment(cls) -> Sealer:
        """A sealer with the key in `CARRYBACK_KEY`.

        Raises:
            RuntimeError: there is none, and `CARRYBACK_INSECURE_DEV=1` does not allow that.
        """
        key = os.environ.get(KEY_VARIABLE, "")
        if not key and os.environ.get(INSECURE_VARIABLE) != "1":
            raise RuntimeError(
                f"carryback: {KEY_VARIABLE} is not set. Give all engines the same secret, e.g. "
                f"{KEY_VARIABLE}=$(openssl rand -hex 32), or set {INSECURE_VARIABLE}=1 "
                "(carryback serve --insecure-dev) on a machine that nobody else reaches."
            )
        return cls(key.encode())

    @property
    def fingerprint(self) -> str:
        """8 hex digits that are equal for equal keys, and too few to tell the key by; empty without one."""
        if not self._has_key:
            return ""
        return blake2b(key=self._key, digest_size=4, person=b"carryback print").hexdigest()

    def digests(self, block_hashes: Sequence[bytes]) -> bytes:
        """`DIGEST_BYTES` for each block hash, concatenated."""
        return b"".join(
            blake2b(block_hash, key=self._key, digest_size=DIGEST_BYTES, person=b"carryback block").digest()
            for block_hash in block_hashes
        )

    def tail(self, token_ids: Sequence[int], multimodal: Sequence[str] = ()) -> str:
        """Hex digest of the tokens after the last full block.

        Args:
            token_ids: those tokens.
            multimodal: identifiers of the request's images, audio etc., whose placeholder tokens are
                all alike.
        """
        digest = blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"carryback tail")
        digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
        for identifier in multimodal:
            digest.update(b"\0" + identifier.encode())
        return digest.hexdigest()

    def seal(
        self,
        record: dict[str, Any],
        *,
        digests: bytes,
        tail: str,
        block_size: int,
        epoch: str = "",
        made: float = 0.0,
    ) -> None:
        """Add the seal to a record, under `carryback`."""
        seal = {
            "v": VERSION,
            "block_size": block_size,
            "epoch": epoch,
            "made": made,
            "digests": base64.b64encode(digests).decode(),
            "tail": tail,
        }
        if others := _others(record):
            seal["others"] = others
        record["carryback"] = {**seal, "mac": self._mac(record, seal)}

    def is_authentic(self, record: Mapping[str, Any]) -> bool:
        """Whether an engine with our key, and of our version of the seal, sealed this record as it is. Never
        raises."""
        seal = record.get("carryback")
        if not isinstance(seal, dict) or not isinstance(seal.get("mac"), str) or seal.get("v") != VERSION:
            return False
        rest = {name: value for name, value in seal.items() if name != "mac"}
        try:
            return seal.get("others", {}) == _others(record) and hmac.compare_digest(
                seal["mac"].encode(), self._mac(record, rest).encode()
            )
        except (TypeError, ValueError, RecursionError):
            return False

    def _mac(self, record: Mapping[str, Any], seal: Mapping[str, Any]) -> str:
        covered = [[record.get(name) for name in SEALED_FIELDS], seal]
        text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), key=self._key, digest_size=32, person=b"carryback mac").hexdigest()

    def common_blocks(self, record: Mapping[str, Any], block_hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many leading blocks of an authentic record are blocks of the prompt with these hashes, and
        how many full blocks it has."""
        held = base64.b64decode(record["carryback"]["digests"])
        own = self.digests(block_hashes[: len(held) // DIGEST_BYTES])
        common = 0
        while (
            common < len(own) and held[common : common + DIGEST_BYTES] == own[common : common + DIGEST_BYTES]
        ):
            common += DIGEST_BYTES
        return common // DIGEST_BYTES, len(held) // DIGEST_BYTES


def sealed_as(record: Mapping[str, Any]) -> str:
    """The version of a record's seal, as it says itself; ours if it has none."""
    seal = record.get("carryback")
    return str(seal.get("v", VERSION))[:8] if isinstance(seal, dict) else str(VERSION)


def _others(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in SOME_VERSIONS_FIELDS if name in record}
