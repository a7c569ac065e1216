"""Tiny models of Hugging Face's, saved in a folder as `save_pretrained` leaves them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}


def saved(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Llama's folder, with changes of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from src.models.hf_export import save

    torch.manual_seed(seed)
    configuration = {**LLAMA, **changes}
    save(AutoModelForCausalLM.from_config(AutoConfig.for_model(**configuration), dtype=torch.float32), folder)
    return folder


def loaded(folder: Path) -> Any:
    """What `from_pretrained` makes of a folder, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))
