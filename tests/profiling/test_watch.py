"""trainer.profile_every: what it logs, and that training goes on as if it had not been."""

from pathlib import Path

import pytest
import torch

from tests.command import metrics
from tests.composing import composed, run_in
from tests.workers import Pool

SMALL = ["model=mlp", "model.hidden=[16]", "data.limit=256", "trainer.micro_batch_size=16", "trainer.max_steps=6"]


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.accumulate=2"],
        ["strategy=fsdp", "precision=bf16"],
        ["compression=topk", "compression.selection=sampled"],
    ],
)
def test_measuring_while_training_changes_no_number(pool: Pool, tmp_path: Path, words: list[str]) -> None:
    plain = run_in(pool, 2, tmp_path / "plain", *SMALL, *words)
    watched = run_in(pool, 2, tmp_path / "watched", *SMALL, *words, "trainer.profile_every=2")
    for key in ("loss", "grad_norm", "batch_hash", "lr", "samples"):
        assert watched.series(key) == plain.series(key)
    assert watched.evaluations == plain.evaluations
    for name, weight in plain.weights.items():
        assert torch.equal(weight, watched.weights[name]), name
    found = metrics(tmp_path / "watched", "overlap")
    assert [record["step"] for record in found] == [2, 4, 6]
    for record in found:
        assert record["exposed_comm_noise_seconds"] > 0
        exposed, fraction = record["exposed_comm_seconds"], record["hidden_comm_fraction"]
        assert exposed is None or exposed > record["exposed_comm_noise_seconds"]
        assert fraction is None or 0 <= fraction <= 1
    assert metrics(tmp_path / "plain", "overlap") == []


def test_a_compressors_warm_up_is_not_measured(pool: Pool, tmp_path: Path) -> None:
    # Three dense steps: a step of which nothing is compressed, against an exchange of which all is, would tell nothing.
    words = ["trainer.profile_every=2", "compression=topk", "compression.warmup_steps=3"]
    run_in(pool, 2, tmp_path / "run", *SMALL, *words)
    assert [record["step"] for record in metrics(tmp_path / "run", "overlap")] == [4, 6]


def test_a_strategy_that_can_leave_out_no_communication_is_refused():
    _, problems = composed("strategy=fsdp1", "launch.nproc=2", "trainer.profile_every=5")
    [line] = [line for line in problems if "profile_every" in line]
    assert "strategy=fsdp1 can leave out none" in line
    assert "Use strategy=ddp or strategy=fsdp" in line


def test_one_data_rank_has_nothing_to_measure():
    _, problems = composed("strategy=ddp", "launch.nproc=1", "trainer.profile_every=5")
    assert any("profile_every=5" in line and "there is only one" in line for line in problems)


def test_never_is_null_and_not_zero():
    _, problems = composed("trainer.profile_every=0", "launch.nproc=2")
    assert problems == ["trainer.profile_every=0 is less than one; choose 1 or more."]
