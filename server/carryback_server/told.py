"""An explanation of a request's reuse, told to a person at a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.text import Text


def lines(found: dict[str, Any]) -> Iterator[Text]:
    """The lines to print.

    Args:
        found: what `GET /admin/conversations/{tenant}/{id}/explain` answered.
    """
    turn = f", turn {found['turn']}.{found['step']}" if found["turn"] else ""
    yield Text(
        f"{found['conversation']}{turn}, {found['endpoint']}, {_ago(time.time() - found['at'])} ago", "bold"
    )
    color = {"hit": "green", "partial": "yellow"}.get(found["outcome"], "red")
    counts = ""
    if found["prompt_tokens"]:
        counts = (
            f": of {found['prompt_tokens']:,} prompt tokens {found['reused_tokens']:,} were read back, "
            f"{found['cached_tokens']:,} were in the prefill engine's cache, "
            f"{found['recomputed_tokens']:,} were computed"
        )
    yield Text.assemble((found["outcome"], color), f" ({found['reason']}){counts}.")
    yield Text(found["means"])
    if found["outcome"] == "hit":
        yield Text("What was computed is new, or fills no whole block.")
    yield from _found(found)
    if found["do"]:
        yield Text(f"Do: {found['do']}")
    if found["parting"] is not None:
        yield Text()
        yield from _parting(found["parting"], found["prompt_tokens"])
    for number, cause in enumerate(found["causes"]):
        yield Text()
        yield Text(f"{'Also' if number else 'Likely'}: {cause['what']}")
        yield Text(f"Do: {cause['do']}")
    if found["compared"] == "tokens" and not found["causes"]:
        yield Text("The prompt begins with the whole prompt before it.")
    if found["why"]:
        yield Text()
        lead = (
            "Compared by messages, not by tokens: " if found["compared"] == "messages" else "Not compared: "
        )
        yield Text(f"{lead}{found['why']}.")


def _found(found: dict[str, Any]) -> Iterator[Text]:
    """What decode engines had, and what the conversation had left there."""
    tokens, left = found["found_tokens"], found["left_tokens"]
    if not found["asked"]:
        return
    holder = f" ({found['holder']})" if found["holder"] else ""
    had = (
        f"A decode engine{holder} had the first {tokens:,} of them"
        if tokens
        else "No decode engine had any of them"
    )
    before = f"; the conversation's last request had left {left:,} tokens" if left is not None else ""
    yield Text(f"{had}{before}.")
    if found["shared_tokens"]:
        whose = found["shared_with"]
        yield Text(
            f"Conversation {_shown(whose)} begins in the same way."
            if whose
            else "Another conversation or branch begins in the same way."
        )


def _parting(parting: dict[str, Any], prompt_tokens: int) -> Iterator[Text]:
    at = ""
    if parting["until"] is not None:
        at = f" between tokens {parting['token']:,} and {parting['until']:,}"
    elif parting["token"] is not None:
        at = f" at token {parting['token']:,}"
    of = f" of {prompt_tokens:,}" if at and prompt_tokens else ""
    yield Text(f"The prompts part{at}{of}, in {parting['where']}:")
    before = _shown(parting["before"])
    if parting["held"] == parting["new"]:
        yield Text(f"  both  ...{before}{_shown(parting['new'])}")
        return
    for name in ("held", "new"):
        yield Text.assemble(f"  {name:<5} ...{before}", (_shown(parting[name]) or "(nothing)", "bold"))


def _ago(seconds: float) -> str:
    minutes = int(seconds // 60)
    return (
        f"{max(int(seconds), 0)} s"
        if minutes < 2
        else f"{minutes} min"
        if minutes < 120
        else f"{minutes // 60} h"
    )


def _shown(text: str) -> str:
    """A text on one line, and without what a terminal would obey."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
