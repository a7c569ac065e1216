"""The loop's own business: losses that are not finite, who watches it while, and a signal in its last step."""

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from src import trainer
from src.control import Control
from src.errors import Interrupted
from src.snapshots import Snapshots
from src.stopping import StopRequest
from tests.composing import composed, run_in
from tests.workers import Pool

SMALL = ["model=mlp", "model.hidden=[16]", "data.limit=256", "trainer.micro_batch_size=16", "trainer.max_steps=6"]
NAN_IN_STEP_3 = [
    *SMALL,
    "data._target_=tests.doubles.DigitsWithoutANumber",
    "+data.on_rank=1",
    "+data.at=3",
]


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_a_skipped_step_changes_nothing_and_its_loss_is_not_called_zero(
    pool: Pool, tmp_path: Path, compression: str
) -> None:
    words = [*NAN_IN_STEP_3, "trainer.on_nonfinite=skip", f"compression={compression}"]
    result = run_in(pool, 2, tmp_path / "run", *words)
    losses = result.series("loss")
    assert [number + 1 for number, loss in enumerate(losses) if loss is None] == [3]
    assert result.train[2]["non_finite"] == {"loss": "nan"}
    assert result.series("skipped_steps") == [0, 0, 1, 1, 1, 1]
    # What was not a number is not kept for the next step either.
    assert compression == "none" or all(norm > 0 for norm in result.series("residual_norm"))
    # Five of the six steps count in the epoch's mean: all of one size.
    [epoch] = result.epochs
    assert epoch["loss"] == pytest.approx(sum(loss for loss in losses if loss is not None) / 5, rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_rank(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"step 3, rank 1: the loss is not finite\. No checkpoint was saved before"):
        run_in(pool, 2, tmp_path / "run", *NAN_IN_STEP_3, "trainer.log_every=4")


def test_weights_that_are_lost_end_the_run_before_they_push_out_the_last_good_checkpoint(
    pool: Pool, tmp_path: Path
) -> None:
    # The first update, by a learning rate of 1e30, ruins them; the losses from the second step on are not finite.
    words = [*SMALL, "trainer.max_steps=40", "trainer.epochs=9", "optimizer=sgd", "optimizer.lr=1e30"]
    words += ["checkpoint.every=1", "checkpoint.keep=1", "trainer.on_nonfinite=skip"]
    with pytest.raises(Exception, match=r"step 11: the loss of 10 steps in a row is not finite.*step_00000001\."):
        run_in(pool, 2, tmp_path / "run", *words)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000001"]


def watched(world: Any, config: dict[str, Any], run_dir: str) -> tuple[list[bool], bool]:
    """Whether somebody watches for beats while each checkpoint is written, and at the end of the run."""
    from src.run import run

    watching = [False]
    at_saves: list[bool] = []
    save = Snapshots.save

    def beat(self: Control) -> None:
        watching[0] = True

    def rest(self: Control) -> None:
        watching[0] = False

    def noting(self: Snapshots, *arguments: Any) -> Path:
        at_saves.append(watching[0])
        return save(self, *arguments)

    with (
        mock.patch.object(Control, "beat", beat),
        mock.patch.object(Control, "rest", rest),
        mock.patch.object(Snapshots, "save", noting),
    ):
        run(config, Path(run_dir), {}, world)
    return at_saves, watching[0]


def test_nobody_watches_while_a_checkpoint_is_written_and_after_the_last_step(pool: Pool, tmp_path: Path) -> None:
    config, problems = composed(
        *SMALL, "launch.nproc=1", "launch.device=cpu", "tracking=off", "checkpoint.every=3", "checkpoint.monitor=loss"
    )
    assert not problems
    [(at_saves, at_end)] = pool.run(1, watched, config, str(tmp_path))
    assert at_saves == [False, False]
    assert not at_end


def signalled_in_the_last_evaluation(world: Any, config: dict[str, Any], run_dir: str) -> int | None:
    """The signal that this rank stops for, when the last rank gets one while the run's last step evaluates."""
    from src.run import run

    stop, evaluate = StopRequest(), trainer.evaluate

    def interrupted(*arguments: Any) -> dict[str, float]:
        if world.world_rank == world.world_size - 1:
            assert not stop.receive(signal.SIGTERM), "deferred"
        return evaluate(*arguments)

    with mock.patch.object(trainer, "evaluate", interrupted):
        try:
            run(config, Path(run_dir), {}, world, stop)
        except Interrupted as ending:
            return ending.signal_number
    return None


def test_a_signal_in_the_last_step_saves_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    config, problems = composed(*SMALL, "launch.nproc=2", "launch.device=cpu", "tracking=off")
    assert not problems
    assert pool.run(2, signalled_in_the_last_evaluation, config, str(tmp_path)) == [signal.SIGTERM] * 2
    assert (tmp_path / "checkpoints" / "last").read_text().strip() == "step_00000006"
