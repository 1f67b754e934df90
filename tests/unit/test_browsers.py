"""Which names in `Host` a stranger's site cannot have."""

from __future__ import annotations

import pytest
from carryback_server.browsers import is_ours


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:8001", "localhost.:80", "app.localhost", "router", "carryback-router:8001"),
        *("127.0.0.1", "127.0.0.1:8001", "10.244.3.7:9000", "[::1]", "[::1]:8001", "[fd00::1]:80"),
        *("127.1", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]:8001"),
        *("carryback.default.svc", "carryback.default.svc.cluster.local:8001", "llm.internal", ""),
        *("llm.example.com", "LLM.example.com:443", "llm.example.com."),
    ],
)
def test_ours(host: str) -> None:
    assert is_ours(host, {"llm.example.com"})


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8001",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil.example.",
        ),
        *("127.0.0.1.nip.io", "llm.example.com.evil.example", "svc.evil.example", "notlocalhost.example"),
        *("a@evil.example", "localhost:80@evil.example", "evil.example#.localhost", "evil.example/.svc", " "),
        *("dead.beef", "fe.ed", "0x7f.evil", "[evil.example]", "\u0430"),
    ],
)
def test_not_ours(host: str) -> None:
    assert not is_ours(host, {"llm.example.com"})


def test_all_may_be_allowed() -> None:
    assert is_ours("evil.example", {"*"})
