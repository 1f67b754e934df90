"""Engines' schedulers for tests with vLLM, and what they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

if TYPE_CHECKING:
    from scheduling import Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "head_dim": 32,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 300, "max_position_embeddings": 4096,
        "torch_dtype": "float32", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def port() -> int:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=32_000)


@pytest.fixture
def start(model: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes an engine."""
    from scheduling import BLOCK, FULL, Engine
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("CARRYBACK_KEY", "k")
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # all engines' blocks are hashed alike
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port + 100))
    engines: list[Engine] = []

    def make(
        role: Any = "kv_consumer",
        rank: int = 0,
        specs: Sequence[Any] = (FULL,),
        *,
        is_async: bool = False,
        chunk: int = 4096,
        caches: bool = True,
        **extra: Any,
    ) -> Engine:
        address = f"tcp://127.0.0.1:{port}"
        transfer = KVTransferConfig(
            kv_connector="CarrybackConnector",
            kv_connector_module_path="carryback_vllm.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"bidirectional_kv_xfer": True, "carryback_events": address, **extra},
        )
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, block_size=BLOCK, max_model_len=4096,
            max_num_batched_tokens=chunk, dtype="float32", enforce_eager=True, async_scheduling=is_async,
            enable_prefix_caching=caches, prefix_caching_hash_algo="sha256_cbor", kv_transfer_config=transfer,
        ).create_engine_config()  # fmt: skip
        config.parallel_config.data_parallel_index = rank
        engines.append(Engine(config, f"tcp://127.0.0.1:{port + rank}", specs, is_async=is_async))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
