"""What a step costs vLLM's scheduler while many long prompts wait: with this tree's plug-in, and with another's.

    .venv/bin/python benchmarks/waiting.py                       # this tree
    .venv/bin/python benchmarks/waiting.py --root ../before      # and another checkout, beside it

Prompts of 30,000 tokens, of which the engine has 29,000 in its own prefix cache, wait at a prefill engine (for their turn)
or at a decode engine (for their router); another request decodes. No model runs: this is the time of `schedule` and
`update_from_output` alone, the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK, SHARED, TOKENS, STEPS = 16, 29_000, 30_000, 60
WAITING = (1, 50, 500)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "head_dim": 32,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "vocab_size": 70_000, "max_position_embeddings": 40_000, "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip


def scheduler_of(role: str, folder: Path) -> Any:
    """A scheduler of vLLM's with the plug-in, and no engine around it."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(MODEL))
    transfer = KVTransferConfig(
        kv_connector="CarrybackConnector",
        kv_connector_module_path="carryback_vllm.connector",
        kv_role=role,
        kv_connector_extra_config={
            "bidirectional_kv_xfer": True,
            "carryback_events": "tcp://127.0.0.1:29173",
            # One decode engine to be asked, which does not answer.
            "carryback_peers": ["tcp://127.0.0.1:29174"] if role == "kv_producer" else [],
            "carryback_ask_timeout_s": 0.2,
        },
    )
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, block_size=BLOCK, max_model_len=40_000, dtype="float32",
        max_num_batched_tokens=40_000, max_num_seqs=4, enforce_eager=True, enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor", kv_transfer_config=transfer,
    ).create_engine_config()  # fmt: skip
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=20_000,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        hash_block_size=BLOCK,
    )
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK)


def measure(role: str, waiting: int, folder: Path) -> float:
    """Seconds a step, with so many prompts that wait."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    scheduler = scheduler_of(role, folder)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK, sha256_cbor)

    def add(name: str, tail: int, tokens: int, params: dict[str, Any] | None) -> Any:
        prompt = [1 + at % 60_000 for at in range(SHARED)] + [tail] * (TOKENS - SHARED)
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        sampling.update_from_generation_config({}, eos_token_id=0)
        request = Request(name, prompt, sampling, None, block_hasher=hasher)
        scheduler.add_request(request)
        return request

    def step() -> float:
        began = time.perf_counter()
        work = scheduler.schedule()
        seconds = time.perf_counter() - began
        names = list(work.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names], kv_connector_output=KVConnectorOutput(),
        )  # fmt: skip
        began = time.perf_counter()
        scheduler.update_from_output(work, done)
        return seconds + time.perf_counter() - began

    add("decodes", 61_000, 10_000, None)
    step()
    for at in range(waiting):
        params: dict[str, Any] = {"carryback_key": f"key-{at}", "carryback_await": 600.0}
        if role == "kv_producer":
            params = {"do_remote_decode": True, "do_remote_prefill": False}
        add(f"waits-{at}", 62_000 + at, 1, params)
    if role == "kv_producer":
        # One that goes before all others, and never comes to the scheduler.
        first = SimpleNamespace(request_id="first", status=RequestStatus.WAITING, kv_transfer_params=None)
        scheduler.connector.connector_scheduler._line.join("first", first, 1, time.perf_counter(), -1)
    deadline = time.perf_counter() + 1
    while time.perf_counter() < deadline:
        step()
    times = [step() for _ in range(STEPS)]
    scheduler.connector.shutdown()
    return statistics.median(times)


def run(root: Path, role: str, waiting: int) -> float:
    """The same in a process of its own, with a checkout's plug-in."""
    paths = [str(root / each) for each in ("sdk", "server", "integrations")]
    env = {**os.environ, "PYTHONPATH": ":".join(paths), "CARRYBACK_INSECURE_DEV": "1", "PYTHONHASHSEED": "0",
           "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NIXL_SIDE_CHANNEL_PORT": "29175"}  # fmt: skip
    command = [sys.executable, __file__, "--role", role, "--waiting", str(waiting)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--root", type=Path, help="another checkout, to compare with")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--waiting", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(args.role, args.waiting, Path(folder)))
        return
    print("| engine | waiting | ms a step | other, ms a step | ratio |\n|---|---:|---:|---:|---:|")
    for role, name in (("kv_producer", "prefill"), ("kv_consumer", "decode")):
        for waiting in WAITING:
            mine = run(ROOT, role, waiting)
            other = run(args.root.resolve(), role, waiting) if args.root else 0.0
            ratio = f"{mine / other:.2f}" if other else ""
            print(f"| {name} | {waiting} | {1000 * mine:.2f} | {1000 * other:.2f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
