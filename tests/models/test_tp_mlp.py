"""model=tp_mlp: the plain two-layer network, whole and split by the plan that it carries."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from src.models.tp_mlp import TPMLP


def networks():
    """(the model, the plain network of the same draw)."""
    torch.manual_seed(0)
    model = TPMLP([1, 2, 3], hidden=8, num_classes=5)
    torch.manual_seed(0)
    return model, nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def test_as_a_whole_it_is_the_plain_two_layer_network():
    model, plain = networks()
    images, labels = torch.randn(4, 1, 2, 3), torch.tensor([0, 4, 2, 2])
    assert torch.equal(model(images), plain(images))
    for network in (model, plain):
        nn.functional.cross_entropy(network(images), labels).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    assert sorted(model.state_dict()) == ["down.bias", "down.weight", "up.bias", "up.weight"]


def train_by_its_plan(world):
    from torch.distributed.tensor.parallel import parallelize_module

    model, plain = networks()
    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tensor",))
    parallelize_module(model, mesh, model.tensor_plan(sequence_parallel=False))
    optimizers = [torch.optim.AdamW(network.parameters(), lr=1e-2) for network in (model, plain)]
    for _ in range(3):
        images, labels = torch.randn(4, 1, 2, 3), torch.randint(5, (4,))
        for network, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
    images = torch.randn(4, 1, 2, 3)
    torch.testing.assert_close(model(images), plain(images))  # logits whole on every rank
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())
    return model.up.weight.to_local().shape, model.tensor_counts()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_split_by_its_plan_it_trains_to_the_same_weights(pool, num_ranks):
    shape, counts = pool.run(num_ranks, train_by_its_plan)[0]
    assert shape == (8 // num_ranks, 6)
    assert counts == {"model.hidden": 8}


def test_own_split_names_the_layers_that_it_is_for():
    from src.parallel.own_split import OwnSplit

    with pytest.raises(ValueError, match=r"not Linear\. Name one of torch's styles"):
        OwnSplit()._apply(nn.Linear(2, 2), None)
