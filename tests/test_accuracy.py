"""What the presets promise, on the real data."""

import pytest

from tests.command import metrics, summary, train


@pytest.mark.slow
def test_the_demo_reaches_0_97_on_digits(tmp_path):
    outcome = train(tmp_path, "launch.device=cpu", "launch.nproc=2", WANDB_MODE="offline")
    assert outcome.code == 0, outcome.text
    assert summary(outcome.run_dir())["eval"]["accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_mnist_preset_reaches_0_99_in_five_epochs(tmp_path, mnist_archives):
    outcome = train(
        tmp_path, "experiment=mnist_ddp", f"data.root={mnist_archives}", "launch.device=cpu", "launch.nproc=2",
        "tracking=off", timeout=1100,
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    done = summary(outcome.run_dir())
    assert done["eval"]["accuracy"] >= 0.99
    assert done["eval"]["samples"] == 10_000
    assert done["samples"] == 5 * 60_000
    assert [record["epoch"] for record in metrics(outcome.run_dir(), "epoch")] == [0, 1, 2, 3, 4]
