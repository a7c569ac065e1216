"""A folder that `from_pretrained` loads: configuration, weights under Hugging Face's names, tokenizer, generation."""

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from src.models.hf_folder import has_tokenizer
from src.models.hf_lora import merge

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from src.models.hf_causal_lm import HFCausalLM

#: How the model is to be sampled from, which is not told by its configuration: end tokens, temperature.
GENERATION = "generation_config.json"

log = logging.getLogger(__name__)


def write(model: "HFCausalLM", folder: Path, weights: dict[str, Tensor]) -> None:
    """model: says what is written; its own values don't matter. weights: by its names, whole, on the CPU."""
    with torch.device("meta"):
        inner = model.changed(model.drawn())
    inner.load_state_dict(weights, assign=True)
    inner.tie_weights()
    merge(inner)
    save(inner, folder)
    source = model.folder()
    if source is not None and (source / GENERATION).is_file():
        # Copied: whatever it says, this version of transformers loses nothing of it.
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    if source is None or not has_tokenizer(source):
        log.info("%s has no tokenizer, so none was written", model.called())
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)


def save(inner: "PreTrainedModel", folder: Path) -> None:
    """As `save_pretrained`; which to see what it saves imports DeepSpeed: seconds, and a driver that it wakes."""
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    inner.config.architectures = [type(inner).__name__]
    inner.config.dtype = str(inner.dtype).removeprefix("torch.")
    inner.config.save_pretrained(folder)
    if inner.can_generate():
        inner.generation_config.save_pretrained(folder)
    told = logging.root.manager.disable
    logging.disable(logging.INFO)  # at which it tells of every file
    try:
        # Where transformers loads an architecture's weights under other names, those of its files.
        save_torch_state_dict(revert_weight_conversion(inner, inner.state_dict()), folder, metadata={"format": "pt"})
    finally:
        logging.disable(told)
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it private
