"""What strategy=pp refuses, before anything is built."""

from torch import nn

from src.strategies.base import Setting


def problems(setting: Setting) -> list[str]:
    return []


def model_problems(model: nn.Module, setting: Setting) -> list[str]:
    return []
