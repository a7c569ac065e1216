"""Where a rank's words go: rank 0's to the terminal and train.log, every rank's to its own rank_<r>.log."""

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from src.world import World

LINE = logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
LINE_WITH_LEVEL = logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s")

#: `extra=ONLY_IN_RANK_LOG` keeps a line off the terminal and out of train.log: a victim's error would hide the cause.
ONLY_IN_RANK_LOG = {"only_in_rank_log": True}


def rank_log(run_dir: Path, world_rank: int) -> Path:
    return run_dir / f"rank_{world_rank}.log"


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to the stdout of the moment, so that a progress bar can take the lines above itself."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Whoever read the terminal is gone (`| head`); the files have every line, and the training goes on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "shown_by_bar", False):
            return
        self.setStream(sys.stdout)
        super().emit(record)


def _for_people(record: logging.LogRecord) -> bool:
    """Our own lines, and what a library warns of."""
    is_ours = record.name.startswith("src.") or record.levelno >= logging.WARNING
    return is_ours and not getattr(record, "only_in_rank_log", False)


def add_to_train_log(run_dir: Path, line: str) -> None:
    """How the run ended, said by who knows: rank 0's process may be gone, or have lost its peers to another's fault."""
    with (run_dir / "train.log").open("a", encoding="utf-8") as stream:
        stream.write(f"[{time.strftime(LINE.datefmt or '')}] {line}\n")


@contextmanager
def rank_logs(run_dir: Path, world: World) -> Iterator[None]:
    """Route this rank's logging, and what libraries print in other ranks than 0, into the run's folder."""
    root = logging.getLogger()
    own = logging.FileHandler(rank_log(run_dir, world.world_rank), encoding="utf-8")
    own.setFormatter(LINE_WITH_LEVEL)
    assert own.stream is not None
    handlers: list[logging.Handler] = [own]
    if world.is_main:
        handlers += [logging.FileHandler(run_dir / "train.log", encoding="utf-8"), TerminalHandler()]
        for handler in handlers[1:]:
            handler.setFormatter(LINE)
            handler.addFilter(_for_people)
    previous = root.handlers[:], root.level
    root.handlers, root.level = handlers, logging.INFO
    logging.captureWarnings(True)
    saved = None if world.is_main else _redirect_output(own.stream.fileno())
    # A crash in C++ leaves Python's stack in the rank's log, where the last line of the terminal sends its reader.
    faulthandler.enable(own.stream)
    try:
        yield
    finally:
        faulthandler.disable()
        logging.captureWarnings(False)
        root.handlers, root.level = previous
        if saved is not None:
            _restore_output(saved)
        for handler in handlers:
            handler.close()


def _redirect_output(target: int) -> tuple[int, int]:
    """Point file descriptors 1 and 2 at `target`; what C++ libraries print goes the same way. Returns the old ones."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # what a rank printed before it was killed is in its log
    saved = os.dup(1), os.dup(2)
    os.dup2(target, 1)
    os.dup2(target, 2)
    return saved


def _restore_output(saved: tuple[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, old in zip((1, 2), saved, strict=True):
        os.dup2(old, descriptor)
        os.close(old)
