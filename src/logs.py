"""Where a rank's words go: rank 0's to the terminal and train.log, every rank's to its own rank_<r>.log."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from src.world import World

LINE = logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
LINE_WITH_LEVEL = logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s")


def rank_log(run_dir: Path, world_rank: int) -> Path:
    return run_dir / f"rank_{world_rank}.log"


class TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the stdout of the moment, so that a progress bar can take the lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stdout)
        super().emit(record)


@contextmanager
def rank_logs(run_dir: Path, world: World) -> Iterator[None]:
    """Route this rank's logging, and what libraries print in other ranks than 0, into the run's folder."""
    root = logging.getLogger()
    own = logging.FileHandler(rank_log(run_dir, world.world_rank))
    own.setFormatter(LINE_WITH_LEVEL)
    handlers: list[logging.Handler] = [own]
    if world.is_main:
        shared = logging.FileHandler(run_dir / "train.log")
        shared.setFormatter(LINE)
        terminal = TerminalHandler()
        terminal.setFormatter(LINE)
        handlers += [shared, terminal]
        for handler in handlers[1:]:
            handler.addFilter(lambda record: record.name.startswith("src.") or record.levelno >= logging.WARNING)
    previous = root.handlers[:], root.level
    root.handlers, root.level = handlers, logging.INFO
    logging.captureWarnings(True)
    saved = None if world.is_main else _redirect_output(own.stream.fileno())
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers, root.level = previous
        for handler in handlers:
            handler.close()
        if saved is not None:
            _restore_output(saved)


def _redirect_output(target: int) -> tuple[int, int]:
    """Point file descriptors 1 and 2 at `target`; what C++ libraries print goes the same way. Returns the old ones."""
    sys.stdout.flush()
    sys.stderr.flush()
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
