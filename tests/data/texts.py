"""Texts and a tokenizer of tests' own, and models that read what data=hf_text gives."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def write_tokenizer(folder: Path, vocab_size: int = 320, bos: bool = False) -> Path:
    """A byte-level BPE trained on a few files of the standard library, saved as transformers saves one.

    Tokens: 0 "<s>", 1 "</s>", 2 "<pad>", then the 256 bytes and what was merged. bos: it begins each text with "<s>".
    """
    import argparse
    import textwrap

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    # One text at a time: on several threads it would leave threads in the tests' process.
    tokenizer.train([str(module.__file__) for module in (argparse, textwrap)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


class PositionsModel(nn.Module):
    """Mixes each token with those before it in its document, by a running mean, and scores the next."""

    inputs = "tokens"
    reads_positions = True

    def __init__(self, vocab_size: int, width: int = 16, **given: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens, positions = inputs.unbind(1)
        document = (positions == 0).cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        seen = (same & torch.ones_like(same[0]).tril()).float()
        mixed = seen @ self.embedding(tokens) / seen.sum(-1, keepdim=True)
        out: Tensor = self.head(torch.tanh(mixed))
        return out
