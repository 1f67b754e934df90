"""What operators see of requests that are under way, and of those that were: `GET /admin/live`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from carryback.wire import Reuse
from carryback_server import live
from carryback_server.access_log import Entry
from carryback_server.app import Router
from carryback_server.live import Live, Step, View
from cluster import Cluster, eventually
from service import TEXT, user
from stub_engine.prompts import CHAT

ACME, GUESTS = "sk-acme-0123456789-0123456789", "sk-guests-0123456789-012345678"


class Watcher:
    """One who asks for what is new, and keeps each step as it was last seen."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        self._cluster = cluster
        self.router = router
        self.after = ""
        self.steps: dict[int, dict[str, Any]] = {}
        self.raw = b""

    async def look(self) -> list[dict[str, Any]]:
        """What has changed, in one answer."""
        answer = await self._cluster.admin(self.router, "GET", f"/admin/live?after={self.after}")
        assert answer.status == 200
        self.raw += answer.raw
        said = answer.json
        if said["is_reset"]:
            self.steps.clear()
        self.after = said["after"]
        self.steps.update({each["id"]: each for each in said["data"]})
        changed: list[dict[str, Any]] = said["data"]
        return changed

    async def sees(self, **fields: object) -> dict[str, Any]:
        """Wait for a step with these fields."""
        found: list[dict[str, Any]] = []

        async def is_there() -> bool:
            await self.look()
            found[:] = [each for each in self.steps.values() if fields.items() <= each.items()]
            return bool(found)

        await eventually(is_there)
        return found[0]


