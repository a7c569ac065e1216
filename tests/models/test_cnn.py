"""model=cnn and model=mlp: layer sizes."""

import pytest
import torch
from torch import nn

from src.models.cnn import CNN
from src.models.mlp import MLP


def test_the_cnn_has_the_layers_of_the_classic_mnist_network():
    model = CNN([1, 28, 28], 10)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert list(shapes.values()) == [(32, 1, 3, 3), (64, 32, 3, 3), (256, 64 * 7 * 7), (10, 256)]
    # (9 + 1) x 32 + (9 x 32 + 1) x 64 + (3136 + 1) x 256 + (256 + 1) x 10
    assert sum(p.numel() for p in model.parameters()) == 824_458


def test_pooling_before_relu_gives_the_same_bits_as_relu_before_pooling():
    torch.manual_seed(0)
    model, images = CNN([1, 28, 28], 10), torch.randn(8, 1, 28, 28)
    images[:, :, :8] = 0.3  # windows of equal values, where max-pooling has to choose
    first_conv, _, _, second_conv, _, _ = model.features
    literal = nn.Sequential(
        first_conv, nn.ReLU(), nn.MaxPool2d(2), second_conv, nn.ReLU(), nn.MaxPool2d(2), *model.classifier
    )
    gradients = []
    for network in (model, literal):
        logits = network(images.to(memory_format=torch.channels_last))
        gradients.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 32, 20)])
def test_the_memory_format_changes_the_speed_and_not_the_numbers(shape):
    torch.manual_seed(0)
    model, images = CNN(list(shape), 10), torch.randn(4, *shape)
    plain = nn.Sequential(*model.features, *model.classifier)
    torch.testing.assert_close(model(images), plain(images))
    seen = []
    model.features[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(images)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_images_too_small_to_halve_twice_are_refused():
    with pytest.raises(ValueError, match="3x28 pixels are too few; it needs 4x4"):
        CNN([1, 3, 28], 10)


def test_the_mlp_is_linear_layers_with_relu_between_them():
    model = MLP([1, 8, 8], [256, 128], 10)
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    assert shapes == [(256, 64), (128, 256), (10, 128)]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert [type(layer).__name__ for layer in model.layers] == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
