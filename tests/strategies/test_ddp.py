"""What only DDP has: unused parameters, buffers, static graphs."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from src.strategies.ddp import DDP
from tests.composing import run_in
from tests.crafted import NormalisedModel, UnusedHead
from tests.strategies.building import built, linear_model, microbatches
from tests.test_parity import assert_equal, cell


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


@pytest.mark.parametrize("view", [True, False])
def test_a_static_graph_with_accumulation_and_a_short_last_window_equals_one_process(pool, tmp_path, view):
    # Of 101 samples, 18 a step in 3 micro-batches a rank, the sixth step has 11: two micro-batches.
    reference = run_in(pool, 1, tmp_path / "single", *cell("single", "none", "fp32", 1))
    options = ["strategy.static_graph=true", f"strategy.gradient_as_bucket_view={str(view).lower()}"]
    result = run_in(pool, 2, tmp_path / "ddp", *cell("ddp", "none", "fp32", 3), *options)
    assert_equal(result, reference, "fp32", f"static graph, view={view}")


def reductions_of_three_steps(world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    strategy = built(world, "ddp", linear_model(), static_graph=True)
    steps: list[int] = []

    def counted(state, bucket):
        steps[-1] += 1
        return allreduce_hook(state, bucket)

    strategy.model.register_comm_hook(None, counted)
    for _ in range(3):
        steps.append(0)
        strategy.forward_backward(microbatches(world.world_rank, 3), 24)
        strategy.optimizer_step(1.0, want_grad_norm=False)
    return steps


def test_a_static_graph_costs_one_more_reduction_in_the_first_step_alone(pool):
    # All parameters fit one bucket: the first and the last micro-batch of the first step meet, then the last ones only.
    for steps in pool.run(2, reductions_of_three_steps):
        assert steps == [2, 1, 1]


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


def test_what_is_built_on_fake_tensors_leaves_the_strategy_itself_as_it_was() -> None:
    strategy = DDP(bucket_cap_mb=7)
    made = strategy.imagined()
    assert strategy.wrapper is DistributedDataParallel
    assert made.wrapper is not DistributedDataParallel
    assert made.options == strategy.options
