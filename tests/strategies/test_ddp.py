"""What only DDP has: unused parameters, buffers, static graphs."""

import pytest
import torch
import torch.distributed as dist

from tests.composing import composed
from tests.crafted import NormalisedModel, UnusedHead
from tests.strategies.building import built, microbatches


def train_with_unused_head(world, find_unused_parameters):
    strategy = built(world, "ddp", UnusedHead(), find_unused_parameters=find_unused_parameters)
    losses = []
    try:
        for _ in range(3):
            losses.append(float(strategy.forward_backward(microbatches(world.world_rank, 2), 16)))
            strategy.optimizer_step(1.0, want_grad_norm=False)
    except ValueError as error:
        return str(error)
    return losses


def test_unused_parameters_are_named_with_the_override_to_set(pool):
    for message in pool.run(2, train_with_unused_head, False):
        assert "spare.weight, spare.bias" in message
        assert "strategy.find_unused_parameters=true" in message


def test_with_find_unused_parameters_it_trains(pool):
    for losses in pool.run(2, train_with_unused_head, True):
        assert losses[2] < losses[0]


def buffers_at_evaluation(world, name, arguments):
    torch.manual_seed(0)
    strategy = built(world, name, NormalisedModel(), **arguments)
    strategy.forward_backward(microbatches(world.world_rank, 2), 16)
    strategy.optimizer_step(1.0, want_grad_norm=False)
    strategy.train_mode(False)
    running_mean = next(b for n, b in strategy.model.named_buffers() if n.endswith("running_mean")).clone()
    weights = strategy.weights()
    gathered = [torch.zeros_like(running_mean) for _ in range(world.world_size)]
    dist.all_gather(gathered, running_mean)
    return gathered, None if weights is None else weights["norm.running_mean"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ddp", {"forward_sync_buffers": True}),
        ("ddp", {"forward_sync_buffers": False}),
        ("fsdp", {}),
        ("fsdp1", {}),
    ],
)
def test_batch_statistics_are_equal_on_all_ranks_before_evaluation_and_saving(pool, name, arguments):
    (gathered, saved), _ = pool.run(2, buffers_at_evaluation, name, arguments)
    assert gathered[0].abs().max() > 0
    torch.testing.assert_close(gathered[0], gathered[1], rtol=0, atol=0)
    torch.testing.assert_close(saved, gathered[0], rtol=0, atol=0)


def test_a_static_graph_with_accumulation_is_refused():
    _, problems = composed("strategy=ddp", "strategy.static_graph=true", "trainer.accumulate=2")
    assert any("strategy.static_graph=true" in line and "trainer.accumulate" in line for line in problems)


def test_a_static_graph_without_accumulation_is_fine():
    _, problems = composed("strategy=ddp", "strategy.static_graph=true")
    assert problems == []


def gradient_strides(world):
    from src.batch import MicroBatch
    from src.models.cnn import CNN

    strategy = built(world, "ddp", CNN([1, 8, 8], 3))
    strategy.forward_backward([MicroBatch(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))], 8)
    return [(p.grad.stride(), p.stride()) for p in strategy.model.parameters()]


def test_the_cnns_gradients_lie_in_the_buckets_as_backward_makes_them(pool):
    # Else DDP copies each and warns that strides do not match, at every user's first run.
    for strides in pool.run(2, gradient_strides):
        assert all(gradient == weight for gradient, weight in strides)
        assert strides[2][1] == (9 * 32, 1, 3 * 32, 32), "64 x 32 x 3 x 3, channels last"
