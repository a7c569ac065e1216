"""A compressor, in one process, that goes on from what another run of it, or of another, has kept."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from src.compression.base import Compression, Ranks
from src.compression.fp16 import FP16
from src.compression.powersgd import PowerSGD
from src.compression.topk import TopK
from tests.compression.building import LoneBucket


def alone(compression: Compression, parameter: Tensor) -> Compression:
    compression.begin(Ranks(1), {parameter: "weight"})
    return compression


def after_steps(compression: Compression, parameter: Tensor, steps: int) -> Compression:
    for step in range(steps):
        gradient = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(step))
        compression.exchange(LoneBucket(parameter, gradient)).wait()
    return compression


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_products_of_another_rank_are_drawn_anew(alone_in_the_world: None, before: int, after: int) -> None:
    parameter = torch.zeros(8, 16)
    old = after_steps(alone(PowerSGD(before, warmup_steps=2), parameter), parameter, 4)
    new = alone(PowerSGD(after, warmup_steps=2), parameter)
    new.go_on_from([old.tensors()], True, old.plain())
    after_steps(new, parameter, 1)
    sizes = {name: tensor.numel() for name, tensor in new.tensors().items() if name[:2] in ("p.", "q.")}
    assert sizes == {"p.weight": 8 * after, "q.weight": 16 * after}


class PairBucket(LoneBucket):
    """A bucket of two parameters."""

    def __init__(self, first: Tensor, second: Tensor, gradient: Tensor) -> None:
        super().__init__(first, gradient)
        self.second = second

    def parameters(self) -> list[Tensor]:
        return [self.parameter, self.second]


def test_products_of_which_one_fits_by_chance_are_both_drawn_anew(alone_in_the_world: None) -> None:
    # 8x16 alone by rank 2: P of 16, Q of 32. By rank 1 in a bucket with 8x32: P of 8 + 8, but Q of 16 + 32.
    first, second = torch.zeros(8, 16), torch.zeros(8, 32)
    old = after_steps(alone(PowerSGD(2, warmup_steps=2), first), first, 4)
    new = PowerSGD(1, warmup_steps=2)
    new.begin(Ranks(1), {first: "weight", second: "other"})
    new.go_on_from([old.tensors()], True, old.plain())
    new.exchange(PairBucket(first, second, torch.randn(8 * 48))).wait()
    sizes = {name: tensor.numel() for name, tensor in new.tensors().items() if name[:2] in ("p.", "q.")}
    assert sizes == {"p.weight": 16, "q.weight": 48}


def test_products_of_the_host_need_no_gpu(alone_in_the_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(device: Any = None) -> None:
        raise AssertionError(f"a wait for {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    parameter = torch.zeros(8, 16)
    after_steps(alone(PowerSGD(warmup_steps=2), parameter), parameter, 4)
    assert torch.cuda.synchronize is wait


def test_another_compressors_steps_are_no_warm_up() -> None:
    parameter = torch.zeros(8, 16)
    before = alone(FP16(), parameter)
    before.ledger.steps, before.ledger.total_sent = 1000, 5
    for compressor, left in ((PowerSGD(warmup_steps=10), 10), (FP16(), 0)):
        after = alone(compressor, parameter)
        after.go_on_from([before.tensors()], True, before.plain())
        assert after.dense_steps_left() == left
        assert after.ledger.total_sent == 5
    same = alone(PowerSGD(warmup_steps=10), parameter)
    same.go_on_from([{}], True, {**before.plain(), "kind": "powersgd"})
    assert same.dense_steps_left() == 0


@pytest.mark.parametrize("compression", [TopK(0.1), PowerSGD(warmup_steps=2)], ids=["topk", "powersgd"])
def test_a_step_is_remembered_in_the_place_of_the_one_before(
    alone_in_the_world: None, compression: Compression
) -> None:
    parameter = torch.zeros(8, 16)
    after_steps(alone(compression, parameter), parameter, 3).remember()
    places = {name: tensor.data_ptr() for name, tensor in compression.memory.tensors.items()}
    expected = {name: tensor.clone() for name, tensor in after_steps(compression, parameter, 1).tensors().items()}
    compression.remember()
    assert places == {name: tensor.data_ptr() for name, tensor in compression.memory.tensors.items()}
    after_steps(compression, parameter, 2)
    compression.discard()
    for name, tensor in compression.tensors().items():
        assert torch.equal(tensor, expected[name]), name


def test_without_feedback_nothing_that_was_owed_is_carried_on(
    alone_in_the_world: None, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.zeros(8, 16)
    owing = after_steps(alone(TopK(0.1), parameter), parameter, 1)
    assert owing.metrics()["residual_norm"] > 0
    careless = alone(TopK(0.1, error_feedback=False), parameter)
    with caplog.at_level(logging.INFO):
        careless.go_on_from([owing.tensors()], True, owing.plain())
    [line] = caplog.messages
    assert "is left behind" in line
    assert not any(name.startswith("residual") for name in careless.tensors())
    assert "residual_norm" not in careless.metrics()
