"""Floating-point operations that a token costs a decoder, and the share of the devices' peak that makes (MFU)."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn


class DecoderFlops(NamedTuple):
    """PaLM's count (Chowdhery et al. 2022, appendix B): forward and backward, attention in full, nothing recomputed.

    trained, frozen: parameters that multiply; a table that is only looked up does not. A frozen one has no gradient of
    its own, so it costs 4 instead of 6. layers: of attention. width: of all its heads together.
    """

    trained: int
    frozen: int
    layers: int
    width: int

    def a_token(self, sequence_length: int) -> int:
        return 6 * self.trained + 4 * self.frozen + 12 * self.layers * self.width * sequence_length

    def formula(self) -> str:
        frozen = f" + 4 x {self.frozen:,} frozen" if self.frozen else ""
        return f"6 x {self.trained:,} parameters{frozen} + 12 x {self.layers} layers x {self.width} width x sequence"


@runtime_checkable
class CountsFlops(Protocol):
    """A model that tells what a token costs it; of others no utilisation is worked out."""

    def flops(self) -> DecoderFlops | None: ...


def decoder_flops(model: nn.Module, layers: int, width: int, looked_up: Iterable[nn.Module]) -> DecoderFlops:
    """looked_up: modules whose parameters are rows to look up, and no matrices of the forward pass."""
    tables = {id(p) for module in looked_up for p in module.parameters()}
    sizes = [(p.requires_grad, p.numel()) for p in model.parameters() if id(p) not in tables]
    trained = sum(size for requires_grad, size in sizes if requires_grad)
    return DecoderFlops(trained, sum(size for _, size in sizes) - trained, layers, width)


class Utilization(NamedTuple):
    """peak: operations a second of all ranks' devices together."""

    flops: DecoderFlops
    peak: float

    def of(self, tokens_per_second: float, sequence_length: int) -> float:
        """tokens_per_second: over all ranks, masked ones among them, since they are computed as well."""
        return tokens_per_second * self.flops.a_token(sequence_length) / self.peak
