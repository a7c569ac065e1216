"""Packed documents in Hugging Face's attention masks (transformers 5.24, `masking_utils`).

Where a batch has position_ids and neither mask nor cache, transformers takes every jump in them for the beginning of
another document and lets none see another. Whether there is a jump at all it finds out by reading the tensor, at every
forward: on a GPU that waits for the device. Here it is known from the batch's shape.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def known_packing(is_packed: bool) -> Iterator[list[Tensor]]:
    """Forwards inside build masks for packed documents, or for rows of one document each, without looking.

    Yields the numbers of documents that masks were built from: none where an architecture does not ask for them, and
    lets documents see one another.
    """
    from transformers import masking_utils  # with transformers: 3 s to import

    found, asked = masking_utils.find_packed_sequence_indices, list[Tensor]()

    def numbers(position_ids: Tensor) -> Tensor:
        asked.append(document_numbers(position_ids))
        return asked[-1]

    masking_utils.find_packed_sequence_indices = numbers if is_packed else no_documents
    try:
        yield asked
    finally:
        masking_utils.find_packed_sequence_indices = found


def document_numbers(position_ids: Tensor) -> Tensor:
    """The number of each token's document in its row. position_ids: (batch, sequence), and the same back."""
    jumps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return jumps.cumsum(-1)


def no_documents(position_ids: Tensor) -> None:
    """A row is one document."""
