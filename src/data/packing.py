"""Which stretches of which documents make up a sample: arithmetic on lengths, no tokens.

A sample is a row of spans, (start, length, document): `length` tokens from `start` on, all of one document.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """spans: (S, 3), int64: start, length, document. firsts: (samples + 1,), int64: where each sample's spans begin."""

    spans: Ints
    firsts: Ints

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def first(self, count: int | None) -> "Samples":
        """The first `count`, None: all."""
        return self if count is None else Samples(self.spans, self.firsts[: count + 1])

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}_spans.npy", self.spans)
        np.save(folder / f"{name}_firsts.npy", self.firsts)

    @classmethod
    def open(cls, folder: Path, name: str) -> "Samples":
        return cls(*(np.load(folder / f"{name}_{part}.npy", mmap_mode="r") for part in ("spans", "firsts")))


def split(num_documents: int, test_share: float, seed: int) -> tuple[Ints, Ints]:
    """(training, test) documents, each in ascending order; of two or more, each has one at least."""
    num_test = min(max(1, round(num_documents * test_share)), num_documents - 1)
    drawn = np.random.default_rng([seed, num_documents]).permutation(num_documents)
    return np.sort(drawn[num_test:]), np.sort(drawn[:num_test])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... lengths[0] numbers, then as many as lengths[1] from starts[1], and so on."""
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - (ends - lengths), lengths)
    return shift + np.arange(len(shift))


def documents_packed(starts: Ints, documents: Ints, sequence_length: int) -> Samples:
    """Whole documents in sequences of at most `sequence_length`; a longer one is cut, each piece packed on its own.

    starts: (all documents + 1,). documents: those to pack. Samples come in the order of their first piece.
    """
    sizes = starts[documents + 1] - starts[documents]
    num_pieces = -(-sizes // sequence_length)
    document = np.repeat(documents, num_pieces)
    offset = ranges(np.zeros_like(num_pieces), num_pieces) * sequence_length
    start = starts[document] + offset
    length = np.minimum(sequence_length, starts[document + 1] - start)
    sample, place = best_fit(length, sequence_length)
    order = np.lexsort((place, sample))
    spans = np.stack([start, length, document], axis=1)[order]
    return Samples(spans, boundaries(np.bincount(sample)))


def best_fit(lengths: Ints, room: int) -> tuple[Ints, Ints]:
    """(sequence, place in it) of each piece, by best fit, longest first, ties by position (Johnson 1974).

    lengths: (pieces,), each 1 ... room. Sequences are numbered by their first piece.
    """
    left_in: list[list[int]] = [[] for _ in range(room + 1)]  # sequences by what is left in them
    lefts = 0  # bit n: there is one with n left; the lowest bit from a piece's length on is its best fit
    sequence, place = np.zeros_like(lengths), np.zeros_like(lengths)
    count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = lefts >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = left_in[left].pop()
            if not left_in[left]:
                lefts ^= 1 << left
        else:
            left, number, count = room, count, count + 1
        sequence[piece], place[piece] = number, room - left
        if left > length:
            left_in[left - length].append(number)
            lefts |= 1 << (left - length)
    return renumbered(sequence, count), place


def renumbered(sequence: Ints, count: int) -> Ints:
    """By first piece, so that the first N sequences are of the first documents, not of the longest."""
    first_piece = np.full(count, len(sequence), np.int64)
    np.minimum.at(first_piece, sequence, np.arange(len(sequence)))
    number = np.empty(count, np.int64)
    number[np.argsort(first_piece)] = np.arange(count)
    return number[sequence]


def windows(starts: Ints, documents: Ints, sequence_length: int) -> Samples:
    """The documents as one row, cut into windows of `sequence_length` + 1 tokens; the last is the next one's first."""
    sizes = starts[documents + 1] - starts[documents]
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    begin = np.arange(max(0, (total - 1) // sequence_length)) * sequence_length
    end = begin + sequence_length + 1
    first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
    counts = last - first + 1
    index = ranges(first, counts)
    row_start = np.maximum(ends[index] - sizes[index], np.repeat(begin, counts))
    length = np.minimum(ends[index], np.repeat(end, counts)) - row_start
    start = starts[documents[index]] + row_start - (ends[index] - sizes[index])
    kept = length > 0  # documents without a token
    sample = np.repeat(np.arange(len(begin)), counts)[kept]
    spans = np.stack([start, length, documents[index]], axis=1)[kept]
    return Samples(spans, boundaries(np.bincount(sample, minlength=len(begin))))


def single_documents(starts: Ints, documents: Ints, sequence_length: int) -> Samples:
    """A document a sample, of a longer one the beginning."""
    sizes = np.minimum(sequence_length, starts[documents + 1] - starts[documents])
    return Samples(np.stack([starts[documents], sizes, documents], axis=1), np.arange(len(documents) + 1))


def boundaries(counts: Ints) -> Ints:
    """0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
