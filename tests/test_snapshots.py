"""Which checkpoint is the best one, told by Snapshots alone."""

from pathlib import Path

import pytest

from src.snapshots import Monitor, SavePlan, Snapshots
from src.strategies.single import Single
from src.world import World
from tests.composing import composed, run_config
from tests.workers import Pool


def watching(monitor: Monitor, folder: Path) -> Snapshots:
    return Snapshots(Single(), World(), folder, "run", SavePlan(every=1, monitor=monitor), seed=0)


@pytest.mark.parametrize(
    ("monitor", "values", "bests"),
    [
        ("loss", [0.5, 0.7, 0.4], [True, False, True]),
        ("accuracy", [0.5, 0.7, 0.4], [True, True, False]),
        ("loss", [float("nan"), 0.7, float("nan"), 0.6], [False, True, False, True]),
    ],
)
def test_the_best_is_the_lowest_loss_or_the_highest_accuracy_of_those_that_are_numbers(
    tmp_path: Path, monitor: Monitor, values: list[float], bests: list[bool]
) -> None:
    snapshots = watching(monitor, tmp_path)
    assert [snapshots.note_best(step, {monitor: value}) for step, value in enumerate(values)] == bests


def test_the_best_goes_on_in_its_folder_and_is_compared_with_its_like(pool: Pool, tmp_path: Path) -> None:
    def run(folder: str, *overrides: str, resume: Path | None = None) -> str:
        """The step that `best` names after two steps more; the learning rate is so high that only they get worse."""
        common = ["model=mlp", "model.hidden=[16]", "data.limit=64", "launch.nproc=1", "launch.device=cpu"]
        config, problems = composed(*common, "tracking=off", "checkpoint.every=2", "checkpoint.keep=9", *overrides)
        assert not problems
        (tmp_path / folder).mkdir(exist_ok=True)
        pool.run(1, run_config, config, str(tmp_path / folder), {} if resume is None else {"resume": str(resume)})
        return (tmp_path / folder / "checkpoints" / "best").read_text().strip()

    good = ["trainer.max_steps=2", "checkpoint.monitor=loss"]
    worse = ["trainer.max_steps=4", "trainer.epochs=9", "optimizer.lr=30"]
    first = tmp_path / "one" / "checkpoints" / "step_00000002"
    assert run("one", *good) == "step_00000002"
    assert run("one", *worse, "checkpoint.monitor=loss", resume=first) == "step_00000002"
    assert run("two", *worse, "checkpoint.monitor=loss", resume=first) == "step_00000004", "the other is not here"
    assert run("one", *worse, "checkpoint.monitor=accuracy", resume=first) == "step_00000004", "of another kind"
