"""model=resnet18."""

import torch

from src.models.resnet import ResNet18


def test_the_weights_have_torchvisions_names_and_shapes_beyond_the_stem():
    from torchvision.models import resnet18

    theirs = {name: tuple(tensor.shape) for name, tensor in resnet18(num_classes=10).state_dict().items()}
    ours = {name: tuple(tensor.shape) for name, tensor in ResNet18([3, 32, 32], 10).state_dict().items()}
    assert theirs.pop("conv1.weight") == (64, 3, 7, 7)
    assert ours.pop("conv1.weight") == (64, 3, 3, 3)
    assert list(ours) == list(theirs)
    assert ours == theirs


def test_small_images_reach_the_last_stage_at_an_eighth_of_their_size():
    model = ResNet18([3, 32, 32], 10).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [(2, 512, 4, 4)]


def test_with_the_same_weights_it_computes_what_torchvisions_stages_compute():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, theirs = ResNet18([1, 16, 16], 5).eval(), resnet18(num_classes=5).eval()
    theirs.conv1, theirs.maxpool = model.conv1, torch.nn.Identity()
    theirs.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(model(images), theirs(images))
