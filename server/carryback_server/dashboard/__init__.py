"""The operators' page: one file for the browser, put together from its sources in this folder.

Everything is within it, and its policy lets nothing else in: what it shows it gets from the router's admin port.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

_SOURCE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">|<script src="(\w+\.js)"></script>')


def load() -> tuple[bytes, dict[str, str]]:
    """The page, and the headers to send with it."""
    folder = resources.files(__package__)
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(source: re.Match[str]) -> str:
        kind = "style" if source[1] else "script"
        text = folder.joinpath(source[1] or source[2]).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = _SOURCE.sub(inline, folder.joinpath("page.html").read_text(encoding="utf-8"))
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {' '.join(hashes['style'])}; script-src {' '.join(hashes['script'])}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return page.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
