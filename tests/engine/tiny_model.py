"""Real but tiny models, randomly initialised, whose tokens are bytes. The usual one is a Qwen3.

Their weights are large on purpose: what they say depends strongly on every token of the prompt, so that KV
of other tokens shows at once. They generate printable ASCII only, so that an answer's text gives the same
tokens again in the next prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Tokens that a sliding window spans: less than any conversation of the tests, more than a block.
WINDOW = 160

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_GEMMA = {
    **_ATTENTION,
    "tie_word_embeddings": True,  # vLLM has no other
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 32,
}
_DEEPSEEK = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    # The sizes of DeepSeek's own models, which vLLM's kernels are made for.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 4,  # all
}

# Of each kind: the name of its configuration in transformers, and what is particular to it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", _ATTENTION),
    # One KV head, of another size.
    "llama-mqa": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_ATTENTION, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    # Windows and full attention in turn.
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    # Nothing but windows.
    "mistral-window": ("MistralConfig", {**_ATTENTION, "sliding_window": WINDOW}),
    # Latent attention.
    "deepseek-v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek-v3": ("DeepseekV3Config", {**_DEEPSEEK, "num_mtp_layers": 0}),
    # A running state beside attention.
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 32,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "attention_multiplier": 0.18,
            "position_embedding_type": "rope",
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_ATTENTION,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            # As in LFM2's own files; transformers has them no more.
            "conv_dim": 128,
            "block_dim": 128,
        },
    ),
    # Nothing but a running state.
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 32, "state_size": 16, "expand": 2, "n_groups": 1, "chunk_size": 32},
    ),
}


def symbols() -> list[str]:
    """The vocabulary, in the order of token ids: special tokens, then one symbol a byte."""
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def no_whitespace() -> dict[str, float]:
    """A `logit_bias` without which a grammar that allows whitespace gets nothing else from this model."""
    return {
        str(symbols().index(symbol)): -100.0 for symbol in "\u0120\u0109\u010a\u010d"
    }  # space, \\t, \\n, \\r


def make_tiny_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of rank 8 for a model of kind `qwen3` to `folder` and return it.

    Args:
        model: where the model is.
        seed: of the random weights, which are large, too.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    sizes = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            out = heads * config["head_dim"]
            weights[f"{at}.lora_A.weight"] = torch.randn(8, config["hidden_size"], generator=generator) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": list(sizes), "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def make_tiny_model(folder: Path, template: Path, *, seed: int = 0, kind: str = "qwen3") -> Path:
    """Write the model to `folder` and return it.

    Args:
        template: the chat template to ship with the tokenizer.
        seed: of the random weights.
        kind: one of `KINDS`.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: at for at, symbol in enumerate(symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template.read_text()

    torch.manual_seed(seed)
    config_class, particular = KINDS[kind]
    shape = {
        "vocab_size": len(fast),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "eos_token_id": fast.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": fast.pad_token_id,
        "initializer_range": 0.2,
    }
    config = getattr(transformers, config_class)(**{**shape, **particular})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    printable = {chr(code) for code in range(33, 127)}
    unwanted = [at for symbol, at in vocabulary.items() if symbol not in printable]
    with torch.no_grad():
        model.get_output_embeddings().weight[unwanted] = 0
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fast.eos_token_id}))
    return folder
