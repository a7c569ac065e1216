"""A two-layer Llama on files of our own: made on first use, and from then on loaded as any other of Hugging Face's.

Beside its weights the folder holds a tokenizer and documents to train on (documents.jsonl), both made of the docstrings
of Python's standard library.
"""

import ast
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from src.errors import Refused, in_words
from src.models.hf_causal_lm import HFCausalLM
from src.models.hf_export import save
from src.models.hf_folder import configuration
from src.once import make_once

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 1024
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SEED = 0
LEAST = 200  # characters of a docstring that counts as a document
DOCUMENTS = 500


class TinyLlama(HFCausalLM):
    """name: the folder, made where it is missing. The rest as for HFCausalLM."""

    def configured(self, name: str | None, overrides: dict[str, Any]) -> "PretrainedConfig":
        if name is None:
            raise ValueError("model.name=null: the tiny Llama needs a folder to be made in, such as data/llama_tiny.")
        return configuration(None, {**LLAMA, **overrides})

    def prepare(self) -> None:
        assert self.name is not None
        make(Path(self.name))
        super().prepare()


def make(folder: Path) -> None:
    """The folder, whole or not at all; what is there already stays as it is. Refused where it can't be written."""
    try:
        make_once(folder, partial(fill, folder))
    except OSError as error:
        raise Refused(f"model.name={folder} can't be made: {in_words(error)}. Choose a folder to write in.") from error


def fill(folder: Path, empty: Path) -> None:
    """Write what is to be `folder` into an empty one."""
    documents = list(islice(docstrings(Path(sysconfig.get_paths()["stdlib"])), DOCUMENTS))
    (empty / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    write_tokenizer(documents, empty)
    write_weights(empty)
    print(f"made {folder}: a two-layer Llama, its tokenizer, {len(documents)} documents", file=sys.stderr)


def docstrings(root: Path) -> Iterator[str]:
    """The longer docstrings of the modules in a folder, in the order of their names."""
    for path in sorted(root.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= LEAST:
                    yield text


def write_tokenizer(documents: list[str], folder: Path) -> None:
    """Byte-level BPE (Sennrich et al. 2016), so that every text has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the forks of the ranks
    try:
        tokenizer.train_from_iterator(documents, trainer)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def write_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        save(AutoModelForCausalLM.from_config(configuration(None, dict(LLAMA)), dtype=torch.float32), folder)
