"""Schedules: the factor of each update."""

import pytest

from src.schedule import Constant, Cosine, Linear
from tests.composing import run_in


def test_linear_falls_from_one_to_its_end_in_equal_parts():
    # 4 updates: 1 - 0/4, 1 - 1/4, ...; after the last the factor would be 0
    assert [Linear().factor(update, 4) for update in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_warm_up_rises_by_equal_parts_and_then_the_decay_begins():
    # 2 of 6 updates warm up (1/2, 2/2), the other 4 fall by a quarter each
    assert [Linear(2).factor(update, 6) for update in range(6)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_in_the_middle():
    assert Cosine(end_factor=0.2).factor(5, 10) == pytest.approx(0.6)  # (1 + 0.2) / 2


def test_constant_stays():
    assert [Constant().factor(update, 3) for update in range(4)] == [1.0] * 4


def test_the_schedule_advances_once_an_optimizer_step_not_once_a_micro_batch(pool, tmp_path):
    # 64 samples, 4 a micro-batch, 4 accumulated: 16 micro-batches, 4 updates
    result = run_in(
        pool, 1, tmp_path / "run", "strategy=single", "model=mlp", "data.limit=64", "trainer.micro_batch_size=4",
        "trainer.accumulate=4", "trainer.epochs=1", "schedule=linear", "optimizer.lr=1.0e-2",
    )  # fmt: skip
    assert result.series("lr") == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
