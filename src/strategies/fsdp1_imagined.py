"""FullyShardedDataParallel where tensors are fake: what it would read from their addresses is left out."""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from src.strategies.base import BuildSpec
from src.strategies.fsdp1 import FSDP1


class ImaginedFSDP1(FSDP1):
    """Does not look whether somebody has given a parameter other memory: fake ones have none, so it would stop there.

    torch 2.14 looks before it gathers; what it looks at takes no memory.
    """

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        wrapped = super().wrap(model, spec)
        for module in FullyShardedDataParallel.fsdp_modules(wrapped):
            if module._handle is not None:
                module._handle._skip_writeback_check = True
        return wrapped
