"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019, section 3) by torch's `parallelize_module`.

A model carries its own plan: `tensor_plan(sequence_parallel)` names, for each module that has parameters, the style in
which it is split. Activations between the named modules are plain tensors: whole on every rank or, under sequence
parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2), this rank's part of each
sequence. The styles of torch that serve a plan are ColwiseParallel, RowwiseParallel and PrepareModuleInput.
"""

from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.parallel.draws import own_draws

Plan = dict[str, ParallelStyle]


class Splittable(Protocol):
    """What a model carries so that strategy=tp can split it."""

    def tensor_plan(self, sequence_parallel: bool) -> Plan:
        """A style for each module that has parameters; keys as parallelize_module takes them ("blocks.*.mlp.up")."""

    def tensor_counts(self) -> dict[str, int]:
        """What the number of ranks must divide, by the configuration's key: {"model.heads": 12}."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> nn.Module:
    """`model` with every parameter a DTensor on `mesh` (one axis), split as its plan says. In place.

    Every rank must hold the same weights: each cuts its part of its own. What is whole (`Whole`) torch sends around.
    """
    plan = cast(Splittable, model).tensor_plan(sequence_parallel)
    parallelize_module(model, mesh, plan, src_data_rank=None)
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left_out:
        raise ValueError(
            f"the tensor plan of {type(model).__name__} leaves out {', '.join(left_out)}; name the module of each."
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


class Both(ParallelStyle):
    """Two styles for one module, applied in this order."""

    def __init__(self, first: ParallelStyle, second: ParallelStyle) -> None:
        self.styles = (first, second)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module


class OwnDraws(ParallelStyle):
    """A module that works on this rank's part of something: its dropout must differ from that of the other parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_draws(module, device_mesh.get_local_rank(), device_mesh.device_type)
        return module


def settle_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients that are still parts of a sum (those of `Whole` modules under sequence parallelism).

    Once a step, after the last backward. Where the model is also data parallel, `fully_shard` has done it.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
            parameter.grad = gradient.redistribute(placements=cast(DTensor, parameter).placements)


def whole_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """The state of a model of DTensors, gathered tensor by tensor to the CPU; empty where not `keep`. Collective."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation under zero2 the gathered weights stand in for the shards
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu().contiguous()
    return whole
