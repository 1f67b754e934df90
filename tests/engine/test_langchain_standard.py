"""LangChain's own tests of chat models, against `carryback serve` with its default model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from carryback_langgraph import ChatCarryback
from carryback_server.launch import free_ports
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pair import Pair

START_LIMIT_S = 600
# Without it a grammar lets a small model write spaces without end.
NO_SPACES = '{"backend": "xgrammar", "disable_any_whitespace": true}'


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def quiet(pair: Pair) -> Any:
    """The session's engines stand still meanwhile."""
    with pair.paused("prefill", "decode"):
        yield


@pytest.fixture(scope="module")
def base_url(quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a router of its own process, with the model served as `default`."""
    if running := os.environ.get("CARRYBACK_TEST_BASE_URL"):
        yield running
        return
    port, admin_port = free_ports(2)
    log = tmp_path_factory.mktemp("serve") / "log"
    argv = ["serve", "--port", str(port), "--admin-port", str(admin_port), "--served-model-name", "default"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "carryback_server.cli", *argv, "--", "--structured-outputs-config", NO_SPACES],
            stdout=out,
            stderr=out,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(START_LIMIT_S):
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        else:
            pytest.fail(log.read_text())
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


class TestChatCarryback(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, base_url: str) -> None:
        self.base_url = base_url

    @property
    def chat_model_class(self) -> type[ChatCarryback]:
        return ChatCarryback

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "default", "base_url": self.base_url, "api_key": "none",
            "temperature": 0, "max_tokens": 128, "timeout": 300,
        }  # fmt: skip

    @property
    def supports_json_mode(self) -> bool:
        return True
