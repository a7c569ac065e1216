"""model=mlp: fully connected layers with ReLU between them."""

import itertools
import math

from torch import Tensor, nn


class MLP(nn.Module):
    """Classifier over flattened images.

    image_shape: (channels, height, width). hidden: widths of the hidden layers.
    """

    inputs = "images"

    def __init__(self, image_shape: list[int], hidden: list[int], num_classes: int) -> None:
        super().__init__()
        widths = [math.prod(image_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in itertools.pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width). Returns logits, (batch, num_classes)."""
        logits: Tensor = self.layers(images)
        return logits
