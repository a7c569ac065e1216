"""Folders that are made once, whole or not at all, however many processes ask for them."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from src.data.download import leave_no_trace


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """See that `folder` exists; where it does not, `make` fills an empty one beside it, which is then renamed.

    At most one process of this machine makes it while the others wait. What `make` raises leaves no trace.
    """
    if folder.is_dir():
        return
    made = [parent for parent in folder.parents if not parent.exists()]
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if folder.is_dir():
                return  # another process was first
            for stale in folder.parent.glob(f".partial-{folder.name}-*"):  # of a process that was killed
                shutil.rmtree(stale)
            with TemporaryDirectory(prefix=f".partial-{folder.name}-", dir=folder.parent) as partial:
                filled = Path(partial) / "filled"
                filled.mkdir()  # of its own, since a temporary folder is private to its user
                make(filled)
                publish(filled, folder)
    except BaseException:
        if made:
            lock.unlink(missing_ok=True)
        leave_no_trace(folder.parent, made)
        raise


def publish(filled: Path, folder: Path) -> None:
    """Rename, unless another machine that shares the disk was first: what it made is the same."""
    try:
        filled.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
