"""What a bench run measured, request by request, as it is kept in a file. Everything shown is worked out from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

VERSION = 1

Direction = Literal["decode_to_prefill", "prefill_to_decode"]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of one arm. Times are in seconds, as the client saw them.

    Attributes:
        arm: what served it: `reuse`, `no_reuse` or `aggregated`.
        conversation: its name within the workload, equal in all arms.
        turn, step: from 1; a turn's steps are the model calls in it.
        group: what a plot's x axis is about; `paper`: the size of the prompt that was aimed at, e.g. `2000`.
        is_measured: it counts in the figures. What warms up or only makes a conversation longer does not.
        started_s: from the run's start until it was sent.
        new_tokens: prompt tokens behind the longest common prefix with the conversation's last prompt and
            its answer, by token ids; None if the server does not give them.
        reused_tokens, recomputed_tokens, cached_tokens: as `X-Carryback-Reuse` says; None without it.
        outcome, reason: from that header too.
        ttft_s: from sending it to the first chunk that carries a token; 0 if none came.
        duration_s: from sending it to the end of the answer.
        itl_s: between each chunk that carries tokens and the next.
        output: a digest of the output's token ids, or of its text if the server does not give them.
        is_identical: the output is that of the reference arm for the same prompt; None for the
            reference arm's own, and where there is none to compare with.
        logprob_gap: most by which the log-probability of a token of the output differs from the
            reference's; None where `is_identical` is, and where the outputs differ.
        error: what went wrong; empty if nothing did.
    """

    arm: str
    conversation: str
    turn: int
    step: int
    group: str = ""
    is_measured: bool = True
    started_s: float
    prompt_tokens: int
    output_tokens: int
    new_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    cached_tokens: int | None = None
    outcome: str = ""
    reason: str = ""
    ttft_s: float
    duration_s: float
    itl_s: list[float] = []
    output: str = ""
    is_identical: bool | None = None
    logprob_gap: float | None = None
    error: str = ""


class Transfers(msgspec.Struct, kw_only=True):
    """KV reads of one arm, from the engines' own metrics.

    Attributes:
        direction: whose KV whose engine read: the decode engine's the prefill engine, or the other way round.
        count: of reads.
        seconds, bytes: of all of them.
    """

    arm: str
    direction: Direction
    count: int
    seconds: float
    bytes: float


class Result(msgspec.Struct, kw_only=True):
    """A run.

    Attributes:
        carryback: its version.
        workload: `agent`, `chat`, `paper`, `branching` or `trace`.
        settings: the workload's and the run's options, by name.
        environment: what it ran on: versions, model, device, processor.
        started: ISO 8601, UTC.
        block_size: tokens in a KV block; 0 if not known.
        requests: in the order in which they ended.
        costs: for each pair of engines what the router has learned, as `GET /admin/costs` says at the end.
    """

    version: int = VERSION
    carryback: str
    workload: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    started: str
    duration_s: float
    block_size: int
    requests: list[Request]
    transfers: list[Transfers]
    costs: list[dict[str, Any]] = []


def load(path: Path) -> Result:
    """The run in a file that `save` wrote.

    Raises:
        ValueError: the file is not one, is of another version, or cannot be read; says which.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ValueError(f"{path}: a bench result of version {version}; this is {VERSION}")
        return msgspec.json.decode(data, type=Result)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a bench result: {error}") from error


class _Version(msgspec.Struct):
    version: int


def save(result: Result, path: Path) -> None:
    """Write a run to a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    partial.replace(path)
