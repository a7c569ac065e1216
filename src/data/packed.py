"""Samples of tokens that lie on disk, gathered by spans a micro-batch at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.batch import IGNORED, Ids, MicroBatch, Request
from src.data.base import Source, mask_padding
from src.data.packing import Ints, Samples, ranges
from src.data.tokenized import Tokens


class Slots(NamedTuple):
    """Of some samples' tokens, one after the other. place: in all tokens. row, column: in the micro-batch.

    position: within its span's stretch. document: whose token it is.
    """

    place: Ints
    row: Ints
    column: Ints
    position: Ints
    document: Ints


class TokensSource(Source):
    """targets_per_sample: None, since any number may be masked; of windows without prompts all count."""

    targets_per_sample: int | None = None

    def __init__(self, tokens: Tokens, samples: Samples, sequence_length: int, device: torch.device) -> None:
        self.tokens, self.samples, self.sequence_length = tokens, samples, sequence_length
        self.device = device
        self.num_samples = len(samples)

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for request in requests:
            inputs, targets = self.gather(request.ids)
            yield MicroBatch(self.moved(inputs), mask_padding(self.moved(targets), request.num_real))

    def gather(self, ids: Ids) -> tuple[Ints, Ints]:
        """Inputs and targets, (batch, sequence) each, or as the subclass says."""
        raise NotImplementedError

    def slots(self, ids: Ids) -> Slots:
        first, after = self.samples.firsts[ids], self.samples.firsts[ids + 1]
        start, length, document = np.asarray(self.samples.spans[ranges(first, after - first)]).T
        row = np.repeat(np.arange(len(ids)), after - first)
        # Where each span begins in its row: what came before it, less what came before the row.
        before = np.cumsum(length) - length
        column = before - before[np.searchsorted(row, row)]
        zeros = np.zeros_like(length)
        return Slots(
            ranges(start, length),
            np.repeat(row, length),
            ranges(column, length),
            ranges(zeros, length),
            np.repeat(document, length),
        )

    def learnt(self, place: Ints, document: Ints) -> np.ndarray:
        """Whether the token at `place` is one of `document`'s that is to be predicted: within it, after its prompt."""
        starts, prompts = self.tokens.starts, self.tokens.prompts
        return (place >= starts[document] + prompts[document]) & (place < starts[document + 1])

    def moved(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class DocumentsSource(TokensSource):
    """Sequences of whole documents, or pieces of them, that know nothing of each other.

    with_positions: inputs are (batch, 2, sequence): tokens, and positions that begin at 0 with each document; what is
    left of a sequence is one more, of padding. Else (batch, sequence), for one document a sample.
    """

    def __init__(
        self, tokens: Tokens, samples: Samples, sequence_length: int, device: torch.device, with_positions: bool
    ) -> None:
        super().__init__(tokens, samples, sequence_length, device)
        self.with_positions = with_positions

    def gather(self, ids: Ids) -> tuple[Ints, Ints]:
        slots = self.slots(ids)
        shape = (len(ids), self.sequence_length)
        inputs = np.full(shape, self.tokens.pad, np.int64)
        inputs[slots.row, slots.column] = self.tokens.tokens[slots.place]
        # The token after a piece of a longer document is that document's own, so its last target counts.
        following = slots.place + 1
        valid = self.learnt(following, slots.document)
        targets = np.full(shape, IGNORED, np.int64)
        targets[slots.row[valid], slots.column[valid]] = self.tokens.tokens[following[valid]]
        if not self.with_positions:
            return inputs, targets
        used = np.bincount(slots.row, minlength=len(ids))
        positions = np.arange(self.sequence_length) - used[:, None]
        positions[slots.row, slots.column] = slots.position
        return np.stack([inputs, positions], axis=1), targets


class RowWindowsSource(TokensSource):
    """Windows of one row of documents; the first token of the next document is predicted as well."""

    def __init__(self, tokens: Tokens, samples: Samples, sequence_length: int, device: torch.device) -> None:
        super().__init__(tokens, samples, sequence_length, device)
        if not tokens.prompts.any():
            self.targets_per_sample = sequence_length  # so that no step needs to ask the other ranks

    def gather(self, ids: Ids) -> tuple[Ints, Ints]:
        slots = self.slots(ids)
        shape = (len(ids), self.sequence_length + 1)
        row = self.tokens.tokens[slots.place].astype(np.int64).reshape(shape)
        learnt = self.learnt(slots.place, slots.document).reshape(shape)
        targets = np.where(learnt[:, 1:], row[:, 1:], IGNORED)
        return np.ascontiguousarray(row[:, :-1]), targets
