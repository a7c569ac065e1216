"""DDP's buckets are made once, before the first step, whatever DDP and the model look like."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from src.compression.base import Compression, Ranks
from src.compression.powersgd import PowerSGD
from src.compression.topk import TopK
from src.parallel.recompute import Recomputed, recompute_activations
from src.strategies.base import Axis
from src.strategies.ddp_hook import Hook, exchange_alone
from tests.compression.building import LoneBucket, linear_model


@pytest.mark.parametrize("device_ids", [None, [0]], ids=["host", "device"])
def test_buckets_are_arranged_where_ddp_moves_its_inputs(
    alone_in_the_world: None, device_ids: list[int] | None
) -> None:
    wrapped = DistributedDataParallel(linear_model())
    wrapped.device_ids = device_ids  # as on a GPU; "cpu:0" is a device, too
    Hook(TopK()).register(wrapped, Axis())
    assert wrapped(torch.ones(2, 4)).shape == (2, 3)
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_a_model_that_recomputes_goes_on_doing_so(alone_in_the_world: None) -> None:
    model = recompute_activations(linear_model(), "full")
    Hook(TopK()).register(DistributedDataParallel(model), Axis())
    assert isinstance(model.forward, Recomputed)


def test_a_model_compiled_as_one_stays_so_and_is_not_compiled_for_this(alone_in_the_world: None) -> None:
    def compiled(*inputs: Tensor) -> Tensor:
        raise AssertionError("compiled for buckets that are only arranged")

    model = linear_model()
    model._compiled_call_impl = compiled  # as `Module.compile` leaves it
    Hook(TopK()).register(DistributedDataParallel(model), Axis())
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize(
    "compression",
    [TopK(), TopK(selection="sampled"), TopK(selection="sampled", error_feedback=False), PowerSGD()],
    ids=["exact", "sampled", "forgetful", "products"],
)
def test_an_exchange_that_is_timed_makes_nothing_that_a_run_makes_once(
    alone_in_the_world: None, monkeypatch: pytest.MonkeyPatch, compression: Compression
) -> None:
    from src.compression import selection

    samples: list[float] = []
    original = selection.sampled_threshold
    monkeypatch.setattr(selection, "sampled_threshold", lambda *given: samples.append(original(*given)) or samples[-1])
    parameter = torch.zeros(100, 1000)
    compression.begin(Ranks(1), {parameter: "weight"})
    bucket, timed, draws = LoneBucket(parameter, torch.zeros(100_000)), compression.timed(), torch.get_rng_state()
    exchange = exchange_alone(timed, [bucket])
    assert bucket.gradient.count_nonzero() > 99_000, "not what a first exchange has left"
    made, sampled = set(timed.tensors()), len(samples)
    exchange()
    assert made == set(timed.tensors())
    assert made
    assert sampled == len(samples)
    assert torch.equal(draws, torch.get_rng_state()), "the training's draws"
