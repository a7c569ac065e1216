"""Linear layers split over the ranks of a mesh axis (Shoeybi et al. 2019, "Megatron-LM", section 3).

    y = relu(x A) B:    A split by columns      B split by rows         A column of A is an output feature,
                        A = [A_1, A_2]          B = [B_1; B_2]          a row of B an input feature.
                        h_i = relu(x A_i)       y = h_1 B_1 + h_2 B_2

A column-parallel layer followed by a row-parallel one needs one all-reduce forward (the sum for y) and one backward
(the sum for x's gradient), and nothing between the two, as the ReLU works on each feature alone.

Parameters are DTensors, so that state dicts, gradient norms and `fully_shard` over another axis know them as parts of
one matrix; the arithmetic is on the rank's own part, with the collectives written out.
"""

import math
from typing import TYPE_CHECKING, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from src.parallel.collectives import copy_to_axis, gather_from_axis, reduce_from_axis, slice_for_axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class SplitLinear(nn.Linear):
    """What the two layers share: nn.Linear, with nn.Linear's draw, whose parameters `split` cuts into parts."""

    split_feature: ClassVar[str]  # the size that the ranks divide among them
    split_dims: ClassVar[dict[str, int | None]]  # the dim of each parameter that it is; None: every rank has a copy
    mesh: DeviceMesh | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool, mesh: DeviceMesh | None) -> None:
        super().__init__(in_features, out_features, bias)
        if mesh is not None:
            self.split(mesh)

    def split(self, mesh: DeviceMesh) -> None:
        """Cut each parameter, in place, to this rank's part. Without communication.

        mesh: one axis. Every rank must hold the same whole parameters: the same draw, from the same seed; the
        assembled matrix is then the whole layer's. Build the optimizer afterwards: these are new parameters.
        Raises ValueError where the sizes don't divide.
        """
        # 0.5 s to import, which a layer that is never split does without.
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        self._check(mesh)
        for name, whole in list(self.named_parameters(recurse=False)):
            dim = self.split_dims[name]
            placement: Placement = Replicate() if dim is None else Shard(dim)
            # src_data_rank=None: cut the own copy, instead of sending rank 0's around.
            part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
            setattr(self, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        self.mesh = mesh

    def reset_parameters(self) -> None:
        if self.mesh is not None:
            # Ranks of one seed would draw the same numbers for different parts of the matrix.
            raise ValueError(
                f"{type(self).__name__} is split over {self.mesh.size()} ranks and can't be drawn part by part."
                " Draw the whole layer, then split(mesh) it."
            )
        super().reset_parameters()

    def own_parts(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight and bias as plain tensors, differentiable."""
        # The cast is for mypy: nn.Linear declares plain parameters.
        weight, bias = cast("DTensor", self.weight), cast("DTensor | None", self.bias)
        return weight.to_local(), None if bias is None else bias.to_local()

    def _check(self, mesh: DeviceMesh) -> None:
        layer, size, num_ranks = type(self).__name__, getattr(self, self.split_feature), mesh.size()
        if self.mesh is not None:
            raise ValueError(f"{layer} is already split over {self.mesh.size()} ranks. Split a whole layer.")
        if mesh.ndim != 1:
            axes = mesh.mesh_dim_names or "(unnamed)"
            raise ValueError(
                f'{layer} splits over one axis, but the mesh has {axes}. Pass one, as in mesh["{axes[-1]}"].'
            )
        if size % num_ranks:
            fewer = max(n for n in range(1, num_ranks) if size % n == 0)
            raise ValueError(
                f"{layer}: {self.split_feature}={size} is not divisible by the mesh's {num_ranks} ranks."
                f" Use a mesh of {fewer}, or {self.split_feature}={math.ceil(size / num_ranks) * num_ranks}."
            )


class ColumnParallelLinear(SplitLinear):
    """nn.Linear whose output features are divided among the ranks; without a mesh, nn.Linear.

    gather_output: every rank gets the whole output, at the price of an all-gather, instead of its own features.
    mesh: one axis, over which to `split` at once; the ranks' draws must be the same, so seed them alike.
    """

    split_feature = "out_features"
    split_dims: ClassVar[dict[str, int | None]] = {"weight": 0, "bias": 0}  # weight: (out_features, in_features)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, mesh)
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features), the same on every rank (every column needs all of it).

        Returns (..., out_features / ranks), or (..., out_features) where gathered.
        """
        if self.mesh is None:
            return super().forward(input)
        weight, bias = self.own_parts()
        output = F.linear(copy_to_axis(input, self.mesh), weight, bias)
        return gather_from_axis(output, self.mesh) if self.gather_output else output


class RowParallelLinear(SplitLinear):
    """nn.Linear whose input features are divided among the ranks; without a mesh, nn.Linear.

    input_is_split: the input is this rank's features, as a ColumnParallelLinear leaves them; False: whole.
    mesh: one axis, over which to `split` at once; the ranks' draws must be the same, so seed them alike.
    """

    split_feature = "in_features"
    split_dims: ClassVar[dict[str, int | None]] = {"weight": 1, "bias": None}  # weight: (out_features, in_features)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_split: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, mesh)
        self.input_is_split = input_is_split

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features / ranks), or (..., in_features) with input_is_split=False.

        Returns (..., out_features), the same on every rank.
        """
        if self.mesh is None:
            return super().forward(input)
        expected = self.in_features // self.mesh.size() if self.input_is_split else self.in_features
        if input.shape[-1] != expected:
            raise ValueError(
                f"RowParallelLinear(input_is_split={self.input_is_split}) got {input.shape[-1]} features and needs"
                f" {expected} of in_features={self.in_features}. Is input_is_split right?"
            )
        own_input = input if self.input_is_split else slice_for_axis(input, self.mesh)
        weight, bias = self.own_parts()
        output = reduce_from_axis(F.linear(own_input, weight), self.mesh)
        # Once, after the sum: inside it, n ranks would add n biases. Under autocast the sum is in 16 bits, as
        # nn.Linear's output would be; an fp32 bias would make it fp32 again.
        return output if bias is None else output + bias.to(output.dtype)
