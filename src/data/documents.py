"""The documents of data=hf_text: records of JSON lines, text files or parquet, or of a data set of the hub.

JSON and text are read here and not by `datasets`, which names no line of a broken file and refuses columns of mixed
types that nobody asked for; parquet and the hub are its business.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal, NamedTuple

from src.errors import Refused, in_words

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
TextUnit = Literal["file", "paragraph", "line"]


class Document(NamedTuple):
    """text: what is learnt. prompt: what stands before it and is not; None: nothing does."""

    prompt: str | None
    text: str


@dataclass(frozen=True)
class Keys:
    """Where a record's text is: `text`, or `prompt` and `response` (both or none). text_unit: of .txt files."""

    text: str
    prompt: str | None
    response: str | None
    text_unit: TextUnit

    @property
    def wanted(self) -> list[str]:
        return [self.text] if self.prompt is None or self.response is None else [self.prompt, self.response]

    def document(self, record: Any, where: str) -> Document | None:
        """A record's; None where there is nothing to learn. Raises Refused, naming `where`."""
        texts = [field(record, key, where) for key in self.wanted]
        if not texts[-1]:
            return None
        return Document(None, texts[0]) if len(texts) == 1 else Document(texts[0], texts[1])


def field(record: Any, key: str, where: str) -> str:
    """The text under `key`. Raises Refused."""
    if not isinstance(record, dict):
        raise Refused(f"{where} is a {type(record).__name__}, not an object with keys. Write one object a record.")
    if key not in record:
        raise Refused(
            f"{where} has no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}."
            " Set data.text_key, or data.prompt_key and data.response_key."
        )
    text = record[key]
    if not isinstance(text, str):
        raise Refused(f"{where}: {key!r} is a {type(text).__name__}, not a text. Correct it, or choose another key.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half a surrogate pair
        raise Refused(f"{where}: {key!r} holds half a character ({error.reason}). Correct it.") from error
    return text


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in their order and each once, a glob's sorted. Raises Refused."""
    found: list[Path] = []
    for pattern in patterns:
        path = str(Path(pattern).expanduser())
        matches = sorted(glob(path, recursive=True)) if has_magic(path) and not Path(path).exists() else [path]
        paths = [Path(match) for match in matches if Path(match).is_file()]
        if not paths:
            what = "is a folder" if Path(path).is_dir() else "names no file"
            raise Refused(
                f"data.files: {pattern} {what}. Give paths or globs of files, such as data.files=[texts/*.jsonl]."
            )
        found += paths
    for file in found:
        if file.suffix not in SUFFIXES:
            raise Refused(f"data.files: {file} ends in none of {', '.join(SUFFIXES)}. Rename or convert it.")
        if not file.stat().st_size:
            raise Refused(f"data.files: {file} is empty. Leave it out, or fill it.")
    return list(dict.fromkeys(found))


def read_files(files: Sequence[Path], keys: Keys) -> Iterator[Document]:
    """Every document of the files, in order. Raises Refused, naming file and line."""
    for path in files:
        if path.suffix == ".parquet":
            yield from parquet_documents(path, keys)
        elif path.suffix == ".txt":
            yield from text_documents(path, keys)
        else:
            for record, where in json_records(path):
                document = keys.document(record, where)
                if document is not None:
                    yield document


def count_documents(files: Sequence[Path], keys: Keys) -> int:
    """How many there are; reads all but parquet's rows, so that what is broken is refused. Raises Refused."""
    parquet = [path for path in files if path.suffix == ".parquet"]
    count = sum(parquet_rows(path, keys) for path in parquet)
    return count + sum(1 for _ in read_files([path for path in files if path not in parquet], keys))


def decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode().removeprefix("\ufeff")  # the mark that some editors write first
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x}"
        raise Refused(f"{where} is not UTF-8 ({byte} at {error.start}). Convert it: iconv -t UTF-8.") from error


def json_records(path: Path) -> Iterator[tuple[Any, str]]:
    """Each record of JSON lines, or of one array, with the words for where it stands."""
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(256).lstrip()[:1] == b"[":
            for number, record in enumerate(parse(path.read_bytes(), str(path)), start=1):
                yield record, f"{path}, record {number}"
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield parse(line, where), where


def parse(raw: bytes, where: str) -> Any:
    text = decode(raw, where)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise Refused(
            f"{where} is no JSON: {error}. Correct it: one object a line (.jsonl), or one array (.json)."
        ) from error


def text_documents(path: Path, keys: Keys) -> Iterator[Document]:
    """A text file's documents: the whole, its paragraphs or its lines."""
    raw = path.read_bytes()
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        line_start = raw.rfind(b"\n", 0, error.start) + 1
        line = raw.count(b"\n", 0, line_start) + 1
        decode(raw[line_start:], f"{path}, line {line},")
    text = decode(raw, str(path))
    if keys.text_unit == "file":
        parts = [text]
    else:
        parts = re.split(r"\n\s*\n" if keys.text_unit == "paragraph" else r"\r?\n", text)
    yield from (Document(None, part) for part in parts if part.strip())


def parquet_rows(path: Path, keys: Keys) -> int:
    """Raises Refused where it is no parquet, or lacks a column."""
    from pyarrow import ArrowInvalid, parquet

    try:
        metadata = parquet.read_metadata(path)
    except (ArrowInvalid, OSError) as error:
        raise Refused(f"{path} can't be read as parquet: {in_words(error)}. Replace it.") from error
    require_columns(metadata.schema.to_arrow_schema().names, keys, str(path))
    return int(metadata.num_rows)


def parquet_documents(path: Path, keys: Keys) -> Iterator[Document]:
    from datasets import load_dataset  # it imports pandas

    # Streaming, since a copy of the file in its own cache would serve nobody.
    rows = load_dataset("parquet", data_files=[str(path)], split="train", streaming=True, columns=keys.wanted)
    yield from row_documents(rows, keys, str(path))


def hub_documents(name: str, subset: str | None, split: str, keys: Keys) -> Iterator[Document]:
    """Every document of a data set of the hub, downloaded by `datasets` into its own cache. Raises Refused."""
    from datasets import load_dataset

    try:
        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # whatever datasets and the hub raise: no network, no such name, no rights, no split
        raise Refused(
            f"data.name={name} (data.subset={subset}, data.split={split}) can't be loaded: {in_words(error)}."
            " Correct the name, or give data.files."
        ) from error
    require_columns(rows.column_names, keys, f"data.name={name}")
    yield from row_documents(rows.select_columns(keys.wanted), keys, f"data.name={name}")


def row_documents(rows: Any, keys: Keys, where: str) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        document = keys.document(row, f"{where}, row {number}")
        if document is not None:
            yield document


def require_columns(names: Sequence[str], keys: Keys, where: str) -> None:
    for key in keys.wanted:
        if key not in names:
            field(dict.fromkeys(names), key, where)
