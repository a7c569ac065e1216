"""A column-parallel layer, a ReLU and a row-parallel layer against the network of whole layers."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.drawn import drawn, gradients, tensor_mesh, whole_gradients


def two_layers(mesh):
    """A column- and a row-parallel layer with a ReLU between; the same network of whole layers."""
    (up, own_up), (down, own_down) = drawn("column", 6, 8, mesh), drawn("row", 8, 3, mesh, seed=1)
    return nn.Sequential(up, nn.ReLU(), down), nn.Sequential(own_up, nn.ReLU(), own_down)


def train_two_layers(world):
    plain, split = two_layers(tensor_mesh(world))
    batches = [torch.randn(5, 6, requires_grad=True) for _ in range(2)]
    for x in batches:  # the second adds to the first's gradients, as accumulation does
        own_x = x.detach().clone().requires_grad_()
        expected, output = plain(x), split(own_x)
        for out in (expected, output):
            out.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(own_x.grad, x.grad)
    torch.testing.assert_close(whole_gradients(split), gradients(plain))
    # Over all ranks, the bias that each of them has counted once.
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (plain, split)]
    torch.testing.assert_close(norms[1].full_tensor(), norms[0])
    torch.testing.assert_close(whole_gradients(split), gradients(plain))
    return split[2].bias.grad.to_local().tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_column_then_row_is_the_two_layer_network(pool, num_ranks):
    bias_gradients = pool.run(num_ranks, train_two_layers)
    assert bias_gradients == [bias_gradients[0]] * num_ranks, "a copy on every rank, equal to the bit"


def train_in_bf16(world):
    plain, split = two_layers(tensor_mesh(world))
    x = torch.randn(16, 6, requires_grad=True)
    own_x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, output = plain(x), split(own_x)
    assert output.dtype == expected.dtype == torch.bfloat16
    for out in (expected, output):
        out.float().square().mean().backward()
    # bf16 has 8 bits: steps of 1/256; the ranks' terms are rounded before they are summed.
    close = {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(output, expected, **close)
    torch.testing.assert_close(own_x.grad, x.grad, **close)
    torch.testing.assert_close(whole_gradients(split), gradients(plain), **close)
    assert {p.grad.dtype for p in split.parameters()} == {torch.float32}


def test_under_bf16_autocast_the_layers_stay_within_its_rounding(pool):
    pool.run(2, train_in_bf16)


def shard_what_is_split(world):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    plain, split = two_layers(None)
    split[0].split(mesh["tensor"])
    split[2].split(mesh["tensor"])
    fully_shard(split, mesh=mesh["shard"])
    split.set_gradient_divide_factor(1.0)  # sums, as src/strategies does; gloo needs both calls
    split.set_force_sum_reduction_for_comms(True)
    x = torch.randn(6, 6, requires_grad=True)
    own_x = x.chunk(2)[mesh["shard"].get_local_rank()].detach().clone().requires_grad_()
    for _ in range(2):  # the second time through parameters that were gathered and freed again
        x.grad = own_x.grad = None
        plain.zero_grad()
        split.zero_grad()
        expected, output = plain(x), split(own_x)
        for out in (expected, output):
            out.square().sum().backward()
    torch.testing.assert_close(output, expected.chunk(2)[mesh["shard"].get_local_rank()])
    torch.testing.assert_close(own_x.grad, x.grad.chunk(2)[mesh["shard"].get_local_rank()])
    torch.testing.assert_close(whole_gradients(split), gradients(plain))
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (plain, split)]
    torch.testing.assert_close(norms[1].full_tensor(), norms[0])


def test_fully_shard_over_another_axis_changes_no_number(pool):
    pool.run(4, shard_what_is_split)
