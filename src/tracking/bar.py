"""The progress bar of a terminal, with the log's lines above it."""

import io
import sys
from typing import Any, TextIO

from rich import progress
from rich.console import Console
from rich.text import Text

from src.tracking.console import Lines

#: Redrawing costs milliseconds of the interpreter that trains.
REDRAWS_PER_SECOND = 2
#: Narrower terminals get a bar without the rate and the epoch.
NARROW_COLUMNS = 80


class Bar:
    """Loss, rate and time left on one line, redrawn in place. stdout and stderr print above it until close()."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self.lines = Lines(total_steps, shown_by_bar=True)
        self.streams = sys.stdout, sys.stderr
        words = "loss {task.fields[loss]}"
        if console.width >= NARROW_COLUMNS:
            words = "epoch {task.fields[epoch]}  " + words + "  {task.fields[rate]} samples/s"
        self.bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn(words),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("left"),
            console=console,
            expand=True,
            refresh_per_second=REDRAWS_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        sys.stdout = AboveBar(console, sys.stdout)
        if sys.stderr.isatty():
            sys.stderr = AboveBar(console, sys.stderr)
        self.bar.start()
        self.task = self.bar.add_task("train", total=total_steps, epoch=1, loss="-", rate="-")

    def step(self, record: dict[str, Any]) -> None:
        self.bar.update(
            self.task,
            completed=record["step"],
            epoch=record["epoch"] + 1,
            loss=f"{record['loss']:.4f}",
            rate=f"{record['samples_per_second']:.0f}",
        )
        self.lines.step(record)

    def close(self) -> None:
        self.bar.stop()
        sys.stdout, sys.stderr = self.streams


class AboveBar(io.TextIOBase):
    """A stream whose lines rich prints above the bar. Long ones are left to the terminal to wrap, not broken."""

    def __init__(self, console: Console, stream: TextIO) -> None:
        self.console, self.stream = console, stream
        self.unfinished = ""

    def write(self, text: str) -> int:
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        for line in lines:
            self.console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding
