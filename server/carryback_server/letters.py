"""What routers tell each other through Redis, so that it is believed only if a router has said it.

Whoever reaches Redis can publish there. So each message is a Fernet token (AES-128-CBC and HMAC-SHA256, with the
time: https://github.com/fernet/spec) under a key that routers alone have. It is of one channel, is believed for
`MAX_AGE_S`, and once. In Redis it can be held back for so long, and not be read, changed, made or said again.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time

from cryptography.fernet import Fernet, InvalidToken

# As old as a message may be, by the routers' clocks. Fernet takes one from up to a minute ahead.
MAX_AGE_S = 30
_AHEAD_S = 60
# Of a message as it comes.
MAX_BYTES = 2**20
_ID_BYTES = 16


class Letters:
    """Seals and opens the messages of one channel.

    Args:
        key: the routers' secret, `state_key`.
        channel: where they are published.
    """

    def __init__(self, key: str, channel: str) -> None:
        own = hmac.digest(key.encode(), b"carryback letters\0" + channel.encode(), "sha256")
        self._fernet = Fernet(base64.urlsafe_b64encode(own))
        # Ids of messages that came, and until when they could come again, on the monotonic clock.
        self._came: dict[bytes, float] = {}

    def seal(self, message: bytes) -> bytes:
        """A message as it is published."""
        return self._fernet.encrypt(secrets.token_bytes(_ID_BYTES) + message)

    def open(self, token: bytes) -> bytes:
        """The message in what was published.

        Raises:
            ValueError: no router said so, or not now, or this came before.
        """
        try:
            content = self._fernet.decrypt(token, ttl=MAX_AGE_S) if len(token) <= MAX_BYTES else b""
        except InvalidToken:
            content = b""
        if len(content) < _ID_BYTES:
            raise ValueError(f"it is not of a router with our state_key, or is older than {MAX_AGE_S} s")
        id, message = content[:_ID_BYTES], content[_ID_BYTES:]
        now = time.monotonic()
        self._came = {each: until for each, until in self._came.items() if until > now}
        if id in self._came:
            raise ValueError("it came before")
        self._came[id] = now + MAX_AGE_S + _AHEAD_S
        return message
