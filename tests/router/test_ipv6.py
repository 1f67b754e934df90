"""Addresses with colons: everything on ::1, and the router on all addresses."""

from __future__ import annotations

import json
import logging

import pytest
from carryback_server.cli import app
from carryback_server.config import ConfigError, RouterConfig
from cluster import Cluster
from pydantic import ValidationError
from service import until
from typer.testing import CliRunner


async def test_two_turns_over_ipv6(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    # A34
    caplog.set_level(logging.INFO, "carryback")
    prefill, decode = await cluster.pair(host="::1")
    router = await cluster.router(host="::", admin_host="::1")
    port = router.url.rpartition(":")[2]
    assert router.url == f"http://[::]:{port}"
    assert router.admin_url.startswith("http://[::1]:")
    router.url = f"http://[::1]:{port}"
    chat = cluster.chat(router)
    await chat.say()
    assert (await chat.say(stream=True)).reuse.outcome == "hit"
    name = decode.url.removeprefix("http://")
    assert name.startswith("[::1]:")
    assert (await cluster.held(chat))["engine"] == name
    assert await cluster.metric(router, "engine_up", role="decode", engine=name) == 1
    shown = (await cluster.admin(router, "GET", "/admin/engines")).json["data"]
    assert {each["name"] for each in shown} == {
        each.url.removeprefix("http://") for each in (prefill, decode)
    }
    drained = await cluster.admin(router, "POST", f"/admin/engines/{name}/drain")
    assert drained.json == {"name": name, "role": "decode", "state": "draining"}
    await decode.kill()
    await until(lambda: f"decode engine {name} is down" in caplog.text)


async def test_ranks_over_ipv6(cluster: Cluster) -> None:
    await cluster.engine("prefill", host="::1")
    await cluster.engine("decode", host="::1", ranks=2)
    router = await cluster.router(host="::1")
    for number in range(4):
        chat = cluster.chat(router, f"chat-{number}")
        await chat.say()
        assert (await cluster.held(chat))["engine"][-2:] in ("#0", "#1")
        assert (await chat.say()).reuse.outcome == "hit"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["--decode", "::1:8100,tcp://[::1]:8101"], "http://[::1]:8100"),
        (["--decode", "http://::1:8100,tcp://[::1]:8101"], "http://[::1]:8100"),
        (["--decode", "http://[::1]:8100,tcp://::1:8101"], "tcp://[::1]:8101"),
        (["--prefill", "http://fe80::a1:8100,tcp://h:1"], "http://[fe80::a1]:8100"),
    ],
)
def test_an_address_without_brackets_is_an_error_that_shows_them(words: list[str], right: str) -> None:
    result = CliRunner().invoke(app, ["router", "--port", "0", *words])
    assert result.exit_code == 1
    assert f"has to be in brackets: {right}" in result.stderr


def test_a_configuration_without_brackets_is_an_error_that_shows_them() -> None:
    engine = {"role": "decode", "url": "http://::1:8200", "events": "tcp://[::1]:8201"}
    with pytest.raises(ValidationError) as raised:
        RouterConfig.model_validate_json(json.dumps({"engines": [engine]}))
    assert "http://[::1]:8200" in str(raised.value)
    assert not isinstance(raised.value, ConfigError)
