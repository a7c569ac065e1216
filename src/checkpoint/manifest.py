"""manifest.json: what a checkpoint holds, and how to see that it is all there."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from src.checkpoint.failures import CheckpointDamaged

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
#: Counted up when a reader of today could no longer read what is written.
FORMAT = 1
DIGEST_BYTES = 16


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor, however many files its parts lie in. dtype: torch's name, "float32"."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileInfo:
    """bytes: its size. digest: blake2b of its content, in hex."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """run: whose checkpoint it is. state: the caller's plain values, as `plain` allows them."""

    run: str
    step: int
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]
    state: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({"digest": _digest(body), **body}, allow_nan=False)

    @classmethod
    def of_text(cls, text: str) -> "Manifest":
        """Raises ValueError, TypeError or KeyError for a text that `to_text` can not have written."""
        body = json.loads(text)
        digest = body.pop("digest")
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, and this version reads {FORMAT}")
        if digest != _digest(body):
            raise ValueError("it has changed since it was written: its digest differs")
        del body["format"]
        body["tensors"] = {
            name: TensorInfo(tuple(info["shape"]), info["dtype"]) for name, info in body["tensors"].items()
        }
        body["files"] = {name: FileInfo(**info) for name, info in body["files"].items()}
        # A name with a folder in it would have us read elsewhere.
        if strange := [name for name in body["files"] if Path(name).name != name or not name.endswith(SUFFIX)]:
            raise ValueError(f"{strange[0]!r} is no name of a file of tensors")
        return cls(**body)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises CheckpointDamaged, with the reason, where there is no sound one."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise CheckpointDamaged(f"{checkpoint} is no checkpoint of shardlab: it has no {MANIFEST}.")
    try:
        return Manifest.of_text(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, AttributeError, RecursionError, OSError, ValueError) as error:
        words = error if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointDamaged(f"{path} can't be read: {words}.") from error


def plain(value: Any, name: str = "state") -> Any:
    """`value` if JSON can give it back: None, bool, int, finite float, str, lists and dicts of them with str keys.

    A tuple comes back as a list. name: where `value` stands, for the error.
    Raises ValueError for anything else; for NaN and infinity too, which JSON does not have and other readers refuse.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} is not finite, and JSON has no word for it. Use None.")
        return value
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} has the key {strange[0]!r}, which JSON would make a text. Use str keys.")
        return {key: plain(item, f"{name}.{key}") for key, item in value.items()}
    raise ValueError(
        f"{name} is a {type(value).__name__}; a checkpoint's state holds plain values. Give it as a tensor."
    )


def file_digest(path: Path) -> str:
    """blake2b of a file's content, in hex. Reads a few hundred KiB at a time and lets other threads run meanwhile."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()  # type: ignore[arg-type, return-value]


def _digest(body: dict[str, Any]) -> str:
    """Of the values, not of the text: so the order of keys and the white space do not matter."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
