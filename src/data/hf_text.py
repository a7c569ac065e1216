"""data=hf_text: documents from files or the hub, tokenised once and packed into sequences."""

import errno
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from src.batch import MicroBatch
from src.data import packing as arithmetic
from src.data.base import Data, Source
from src.data.documents import Keys, TextUnit, count_documents, find_files, hub_documents, read_files
from src.data.packed import DocumentsSource, RowWindowsSource
from src.data.packing import Samples
from src.data.tokenized import Documents, Tokens, tokenize, tokenize_apart
from src.data.tokenizer import fingerprint, load_tokenizer
from src.data.tokens import example_tokens
from src.errors import Refused, in_words
from src.once import make_once

log = logging.getLogger(__name__)

FORM = 1  # of what is kept on disk; another number makes it anew
Packing = Literal["documents", "windows", "none"]
PACKERS = {
    "documents": arithmetic.documents_packed,
    "windows": arithmetic.windows,
    "none": arithmetic.single_documents,
}


class HFText(Data):
    """Text for language models. The keys are those of conf/data/hf_text.yaml, which says what each is for.

    vocab_size: for models that interpolate it. num_workers: not needed, a micro-batch is gathered from mapped files.
    """

    kind = "tokens"

    def __init__(
        self,
        tokenizer: str | None,
        sequence_length: int,
        files: list[str] | str | None = None,
        name: str | None = None,
        subset: str | None = None,
        split: str = "train",
        text_key: str = "text",
        prompt_key: str | None = None,
        response_key: str | None = None,
        text_unit: TextUnit = "file",
        packing: Packing = "documents",
        test_share: float = 0.01,
        split_seed: int = 0,
        vocab_size: int | None = None,
        root: str = "data/hf_text",
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.tokenizer, self.sequence_length = tokenizer, sequence_length
        self.files = [files] if isinstance(files, str) else files
        self.name, self.subset, self.split = name, subset, split
        self.keys = Keys(text_key, prompt_key, response_key, text_unit)
        self.packing, self.test_share, self.split_seed = packing, test_share, split_seed
        self.root, self.limit = Path(root), limit
        found = self.problems()
        if found:
            raise Refused(*found)

    def problems(self) -> list[str]:
        """What is wrong with the keys by themselves."""
        found = []
        if self.files and self.name is not None:
            found.append("data=hf_text reads either data.files or data.name. Give one of the two.")
        if self.name is not None and Path(self.name).expanduser().exists():  # whose content the name does not tell
            found.append(
                f"data.name={self.name} is here on the disk. Give data.files=[<its files>], whose changes are seen."
            )
        if self.sequence_length < 2:
            found.append(f"data.sequence_length={self.sequence_length} predicts nothing; choose 2 or more.")
        if not 0 < self.test_share < 1:
            found.append(f"data.test_share={self.test_share} is no share; choose between 0 and 1, such as 0.01.")
        if (self.keys.prompt is None) != (self.keys.response is None):
            found.append("data.prompt_key and data.response_key belong together. Give both, or neither.")
        if self.keys.prompt is not None and any(str(file).endswith(".txt") for file in self.files or []):
            found.append("data.prompt_key: a .txt file has no keys. Use JSON lines, or data.prompt_key=null.")
        return found

    @classmethod
    def gives_positions(cls, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("packing", "documents") == "documents")

    def prepare(self) -> None:
        if not self.files and self.name is None:  # which a plan needs not
            raise Refused("data=hf_text has nothing to read. Give data.files=[<paths>] or data.name=<hub data set>.")
        self.fetch(tokenize_apart)

    def example(self, micro_batch_size: int) -> MicroBatch:
        inputs, targets = example_tokens(micro_batch_size, self.sequence_length)
        if self.packing == "documents":
            inputs = torch.zeros(micro_batch_size, 2, self.sequence_length, dtype=torch.int64)
        return MicroBatch(inputs, targets)

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        # A machine of its own disk makes it here: a rank, of which nothing is forked any more, needs no other process.
        folder = self.remembered() or self.fetch(tokenize)
        tokens = Tokens.open(folder.parent)
        train, test = Samples.open(folder, "train").first(self.limit), Samples.open(folder, "test")
        if data_rank == 0:
            self.announce(tokens, train, test)
        return self.source(tokens, train, device), self.source(tokens, test, device)

    def source(self, tokens: Tokens, samples: Samples, device: torch.device) -> Source:
        if self.packing == "windows":
            return RowWindowsSource(tokens, samples, self.sequence_length, device)
        return DocumentsSource(tokens, samples, self.sequence_length, device, self.packing == "documents")

    def announce(self, tokens: Tokens, train: Samples, test: Samples) -> None:
        slots = len(train) * self.sequence_length
        used = int(train.spans[: train.firsts[-1], 1].sum()) - (len(train) if self.packing == "windows" else 0)
        log.info(
            "text: %d documents of %d tokens; %d sequences of %d to train on, %.1f %% padding, and %d to test",
            len(tokens.prompts), len(tokens.tokens), len(train), self.sequence_length,
            100 - 100 * used / max(slots, 1), len(test),
        )  # fmt: skip
        if self.packing == "none" and (lost := len(tokens.tokens) - used - int(test.spans[:, 1].sum())) > 0:
            log.warning("data.packing=none: %d tokens beyond data.sequence_length or data.limit are left out", lost)

    def fetch(self, tokenize: Callable[[Path, Documents, Any], None]) -> Path:
        """The folder of the samples, in that of the tokens; what is not there is made. Raises Refused."""
        try:
            return self.fetch_into_root(tokenize)
        except OSError as error:
            raise Refused(f"data.root={self.root} can't be used: {in_words(error)}. Choose another.") from error

    def fetch_into_root(self, tokenize: Callable[[Path, Documents, Any], None]) -> Path:
        tokenizer = load_tokenizer(self.tokenizer)
        found = None if self.files is None else find_files(self.files)
        tokens = self.root / digest(FORM, self.content(found), fingerprint(tokenizer), self.how_read())
        if not tokens.is_dir():
            documents = self.documents(found)
            print(f"tokenising {self.name or f'{len(found or [])} file(s)'} into {tokens}", file=sys.stderr)
            make_once(tokens, lambda folder: tokenize(folder, documents, tokenizer))
        samples = tokens / digest(self.packing, self.sequence_length, self.test_share, self.split_seed)
        make_once(samples, partial(self.pack, tokens))
        self.remember(samples)
        return samples

    def content(self, files: list[Path] | None) -> Any:
        """What identifies the documents: the files' bytes, or the name on the hub."""
        if files is None:
            return [self.name, self.subset, self.split]
        contents = []
        for path in files:
            with path.open("rb") as file:
                contents.append([path.suffix, hashlib.file_digest(file, "blake2b").hexdigest()])
        return contents

    def how_read(self) -> list[str]:
        """The keys on which the tokens depend."""
        return [*self.keys.wanted, self.keys.text_unit]

    def documents(self, files: list[Path] | None) -> Documents:
        """Reads them all when called; files are read through once, so that nothing broken is begun with."""
        if files is None:
            assert self.name is not None
            return partial(hub_documents, self.name, self.subset, self.split, self.keys)
        count = count_documents(files, self.keys)
        self.require_two(count)
        return partial(read_files, files, self.keys)

    def require_two(self, count: int) -> None:
        if count < 2:
            where = f"data.name={self.name}" if self.files is None else f"data.files={self.files}"
            raise Refused(
                f"{where} holds {count} document(s) with text; one to train on and one to test make 2. Give more, or"
                " cut .txt files into documents by data.text_unit=paragraph or line."
            )

    def pack(self, tokens_folder: Path, folder: Path) -> None:
        """Split the documents and put the samples of both parts into `folder`. Raises Refused."""
        tokens = Tokens.open(tokens_folder)
        self.require_two(len(tokens.prompts))
        parts = arithmetic.split(len(tokens.prompts), self.test_share, self.split_seed)
        for name, documents in zip(("train", "test"), parts, strict=True):
            samples = PACKERS[self.packing](np.asarray(tokens.starts), documents, self.sequence_length)
            if not any_target(self.source(tokens, samples, torch.device("cpu"))):
                what = "a training sequence" if name == "train" else "a test sequence"
                raise Refused(
                    f"data.packing={self.packing}: {len(documents)} {name} document(s) give not {what} of"
                    f" data.sequence_length={self.sequence_length} with a token to learn. Give more text, a shorter"
                    " data.sequence_length, or another data.test_share."
                )
            samples.save(folder, name)

    def note(self) -> Path:
        """Where `remember` notes the samples' folder: for these keys, and files of this size and time."""
        signs: list[Any] = [self.name, self.subset, self.split]
        paths = [] if self.files is None else find_files(self.files)
        folder = Path(self.tokenizer or "").expanduser()
        paths += sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
        for path in paths:
            stat = path.stat()
            signs.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino])
        keys = [self.packing, self.sequence_length, self.test_share, self.split_seed, self.tokenizer]
        return self.root / "notes" / digest(FORM, signs, keys, self.how_read())

    def remember(self, samples: Path) -> None:
        """Tell the ranks, so that none of them reads the files again to know what they hold."""
        if self.remembered() == samples:
            return
        note = self.note()
        try:
            note.parent.mkdir(exist_ok=True)
            with TemporaryDirectory(prefix=".partial-", dir=note.parent) as partial:
                written = Path(partial) / note.name
                written.write_text(str(samples.relative_to(self.root)))
                written.replace(note)
        except OSError as error:
            # A root that can only be read serves as well, when all in it is there: ranks then look for themselves.
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise

    def remembered(self) -> Path | None:
        """The samples' folder as `prepare` left it; None where it did not come by here, or the files have changed."""
        note = self.note()
        folder = self.root / note.read_text() if note.is_file() else None
        return folder if folder is not None and folder.is_dir() else None


def any_target(source: Any) -> bool:
    """Whether some sample has a token to learn."""
    steps = range(0, source.num_samples, 64)
    return any((source.gather(np.arange(i, min(i + 64, source.num_samples)))[1] >= 0).any() for i in steps)


def digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
