"""The style by which a plan for torch's `parallelize_module` names a layer that splits itself.

A file of its own: the base class costs 0.5 s to import, which `linear.py` spares whoever splits nothing.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.parallel.linear import SplitLinear


class OwnSplit(ParallelStyle):
    """For a ColumnParallelLinear or a RowParallelLinear: its own `split`, in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, SplitLinear):
            raise ValueError(
                f"OwnSplit is for ColumnParallelLinear and RowParallelLinear, not {type(module).__name__}."
                " Name one of torch's styles for it, as ColwiseParallel."
            )
        module.split(device_mesh)
        return module
