"""strategy=single: one process and no communication. The reference for every parity test."""

import torch
from torch import nn

from src.strategies.autograd import AutogradStrategy
from src.strategies.base import BuildSpec, Support


class Single(AutogradStrategy):
    """The bare model on one device."""

    supports = Support(
        layout="is one process with a whole copy", sharding=frozenset({"none"}), many_processes=False, compiles=True
    )

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        return model.to(spec.world.device)

    def make_scaler(self, spec: BuildSpec) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(spec.world.device.type)
