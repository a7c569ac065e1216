"""What a person sees: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Progress:
    """On a terminal a bar with loss, rate and time left; elsewhere one line of log a logged step, thinned out."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.total_steps = 0
        self.last_line = 0.0

    def begin(self, total_steps: int) -> None:
        self.total_steps = total_steps
        if sys.stdout.isatty():
            from rich import progress  # 0.1 s to import

            self.bar = progress.Progress(
                progress.TextColumn("epoch {task.fields[epoch]}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("loss {task.fields[loss]}  {task.fields[rate]} samples/s"),
                progress.TimeRemainingColumn(),
            )
            self.bar.start()
            self.task = self.bar.add_task("train", total=total_steps, epoch=1, loss="-", rate="-")

    def step(self, record: dict[str, Any]) -> None:
        if self.bar is not None:
            self.bar.update(
                self.task,
                completed=record["step"],
                epoch=record["epoch"] + 1,
                loss=f"{record['loss']:.4f}",
                rate=f"{record['samples_per_second']:.0f}",
            )
            return
        now = time.perf_counter()
        is_end = record["step"] in (1, self.total_steps)
        if is_end or now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = (self.total_steps - record["step"]) * record["step_seconds"]
            log.info(
                "step %d/%d  loss %.4f  grad norm %.3f  %.0f samples/s  %s left",
                record["step"],
                self.total_steps,
                record["loss"],
                record["grad_norm"],
                record["samples_per_second"],
                duration(left),
            )

    def evaluated(self, record: dict[str, Any]) -> None:
        log.info("step %d  test %s", record["step"], evaluation_words(record))

    def epoch_ended(self, record: dict[str, Any]) -> None:
        log.info("epoch %d done  mean train loss %.4f", record["epoch"] + 1, record["loss"])

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


SECONDS_BETWEEN_LINES = 2.0


def evaluation_words(record: dict[str, Any]) -> str:
    words = f"loss {record['loss']:.4f}"
    if "accuracy" in record:
        words += f"  accuracy {record['accuracy']:.4f}"
    if "perplexity" in record:
        words += f"  perplexity {record['perplexity']:.2f}"
    return f"{words}  ({record['samples']} samples)"


def duration(seconds: float) -> str:
    """h:mm:ss, or seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def final_table(summary: dict[str, Any], run_dir: Path, commands: list[str]) -> None:
    """What was trained, how well, how fast, and how to look at it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    peak = max(summary["peak_memory_bytes"] or [0])
    rows = {
        "run folder": str(run_dir),
        "model": f"{summary['parameters']:,} parameters on {summary['world_size']} rank(s)",
        "trained": f"{summary['steps']} steps, {summary['samples']:,} samples, {duration(summary['seconds'])}",
        "train loss": f"{summary['train_loss']:.4f} (mean of the last epoch)",
        "test": evaluation_words(summary["eval"]) if summary["eval"] else "not evaluated",
        "speed": f"{summary['samples_per_second']:.0f} samples/s",
        "peak memory": f"{peak / 2**30:.2f} GiB on the fullest rank",
        "weights": str(run_dir / "model.safetensors"),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for index, command in enumerate(commands):
        table.add_row("look at it" if index == 0 else "", command)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    console.print(table)
