"""Addresses: of this machine for others, and as they stand in URLs."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from carryback_server.config import ConfigError

# Reserved for documentation (RFC 5737, RFC 3849): nobody has them, so the way to them is the default route.
_NOBODYS = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


def advertised(host: str | None, *, is_here: bool = True) -> str:
    """The IP address to give to routers and other engines.

    Args:
        host: what the operator gave, an address or a name; None: the address on the default route, IPv4 first.
        is_here: it must be this machine's. vLLM listens for NIXL's handshake on the address that it tells other
            engines, so an address that is translated on the way (NAT) cannot work.

    Raises:
        ConfigError: there is none, or nobody else could reach it; says what to set.
    """
    if host is None:
        return _on_default_route()
    try:
        found = resolved(host)
    except OSError as error:
        raise ConfigError(f"--advertise-host {host}: {error.strerror or error}") from error
    if is_here:
        here = [each for each in found if is_ours(each)]
        if not here:
            raise ConfigError(
                f"--advertise-host {host} is not an address of this machine, and an engine listens on the "
                "address that it tells others: NAT and published container ports cannot work. Give a container "
                "the host's network, or an address of its own that routers and engines have a route to (as "
                "Kubernetes' pods have)"
            )
        found = here
    address = ipaddress.ip_address(found[0])
    if address.is_unspecified or (address.version == 6 and address.is_link_local):
        raise ConfigError(
            f"--advertise-host {host} is no address that others could connect to; to listen on every address, "
            "give --host"
        )
    return found[0]


def _on_default_route() -> str:
    for family, nobody in _NOBODYS.items():
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((nobody, 9))  # which sends nothing
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        "this machine has no default route to tell its address by; give the address under which routers and "
        "other engines reach it with --advertise-host"
    )


def resolved(host: str) -> list[str]:
    """All IP addresses of a name or an address.

    Raises:
        OSError: there is none.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def is_ours(address: str) -> bool:
    """Whether an IP address is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def in_url(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of a URL or a ZMQ address."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def one_port_above(url: str) -> str:
    """Where a router's operators' port is unless it was told otherwise."""
    host, port = host_and_port(url)
    return f"{urlsplit(url).scheme}://{in_url(host)}:{port + 1}"
