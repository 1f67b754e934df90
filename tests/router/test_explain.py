"""`carryback explain`: the router in front of stub engines, asked why a request reused what it reused."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from carryback_server.app import Router
from carryback_server.cli import app
from carryback_server.config import RouterConfig, ServeConfig
from cluster import TOOLS, Cluster, eventually
from redis_server import redis_server
from service import TEXT, Serve, Service, said, until, user
from stub_engine.prompts import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from typer.testing import CliRunner, Result

ON = {"explain_bytes": 2**24}
KEYS = {"one": "the-key-of-one-0123456789", "two": "the-key-of-two-0123456789"}


async def explained(service: Service, conversation: str = "t", *, tenant: str = "default") -> Any:
    """What the admin port says."""
    path = f"/admin/conversations/{tenant}/{quote(conversation, safe='')}/explain"
    async with service.session.get(service.router.admin_url + path) as response:
        answer = await response.json()
        assert response.status == (404 if "error" in answer else 200)
        return answer


async def held(service: Service, conversation: str = "t", *, before: int = 0) -> int:
    """Wait until it is known where the last answer's KV is; its tokens, which are not those of before."""
    tokens = before

    async def is_known() -> bool:
        nonlocal tokens
        location = (await service.conversation(quote(conversation, safe="")))["location"]
        tokens = location["tokens"] if location is not None else before
        return tokens != before

    await eventually(is_known)
    return tokens


