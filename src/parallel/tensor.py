"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3) by torch's `parallelize_module`.

A model carries its own plan: `tensor_plan(sequence_parallel)` names, for each module that has parameters, the style in
which it is split. Activations between the named modules are plain tensors: whole on every rank or, under sequence
parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2), this rank's part of each
sequence. The styles of torch that serve a plan are ColwiseParallel, RowwiseParallel and PrepareModuleInput.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.parallel.plan import Splittable, plan_faults, resolved


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """`model` with every parameter a DTensor on `mesh` (one axis), split as its plan says. In place.

    Every rank must hold the same weights: each cuts its part of its own. What is whole (`Whole`) torch sends around.
    The plan may name modules that the model lacks: those of other stages.
    """
    plan, name = cast(Splittable, model).tensor_plan(sequence_parallel), type(model).__name__
    if faults := plan_faults(model, plan, name):
        raise ValueError(" ".join(faults))
    parallelize_module(model, mesh, resolved(model, plan), src_data_rank=None)
    left = [key for key, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise ValueError(f"the tensor plan of {name} has styles that leave {', '.join(left)} unsplit; use others.")
    split = [key for key, buffer in model.named_buffers() if buffer.is_floating_point() and isinstance(buffer, DTensor)]
    if split:
        # Data ranks average these after a step, each the plain one that it holds.
        raise ValueError(
            f"the tensor plan of {name} makes the buffers {', '.join(split)} DTensors, and floating-point buffers must"
            " stay plain. Give their module no style, and its parameters, if any, to a module inside it."
        )
    if sequence_parallel:
        model.register_forward_pre_hook(_refuse_uneven(mesh.size()))
    return model


def _refuse_uneven(degree: int) -> Any:
    def refuse(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0]
        if not tokens.is_floating_point() and tokens.shape[1] % degree:
            raise ValueError(
                f"sequences of {tokens.shape[1]} tokens don't split over strategy.tp={degree} ranks evenly."
                " Use strategy.sequence_parallel=false, or a length that the ranks divide."
            )

    return refuse


class Whole(ParallelStyle):
    """A module whose weights are whole on every rank; its activations may be parts.

    inputs, outputs: how the plain tensors that go in and come out are placed; outputs None: as the inputs.
    Where they are parts, the gradient of the weights is a sum over the ranks, and DTensor knows that it is.
    """

    def __init__(self, inputs: Placement, outputs: Placement | None = None) -> None:
        self.inputs, self.outputs = [inputs], [inputs if outputs is None else outputs]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # No partition function: every weight replicated. torch's types say that hooks return nothing.
        return distribute_module(module, device_mesh, None, self._take, self._give)  # type: ignore[arg-type]

    def _take(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, self.inputs, run_check=False)

    def _give(self, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        return outputs.redistribute(placements=self.outputs).to_local()


class VocabularyParallel(ParallelStyle):
    """An embedding whose table is split by rows, which also scores vectors against it (the tied head).

    stream: the placement of activations between modules. Numbers give vectors, plain; vectors give scores, a DTensor
    split on the last dim.
    """

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split, self._take, self._give)  # type: ignore[arg-type]

    def _split(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(part, weight.requires_grad))

    def _take(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        (tensor,) = inputs
        placement = self.stream if tensor.is_floating_point() else Replicate()
        return DTensor.from_local(tensor, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])

    def _give(self, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        if outputs.placements == (Shard(outputs.ndim - 1),):  # scores
            return outputs
        return outputs.redistribute(placements=[self.stream]).to_local()


def settle_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients that are still parts of a sum (those of `Whole` modules under sequence parallelism).

    Once a step, after the last backward. Where the model is also data parallel, `fully_shard` has done it.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
            parameter.grad = gradient.redistribute(placements=cast(DTensor, parameter).placements)


def whole(tensor: Tensor) -> Tensor:
    """The full value of a DTensor, plain; gathered or summed one mesh axis after the other. Collective.

    `full_tensor()` may go several axes at once, and says in a warning that it is slow. A plain tensor stays as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    for axis in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def whole_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The state of a model of DTensors, gathered tensor by tensor to the CPU; empty where not `keep`. Collective."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation under zero2 the gathered weights stand in for the shards
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full = whole(tensor)
        if keep:
            weights[name] = full.detach().cpu().contiguous()
    return weights
