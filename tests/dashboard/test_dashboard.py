"""The operators' page, in a real browser before real routers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from browsing import Complaints
from carryback.wire import Reuse
from carryback_server.access_log import Entry
from carryback_server.app import Router
from carryback_server.live import Live, Step
from carryback_server.workers import WORKER
from cluster import Cluster, eventually
from playwright.async_api import Locator, Page, expect
from service import TEXT, user
from stub_engine.prompts import CHAT

pytestmark = pytest.mark.asyncio(loop_scope="module")
expect.set_options(timeout=30_000)

REASON = "Why KV was not reused"


async def look(page: Page, router: Router) -> None:
    """Open the page, and wait until it shows what there is."""
    await page.goto(f"{router.admin_url}/dashboard")
    await expect(page.locator("#connection")).to_contain_text("Live")


def lane(page: Page, name: str) -> Locator:
    """A conversation's row."""
    return page.get_by_role("row", name=name)


def steps(page: Page, name: str) -> Locator:
    """The bars of a conversation's steps."""
    return lane(page, name).get_by_role("button")


def figure(page: Page, title: str) -> Locator:
    """One of the figures at the top."""
    return page.locator(".figure").filter(has=page.get_by_role("heading", name=title))


async def focused(page: Page) -> str:
    """The name of what has the focus."""
    return str(
        await page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")
    )


async def accessible(page: Page) -> None:
    """Nothing that axe-core finds wrong."""
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


# -- what it shows


