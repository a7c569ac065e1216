"""What a task says of itself before anything starts: which ranks it wants, and whether it reads data or is tracked."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from src.strategies.base import Setting


class Task(ABC):
    """What a run does with the parts of an experiment. Its class is read by the checks, which never build it for that.

    ranks: "started": launch.nproc of them, in one process group; "one": this process alone; "imagined": this process
    stands for rank 0 of launch.nproc, and there is no process group. reads_data: whether the data set is fetched
    before the start. is_tracked: whether it makes a run in W&B. trains: whether it takes the steps of a training
    run: their memory is forecast, and it can go on from a checkpoint.
    """

    ranks: ClassVar[Literal["started", "one", "imagined"]] = "started"
    reads_data: ClassVar[bool] = True
    is_tracked: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        """What the task refuses, one line each of choice, reason and remedy. arguments: its node's own values."""
        return []

    @abstractmethod
    def __call__(self, experiment: Any) -> None:
        """Run on every rank. experiment: the parts of a run, of src/run.py, which stands above the checks."""
