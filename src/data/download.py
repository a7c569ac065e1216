"""Fetching files once, however many processes ask, and all or nothing."""

import http.client
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from src.errors import Refused
from src.once import leave_no_trace, unfinished

LOCK = ".download.lock"


def download_once(
    root: Path, is_complete: Callable[[], bool], download: Callable[[Path], None], name: str, by_hand: str
) -> None:
    """Make `root` complete, at most one process of this machine downloading while the others wait.

    download: fills an empty folder; its files are moved to the same places below `root` when all are there, so
    a process that is killed in between leaves no half-written file.
    by_hand: which files to place where; ends the refusal where the download fails. Raises Refused.
    """
    if is_complete():
        return
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / LOCK):
            if is_complete():
                return  # another process was first
            print(f"downloading {name} into {root}", file=sys.stderr)
            with unfinished(root, root.name) as partial:
                download(partial)
                publish(partial, root)
    # RuntimeError: torchvision's, when every mirror failed. URLError is an OSError.
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        if root in made:
            (root / LOCK).unlink(missing_ok=True)
        leave_no_trace(made)
        reason = (str(error).splitlines() or [type(error).__name__])[-1]
        raise Refused(f"data={name} is not in {root} and can't be downloaded ({reason}). {by_hand}") from error
    if not is_complete():
        raise Refused(f"data={name} is not whole after its download into {root}. {by_hand}")


def publish(partial: Path, root: Path) -> None:
    """Move every file below `partial` to its place below `root`, one rename each."""
    for file in sorted(path for path in partial.rglob("*") if path.is_file()):
        target = root / file.relative_to(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
