"""What pages of other sites, in the browser of somebody who reaches a port, may not do there.

A port without keys is protected by its address. A browser is inside of that: a page of any site can send requests
from there. It can read the answers, too, if the name of its own site is made to lead to our address (DNS rebinding):
the browser then takes us for that site. The name is in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from aiohttp import web

from carryback_server.errors import ApiError

# Names under these are not to be had by strangers: RFC 6761 (localhost), ICANN's reservation of `internal`, and
# those of Kubernetes.
_RESERVED = (".localhost", ".internal", ".svc", ".cluster.local")
_PORT = re.compile(r":\d*$")


def check(request: web.Request, allowed: Collection[str], *, pages: Collection[str] = ()) -> None:
    """Refuse a request that a page of another site makes, or may make.

    Args:
        allowed: names in `Host`, in lower case, that are ours besides addresses and names that no stranger can
            have; `*`: all.
        pages: paths that a page of another site may link to.

    Raises:
        ApiError: 403.
    """
    host = request.headers.get("Host", "")
    if not is_ours(host, allowed):
        message = (
            f"this port is not to be asked for by the name {host[:100]!r}: a page of that site could be behind it. If "
            "the name is yours, add it to allowed_hosts"
        )
        raise ApiError(403, message, code="host_not_allowed", param="Host")
    is_reading = request.method in ("GET", "HEAD")
    origin = request.headers.get("Origin")
    if not is_reading and origin and origin.partition("://")[2].lower() != host.lower():
        message = f"a page of {origin[:100]} may not do this; ask from elsewhere than a browser"
        raise ApiError(403, message, code="foreign_origin", param="Origin")
    if request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        is_link = is_reading and request.headers.get("Sec-Fetch-Dest", "").lower() == "document"
        if not (is_link and request.path in pages):
            message = "a page of another site may not do this; ask from elsewhere than a browser"
            raise ApiError(403, message, code="foreign_origin", param="Sec-Fetch-Site")


def is_ours(host: str, allowed: Collection[str]) -> bool:
    """Whether what stands in `Host` cannot be the name of a stranger's site.

    An address is none, nor is a name without a dot or under a reserved one. Browsers always send `Host`.
    """
    if not host or "*" in allowed:
        return True
    name = _PORT.sub("", host).lower().removesuffix(".")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return (
        name in allowed
        or _is_address(name)
        or (re.fullmatch(r"[a-z0-9_-]+", name) is not None)
        or (name.endswith(_RESERVED) and re.fullmatch(r"[a-z0-9_.-]+", name) is not None)
    )


def _is_address(name: str) -> bool:
    """Whether it is an IP address, however it is written (`127.1`, `0x7f000001`)."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if not re.fullmatch(r"[0-9a-fx.]+", name):
            return False
        try:
            socket.inet_aton(name)
        except OSError:
            return False
    return True
