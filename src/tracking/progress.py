"""Which way a run shows its progress: a bar on a terminal, lines elsewhere."""

import sys
from typing import Any, Protocol

from src.tracking.console import Lines


class Progress(Protocol):
    """What follows the training step by step."""

    def step(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_progress(total_steps: int) -> Progress:
    """A bar where stdout is a terminal that can move its cursor, else lines only."""
    if sys.stdout.isatty():
        from rich.console import Console  # 0.1 s to import, with what the bar needs

        console = Console(file=sys.stdout)
        if not console.is_dumb_terminal:
            from src.tracking.bar import Bar

            return Bar(console, total_steps)
    return Lines(total_steps)
