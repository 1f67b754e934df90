"""A real but tiny model: a randomly initialised Qwen3 and a tokenizer trained on the spot.

Its weights are large on purpose: the first token depends strongly on every token of the prompt, so that
KV of other tokens shows at once in its log-probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path

CORPUS = """
The quick brown fox jumps over the lazy dog. A user asks a question about the weather in Lisbon, and the
assistant answers with a number. Tools return results as text. Numbers: 0 1 2 3 4 5 6 7 8 9 10 100 1000.
What is the capital of France? Paris is the capital. Read section three of the document and summarise it.
{"name": "search_document", "arguments": {"query": "budget", "limit": 3}} <tool_call> </tool_call>
system user assistant tool animal cat dog horse bird fish river mountain city harbour letter garden
"""


def make_tiny_model(folder: Path, template: Path, *, seed: int = 0) -> Path:
    """Write the model to `folder` and return it.

    Args:
        template: the chat template to ship with the tokenizer.
        seed: of the random weights.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        CORPUS.splitlines(),
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
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
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fast.eos_token_id}))
    return folder
