"""model=gpt_*: a decoder language model (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Pre-norm blocks of causal attention and a GELU MLP four times as wide, learned positions. Query, key and value are
layers of their own, so that tensor parallelism can split each by heads.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.flops import DecoderFlops, decoder_flops

if TYPE_CHECKING:
    from src.parallel.plan import Plan

STD = 0.02  # of the initial weights, as in GPT-2


def divisors(number: int) -> str:
    """All of them, as the remedy of an error."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


class Linear(nn.Linear):
    """A linear layer drawn from a normal distribution; std: its standard deviation."""

    def __init__(self, width_in: int, width_out: int, bias: bool = True, std: float = STD) -> None:
        self.std = std
        super().__init__(width_in, width_out, bias)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return  # nothing to draw, and torch would import its symbolic shapes (1.4 s) to find out
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors; given vectors instead of numbers, it scores them against its own (the tied head)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=STD)

    def forward(self, numbers: Tensor) -> Tensor:
        """numbers: (...), integer, gives (..., width); or (..., width), float, gives scores (..., num_embeddings).

        Through forward, and not through `weight`, so that a strategy that shards the table gathers it first.
        """
        return F.linear(numbers, self.weight) if numbers.is_floating_point() else super().forward(numbers)


class Attention(nn.Module):
    """Causal self-attention. kv_heads: as many groups of query heads share a key and a value head (GQA, 2023)."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.grouped = kv_heads != heads
        self.q = Linear(width, width)
        # No bias: softmax cancels it, so its gradient is rounding noise, which Adam would scale up to full steps.
        self.k = Linear(width, kv_heads * self.head_width, bias=False)
        self.v = Linear(width, kv_heads * self.head_width)
        self.o = Linear(width, width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width), and the same back."""
        batch, sequence, _ = x.shape
        # -1: as many heads as this rank holds.
        q, k, v = (
            part(x).view(batch, sequence, -1, self.head_width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Up to four times the width, GELU, down again."""

    def __init__(self, width: int, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width), and the same back."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads, dropout, residual_std)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, residual_std)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width), and the same back."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        x = x + self.drop(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """sequence_length: the longest. kv_heads: None: as many as heads. dropout: a share, 0 ... 1."""

    inputs = "tokens"

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "sequence_length": sequence_length, "layers": layers, "width": width}
        _refuse_none({**sizes, "heads": heads} | ({} if kv_heads is None else {"kv_heads": kv_heads}))
        if width % heads:
            raise ValueError(f"model.heads={heads} does not divide model.width={width}; choose from {divisors(width)}.")
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"model.kv_heads={kv_heads} does not divide model.heads={heads}; choose from {divisors(heads)}."
            )
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.heads, self.kv_heads, self.dropout = heads, kv_heads, dropout
        self.tie_embeddings = tie_embeddings
        # What a pipeline stage does not hold (`keep_layers`) is None.
        self.embedding: Embedding | None = Embedding(vocab_size, width)
        self.positions: Embedding | None = Embedding(sequence_length, width)
        self.drop = nn.Dropout(dropout)
        # Each block adds twice to the residual stream; so its variance at the end is that of one layer (GPT-2).
        residual_std = STD / math.sqrt(2 * layers)
        # By number, not a list: a part of the model that drops the others keeps its blocks' names.
        self.blocks = nn.ModuleDict(
            {str(i): Block(width, heads, kv_heads, dropout, residual_std) for i in range(layers)}
        )
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: Linear | None = None if tie_embeddings else Linear(width, vocab_size, bias=False)

    def units(self) -> list[nn.Module]:
        """What is sharded and gathered as one."""
        return list(self.blocks.values())

    def tensor_counts(self) -> dict[str, int]:
        """What the ranks that share a layer must divide; key and value heads where they are fewer."""
        counts = {"model.heads": self.heads, "model.kv_heads": self.kv_heads}
        return counts if self.kv_heads != self.heads else {"model.heads": self.heads}

    def tensor_plan(self, sequence_parallel: bool) -> "Plan":
        """Attention by heads, the MLP by its inner width, embedding, head and loss by vocabulary."""
        from src.models.gpt_plan import plan  # imports DTensor: 1 s that only tensor parallelism pays

        return plan(self, sequence_parallel)

    def flops(self) -> DecoderFlops:
        """Of the whole model, a token: what MFU is worked out from."""
        assert self.embedding is not None
        assert self.positions is not None
        tables = [self.positions] if self.tie_embeddings else [self.positions, self.embedding]
        return decoder_flops(self, len(self.blocks), self.embedding.embedding_dim, looked_up=tables)

    def layer_parameters(self) -> list[int]:
        """Parameters of each layer; the first counts what comes before the layers, the last what comes after."""
        counts = [_size(block) for block in self.blocks.values()]
        counts[0] += _size(self.embedding) + _size(self.positions)
        counts[-1] += _size(self.norm) + _size(self.head)
        return counts

    def keep_layers(self, layers: range) -> None:
        """Drop all but some consecutive layers, and the ends that don't belong to them; names stay."""
        last = len(self.blocks) - 1
        if 0 not in layers:
            self.embedding = self.positions = None
        if last not in layers:
            self.norm = self.head = None
        self.blocks = nn.ModuleDict({name: block for name, block in self.blocks.items() if int(name) in layers})

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, sequence), int64. Returns the next token's logits, (batch, sequence, vocab_size).

        A stage without the first layer takes, and one without the last gives, (batch, sequence, width).
        """
        x = tokens if self.embedding is None else self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is None:
            return x
        score = self.head or self.embedding  # tied, the embedding scores
        assert score is not None
        logits: Tensor = score(self.norm(x))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, sequence), int64. Returns (batch, sequence, width)."""
        length = tokens.shape[1]
        if length > self.sequence_length:
            raise ValueError(
                f"{length} tokens a sample are more than model.sequence_length={self.sequence_length};"
                f" use model.sequence_length={length}, or data.sequence_length={self.sequence_length} or less."
            )
        assert self.embedding is not None
        assert self.positions is not None
        places = self.positions(torch.arange(length, device=tokens.device))
        embedded: Tensor = self.drop(self.embedding(tokens) + places)
        return embedded


def _refuse_none(sizes: dict[str, int]) -> None:
    """sizes: by the model's key."""
    if less := [f"model.{key}={size}" for key, size in sizes.items() if size < 1]:
        raise ValueError(f"a GPT has at least one of each, and {', '.join(less)} is less; choose 1 or more.")


def _size(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())