async def test_without_a_conversation_it_says_what_to_do(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    await expect(page.get_by_text("No conversation yet.")).to_contain_text(f"Send a request to {router.url}")
    await expect(page.get_by_label("A request to try it with")).to_contain_text(f"{router.url}{CHAT}")
    await expect(page.get_by_text("No misses in this window.")).to_be_visible()
    await accessible(page)


async def test_each_step_says_what_it_reused(cluster: Cluster, page: Page) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    reuses: dict[str, list[Reuse]] = {}
    for name in ("alpha", "beta"):
        chat = cluster.chat(router, name)
        reuses[name] = [(await chat.say(f"I am {name}. {TEXT}")).reuse for _ in range(3)]
    for name, known in reuses.items():
        await expect(steps(page, name)).to_have_count(3)
        for number, reuse in enumerate(known):
            bar = steps(page, name).nth(number)
            said = f"{reuse.tokens} tokens reused, {reuse.cached} cached, {reuse.recomputed} recomputed"
            await expect(bar).to_have_attribute("aria-label", re.compile(f"{reuse.outcome}, .*{said}"))
            # Its height is made of what it says.
            height, reused = [
                float((await bar.evaluate(f"e => e.style.getPropertyValue('--{each}')")).removesuffix("px"))
                for each in ("height", "reused")
            ]
            assert (reused > 0) == (reuse.tokens > 0)
            assert reused < height
        await expect(lane(page, name)).to_contain_text("hit")
    await expect(figure(page, "Hits among returning requests")).to_contain_text("100%")
    every = [each for known in reuses.values() for each in known]
    kept = round(100 * sum(each.tokens for each in every) / sum(each.prompt_tokens for each in every))
    await expect(figure(page, "Prompt tokens not recomputed")).to_contain_text(f"{kept}%")
    await expect(page.get_by_role("button", name=re.compile("^new 2"))).to_be_visible()
    for engine in (prefill, decode):
        row = page.get_by_role("row", name=engine.url.removeprefix("http://"))
        await expect(row.first).to_contain_text("up")
    await expect(figure(page, "KV held")).to_contain_text(re.compile(r"[1-9]\d* of 2,048 blocks"))


async def test_the_estimate_without_reuse_comes_once_it_is_learned(cluster: Cluster, page: Page) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    chat = cluster.chat(router, "alpha")
    for _ in range(2):
        await chat.say()
    await expect(lane(page, "alpha")).to_contain_text("est. learning")
    costs = page.get_by_role("table").filter(has_text="from tokens")
    pair = costs.get_by_role("row", name=re.compile(f"{prefill.url[7:]} {decode.url[7:]}"))
    await expect(pair).to_contain_text("learning")
    for _ in range(10):
        await chat.say()
        await cluster.held(chat)
    await expect(lane(page, "alpha")).to_contain_text(re.compile(r"est\. [\d.]+ m?s"))
    await expect(pair).to_contain_text(re.compile(r"(never|\d[\d,.]*[KM]?)$"))


async def test_what_runs_and_what_fails_is_seen(cluster: Cluster, page: Page) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    decode.fault(status_delay_s=1000, contains="wait", hop="decode")
    headers = {"X-Conversation-ID": "slow"}
    body = {"messages": [user(f"wait {TEXT}")]}
    task = asyncio.create_task(cluster.post(router, CHAT, body, headers=headers))
    await expect(steps(page, "slow")).to_have_attribute("aria-label", re.compile("waiting for decode"))
    await expect(figure(page, "Running now")).to_contain_text("0 at prefill, 1 at decode")
    await expect(page).to_have_title(re.compile("^1 running"))
    await page.get_by_label("Show").select_option("running")
    await expect(lane(page, "slow")).to_be_visible()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await expect(page.get_by_text("No conversation is like this.")).to_be_visible()

    decode.fault(status=500, times=2, contains="fail", hop="decode")
    headers = {"X-Conversation-ID": "bad"}
    await cluster.post(router, CHAT, {"messages": [user("fail")]}, headers=headers)
    await page.get_by_label("Show").select_option("failed")
    await expect(lane(page, "bad")).to_contain_text("failed")
    await expect(lane(page, "slow")).to_have_count(0)
    await expect(figure(page, "Running now")).to_contain_text("1 request failed")


async def test_a_worker_says_that_it_is_one(
    cluster: Cluster, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    await expect(page.get_by_role("contentinfo")).to_contain_text("this router process")
    monkeypatch.setenv(WORKER, "2")
    await expect(page.get_by_role("contentinfo")).to_contain_text("worker 2 only")


async def test_a_hostile_name_is_text(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    name = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"
    headers = {"X-Conversation-ID": name, "X-Turn-ID": "<b>turn</b>"}
    await cluster.post(router, CHAT, {"messages": [user(TEXT)]}, headers=headers)
    await look(page, router)
    row = page.locator("#rows .row")
    await expect(row.locator(".name")).to_have_text(name)
    await row.click()
    await expect(page.get_by_role("heading", name=name)).to_be_visible()
    assert await page.locator("main img, main script, main b").count() == 0


# -- what people do


async def test_it_is_used_with_the_keyboard_alone(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    for name in ("alpha", "beta", "gamma"):  # the newest is the first row
        chat = cluster.chat(router, name)
        for number in range(3):
            await chat.say(f"I am {name}. {TEXT}", headers={"X-Turn-ID": "t", "X-Turn-Step": str(number + 1)})
    await look(page, router)
    await expect(steps(page, "alpha")).to_have_count(3)
    press = page.keyboard.press

    await press("/")
    assert await focused(page) == "filter"
    for _ in range(3):  # past what to show and in which order, to the lanes: one stop for all of them
        await press("Tab")
    assert (await focused(page)).startswith("gamma, ")
    await press("ArrowDown")
    assert (await focused(page)).startswith("beta, ")
    await press("ArrowRight")
    assert (await focused(page)).startswith("Turn t, step 1")
    tip = page.get_by_role("tooltip")
    await expect(tip).to_contain_text("miss, new")
    await press("End")
    assert (await focused(page)).startswith("Turn t, step 3")
    await expect(tip).to_contain_text("hit, verified")
    # There is a ring around what has the focus.
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await press("ArrowDown")
    assert (await focused(page)).startswith("Turn t, step 3")
    await press("Home")
    assert (await focused(page)).startswith("alpha, ")
    await press("Control+Home")
    assert (await focused(page)).startswith("gamma, ")
    await press("Control+End")
    await press("ArrowDown")  # there is no more
    assert (await focused(page)).startswith("alpha, ")

    await press("Enter")
    assert await focused(page) == "details-title"
    details = page.get_by_role("region", name="alpha")
    await expect(details.get_by_role("row")).to_have_count(4)
    await expect(details.get_by_role("row").nth(1)).to_contain_text("hit, verified")
    await accessible(page)
    await press("Escape")
    await expect(details).to_be_hidden()
    assert (await focused(page)).startswith("alpha, ")

    # What comes in takes the focus from nobody.
    await cluster.chat(router, "delta").say()
    await expect(lane(page, "delta")).to_be_visible()
    assert (await focused(page)).startswith("alpha, ")
    await press("p")
    await expect(page.locator("#connection")).to_contain_text("Paused")
    await press("p")
    await expect(page.locator("#connection")).to_contain_text("Live")


async def test_it_filters_by_words_and_by_reasons(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    for name in ("alpha-1", "alpha-2", "beta-1"):
        await cluster.chat(router, name).say()
    changed = cluster.chat(router, "changed")
    await changed.say()
    changed.messages[0]["content"] = f"Otherwise. {TEXT}"
    await changed.say()
    await look(page, router)
    rows = page.locator("#rows .row")
    await expect(rows).to_have_count(4)
    box = page.get_by_role("searchbox")
    await box.fill("ALPHA")
    await expect(rows).to_have_count(2)
    await box.fill("alpha-2 default")
    await expect(rows).to_have_count(1)
    await expect(page.locator("#count")).to_have_text("1 of 4")
    await box.press("Escape")
    await expect(rows).to_have_count(4)

    reason = page.get_by_role("region", name=REASON).get_by_role("button", name="history changed")
    await reason.click()
    await expect(reason).to_have_attribute("aria-pressed", "true")
    await expect(rows).to_have_count(1)
    await expect(lane(page, "changed")).to_be_visible()
    await page.get_by_role("button", name="No longer only the reason").click()
    await expect(rows).to_have_count(4)
    await page.get_by_label("Order").select_option("recomputed")
    await expect(rows.first).to_contain_text("changed")


async def test_paused_it_stands_still(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    await cluster.chat(router, "before").say()
    await look(page, router)
    await expect(lane(page, "before")).to_be_visible()
    pause = page.get_by_role("button", name="Pause")
    await pause.click()
    await expect(pause).to_have_attribute("aria-pressed", "true")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await cluster.chat(router, "meanwhile").say()
    # What was under way may still come; then nothing is asked any more.
    await page.wait_for_load_state("networkidle")
    asked.clear()
    await asyncio.sleep(1)
    assert asked == []
    await expect(lane(page, "meanwhile")).to_have_count(0)
    await pause.click()
    await expect(lane(page, "meanwhile")).to_be_visible()


async def test_it_is_light_or_dark(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    await cluster.chat(router, "alpha").say()
    await look(page, router)
    await expect(lane(page, "alpha")).to_be_visible()

    async def ground() -> int:
        colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert await ground() > 600
    await page.emulate_media(color_scheme="dark")
    assert await ground() < 150
    await accessible(page)
    # What somebody chose wins, and is remembered.
    await page.get_by_label("Colours").select_option("light")
    assert await ground() > 600
    await page.reload()
    await expect(lane(page, "alpha")).to_be_visible()
    assert await ground() > 600


async def test_it_fits_a_narrow_window(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router, "alpha")
    for _ in range(14):
        await chat.say()
    await page.set_viewport_size({"width": 360, "height": 700})
    await look(page, router)
    await expect(lane(page, "alpha")).to_be_visible()
    # The latest steps that there is room for, and how many there are besides.
    shown = await steps(page, "alpha").count()
    assert 0 < shown < 14
    await expect(lane(page, "alpha")).to_contain_text(f"+{14 - shown}")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await accessible(page)


# -- when the router goes


async def test_it_says_that_the_router_is_gone_and_comes_back(
    cluster: Cluster, page: Page, complaints: Complaints
) -> None:
    await cluster.pair()
    router = await cluster.router()
    await cluster.chat(router, "before").say()
    await look(page, router)
    await expect(lane(page, "before")).to_be_visible()
    await cluster.stop(router)
    connection = page.get_by_role("status").filter(has_text="does not answer")
    await expect(connection).to_contain_text("The router does not answer since")
    await expect(lane(page, "before")).to_be_visible()
    router = await cluster.router(admin_port=urlsplit(router.admin_url).port)
    await cluster.chat(router, "after").say()
    await expect(lane(page, "after")).to_be_visible()
    await expect(page.locator("#connection")).to_contain_text("Live")
    # What the old one knew, the new one does not.
    await expect(lane(page, "before")).to_have_count(0)
    assert all("ERR_CONNECTION_REFUSED" in each or "ERR_EMPTY" in each for each in complaints), complaints
    complaints.clear()


# -- for those who do not see it


async def test_a_screen_reader_finds_all_of_it(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router, "alpha")
    for _ in range(2):
        await chat.say()
    await look(page, router)
    await expect(steps(page, "alpha")).to_have_count(2)
    await expect(page.get_by_role("banner")).to_be_visible()
    await expect(page.get_by_role("main")).to_be_visible()
    names = ["At a glance", "Conversations", REASON, "Engines", "When reading back pays"]
    for name in names:
        await expect(page.get_by_role("region", name=name, exact=True)).to_be_attached()
        await expect(page.get_by_role("heading", name=name, exact=True)).to_be_attached()
    grid = page.get_by_role("grid", name="Conversations")
    await expect(grid).to_have_attribute("aria-rowcount", "2")
    assert await grid.get_by_role("columnheader").all_text_contents() == [
        "Conversation", "Steps, the latest last", "Prompt", "Reuse", "First token",
    ]  # fmt: skip
    row = grid.get_by_role("row", name="alpha, tenant default, 2 steps, done, hit, verified")
    await expect(row).to_have_attribute("aria-rowindex", "2")
    await expect(row.get_by_role("rowheader")).to_contain_text("alpha")
    await expect(row.get_by_role("gridcell")).to_have_count(4)
    await expect(page.get_by_role("list", name="Tokens of a step, from below")).to_contain_text("recomputed")
    await expect(page.locator("#summary")).to_have_attribute("aria-live", "polite")
    await expect(page.locator("#summary")).to_contain_text("1 conversation.")
    await accessible(page)


async def test_a_step_says_what_was_found_and_not_read(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    await look(page, router)
    entry = Entry(CHAT, tenant="default", conversation="alpha", turn="t", step=1)
    step = Step(entry)
    router.pipeline.shared.live.begin(step)
    entry.reuse, entry.status = Reuse("miss", 0, "too_many_leases", 120, 0, found=96), 200
    router.pipeline.shared.live.end(step)
    await expect(steps(page, "alpha")).to_have_attribute(
        "aria-label", re.compile("96 more found and not read")
    )
    await steps(page, "alpha").focus()
    await expect(page.get_by_role("tooltip")).to_contain_text("96 more found at a decode engine and not read")
    reason = page.get_by_role("region", name=REASON).get_by_role("button", name="too many leases")
    await expect(reason).to_contain_text("would lend no more KV")


# -- 500 conversations


def many(live: Live, count: int) -> list[Step]:
    """So many conversations, each with a dozen steps, the last of them running."""
    running = []
    for number in range(count):
        for step in range(1, 13):
            entry = Entry(CHAT, tenant="default", conversation=f"agent-{number:03}", turn="t-1", step=step)
            entry.prefill_engine, entry.decode_engine = "p0", "d0"
            shown = Step(entry)
            live.begin(shown)
            if step == 12:
                running.append(shown)
            else:
                entry.reuse = Reuse("hit" if step > 1 else "miss", 96 * step - 96, "verified", 50)
                entry.ttft_s, entry.status = 0.05, 200
                live.end(shown)
    return running


@asynccontextmanager
async def going_on(live: Live, running: list[Step]) -> AsyncIterator[None]:
    """Hundreds of changes a second: each request ends in its turn, and its conversation's next one begins."""

    async def go_on() -> None:
        while True:
            for number, step in enumerate(running):
                step.entry.reuse = Reuse("hit", 1100, "verified", 60)
                step.entry.ttft_s, step.entry.status = 0.05, 200
                live.end(step)
                before = step.entry
                entry = Entry(CHAT, tenant="default", conversation=before.conversation, turn="t-1")
                entry.step = before.step + 1
                running[number] = Step(entry)
                live.begin(running[number])
                if number % 25 == 0:
                    await asyncio.sleep(0.05)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_500_conversations_are_live(cluster: Cluster, page: Page) -> None:
    await cluster.pair()
    router = await cluster.router()
    live = router.pipeline.shared.live
    async with going_on(live, many(live, 500)):
        await look(page, router)
        await expect(page.locator("#count")).to_have_text("500")
        await expect(figure(page, "Running now")).to_contain_text("500")
        grid = page.get_by_role("grid")
        await expect(grid).to_have_attribute("aria-rowcount", "501")
        rows = page.locator("#rows .row")
        # Only those in sight are there.
        assert await rows.count() < 40
        await expect(rows.first).to_contain_text("agent-499")

        async def step_of(name: str) -> int:
            said = await lane(page, name).locator(".about").first.text_content()
            return int(re.findall(r"step (\d+)", said or "")[0])

        before = await step_of("agent-495")
        await page.locator("#rows .row").nth(2).focus()
        await page.keyboard.press("Control+End")
        assert (await focused(page)).startswith("agent-000, ")
        await expect(lane(page, "agent-000")).to_be_in_viewport()
        assert await rows.count() < 40
        await page.get_by_role("searchbox").fill("agent-495")
        await expect(page.locator("#count")).to_have_text("1 of 500")
        await expect(rows).to_have_count(1)

        # It goes on meanwhile.
        async def has_gone_on() -> bool:
            return await step_of("agent-495") > before

        await eventually(has_gone_on)
        await lane(page, "agent-495").click()
        await expect(page.get_by_role("region", name="agent-495")).to_be_visible()
        await page.get_by_role("button", name="Close").click()
        await page.get_by_role("searchbox").fill("")
        await expect(page.locator("#count")).to_have_text("500")
