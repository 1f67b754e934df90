"""Runs the snippets of one page: a line of JSON in, with the program; a line out, with what came of it.

One process for a page: frameworks take seconds to import. Each snippet is a `__main__` of its own.
"""

from __future__ import annotations

import io
import json
import sys
import traceback
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_sought: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """Nothing outside of this machine is asked for anything."""
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host and host not in LOOPBACK:
        _sought.append(host)
        raise OSError(f"{host} is not this machine")


def run(program: str) -> dict[str, Any]:
    """What a program printed, how it failed, and whom it sought outside of this machine."""
    _sought.clear()
    printed, error = io.StringIO(), ""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    with redirect_stdout(printed):
        try:
            exec(compile(program, "<snippet>", "exec"), module.__dict__)
        except BaseException:  # noqa: BLE001 - sys.exit too
            error = traceback.format_exc()
    return {"output": printed.getvalue(), "error": error, "sought": list(_sought)}


if __name__ == "__main__":
    sys.addaudithook(_watch)
    answers = sys.stdout
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
