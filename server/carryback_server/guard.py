"""Ends engines whose supervisor is gone without having stopped them, as after SIGKILL.

Runs as a process of its own and reads from its standard input, a pipe whose other end only the
supervisor holds: `+<group>` for a process group that it started, `-<group>` for one that is gone. At
the end of input the main processes of the groups that are left are asked to stop and, after a grace,
the whole groups are killed: vLLM's workers can outlive a killed API server.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


def alive(group: int) -> bool:
    """Whether a process of the group still runs; one that ended and was not reaped does not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                # proc(5): pid (comm) state ppid pgrp ...; comm may hold spaces and parentheses
                state, _, pgrp = file.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # ended meanwhile
        if int(pgrp) == group and state not in "ZX":
            return True
    return False


def kill(group: int) -> None:
    """Kill all processes of a group, if there are any."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Usage: `guard.py <grace in seconds>`."""
    grace_s = float(sys.argv[1])
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)  # the engine's main process
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(map(alive, groups)):
        time.sleep(0.1)
    for group in groups:
        kill(group)


if __name__ == "__main__":
    main()
