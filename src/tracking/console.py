"""What a person sees: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

import logging
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from src.memory import memory

log = logging.getLogger(__name__)


class Lines:
    """A line of log for a logged step, thinned out: every 2 s at first, once a minute in a long run.

    shown_by_bar: the terminal has a bar that says the same; the lines go to the log files.
    """

    def __init__(self, total_steps: int, shown_by_bar: bool = False) -> None:
        self.total_steps, self.shown_by_bar = total_steps, shown_by_bar
        self.started = time.perf_counter()
        self.last_line = -math.inf

    def step(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        is_end = record["step"] in (1, self.total_steps)
        if is_end or now - self.last_line >= seconds_between_lines(now - self.started):
            self.last_line = now
            left = (self.total_steps - record["step"]) * record["step_seconds"]
            words = f"step {record['step']}/{self.total_steps}  {step_words(record)}  {duration(left)} left"
            log.info(words, extra={"shown_by_bar": self.shown_by_bar})

    def close(self) -> None:
        return None


def seconds_between_lines(elapsed_seconds: float) -> float:
    return min(60.0, max(2.0, elapsed_seconds / 60))


def step_words(record: dict[str, Any]) -> str:
    words = f"loss {record['loss']:.4f}"
    if record.get("grad_norm") is not None:
        words += f"  grad norm {record['grad_norm']:.3f}"
    return f"{words}  {record['samples_per_second']:.0f} samples/s"


def evaluation_words(record: dict[str, Any]) -> str:
    words = f"loss {record['loss']:.4f}"
    if "accuracy" in record:
        words += f"  accuracy {record['accuracy']:.4f}"
    if "perplexity" in record:
        words += f"  perplexity {record['perplexity']:.2f}"
    return f"{words}  ({record['samples']:,} samples)"


def duration(seconds: float) -> str:
    """h:mm:ss, or seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def shown(path: Path) -> str:
    """As one would type it from here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def memory_words(found: dict[str, Any]) -> str:
    """The peak of a step's tensors on the fullest rank, expected and measured. found: of src/plan/forecast.py."""
    measured = max((peak for peak in found["measured_bytes"] if peak is not None), default=None)
    if measured is None:
        return "not measured: no step was taken past the warm-up of a compression"
    if found["predicted_bytes"] is None:
        return f"{memory(measured)} measured, no forecast ({found['reason']})"
    expected = f"{memory(found['predicted_bytes'])} expected ({found['method']})"
    return f"{expected}, {memory(measured)} measured: {found['error']:+.1%}"


def table_rows(summary: dict[str, Any], run_dir: Path) -> dict[str, str]:
    """What was trained, how well, how fast; only what this run has done."""
    rows = {}
    if summary["parameters"] is not None:
        ranks = summary["world_size"]
        rows["model"] = f"{summary['parameters']:,} parameters on {ranks} rank{'s' if ranks != 1 else ''}"
    if summary["steps"] is not None:
        rows["trained"] = (
            f"{summary['steps']:,} steps, {summary['samples']:,} samples in {duration(summary['seconds'])}"
        )
    if summary["train_loss"] is not None:
        rows["train loss"] = f"{summary['train_loss']:.4f} (mean of the last epoch)"
    if summary["eval"] is not None:
        rows["test"] = evaluation_words(summary["eval"])
    if summary["samples_per_second"] is not None:
        rows["speed"] = f"{summary['samples_per_second']:.0f} samples/s"
    if summary["peak_memory_bytes"]:
        rows["peak memory"] = f"{memory(max(summary['peak_memory_bytes']))} on the fullest rank"
    if summary["memory"] is not None:
        rows["step memory"] = memory_words(summary["memory"])
    rows["run folder"] = shown(run_dir)
    if (run_dir / "model.safetensors").exists():
        rows["weights"] = shown(run_dir / "model.safetensors")
    return rows


def final_table(summary: dict[str, Any], run_dir: Path, commands: list[str]) -> None:
    """Print what was trained, how well and how fast, then the commands to look at it and to go on from it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in table_rows(summary, run_dir).items():
        table.add_row(name, Text(value))  # Text: brackets in a path are no markup
    console.print(table)
    if commands:
        console.print(Text("look at it", style="bold"))
    commands = [*commands, *resume_commands(summary, run_dir)]
    for command in commands:
        # Soft-wrapped: the terminal breaks the line, and copying it gives one.
        console.print(Text(f"  {command}"), soft_wrap=True)


def resume_commands(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """How to go on with the run, where it has left a checkpoint of its own."""
    checkpoint = summary["checkpoint"]
    if checkpoint is None or not Path(checkpoint).is_relative_to(run_dir):
        return []
    return [f"python train.py checkpoint.resume={shlex.quote(shown(run_dir))}"]


def closing_line(summary: dict[str, Any], total_steps: int | None, run_dir: Path) -> str:
    """What there is to say of a run that did not finish."""
    after = f"after step {summary['steps'] or 0}" + (f" of {total_steps}" if total_steps is not None else "")
    how = f"{summary['status']} {after}, {duration(summary['seconds'])}: {summary['error']}"
    lines = [how, f"  what it measured: {shown(run_dir)}"]
    lines += [f"  go on: {command}" for command in resume_commands(summary, run_dir)]
    return "\n".join(lines)
