"""The idx format of MNIST's files, read with numpy: importing torchvision for it would take seconds.

Two zero bytes, the type (8: uint8), the number of dims, each dim as a big-endian 32-bit integer, then the values.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from src.errors import Refused

REPLACE = "Replace it, or remove it to have it downloaded anew."


def check_idx(path: Path, dims: int) -> tuple[int, ...]:
    """The shape that the header gives. Raises Refused where it does not fit the size, or is none.

    Reads the two ends of the file only: a gzip file's last four bytes are its unpacked size (RFC 1952).
    """
    packed = path.suffix == ".gz"
    with opened(path) as file:
        shape = read_header(path, file, dims)
    if packed:
        with path.open("rb") as raw:
            raw.seek(-4, 2)
            num_bytes = struct.unpack("<I", raw.read(4))[0]
    else:
        num_bytes = path.stat().st_size
    require_size(path, num_bytes - (4 + 4 * dims), shape)
    return shape


def read_idx(path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The array, writable. Raises Refused where the file is damaged."""
    with opened(path) as file:
        shape = read_header(path, file, dims)
        values = np.frombuffer(bytearray(file.read()), dtype=np.uint8)
    require_size(path, values.size, shape)
    return values.reshape(shape)


def read_header(path: Path, file: BinaryIO, dims: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * dims)
    magic = bytes([0, 0, 8, dims])
    if header[:4] != magic or len(header) < 4 + 4 * dims:
        raise Refused(f"{path} begins with {header[:4].hex() or 'nothing'}, not {magic.hex()}. {REPLACE}")
    return struct.unpack(f">{dims}I", header[4:])


def require_size(path: Path, num_values: int, shape: tuple[int, ...]) -> None:
    if num_values != math.prod(shape):
        raise Refused(f"{path} is not whole: it holds {num_values} values instead of {math.prod(shape)}. {REPLACE}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file; what gzip says of a damaged one, as a refusal that names it."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Refused(f"{path} is damaged ({error}). {REPLACE}") from error
