"""LangChain's own tests of chat models that need no server."""

from __future__ import annotations

from typing import Any

import pytest
from carryback_langgraph import ChatCarryback
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumpd, load
from langchain_tests.unit_tests import ChatModelUnitTests
from syrupy.assertion import SnapshotAssertion

PARAMS = {"model": "default", "base_url": "http://127.0.0.1:8000/v1", "api_key": "none"}


class TestChatCarryback(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatCarryback]:
        return ChatCarryback

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PARAMS

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"OPENAI_API_KEY": "key", "OPENAI_API_BASE": "http://127.0.0.1:9/v1"}
        return environment, {"model": "default"}, {"openai_api_base": "http://127.0.0.1:9/v1"}

    @pytest.mark.xfail(
        raises=ValueError,
        reason="LangChain loads classes of its partners only, others when they are given to it",
    )
    def test_serdes(self, model: BaseChatModel, snapshot: SnapshotAssertion) -> None:
        super().test_serdes(model, snapshot)


def test_a_model_is_loaded_from_what_it_was_dumped_to() -> None:
    model = ChatCarryback(**PARAMS, temperature=0)
    loaded = load(
        dumpd(model),
        allowed_objects=[ChatCarryback],
        valid_namespaces=["carryback_langgraph"],
        secrets_map={"OPENAI_API_KEY": "none"},
    )
    assert isinstance(loaded, ChatCarryback)
    assert loaded.dict() == model.dict()
