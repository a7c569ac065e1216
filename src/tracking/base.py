"""What a tracker is: a place outside the run's folder that follows the run. It may be slow; it may not be missed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of a run when it starts; config is nested, plain and resolved.

    earlier_id: the id of the tracked run that this one continues; None: a new one.
    """

    run_dir: Path
    name: str
    config: dict[str, Any]
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    earlier_id: str | None = None


class Tracker(ABC):
    """Lives on rank 0 only. No method raises for want of a network, and none makes the training wait for one.

    The constructor also runs in the parent, before any rank starts: what it refuses (Refused) never starts.
    """

    def __init__(self, project: str | None = None, group: str | None = None, tags: list[str] | None = None) -> None:
        self.project, self.group, self.tags = project, group, tags or []

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Begin to follow; returns at once."""

    @abstractmethod
    def log(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl, before its non-finite numbers are replaced. Returns at once.

        Without a "step" it is a row of a table named after its "kind".
        """

    @abstractmethod
    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Close the run, as failed where exit_code is not 0. Waits, but not without a limit."""

    def identity(self) -> dict[str, Any]:
        """{"id", "mode"} as far as known: an id from start() on, the mode once the tracker has settled it."""
        return {"id": None, "mode": "off"}

    def commands(self) -> list[str]:
        """Commands that show the run, for the final table."""
        return []


class NoTracker(Tracker):
    """tracking=off: the run's own files are all there is."""

    def start(self, run: RunInfo) -> None:
        return None

    def log(self, record: dict[str, Any]) -> None:
        return None

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        return None
