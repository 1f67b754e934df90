"""Several hosts on one machine: network namespaces with addresses of their own, on one switch.

The switch is a bridge in one more namespace, and each host's link a pair of virtual interfaces. What is cut
vanishes without a word, as on a network whose cable is out: no connection is refused or closed.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

_PREFIX = "carryback"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """Hosts and the switch between them, as a context: at its end they are gone, and all that ran there.

    Args:
        hosts: their names, short enough for an interface.
        ipv4: give each an IPv4 address as well, not an IPv6 address alone.
    """

    def __init__(self, hosts: Sequence[str], *, ipv4: bool = True) -> None:
        # The name says whose they are: what a run that was killed left is removed by the next.
        self._run = f"{_PREFIX}-{os.getpid()}"
        self._hosts = {name: number for number, name in enumerate(hosts, start=1)}
        self._has_ipv4 = ipv4
        self._end = ExitStack()

    def __enter__(self) -> Self:
        for namespace in _namespaces():
            owner = re.fullmatch(rf"{_PREFIX}-(\d+)-.*", namespace)
            if owner and not os.path.exists(f"/proc/{owner[1]}"):
                _remove(namespace)
        with ExitStack() as stack:
            for name in ("switch", *self._hosts):
                _ip("netns", "add", self.namespace(name))
                stack.callback(_remove, self.namespace(name))
                self._in(name, "link", "set", "lo", "up")
            self._in("switch", "link", "add", "bridge", "type", "bridge")
            self._in("switch", "link", "set", "bridge", "up")
            for name in self._hosts:
                self._plug_in(name)
            self._end = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.close()

    def _plug_in(self, name: str) -> None:
        peer = ("peer", "name", "eth0", "netns", self.namespace(name))
        self._in("switch", "link", "add", "name", name, "type", "veth", *peer)
        self._in("switch", "link", "set", "dev", name, "master", "bridge", "up")
        self._in(name, "link", "set", "eth0", "up")
        self._forget_connections_of_killed(name)
        self._in(name, "address", "add", f"{self.ipv6(name)}/64", "dev", "eth0", "nodad")
        self._in(name, "-6", "route", "add", "default", "dev", "eth0")
        if self._has_ipv4:
            self._in(name, "address", "add", f"{self.ipv4(name)}/24", "dev", "eth0")
            self._in(name, "route", "add", "default", "dev", "eth0")

    def _forget_connections_of_killed(self, host: str) -> None:
        # The kernel of a host that lost its power cannot go on to close its connections; ours would, for minutes.
        setting = "/proc/sys/net/ipv4/tcp_orphan_retries"
        subprocess.run(self.command(host, "sh", "-c", f"echo 1 > {setting}"), check=True)

    def namespace(self, host: str) -> str:
        """Its name for `ip netns`."""
        return f"{self._run}-{host}"

    def ipv4(self, host: str) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{self._hosts[host]}"

    def ipv6(self, host: str) -> str:
        """The host's IPv6 address."""
        return f"fd77::{self._hosts[host]:x}"

    def command(self, host: str, *words: str) -> list[str]:
        """A command that runs on a host. It is the same process: `ip` becomes the command."""
        return ["ip", "netns", "exec", self.namespace(host), *words]

    def socket_of(self, host: str) -> Callable[[Any], socket.socket]:
        """Makes sockets of a host in this process, for `aiohttp.TCPConnector`."""

        def make(info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
            with (
                open("/proc/thread-self/ns/net") as here,
                open(f"/run/netns/{self.namespace(host)}") as there,
            ):
                _enter(there.fileno())
                try:
                    return socket.socket(*info[:3])
                finally:
                    _enter(here.fileno())

        return make

    def received(self, host: str) -> int:
        """Bytes that came over the host's link so far."""
        (link,) = json.loads(self._in(host, "-j", "-s", "link", "show", "eth0"))
        bytes_in: int = link["stats64"]["rx"]["bytes"]
        return bytes_in

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """No packet from one host to the other, nor back; all others reach both."""
        # Isolated ports of a bridge reach those that are not isolated, and not each other.
        for name in (one, other):
            self._in("switch", "link", "set", "dev", name, "type", "bridge_slave", "isolated", "on")
        try:
            yield
        finally:
            for name in (one, other):
                self._in("switch", "link", "set", "dev", name, "type", "bridge_slave", "isolated", "off")

    @contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """No packet to the host, and none from it."""
        self._in("switch", "link", "set", "dev", host, "nomaster")
        try:
            yield
        finally:
            self._in("switch", "link", "set", "dev", host, "master", "bridge")

    @contextmanager
    def cut_port(self, host: str, port: int, other: str) -> Iterator[None]:
        """No packet of one TCP port of a host to another host, nor back."""
        rules = []
        families = {"-6": self.ipv6} | ({"-4": self.ipv4} if self._has_ipv4 else {})
        for family, address in families.items():
            for name, peer, end in ((host, other, "sport"), (other, host, "dport")):
                rules.append((name, family, "to", address(peer), "ipproto", "tcp", end, str(port)))
        for name, family, *rule in rules:
            self._in(name, family, "rule", "add", "blackhole", *rule)
        try:
            yield
        finally:
            for name, family, *rule in rules:
                self._in(name, family, "rule", "del", "blackhole", *rule)

    def _in(self, host: str, *words: str) -> str:
        return _ip("-n", self.namespace(host), *words)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", namespace)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
