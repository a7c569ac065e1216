"""Samples of a language model: windows of a long row of tokens, the targets shifted by one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from src.batch import MicroBatch, Request
from src.data.base import Source, mask_padding


def shifted(windows: Tensor, num_real: int) -> MicroBatch:
    """Inputs and, for each, the token that follows. windows: (batch, sequence + 1), int64."""
    return MicroBatch(windows[:, :-1].contiguous(), mask_padding(windows[:, 1:].contiguous(), num_real))


def example_tokens(micro_batch_size: int, sequence_length: int) -> MicroBatch:
    """What `shifted` gives, in zeros."""
    shape = (micro_batch_size, sequence_length)
    return MicroBatch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


class WindowSource(Source):
    """Consecutive windows of `sequence_length` tokens; window i starts where i - 1 ended.

    tokens: (N,), any integer type; held on the device as they are, and made int64 a micro-batch at a time.
    """

    targets_per_sample: int | None

    def __init__(self, tokens: Tensor, sequence_length: int, device: torch.device) -> None:
        self.tokens = tokens.to(device)
        self.sequence_length = sequence_length
        self.device = device
        # The last target of a window is the first input of the next, so one token more than the windows hold.
        self.num_samples = max(0, len(tokens) - 1) // sequence_length
        self.targets_per_sample = sequence_length
        self.offsets = torch.arange(sequence_length + 1, device=device)

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for request in requests:
            ids = torch.from_numpy(request.ids).to(self.device, non_blocking=True)
            places = ids[:, None] * self.sequence_length + self.offsets
            yield shifted(self.tokens[places].long(), request.num_real)
