"""What a stranger to the router meets first: paths, methods, ids, and what an answer's head tells."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import pytest
from cluster import Cluster
from service import TEXT, until
from stub_engine.prompts import CHAT
from yarl import URL

COUNT = "/v1/messages/count_tokens"


async def exchange(url: str, *requests: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Send requests one after the other over one connection: status, headers and body of each answer."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    answers = []
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(port))
        for request in requests:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            is_bodyless = request.startswith(b"HEAD")
            body = b"" if is_bodyless else await reader.readexactly(int(headers["content-length"]))
            answers.append((int(first.split()[1]), headers, body))
        writer.close()
    return answers


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


# As Codex asks.
KNOCK = (
    "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "OpenAI-Beta: responses_websockets=2026-02-06",
)  # fmt: skip


async def test_a_websocket_is_refused_at_once_and_its_connection_is_of_use(cluster: Cluster) -> None:
    """Codex goes over to plain requests at once for a 426, and only then."""
    await cluster.pair()
    router = await cluster.router()
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    post = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    answers = await exchange(
        router.url, get("/v1/responses", *KNOCK), get("/v1/responses", *KNOCK), post, get("/v1/responses")
    )
    assert [status for status, _, _ in answers] == [426, 426, 200, 405]
    _, headers, refusal = answers[0]
    assert json.loads(refusal)["error"]["code"] == "websocket_not_served"
    assert headers["upgrade"] == "HTTP/1.1"
    assert answers[3][1]["allow"] == "POST"
    assert await cluster.metric(router, "requests_total", endpoint="/v1/responses", status="426") == 2
    # No turn was one of them.
    listed = (await cluster.get(router, "/v1/conversations")).json["data"]
    assert [each["requests"] for each in listed] == [1]


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/v1/conversations"])
async def test_head_is_answered_as_get_is(cluster: Cluster, path: str) -> None:
    await cluster.pair()
    router = await cluster.router()
    (status, headers, _), (other, others, body) = await exchange(
        router.url, get(path, method="HEAD"), get(path)
    )
    assert (status, other) == (200, 200)
    assert headers["content-type"] == others["content-type"]
    assert int(headers["content-length"]) == len(body)


async def test_tokens_are_counted_while_turns_wait(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router()
    decode.fault(contains="Wait", hop="decode", status_delay_s=1000)
    waiting = asyncio.create_task(
        cluster.post(router, CHAT, {"messages": [{"role": "user", "content": f"Wait. {TEXT}"}]})
    )
    await until(lambda: any("Wait" in str(each.body) for each in decode.requests))
    body = {"model": "stub", "messages": [{"role": "user", "content": TEXT}]}
    async with asyncio.timeout(30):
        counts = await asyncio.gather(*(cluster.post(router, f"{COUNT}?beta=true", body) for _ in range(50)))
    assert {each.status for each in counts} == {200}
    assert not waiting.done()
    listed = (await cluster.get(router, "/v1/conversations")).json["data"]
    assert [each["in_flight"] for each in listed] == [1]  # counting opens none
    waiting.cancel()


# Each may be an id, since it is printable ASCII.
IDS = [
    "plain", "{braces}", "{", "}", "{id}", "a b", "a/b", "/", "a//b/", "50%", "%2F", "%252F", "a?b=c", "a#b", "a&b;c",
    "a+b", "ä".encode().hex(), "[1]", '"quoted"', "back\\slash", "pipe|", "^`~", "~", "...", "a:b@c", "'", "*",
    "".join(map(chr, range(33, 127))),
]  # fmt: skip


@pytest.mark.parametrize("id", IDS)
async def test_whatever_may_be_an_id_can_be_read_and_deleted(cluster: Cluster, id: str) -> None:
    _, decode = await cluster.pair()
    router = await cluster.router(explain_bytes=2**24)
    chat = cluster.chat(router, id)
    await chat.say()
    await until(lambda: decode.pinned > 0)
    path = quote(id, safe="")

    async def ask(method: str, url: str) -> tuple[int, object]:
        async with cluster.client.request(method, URL(url, encoded=True)) as response:
            return response.status, await response.json()

    status, view = await ask("GET", f"{router.url}/v1/conversations/{path}")
    assert (status, view["id"]) == (200, id)  # type: ignore[index]
    status, told = await ask("GET", f"{router.admin_url}/admin/conversations/default/{path}/explain")
    assert (status, told["conversation"]) == (200, id)  # type: ignore[index]
    assert (await ask("DELETE", f"{router.url}/v1/conversations/{path}"))[0] == 200
    await until(lambda: decode.pinned == 0, "it is released")
    assert (await ask("DELETE", f"{router.admin_url}/admin/conversations/default/{path}"))[0] == 404


async def test_what_takes_no_such_method_is_counted(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    for method, path in [
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/conversations/x"),
    ]:
        answer = await cluster.request(method, router.url + path)
        assert (answer.status, answer.error["code"]) == (405, "unknown_endpoint")
    await cluster.request("GET", f"{router.url}/nowhere")

    async def counted(endpoint: str) -> float:
        return await cluster.metric(router, "requests_total", endpoint=endpoint)

    assert await cluster.metric(router, "requests_total", endpoint=CHAT, status="405") == 2
    assert await counted("/v1/models") == 1
    assert await counted("/v1/conversations/{id}") == 1
    assert await counted("unknown") == 1
    # What is served is counted once, as ever.
    await cluster.chat(router).say()
    assert await cluster.metric(router, "requests_total", endpoint=CHAT, status="200") == 1


async def test_no_answer_tells_versions(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()
    answers = [
        await cluster.get(router, "/health"),
        await cluster.get(router, "/nowhere"),
        await cluster.post(router, CHAT, b"{"),
        await cluster.admin(router, "GET", "/metrics"),
        await cluster.chat(router).say(),
        await cluster.chat(router, "two").say(stream=True),
    ]
    assert {each.headers["server"] for each in answers} == {"carryback"}


async def test_a_name_of_two_engines_does_not_drain_both(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    both = [{**each.config().model_dump(), "name": "one"} for each in (prefill, decode)]
    router = await cluster.router(engines=both)
    ambiguous = await cluster.admin(router, "POST", "/admin/engines/one/drain")
    assert (ambiguous.status, ambiguous.error["param"]) == (409, "role")

    async def states() -> dict[str, str]:
        engines = (await cluster.admin(router, "GET", "/admin/engines")).json["data"]
        return {each["role"]: each["state"] for each in engines}

    assert await states() == {"prefill": "up", "decode": "up"}
    drained = await cluster.admin(router, "POST", "/admin/engines/one/drain?role=prefill")
    assert drained.json == {"name": "one", "role": "prefill", "state": "draining"}
    assert await states() == {"prefill": "draining", "decode": "up"}
    await cluster.admin(router, "POST", "/admin/engines/one/undrain?role=prefill")
    assert await states() == {"prefill": "up", "decode": "up"}
    assert (await cluster.admin(router, "POST", "/admin/engines/one/drain?role=other")).status == 404