def carryback(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


RULES = "You help sailors. " * 20


async def test_a_time_in_the_system_prompt(serve: Serve) -> None:
    service = await serve(**ON)
    history = [system(f"{RULES}Today is 2026-01-01 10:00. Be kind. {RULES}"), user(TEXT)]
    answer = await service.chat(history, "t")
    await held(service)
    history[0] = system(f"{RULES}Today is 2026-01-01 10:05. Be kind. {RULES}")
    answer = await service.chat([*history, said(answer.text), user("And the wind?")], "t")
    assert answer.reuse.outcome == "partial"
    found = await explained(service)
    assert found["object"] == "conversation.explanation"
    assert (found["conversation"], found["tenant"], found["endpoint"]) == ("t", "default", CHAT)
    assert (found["turn"], found["step"]) == ("2", 1)
    assert (found["outcome"], found["reason"]) == ("partial", "history_changed")
    assert found["reused_tokens"] == answer.reuse.tokens
    assert found["recomputed_tokens"] == answer.reuse.recomputed
    assert (found["found_tokens"], found["asked"]) == (answer.reuse.found, 1)
    assert found["left_tokens"] > found["found_tokens"]
    assert found["shared_tokens"] == 0
    assert found["compared"] == "tokens"
    parting = found["parting"]
    # The engine found the block, the comparison the token in it.
    assert answer.reuse.tokens <= parting["token"] < answer.reuse.tokens + 16
    assert (parting["until"], parting["message"], parting["where"]) == (None, 0, "message 0 (system)")
    assert parting["before"].endswith("Today is 2026-01-01")
    assert parting["held"].startswith(" 10:00. Be kind.")
    assert parting["new"].startswith(" 10:05. Be kind.")
    (cause,) = found["causes"]
    assert cause["code"] == "system_prompt_changed"
    assert "a time" in cause["what"]


async def test_a_hit_needs_no_explanation(serve: Serve) -> None:
    service = await serve(**ON)
    answer = await service.chat([user(TEXT)], "t")
    await held(service)
    answer = await service.chat([user(TEXT), said(answer.text), user("More.")], "t")
    assert answer.reuse.outcome == "hit"
    found = await explained(service)
    assert (found["outcome"], found["reason"], found["causes"], found["parting"]) == (
        "hit",
        "verified",
        [],
        None,
    )
    assert found["left_tokens"] == found["found_tokens"] == answer.reuse.tokens


async def test_the_first_request(serve: Serve) -> None:
    service = await serve(**ON)
    await service.chat([user(TEXT)], "t")
    found = await explained(service)
    assert (found["outcome"], found["reason"], found["left_tokens"]) == ("miss", "new", None)
    assert "first request" in found["means"]
    assert found["why"] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_answer_that_was_changed(serve: Serve, path: str, stream: bool) -> None:
    service = await serve(engine={"answer_tokens": 64}, **ON)
    name = "input" if path == RESPONSES else "messages"
    first: dict[str, Any] = {name: [user(TEXT)], "stream": stream}
    if path == MESSAGES:
        first["max_tokens"] = 100
    answer = await service.post(path, first, conversation="t")
    await held(service)
    changed = said(answer.text[:150] + answer.text[160:])
    again = await service.post(path, {**first, name: [user(TEXT), changed, user("More.")]}, conversation="t")
    assert again.reuse.reason == "history_changed"
    found = await explained(service)
    assert found["compared"] == "tokens"
    assert [each["code"] for each in found["causes"]] == ["answer_changed"]
    parting = found["parting"]
    assert (parting["where"], parting["message"]) == ("the answer, message 1 (assistant)", 1)
    assert again.reuse.tokens <= parting["token"] < again.reuse.tokens + 16
    assert parting["until"] is None
    assert parting["held"] != parting["new"]
    assert len(parting["held"]) > 20
    at = answer.text.index(parting["before"][-20:]) + 20
    assert answer.text[at:].startswith(parting["held"][:10])
    assert changed["content"][at:].startswith(parting["new"][:10])


async def test_completions_of_texts_and_of_tokens(serve: Serve) -> None:
    service = await serve(**ON)
    first = await service.post(COMPLETIONS, {"prompt": f"At 10:00. {TEXT}"}, conversation="t")
    await held(service)
    await service.post(COMPLETIONS, {"prompt": f"At 10:01. {TEXT}{first.text} More."}, conversation="t")
    found = await explained(service)
    assert [each["code"] for each in found["causes"]] == ["prompt_changed"]
    assert (found["parting"]["where"], found["parting"]["token"]) == ("the prompt", 1)
    numbers = list(range(100, 300))
    await service.post(COMPLETIONS, {"prompt": numbers}, conversation="n")
    await held(service, "n")
    await service.post(COMPLETIONS, {"prompt": [*numbers[:100], 7, *numbers[101:], 8]}, conversation="n")
    found = await explained(service, "n")
    assert (found["parting"]["token"], found["reused_tokens"]) == (100, 96)


async def test_tools(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router(**ON)
    for engine in cluster.engines:
        await cluster.hears(router, engine)
    chat = cluster.chat(router, "t")
    await chat.call()
    await chat.result(tools=[*TOOLS, {"type": "function", "function": {"name": "dive"}}])
    found = await of(cluster, router, "t")
    assert [each["code"] for each in found["causes"]] == ["tools_changed"]
    assert found["parting"]["where"] == "the tools"
    assert "dive" in found["causes"][0]["what"]


async def of(cluster: Cluster, router: Router, conversation: str) -> Any:
    path = f"/admin/conversations/default/{conversation}/explain"
    async with cluster.client.get(router.admin_url + path) as response:
        return await response.json()


async def test_a_history_that_is_trimmed(serve: Serve) -> None:
    service = await serve(**ON)
    history = [system(RULES), user("One. " + TEXT), said("Two. " + TEXT), user("Three. " + TEXT)]
    answer = await service.chat(history, "t")
    await held(service)
    await service.chat([history[0], *history[3:], said(answer.text), user("Four.")], "t")
    found = await explained(service)
    assert [each["code"] for each in found["causes"]] == ["history_trimmed"]
    assert found["parting"]["message"] == 1
    assert found["parting"]["new"].startswith("Three")
    assert found["parting"]["held"].startswith("One")


async def test_kv_that_differs_though_the_tokens_do_not(serve: Serve) -> None:
    service = await serve(**ON)
    answer = await service.chat([user(TEXT)], "t")
    await held(service)
    await service.chat([user(TEXT), said(answer.text), user("More.")], "t", cache_salt="mine")
    found = await explained(service)
    assert (found["outcome"], found["found_tokens"]) == ("miss", 0)
    assert [each["code"] for each in found["causes"]] == ["cache_salt_changed"]
    assert (found["parting"]["token"], found["parting"]["until"]) == (0, 16)


async def test_what_was_not_to_be_reused_is_explained_by_its_reason(serve: Serve) -> None:
    service = await serve(**ON)
    answer = await service.chat([user(f"At 10:00. {TEXT}")], "t")
    await held(service)
    history = [user(f"At 10:01. {TEXT}"), said(answer.text), user("More.")]
    await service.chat(history, "t", headers={"X-Carryback-Reuse": "off"})
    found = await explained(service)
    assert (found["reason"], found["compared"], found["causes"], found["why"]) == ("off", "nothing", [], "")
    assert found["do"]
    await service.chat([user(TEXT)], "t", n=2)
    found = await explained(service)
    assert (found["reason"], found["prompt_tokens"]) == ("several_answers", 0)


async def test_an_answer_that_the_client_left_out(serve: Serve) -> None:
    service = await serve(**ON)
    await service.chat([user(TEXT)], "t")
    await held(service)
    again = await service.chat([user(TEXT), user("And the wind?")], "t")
    assert again.reuse.outcome == "partial"
    found = await explained(service)
    assert (found["compared"], found["parting"]["message"]) == ("tokens", 1)
    assert [each["code"] for each in found["causes"]] == ["answer_left_out"]


async def test_a_title_under_the_same_name_costs_the_next_turn_nothing(serve: Serve) -> None:
    """The conversation's newest request is the title's; what the one before it left is found all the same."""
    service = await serve(**ON)
    history = [system(RULES), user(TEXT)]
    answer = await service.chat(history, "t")
    left = await held(service)
    await service.chat([system("Write titles for talks."), user(TEXT)], "t")
    assert [each["code"] for each in (await explained(service))["causes"]] == ["other_conversation"]
    await held(service, before=left)
    again = await service.chat([*history, said(answer.text), user("More.")], "t")
    assert again.reuse.tokens == again.reuse.found > 0
    assert again.reuse.recomputed < 32
    found = await explained(service)
    assert [each["code"] for each in found["causes"]] == ["other_conversation"]
    assert found["shared_tokens"] == again.reuse.found


async def test_a_beginning_that_another_conversation_has(serve: Serve) -> None:
    service = await serve(**ON)
    await service.chat([system(RULES), user("Which way?")], "mine")
    await held(service, "mine")
    answer = await service.chat([system(RULES), user("How deep?")], "t")
    assert answer.reuse.found > 0
    found = await explained(service)
    assert (found["reason"], found["left_tokens"]) == ("verified", None)
    assert (found["shared_tokens"], found["shared_with"]) == (answer.reuse.found, "mine")
    assert found["holder"] == service.decode.url.removeprefix("http://")


async def test_requests_that_run_at_the_same_time(serve: Serve) -> None:
    """The newest one that left something is what the next is compared with; it finds what each of them left."""
    service = await serve(**ON)
    answer = await service.chat([user(TEXT)], "t")
    left = await held(service)
    history = [user(TEXT), said(answer.text)]
    fault = service.decode.fault(status_delay_s=1.0, times=1)
    slow = asyncio.create_task(service.chat([*history, user("Slow. " + TEXT)], "t"))
    await until(lambda: fault not in service.decode.faults, "it runs")
    quick = await service.chat([*history, user("Quick. " + TEXT)], "t")
    assert quick.reuse.outcome == "hit"
    await slow
    await held(service, before=left)
    last = await service.chat([*history, user("Slow. " + TEXT), said((await slow).text), user("?")], "t")
    found = await explained(service)
    assert (found["outcome"], found["why"]) == (last.reuse.outcome, "")
    assert last.reuse.recomputed < 32
    assert [each["code"] for each in found["causes"]] == ["message_changed"]
    assert found["shared_tokens"] == last.reuse.found


async def test_an_engine_that_renders_otherwise(serve: Serve) -> None:
    """Then messages are compared, and it is said why."""
    service = await serve(**ON)
    history = [system("At 10:00. " + RULES), user(TEXT)]
    answer = await service.chat(history, "t")
    await held(service)
    await service.chat([system("At 10:01. " + RULES), user(TEXT), said(answer.text), user("?")], "t")
    for fields, words in (
        ({"status": 500}, "status 500"),
        ({"status": 200, "error": '{"tokens":[1,2,3]}'}, "to 3 tokens"),
        ({"status": 200, "error": "[]"}, "cannot be read"),
        ({"drop": "before_status"}, "did not answer"),
    ):
        fault = service.prefill.fault(path="/tokenize", times=None, **fields)
        found = await explained(service)
        assert (found["compared"], found["reason"]) == ("messages", "history_changed")
        assert words in found["why"]
        assert [each["code"] for each in found["causes"]] == ["system_prompt_changed"]
        assert found["parting"]["message"] == 0
        assert (found["parting"]["held"][:3], found["parting"]["new"][:3]) == ("0. ", "1. ")
        service.prefill.faults.remove(fault)
    await service.prefill.kill()
    await service.decode.kill()
    found = await explained(service)
    assert "no engine is up" in found["why"] or "did not answer" in found["why"]


# -- what is kept


async def test_off_unless_set(serve: Serve) -> None:
    service = await serve()
    await service.chat([user(TEXT)], "t")
    found = await explained(service)
    assert found["error"]["code"] == "explain_off"
    assert "explain_bytes" in found["error"]["message"]


def test_serve_has_it_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYBACK_EXPLAIN_BYTES", raising=False)
    assert RouterConfig().explain_bytes == 0
    assert ServeConfig().router([]).explain_bytes == 64 * 2**20
    assert ServeConfig(host="::1", admin_host="localhost").router([]).explain_bytes == 64 * 2**20
    assert ServeConfig(host="0.0.0.0").router([]).explain_bytes == 0
    assert ServeConfig(admin_host="10.0.0.1").router([]).explain_bytes == 0
    assert ServeConfig(explain_bytes=0).router([]).explain_bytes == 0
    assert ServeConfig(host="0.0.0.0", explain_bytes=5).router([]).explain_bytes == 5


async def test_what_is_over_is_forgotten(serve: Serve) -> None:
    service = await serve(**ON)
    await service.chat([user(TEXT)], "t")
    assert "error" not in await explained(service)
    async with service.session.delete(f"{service.url}/v1/conversations/t"):
        pass
    assert (await explained(service))["error"]["code"] == "conversation_not_found"
    await service.chat([user(TEXT)], "t")
    await service.chat([user(TEXT)], "t", headers={"X-Conversation-End": "true"})
    assert (await explained(service))["error"]["code"] == "conversation_not_found"
    found = await explained(service, "never seen/at all?")
    assert found["error"]["code"] == "conversation_not_found"
    assert "each knows only what it served itself" in found["error"]["message"]


async def test_memory_is_bounded(serve: Serve) -> None:
    service = await serve(explain_bytes=20_000)
    for number in range(40):
        await service.chat([user(f"{number} {TEXT}")], f"t{number}")
    kept = [number for number in range(40) if "error" not in await explained(service, f"t{number}")]
    assert kept == list(range(kept[0], 40))  # the newest
    assert 4 <= len(kept) < 30
    # One that is large is not kept, and pushes nobody out.
    await service.chat([user(TEXT * 40)], "large")
    assert "error" in await explained(service, "large")
    assert "error" not in await explained(service, "t39")


async def test_a_long_answer_is_not_kept_and_a_cause_is_found_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carryback_server.explain.MAX_ANSWER_BYTES", 100)
    service = await serve(engine={"answer_tokens": 64}, **ON)
    answer = await service.chat([user(TEXT)], "t", stream=True)
    await held(service)
    again = await service.chat([user(TEXT), said(answer.text[:100]), user("More.")], "t")
    assert again.reuse.reason == "history_changed"
    found = await explained(service)
    assert [each["code"] for each in found["causes"]] == ["respelled"]
    assert found["parting"]["token"] <= again.reuse.tokens + 16


async def test_tenants_have_conversations_of_their_own(serve: Serve) -> None:
    service = await serve(api_keys=[f"{name}={key}" for name, key in KEYS.items()], **ON)
    for name, key in KEYS.items():
        await service.chat([user(f"I am {name}. {TEXT}")], "t", headers={"Authorization": f"Bearer {key}"})
    assert (await explained(service, tenant="one"))["tenant"] == "one"
    assert (await explained(service, tenant="two"))["tenant"] == "two"
    assert "error" in await explained(service, tenant="default")
    # Nor is it on the clients' port.
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    for path in ("/v1/conversations/t/explain", "/admin/conversations/one/t/explain"):
        async with service.session.get(service.url + path, headers=headers) as response:
            assert response.status == 404


async def test_another_router_served_the_request_before(cluster: Cluster) -> None:
    """With a shared state it knows where that one left its KV, and not what it was."""
    with redis_server() as redis:
        await cluster.pair()
        first, second = [await cluster.router(state=redis.url, **ON) for _ in range(2)]
        for router in (first, second):
            for engine in cluster.engines:
                await cluster.hears(router, engine)
        chat = cluster.chat(first, "t")

        async def is_known(turn: str) -> bool:
            location = (await cluster.conversation(first, "t"))["location"]
            return location is not None and location["turn"] == turn

        await chat.say()
        await eventually(lambda: is_known("1"))
        await chat.say(via=second)
        await eventually(lambda: is_known("2"))
        found = await of(cluster, second, "t")
        assert (found["reason"], found["compared"], found["why"]) == ("verified", "nothing", "")
        chat.messages[0] = user("Something else. " + TEXT)
        await chat.say(via=first)
        found = await of(cluster, first, "t")
        assert (found["reason"], found["compared"]) == ("history_changed", "nothing")
        assert "another router" in found["why"]
        for router in (first, second):
            await cluster.stop(router)


# -- the command line


async def test_the_command(serve: Serve) -> None:
    service = await serve(**ON)
    history = [system(f"It is 10:00. {RULES}"), user(TEXT)]
    answer = await service.chat(history, "a/b c")
    await held(service, "a/b c")
    nasty = said(answer.text + "\x1b[31m[bold]")
    await service.chat([system(f"It is 10:05. {RULES}"), user(TEXT), nasty, user("?")], "a/b c")
    url = service.router.admin_url
    done = await asyncio.to_thread(carryback, "explain", "a/b c", "--url", url)
    assert done.exit_code == 0, done.output
    assert "a/b c, turn 2.1, /v1/chat/completions" in done.stdout
    assert "miss (history_changed)" in done.stdout
    assert "No decode engine had any of them; the conversation's last request had left" in done.stdout
    assert "in message 0 (system):" in done.stdout
    assert "  held  ...<|system|>It is 10:00." in done.stdout
    assert "  new   ...<|system|>It is 10:05." in done.stdout
    assert "Likely: The system prompt is not the same: a time in it changes." in done.stdout
    assert "\x1b" not in done.stdout
    done = await asyncio.to_thread(carryback, "explain", "a/b c", "--url", url, "--json")
    assert json.loads(done.stdout) == await explained(service, "a/b c")
    for args, words in (
        (("other", "--url", url), "no request of conversation 'other' of tenant 'default'"),
        (("a/b c", "--url", url, "--tenant", "x"), "of tenant 'x'"),
        (("a/b c", "--url", service.url), "is not the admin port"),
        (("a/b c", "--url", service.prefill.url), "is not the admin port"),
        (("a/b c", "--url", "http://127.0.0.1:9"), "no answer from"),
        (("a/b c", "--url", "nonsense"), "no answer from"),
    ):
        done = await asyncio.to_thread(carryback, "explain", *args)
        assert done.exit_code == 1, done.output
        assert words in done.stderr
        assert done.stdout == ""
