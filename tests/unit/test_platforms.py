"""The client imports everywhere; the command, which is Linux's, says so elsewhere."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

# What systems other than Linux lack: modules, and names in modules. (macOS has more of them than Windows.)
MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "uvloop")
NAMES = {
    "socket": "AF_UNIX AF_NETLINK SO_REUSEPORT SO_PEERCRED TCP_USER_TIMEOUT TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT "
    "TCP_QUICKACK TCP_CORK",
    "signal": "SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD pthread_sigmask",
    "os": "sched_getaffinity sched_setaffinity setpriority getpriority PRIO_PROCESS fork forkpty killpg setpgrp setsid "
    "getuid geteuid register_at_fork pidfd_open eventfd memfd_create sendfile",
    "select": "epoll poll",
}

# Packages of others are imported before, as they are; ours are imported as on that system.
PROGRAM = """
import importlib, pkgutil, sys
system, ours, others, modules, names = sys.argv[1], *map(str.split, sys.argv[2:5]), sys.argv[5].split(";")
import asyncio, socket, signal, select, os, subprocess, threading, multiprocessing, logging.handlers
for each in others:
    importlib.import_module(each)
for each in modules:
    sys.modules[each] = None
for line in names:
    module, *lacking = line.split()
    for name in lacking:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
sys.platform = system
for each in ours:
    package = importlib.import_module(each)
    for name in getattr(package, "__all__", ()):
        getattr(package, name)
    for module in pkgutil.walk_packages(package.__path__, each + "."):
        importlib.import_module(module.name)
print("imported")
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("carryback", "openai msgspec zmq"),
        ("carryback_langgraph", "openai langchain.agents langgraph.graph langchain_openai"),
        ("carryback_agents", "openai agents"),
    ],
)
def test_the_client_imports_everywhere(system: str, package: str, others: str) -> None:
    names = ";".join(f"{module} {lacking}" for module, lacking in NAMES.items())
    words = [system, package, others, " ".join(MODULES), names]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_command_says_that_it_needs_linux(system: str) -> None:
    # Without all that it would import.
    program = (
        f"import sys; sys.platform = {system!r}; sys.modules.update(dict.fromkeys({MODULES!r}))\n"
        "from carryback_server.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program, "serve"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "runs on Linux only" in done.stderr
    assert system in done.stderr
    assert metadata.version("carryback") in done.stderr
    assert "Traceback" not in done.stderr
