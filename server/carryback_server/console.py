"""The terminal of all commands: what they print, and how they end with an error."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with a message and an exit status."""
    err.print(f"error: {message}", markup=False)
    raise typer.Exit(status)
