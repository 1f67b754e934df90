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

TRACKERS_S = 5.0
"How long resource trackers have to end by themselves."


def alive(group: int) -> list[int]:
    """Processes of a group that still run; those that ended and were not reaped do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        # proc(5): pid (comm) state ppid pgrp ...; comm may hold spaces and parentheses
        fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if fields and int(fields[2]) == group and fields[0] not in b"ZX":
            found.append(int(name))
    return found


def kill(group: int, *, trackers: bool) -> None:
    """Kill the processes of a group.

    Args:
        group: the process group.
        trackers: kill Python's resource trackers too. Left alone, each ends once those that it tracks
            have ended, and removes their shared memory, which otherwise stays until the machine restarts.
    """
    for pid in alive(group):
        if trackers or b"resource_tracker" not in _read(f"/proc/{pid}/cmdline"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # the process ended meanwhile


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
    deadline = time.monotonic() + TRACKERS_S
    while any(map(alive, groups)):
        for group in groups:
            kill(group, trackers=time.monotonic() > deadline)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
