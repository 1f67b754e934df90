"""What a browser complains of."""

from __future__ import annotations

from playwright.async_api import Page


class Complaints(list[str]):
    """What went wrong in the browser: the page's own errors, and requests to anywhere but its router."""

    def watch(self, page: Page) -> None:
        """Note what goes wrong in a page."""
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self._check(page, request.url))

    def _check(self, page: Page, url: str) -> None:
        own = page.url.removesuffix("/dashboard")
        if not (page.url == "about:blank" or url.startswith((own, "data:"))):
            self.append(f"a request to {url}")
