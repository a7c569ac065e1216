"""Folders that are made once, whole or not at all, however many processes ask for them."""

import errno
import glob
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock


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
            with unfinished(folder.parent, folder.name) as partial:
                filled = partial / "filled"
                filled.mkdir()  # of its own, since a temporary folder is private to its user
                make(filled)
                publish(filled, folder)
    except BaseException:
        if made:
            lock.unlink(missing_ok=True)
        leave_no_trace(made)
        raise


@contextmanager
def unfinished(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder in `parent` for what is to be `name`, gone after the block. For who holds the lock of `name`.

    What a killed process of this machine left is swept up. Another machine that shares the disk may be at work, since
    locks of shared disks can't be relied on: its folder stays.
    """
    prefix = f".partial-{name}+{platform.node()}+"  # no host name has a plus
    for stale in parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(stale)
    with TemporaryDirectory(prefix=prefix, dir=parent) as partial:
        yield Path(partial)


def publish(filled: Path, folder: Path) -> None:
    """Rename, unless another machine that shares the disk was first: what it made is the same."""
    try:
        filled.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def leave_no_trace(made: list[Path]) -> None:
    """Remove the folders that were made for what failed, deepest first, unless something is in them."""
    with suppress(OSError):  # not empty: another process is at work there
        for folder in made:
            folder.rmdir()
