"""Runs the agent of `openai_loop.py` with and without reuse, on two real vLLM engines on this CPU.

    python examples/demo.py

Starts `carryback serve` with the default model: a prefill engine, a decode engine and the router. Then
two conversations go through the same steps side by side; one of them sends `X-Carryback-Reuse: off`.
The last line is one JSON object. The exit status is 1 if the two generated different tokens, or if a
step recomputed more than it should.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import carryback
from openai_loop import QUESTIONS, TOOLS, Step, run_agent
from rich import box
from rich.console import Console
from rich.table import Table

BLOCK = 32  # tokens; KV is reused in whole blocks
SERVE = (
    *(sys.executable, "-m", "carryback_server", "serve", "--device", "cpu", "--port", "0"),
    "--prefill-args=--no-enable-prefix-caching",
)

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One step of both conversations.

    Attributes:
        new: tokens of the prompt that are no common prefix with the step before, its answer included.
        reused, recomputed: prompt tokens read back and computed, with reuse.
        reason: the server's word for it.
        ttft_s, ttft_off_s: with and without reuse, in seconds.
        identical: both had the same prompt and generated the same tokens.
    """

    name: str
    prompt: int
    new: int
    reused: int
    recomputed: int
    reason: str
    ttft_s: float
    ttft_off_s: float
    identical: bool

    @property
    def ratio(self) -> float:
        return self.ttft_off_s / self.ttft_s

    @property
    def is_bounded(self) -> bool:
        """Not more than one block was computed that the step before had computed already."""
        return self.recomputed <= self.new + BLOCK


def main() -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print("Starting a prefill engine, a decode engine and the router: about a minute on two cores.")
    console.print(
        "Prefix caching is off on the prefill engine: without reuse, every step computes its whole prompt.\n"
    )
    with serving() as base_url:
        console.print(f"Serving at {base_url} after {time.monotonic() - started:.0f} s. Warming up ...")
        on = carryback.OpenAI(base_url=base_url, api_key="none", timeout=300, max_retries=0)
        off = carryback.OpenAI(
            base_url=base_url,
            api_key="none",
            timeout=300,
            max_retries=0,
            default_headers={"X-Carryback-Reuse": "off"},
        )
        model = on.models.list().data[0].id
        warm_up(on, model)
        console.print(f"Warm after {time.monotonic() - started:.0f} s. The agent, with and without reuse:")
        rows = list(compare(on, off, model))
        console.print("Stopping the engines ...")
    print_table(rows)
    is_bounded = all(row.is_bounded for row in rows[1:])
    console.print(
        f"Each step computed at most one block ({BLOCK} tokens) more than its new tokens: {'yes' if is_bounded else 'NO'}."
        f"\nThe median is over the {len(rows) - 1} steps that have one before them. All took {time.monotonic() - started:.0f} s."
    )
    result = summary(rows)
    print(json.dumps(result), flush=True)
    return 0 if result["identical"] and is_bounded else 1


@contextmanager
def serving() -> Iterator[str]:
    """`carryback serve` until the block ends, however it does; gives the base URL."""
    # Ctrl-C in the terminal reaches this process alone, which then asks the server to stop, once.
    environment = {"CARRYBACK_LOG_FORMAT": "off", **os.environ}
    process = subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready at (\S+)", line):
                yield found[1]
                return
        raise SystemExit(f"carryback serve ended with exit status {process.wait()}; see above")
    finally:
        process.terminate()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()  # once more: at once
            process.wait()


def warm_up(client: carryback.OpenAI, model: str) -> None:
    """The engines meet each other, and compile a grammar for each tool. None of this is measured."""
    with carryback.conversation() as conversation:
        for _, name in QUESTIONS:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Hello!"}],
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": name}},
                max_completion_tokens=8,
                stream=True,
            )
            for _ in stream:
                pass
    conversation.end()


def compare(on: carryback.OpenAI, off: carryback.OpenAI, model: str) -> Iterator[Row]:
    """Take both conversations forward, a step of the one right after the same step of the other.

    Which of them goes first alternates, so that what else the machine does hits both alike.
    """
    # vLLM's own option: the tokens themselves, as numbers, come with the text.
    agents = [
        run_agent(client, model, show=lambda text: None, extra_body={"return_token_ids": True})
        for client in (on, off)
    ]
    count = 0
    before: list[int] = []
    while True:
        steps: dict[int, Step] = {}
        for which in (0, 1) if count % 2 == 0 else (1, 0):
            step = next(agents[which], None)
            if step is not None:
                steps[which] = step
        if len(steps) < 2:
            return
        row, before = compared(steps[0], steps[1], before)
        console.print(
            f"  {row.name}: {row.reused} of {row.prompt} tokens reused ({row.reason}), "
            f"first token after {row.ttft_s:.1f} s with, {row.ttft_off_s:.1f} s without"
        )
        yield row
        count += 1


def compared(on: Step, off: Step, before: Sequence[int]) -> tuple[Row, list[int]]:
    """A step's row, and its tokens: the prompt's and the generated ones.

    Args:
        before: the tokens of the step before; empty for the first.
    """
    (prompt, generated), (prompt_off, generated_off) = tokens(on), tokens(off)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
    if on.reuse is None or off.reuse is None or off.reuse.tokens:
        raise SystemExit("the server does not say what it reused, or reused although it was told not to")
    call = on.message.get("tool_calls")
    row = Row(
        name=f"{on.turn}.{on.number} {call[0]['function']['name'] if call else 'answer'}",
        prompt=len(prompt),
        new=len(prompt) - common,
        reused=on.reuse.tokens,
        recomputed=on.reuse.recomputed,
        reason=on.reuse.reason,
        ttft_s=on.ttft_s,
        ttft_off_s=off.ttft_s,
        identical=(prompt, generated) == (prompt_off, generated_off),
    )
    return row, prompt + generated


def tokens(step: Step) -> tuple[list[int], list[int]]:
    """The tokens of a step's prompt, and those generated."""
    prompt: list[int] = []
    generated: list[int] = []
    for chunk in step.chunks:
        prompt += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            generated += getattr(choice, "token_ids", None) or []
    return prompt, generated


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The last line. The ratio's median is over the steps that could reuse something: all but the first."""
    return {
        "turns": len(QUESTIONS),
        "steps": len(rows),
        "reused_tokens": sum(row.reused for row in rows),
        "recomputed_tokens": sum(row.recomputed for row in rows),
        "ttft_ratio_median": round(statistics.median(row.ratio for row in rows[1:]), 2),
        "identical": all(row.identical for row in rows),
    }


def print_table(rows: Sequence[Row], console: Console = console) -> None:
    title = "Model calls (turn.step): tokens of the prompt, seconds to the first token"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    table.add_column("step", no_wrap=True)
    for column in (
        "prompt",
        "new",
        "reused",
        "recomputed",
        "TTFT\nwith",
        "TTFT\nwithout",
        "ratio",
        "same\ntokens",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        counts = (row.prompt, row.new, row.reused, row.recomputed)
        times = (f"{row.ttft_s:.2f}", f"{row.ttft_off_s:.2f}", f"{row.ratio:.1f}")
        table.add_row(row.name, *map(str, counts), *times, "yes" if row.identical else "NO")
    console.print(table, soft_wrap=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
