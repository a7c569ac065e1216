"""model=resnet18: torchvision's ResNet-18 (He et al. 2016) for small images."""

import torch
from torch import Tensor, nn


class ResNet18(nn.Module):
    """A 3x3 first convolution and no pooling before the stages, as is usual for CIFAR-10.

    image_shape: (channels, height, width). The weights have torchvision's names, and its shapes beyond conv1.
    """

    inputs = "images"
    memory_format = torch.channels_last  # what forward turns the images into

    def __init__(self, image_shape: list[int], num_classes: int) -> None:
        super().__init__()
        from torchvision.models import resnet18  # 2 to 7 s to import, so only where it is needed

        network = resnet18(num_classes=num_classes)
        self.conv1 = nn.Conv2d(image_shape[0], 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1, self.relu = network.bn1, network.relu
        self.layer1, self.layer2 = network.layer1, network.layer2
        self.layer3, self.layer4 = network.layer3, network.layer4
        self.avgpool, self.fc = network.avgpool, network.fc

    def units(self) -> list[nn.Module]:
        """The four stages: what is sharded and gathered as one."""
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width). Returns logits, (batch, num_classes)."""
        # Channels last in memory: convolutions run faster so, on CPUs and on tensor cores alike.
        x = self.relu(self.bn1(self.conv1(images.to(memory_format=torch.channels_last))))
        for stage in self.units():
            x = stage(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits
