"""Pages of other sites, in the browser of somebody who reaches a router's ports."""

from __future__ import annotations

import pytest
from cluster import Cluster
from service import user
from stub_engine.prompts import CHAT

KEY = "sk-acme-0123456789-0123456789"
HI = {"messages": [user("Hi")], "max_tokens": 4}
REBOUND = {"Host": "evil.example:8001", "Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/conversations"),
        ("GET", "/admin/engines"),
        ("GET", "/metrics"),
        ("GET", "/dashboard"),
        ("GET", "/health"),
        ("GET", "/nothing"),
        ("POST", "/admin/engines"),
        ("POST", "/admin/reload"),
        ("DELETE", "/admin/conversations/default/chat-1"),
    ],
)
async def test_a_name_that_was_rebound_opens_nothing_to_its_site(
    cluster: Cluster, method: str, path: str
) -> None:
    await cluster.pair()
    router = await cluster.router()
    await cluster.chat(router).say()
    rebound = {**REBOUND, "Origin": "http://evil.example:8001"}
    answer = await cluster.request(method, f"{router.admin_url}{path}", headers=rebound)
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "allowed_hosts" in answer.error["message"]
    assert b"chat-1" not in answer.raw
    assert len((await cluster.request("GET", f"{router.admin_url}/admin/conversations")).json["data"]) == 1


async def test_nor_do_the_clients_endpoints_where_nobody_needs_a_key(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    router = await cluster.router()
    for method, path in (("POST", CHAT), ("GET", "/v1/conversations"), ("GET", "/v1/models")):
        answer = await cluster.request(method, f"{router.url}{path}", HI, headers=REBOUND)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    foreign = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    answer = await cluster.request("POST", f"{router.url}{CHAT}", HI, headers=foreign)
    assert (answer.status, answer.error["code"]) == (403, "foreign_origin")
    assert not prefill.requests
    assert not decode.requests


async def test_where_a_key_is_needed_the_name_does_not_matter(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router(api_keys=[f"acme={KEY}"])
    named = {"Host": "llm.example.com"}
    assert (await cluster.request("POST", f"{router.url}{CHAT}", HI, headers=named)).status == 401
    answer = await cluster.request("POST", f"{router.url}{CHAT}", HI, key=KEY, headers=named)
    assert answer.status == 200
    # A key for clients is none for operators.
    answer = await cluster.request("GET", f"{router.admin_url}/metrics", key=KEY, headers=named)
    assert answer.status == 403


@pytest.mark.parametrize(
    "host",
    ["10.0.0.7:8001", "localhost:9000", "router:8001", "carryback.llm.svc.cluster.local", "ops.example"],
)
async def test_who_asks_by_an_address_or_a_name_of_ours_is_answered(cluster: Cluster, host: str) -> None:
    await cluster.pair()
    router = await cluster.router(allowed_hosts=["Ops.example"])
    for url in (f"{router.admin_url}/metrics", f"{router.url}/health", f"{router.url}/v1/models"):
        assert (await cluster.request("GET", url, headers={"Host": host})).status == 200


async def test_a_link_leads_to_the_dashboard_and_a_page_reads_nothing(cluster: Cluster) -> None:
    await cluster.pair()
    router = await cluster.router()

    async def status(path: str, site: str, destination: str) -> int:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": destination}
        return (await cluster.request("GET", f"{router.admin_url}{path}", headers=headers)).status

    assert await status("/dashboard", "cross-site", "document") == 200
    assert await status("/dashboard", "cross-site", "iframe") == 403
    assert await status("/admin/live", "same-origin", "empty") == 200
    assert await status("/admin/live", "cross-site", "empty") == 403
    assert await status("/admin/conversations", "cross-site", "document") == 403
    assert await status("/metrics", "none", "document") == 200
