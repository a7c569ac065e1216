"""A folder that `from_pretrained` loads: configuration, weights under Hugging Face's names, tokenizer."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.models.hf_folder import has_tokenizer
from src.models.hf_lora import merge

if TYPE_CHECKING:
    from src.models.hf_causal_lm import HFCausalLM

log = logging.getLogger(__name__)


def write(model: "HFCausalLM", folder: Path, weights: dict[str, Tensor]) -> None:
    """model: says what is written; its own values don't matter. weights: by its names, whole, on the CPU."""
    with torch.device("meta"):
        inner = model.changed(model.drawn())
    inner.load_state_dict(weights, assign=True)
    inner.tie_weights()
    merge(inner)
    inner.save_pretrained(folder)
    source = model.folder()
    if source is None or not has_tokenizer(source):
        log.info("%s has no tokenizer, so none was written", model.called())
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)
