"""data=text: the bytes of text files, read as one row of tokens; no tokenizer, no download."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from src.batch import MicroBatch
from src.data.base import Data, Source
from src.data.tokens import WindowSource, example_tokens
from src.errors import Refused

TEST_SHARE = 0.01  # of the windows, the last ones
#: Folders that hold no prose or code of the library's own.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Text(Data):
    """Windows of `sequence_length` bytes; the last hundredth of them, at least one, are the test set.

    root: a folder, searched to its depths, or one file; None: the Python standard library's own sources.
    suffixes: of the files that count. limit: first N training windows. num_workers: not needed, all is in memory.
    """

    kind = "tokens"

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        suffixes: list[str],
        root: str | None = None,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        if vocab_size != 256:
            raise ValueError(
                f"data.vocab_size={vocab_size}, but data=text reads bytes, which are 256. Leave it at 256."
            )
        if sequence_length < 1:
            raise ValueError(f"data.sequence_length={sequence_length} is no window; choose 1 or more.")
        self.root = Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])
        self.sequence_length = sequence_length
        self.suffixes = tuple(suffixes)
        self.limit = limit

    def files(self) -> list[Path]:
        """What is read, in an order that is the same on every machine."""
        if self.root.is_file():
            return [self.root]
        found = [path for path in self.root.rglob("*") if path.suffix in self.suffixes and path.is_file()]
        inside = [path for path in found if not SKIPPED & set(path.relative_to(self.root).parts)]
        return sorted(inside, key=lambda path: path.relative_to(self.root).as_posix())

    def prepare(self) -> None:
        if not self.root.exists():
            raise Refused(
                f"data.root={self.root} does not exist. Name a folder or a file of text, or use data.root=null."
            )
        files = self.files()
        if not files:
            raise Refused(
                f"data.root={self.root} holds no file that ends in {' or '.join(self.suffixes)}."
                " Name another folder, or set data.suffixes."
            )
        num_bytes = sum(path.stat().st_size for path in files)
        if num_bytes <= 2 * self.sequence_length:
            raise Refused(
                f"data.root={self.root} holds {num_bytes} bytes; a training and a test window of"
                f" data.sequence_length={self.sequence_length} need {2 * self.sequence_length + 1}."
                " Use a shorter data.sequence_length, or more text."
            )

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_tokens(micro_batch_size, self.sequence_length)

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        text = bytearray().join(path.read_bytes() for path in self.files())
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8))
        num_windows = (len(tokens) - 1) // self.sequence_length
        num_train = num_windows - max(1, int(num_windows * TEST_SHARE))
        end = num_train * self.sequence_length
        num_kept = num_train if self.limit is None else min(num_train, self.limit)
        train = tokens[: num_kept * self.sequence_length + 1]
        return (
            WindowSource(train, self.sequence_length, device),
            WindowSource(tokens[end:], self.sequence_length, device),
        )
