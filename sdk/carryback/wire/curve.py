"""The key of the engines' events: CURVE, one key pair that all engines and routers derive from one secret.

Whoever has the secret may publish and subscribe; nobody else can read the events or pass for an engine.
Needs pyzmq.
"""

from __future__ import annotations

from hashlib import blake2b

import zmq
from zmq.utils import z85

_PERSON = b"carryback events"


def key_pair(secret: str) -> tuple[bytes, bytes]:
    """The key pair (public, secret), z85, 40 bytes each, of the engines' events.

    Both ends use it as their own; a subscriber gives the public one as the server's key as well.

    Args:
        secret: what the engines and routers share (`CARRYBACK_EVENTS_KEY`).
    """
    key = z85.encode(blake2b(secret.encode(), digest_size=32, person=_PERSON).digest())
    return zmq.curve_public(key), key
