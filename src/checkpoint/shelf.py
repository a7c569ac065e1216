"""A run's folder of checkpoints as its writer sees it: begin beside, publish by rename, prune. One rank does it all."""

import logging
import os
import re
import shutil
from pathlib import Path

from src.checkpoint.failures import CheckpointDamaged
from src.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from src.checkpoint.whole import BEST, LAST, checkpoints, pointed, step_name, step_of

log = logging.getLogger(__name__)


class Shelf:
    """The checkpoints of the run `run` in `folder`.

    run: letters, digits, dots, dashes, underscores. It stands in each manifest and in the names of hidden folders, so
    that nothing is ever removed that another run, or a person, put there.
    keep: how many checkpoints stay, counted from the newest step; None: all.
    """

    def __init__(self, folder: Path, run: str, keep: int | None) -> None:
        if not re.fullmatch(r"[\w.-]+", run, re.ASCII):
            raise ValueError(f"run={run!r} would not do in a file's name; use letters, digits, dots and dashes.")
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} would remove the checkpoint just written; use 1 or more, or None for all.")
        self.folder, self.run, self.keep = folder, run, keep
        self.hidden = re.compile(rf"\.{re.escape(run)}\.((saving|removing)\.step_\d+|{LAST}|{BEST})")

    def saving(self, step: int) -> Path:
        """Where the checkpoint of `step` lies until it is whole."""
        return self.folder / f".{self.run}.saving.{step_name(step)}"

    def begin(self, step: int) -> None:
        """Make the empty folder `saving(step)`."""
        self.remove_leftovers()
        self.saving(step).mkdir(parents=True)

    def publish(self, manifest: Manifest, best: bool) -> None:
        """Give what lies in `saving(step)` its name, point to it, and remove the checkpoints beyond `keep`.

        All that takes room on the disk comes before the first rename.
        """
        saving, final = self.saving(manifest.step), self.folder / step_name(manifest.step)
        _write(saving / MANIFEST, manifest.to_text())
        _sync_folder(saving)
        pointers = [LAST, BEST] if best else [LAST]
        for pointer in pointers:
            _write(self.folder / f".{self.run}.{pointer}", final.name + "\n")
        before = self._clear(final) if final.exists() else None
        saving.rename(final)
        _sync_folder(self.folder)
        for pointer in pointers:
            (self.folder / f".{self.run}.{pointer}").replace(self.folder / pointer)
        _sync_folder(self.folder)
        if before is not None:
            shutil.rmtree(before)
        self._prune(manifest.step)

    def remove_leftovers(self) -> None:
        """Remove what a killed save of this run, and of no other, left half done."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if self.hidden.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _clear(self, final: Path) -> Path | None:
        """Make room where a checkpoint of an earlier attempt at this step lies. Returns what is to be removed later."""
        if self._is_ours(final):
            return self._hide(final)
        aside = next(path for n in range(1, 1000) if not (path := final.with_name(f"{final.name}.aside-{n}")).exists())
        log.warning("%s is no checkpoint of this run, or a damaged one; it is now called %s.", final, aside.name)
        final.rename(aside)
        return None

    def _prune(self, newest: int) -> None:
        """Remove this run's checkpoints beyond `keep`, the best one excepted.

        newest: the step just published. Later ones, from before a resume at an earlier step, do not count and stay:
        they may be damaged, and the one just written must never give way to them.
        """
        if self.keep is None:
            return
        ours = [
            path for path in checkpoints(self.folder) if self._is_ours(path) and (step_of(path.name) or 0) <= newest
        ]
        best = pointed(self.folder, BEST)
        for path in ours[self.keep :]:
            if path != best:
                # Renamed first: what is half removed when the process dies is no checkpoint to anybody.
                shutil.rmtree(self._hide(path))

    def _hide(self, checkpoint: Path) -> Path:
        hidden = self.folder / f".{self.run}.removing.{checkpoint.name}"
        checkpoint.rename(hidden)
        return hidden

    def _is_ours(self, checkpoint: Path) -> bool:
        try:
            return read_manifest(checkpoint).run == self.run
        except CheckpointDamaged:  # whose it is can't be seen, so it is not ours to remove
            return False


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    """The names in a folder reach the disk only when the folder itself is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
