"""A browser, and routers for it to look at. All of it runs in one event loop for the whole of a module."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from browsing import Complaints
from cluster import Cluster, running_cluster
from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium without a window."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("the dashboard's tests need Chromium on the PATH: scripts/test-tools.sh installs it")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """Engines, routers and a client; at the end no engine may have seen a violation."""
    async with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def complaints() -> Complaints:
    """Of the test's page. A test that provokes some clears them."""
    return Complaints()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, complaints: Complaints) -> AsyncIterator[Page]:
    """A page of a browser that nobody used before; nothing may have gone wrong in it."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(30_000)
    page = await context.new_page()
    complaints.watch(page)
    yield page
    await context.close()
    assert complaints == []
