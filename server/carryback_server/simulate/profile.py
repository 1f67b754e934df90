"""How quick the engines are, and how large: the numbers that a simulation needs of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml
from carryback_vllm.line import PATIENCE_S

_BUILT_IN = Path(__file__).with_name("profiles")


class Profile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Engines of one kind. Times are in seconds.

    Attributes:
        description: what the numbers are of, and where they come from.
        block_size: tokens in a KV block.
        kv_bytes_per_token: of all layers.
        prefill_blocks, decode_blocks: KV blocks of an engine.
        prefill_prefix_caching: what is in free blocks of a prefill engine is found again, as at decode engines.
        prefill_request_s: from the router to the prefill engine's scheduler and back: HTTP, tokenizing.
        prefill_request_s_per_token: that, for each token of the prompt.
        prefill_step_s: of each step of a prefill engine,
        prefill_token_s: and for each token that it computes,
        prefill_attention_s: and for each pair of such a token and one before it.
        max_num_batched_tokens: of one step of a prefill engine.
        max_num_seqs: requests in an engine's batch.
        transfer_s: of each read of KV,
        transfer_bytes_per_s: and its rate.
        parallel_reads: that an engine makes at once, each at that rate.
        decode_request_s: as `prefill_request_s`,
        decode_go_s: and from a prompt's end until the request that waits there for it goes on (`admit_early`).
        decode_step_s: of each step of a decode engine,
        decode_sequence_s: and for each answer in its batch,
        decode_context_s: and for each token in their contexts.
        control_s: from an engine's event, a release, or a prefill engine's question until it is taken.
        prefill_slowdown: how many times longer a prefill engine takes while a decode engine that shares its
            processor generates (prefill engine i and decode engine i do). 1: they share nothing.
        decode_slowdown: the same of the decode engine, while the prefill engine computes.
        kv_recompute_threshold: tokens below which a prefill engine recomputes rather than reads.
        max_pinned: the share of its blocks that a decode engine holds at most (`carryback_max_pinned`).
        patience_s: how much longer than first come, first served a prompt may wait at a prefill engine for shorter ones.
    """

    description: str = ""
    block_size: int = 16
    kv_bytes_per_token: float
    prefill_blocks: int
    decode_blocks: int
    prefill_prefix_caching: bool = False
    prefill_request_s: float = 0.0
    prefill_request_s_per_token: float = 0.0
    prefill_step_s: float = 0.0
    prefill_token_s: float
    prefill_attention_s: float = 0.0
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    transfer_s: float = 0.0
    transfer_bytes_per_s: float
    parallel_reads: int = 1
    decode_request_s: float = 0.0
    decode_go_s: float = 0.0
    decode_step_s: float
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    control_s: float = 0.001
    prefill_slowdown: float = 1.0
    decode_slowdown: float = 1.0
    kv_recompute_threshold: int = 64
    max_pinned: float = 0.9
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        positive = (
            "parallel_reads",
            "block_size",
            "prefill_blocks",
            "decode_blocks",
            "max_num_batched_tokens",
            "max_num_seqs",
        )
        for name in (*positive, "kv_bytes_per_token", "transfer_bytes_per_s", "decode_step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must not be negative, or infinite")
        if self.prefill_slowdown < 1 or self.decode_slowdown < 1:
            raise ValueError("a slowdown is at least 1")

    def read_s(self, tokens: int) -> float:
        """Seconds of the link that a read of so many tokens takes, besides `transfer_s`."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def prefill_s(self, tokens: int, *, after: int = 0) -> float:
        """Seconds in which a prefill engine that does nothing else computes so many tokens.

        Args:
            after: tokens before them, whose KV is there.
        """
        seconds = 0.0
        while tokens > 0:
            chunk = min(tokens, self.max_num_batched_tokens)
            seconds += self.prefill_step_s + self.chunk_s(chunk, after)
            after += chunk
            tokens -= chunk
        return seconds

    def chunk_s(self, tokens: int, after: int) -> float:
        """Seconds of a step that so many tokens of one prompt take, behind others."""
        pairs = tokens * (after + (tokens + 1) / 2)  # each sees itself and all before it
        return self.prefill_token_s * tokens + self.prefill_attention_s * pairs


def built_in() -> list[str]:
    """The names of the profiles that come with carryback."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """A profile that comes with carryback, by its name, or one of your own, by its file (YAML).

    Raises:
        ValueError: there is none, or it is not a profile; says what is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml", ".json")) else _BUILT_IN / f"{name}.yaml"
    try:
        # Not strict: YAML takes 5e10 for a text.
        return msgspec.convert(yaml.safe_load(path.read_text()), Profile, strict=False)
    except FileNotFoundError as error:
        raise ValueError(
            f"no profile {name}; there are {', '.join(built_in())}, or give a YAML file"
        ) from error
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"profile {path}: {error}") from error