async def test_each_request_is_a_step_of_its_conversation(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    watcher = Watcher(cluster, router)
    chat = cluster.chat(router, "a-chat", stream=True)
    headers = [{"X-Turn-ID": "t-1", "X-Turn-Step": "1"}, {"X-Turn-ID": "t-1", "X-Turn-Step": "2"}]
    answers = [await chat.say(headers=each) for each in headers]
    await cluster.held(chat)
    for number, answer in enumerate(answers, 1):
        step = await watcher.sees(id=number, state="done")
        assert (step["tenant"], step["conversation"]) == ("default", "a-chat")
        assert (step["turn"], step["step"], step["endpoint"]) == ("t-1", number, CHAT)
        said = {"outcome": step["outcome"], "tokens": step.get("reused", 0), "reason": step["reason"]}
        said |= {"recomputed": step["recomputed"], "cached": step.get("cached", 0)}
        said |= {"found": step.get("found", 0)}
        assert Reuse(**said) == answer.reuse
        assert 0 < step["prefill_s"] < step["ttft_s"] <= step["duration_s"]
        assert step["prefill_engine"] == prefill.url.removeprefix("http://")
        assert step["decode_engine"] == decode.url.removeprefix("http://")
        assert step["status"] == 200
    assert [each.reuse.outcome for each in answers] == ["miss", "hit"]


async def test_the_answers_tokens_come_from_the_engine(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    body = {"messages": [user(TEXT)], "max_tokens": 9}
    headers = {"X-Conversation-ID": "c"}
    answer = await cluster.post(router, CHAT, body, headers=headers)
    step = await Watcher(cluster, router).sees(generated=answer.json["usage"]["completion_tokens"])
    assert step["state"] == "done"


async def test_a_request_is_seen_on_its_way(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    watcher = Watcher(cluster, router)
    prefill.fault(hang=True, contains="first")
    first = asyncio.create_task(cluster.post(router, CHAT, {"messages": [user(f"first {TEXT}")]}))
    step = await watcher.sees(state="prefill")
    assert "outcome" not in step
    assert "ttft_s" not in step
    first.cancel()
    await watcher.sees(id=step["id"], state="gone")

    decode.fault(status_delay_s=1000, contains="second", hop="decode")
    second = asyncio.create_task(cluster.post(router, CHAT, {"messages": [user(f"second {TEXT}")]}))
    step = await watcher.sees(state="decode")
    assert step["recomputed"] > 0
    second.cancel()
    await watcher.sees(id=step["id"], state="gone")

    decode.fault(chunk_delay_s=0.5, contains="third", hop="decode")
    body = {"messages": [user(f"third {TEXT}")], "stream": True}
    third = asyncio.create_task(cluster.post(router, CHAT, body))
    step = await watcher.sees(state="answer")
    assert step["ttft_s"] > 0
    third.cancel()
    await watcher.sees(id=step["id"], state="gone")


async def test_what_went_wrong_is_said(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    watcher = Watcher(cluster, router)
    decode.fault(status=500, times=2, contains="fails", hop="decode")
    answer = await cluster.post(router, CHAT, {"messages": [user("It fails")]})
    step = await watcher.sees(status=answer.status)
    assert answer.status >= 500
    assert (step["state"], step["retries"]) == ("failed", 1)
    # The client's own mistakes, which an engine found.
    answer = await cluster.post(router, CHAT, {"messages": [user("Hi")], "n": 1000})
    assert (await watcher.sees(status=answer.status))["state"] == "failed"
    # An answer that breaks off.
    decode.fault(drop=3, contains="breaks", hop="decode")
    answer = await cluster.post(router, CHAT, {"messages": [user("It breaks")], "stream": True})
    step = await watcher.sees(status=200, state="failed")
    assert step["error"]


async def test_all_tenants_are_shown_and_no_text_or_key(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router(api_keys=[f"acme={ACME}", f"guests={GUESTS}"])
    watcher = Watcher(cluster, router)
    said = []
    for key in (ACME, GUESTS):
        chat = cluster.chat(router, "same-id", key=key)
        said += [(await chat.say("The secret word is xylophone.")).text for _ in range(2)]
    await cluster.post(router, CHAT, {"messages": [user("xylophone")]}, key="sk-nobody-0123456789-0123")
    await watcher.look()
    assert [each["tenant"] for each in watcher.steps.values()] == ["acme", "acme", "guests", "guests"]
    for secret in ("xylophone", ACME, GUESTS, "sk-nobody", *said):
        assert secret.encode() not in watcher.raw


async def test_only_what_changed_comes_again(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    watcher, chat = Watcher(cluster, router), cluster.chat(router, "one")
    await chat.say()
    await cluster.held(chat)
    assert {each["conversation"] for each in await watcher.look()} == {"one"}
    assert await watcher.look() == []
    await cluster.chat(router, "two").say()
    assert {each["conversation"] for each in await watcher.look()} == {"two"}


async def test_an_answer_of_another_start_begins_anew(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    watcher = Watcher(cluster, router)
    await cluster.chat(router, "before").say()
    await watcher.look()
    await cluster.stop(router)
    watcher.router = router = await cluster.router()
    await cluster.chat(router, "after").say()
    await watcher.look()
    assert [each["conversation"] for each in watcher.steps.values()] == ["after"]


async def test_an_after_that_is_none_is_refused(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    run = "0123456789ab"
    for after in ("1", "x.y", ".1", f"{run}.-1", f"{run}.1e3", f"{run}.%C2%B2", f"{run}.{'1' * 20}"):
        answer = await cluster.admin(router, "GET", f"/admin/live?after={after}")
        assert (answer.status, answer.error["param"]) == (400, "after")


async def test_a_read_is_set_against_what_is_learned(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    chat = cluster.chat(router)
    for _ in range(12):
        await chat.say()
        await cluster.held(chat)
    watcher = Watcher(cluster, router)
    await watcher.look()
    [pair] = (await cluster.admin(router, "GET", "/admin/costs")).json["data"]
    assert "saved_s" not in watcher.steps[1]  # nothing was read
    step = watcher.steps[12]
    gain_s = (pair["prefill_s_per_token"] - pair["read_s_per_token"]) * step["reused"]
    assert step["saved_s"] == pytest.approx(gain_s - pair["read_s"], abs=2e-6)


# -- bounds


def begin(shown: Live, conversation: str) -> Step:
    """A request of a conversation begins."""
    step = Step(Entry(endpoint=CHAT, tenant="default", conversation=conversation))
    shown.begin(step)
    return step


def everything(shown: Live) -> dict[int, View]:
    """All steps that a new watcher gets, as last seen."""
    steps: dict[int, View] = {}
    said: Mapping[str, Any] = {"after": "", "has_more": True}
    while said["has_more"]:
        said = shown.since(said["after"])
        assert len(said["data"]) <= live.MAX_CHANGES
        steps.update({view.id: view for view in said["data"]})
    return steps


def unknown(prefill: str, decode: str, tokens: int) -> None:
    """Nothing was learned."""


def test_old_conversations_make_room() -> None:
    shown = Live(unknown)
    old = [begin(shown, "old") for _ in range(3)]
    for number in range(live.MAX_CONVERSATIONS - 1):
        begin(shown, str(number))
    begin(shown, "old")  # it is used again
    begin(shown, "new")
    seen = everything(shown).values()
    names = {each.conversation for each in seen}
    assert len(names) == live.MAX_CONVERSATIONS
    assert {"old", "new"} <= names
    assert "0" not in names
    assert len([each for each in seen if each.conversation == "old"]) == len(old) + 1


def test_a_long_conversation_keeps_its_latest_steps() -> None:
    shown = Live(unknown)
    steps = [begin(shown, "long") for _ in range(live.MAX_STEPS_EACH + 10)]
    # What is no longer shown does not come back when it ends.
    for number, step in enumerate(steps):
        shown.decoding(step, f"key-{number}")
        shown.generated(f"key-{number}", 7)
        shown.end(step)
    seen = everything(shown)
    assert list(seen) == list(range(11, live.MAX_STEPS_EACH + 11))
    assert {(each.generated, each.state) for each in seen.values()} == {(7, "done")}


def test_all_steps_together_are_bounded() -> None:
    shown = Live(unknown)
    for number in range(2 * live.MAX_STEPS):
        begin(shown, str(number % 700))
    assert live.MAX_STEPS - live.MAX_STEPS_EACH < len(everything(shown)) <= live.MAX_STEPS


def test_a_slow_watcher_misses_nothing_and_gets_nothing_twice_unchanged() -> None:
    shown = Live(unknown)
    steps = [begin(shown, str(number)) for number in range(3 * live.MAX_CHANGES)]
    seen: list[View] = []
    said = shown.since("")
    while said["has_more"]:
        seen += said["data"]
        # Between two answers some begin and some end.
        if len(seen) <= live.MAX_CHANGES:
            begin(shown, "meanwhile")
        shown.end(steps[len(seen) - 1])
        said = shown.since(said["after"])
    seen += said["data"]
    last = {view.id: view for view in seen}
    assert len(last) == len(steps) + 1
    assert {view.id: view.state for view in last.values()} == {
        view.id: view.state for view in everything(shown).values()
    }
    assert len(seen) <= len(last) + 4


# -- the page


async def test_the_page_is_whole_and_lets_nothing_else_in(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    answer = await cluster.admin(router, "GET", "/dashboard")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = answer.raw.decode()
    parts = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    assert len(parts) > 1
    for part in parts:
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page)
    head = await cluster.request("HEAD", f"{router.admin_url}/dashboard")
    assert (head.status, head.raw) == (200, b"")
    assert (await cluster.admin(router, "POST", "/dashboard")).status == 405


async def test_clients_see_none_of_it(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    for path in ("/dashboard", "/admin/live"):
        assert (await cluster.get(router, path)).status == 404
