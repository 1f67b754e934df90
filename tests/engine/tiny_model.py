"""A real but tiny model: a randomly initialised Qwen3 whose tokens are bytes.

Its weights are large on purpose: what it says depends strongly on every token of the prompt, so that KV
of other tokens shows at once. It generates printable ASCII only, so that an answer's text gives the same
tokens again in the next prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def symbols() -> list[str]:
    """The vocabulary, in the order of token ids: special tokens, then one symbol a byte."""
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def no_whitespace() -> dict[str, float]:
    """A `logit_bias` without which a grammar that allows whitespace gets nothing else from this model."""
    return {
        str(symbols().index(symbol)): -100.0 for symbol in "\u0120\u0109\u010a\u010d"
    }  # space, \\t, \\n, \\r


def make_tiny_model(folder: Path, template: Path, *, seed: int = 0) -> Path:
    """Write the model to `folder` and return it.

    Args:
        template: the chat template to ship with the tokenizer.
        seed: of the random weights.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {symbol: at for at, symbol in enumerate(symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template.read_text()

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    printable = {chr(code) for code in range(33, 127)}
    unwanted = [at for symbol, at in vocabulary.items() if symbol not in printable]
    with torch.no_grad():
        model.lm_head.weight[unwanted] = 0
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fast.eos_token_id}))
    return folder
