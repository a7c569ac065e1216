"""A model's tensor plan, which says module by module how each is split, and what is wrong with it.

The plan's keys are those of torch's `parallelize_module`: names of modules, with patterns for each part between dots.
"""

from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Protocol, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.parallel.draws import own_draws

Plan = dict[str, ParallelStyle]


class Splittable(Protocol):
    """What a model carries so that strategy=tp can split it."""

    def tensor_plan(self, sequence_parallel: bool) -> Plan:
        """A style for each module that has parameters; keys as parallelize_module takes them ("blocks.*.mlp.up")."""

    def tensor_counts(self) -> dict[str, int]:
        """What the number of ranks must divide, by the configuration's key: {"model.heads": 12}."""


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


#: What a style does to activations or random numbers alone leaves the module's parameters as they are.
HOOKS_ONLY = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput, OwnDraws)


def splits(style: ParallelStyle) -> bool:
    """Whether `style` reaches the parameters of its module."""
    if isinstance(style, Both):
        return any(splits(part) for part in style.styles)
    return not isinstance(style, HOOKS_ONLY)


def matched(model: nn.Module, key: str) -> dict[str, nn.Module]:
    """The modules that a plan's key names; "" is the model itself."""
    found = {"": model}
    for token in key.split(".") if key else []:
        found = {
            f"{path}.{name}" if path else name: child
            for path, module in found.items()
            for name, child in module.named_children()
            if fnmatch(name, token)
        }
    return found


def resolved(model: nn.Module, plan: Plan) -> Plan:
    """The plan with a name for each module in place of patterns; without the keys that name none."""
    return {name: style for key, style in plan.items() for name in matched(model, key)}


def unknown_keys(model: nn.Module, plan: Plan) -> dict[str, str | None]:
    """The plan's keys that name no module, and for each the nearest that would."""
    return {key: _nearest(model, key) for key in plan if not matched(model, key)}


def _nearest(model: nn.Module, key: str) -> str | None:
    tokens = key.split(".")
    for place, token in enumerate(tokens):
        parents = matched(model, ".".join(tokens[:place]))
        if not matched(model, ".".join(tokens[: place + 1])):
            names = {name for module in parents.values() for name, _ in module.named_children()}
            close = get_close_matches(token, sorted(names), n=1)
            return ".".join([*tokens[:place], *close, *tokens[place + 1 :]]) if close else None
    return None


def left_out(model: nn.Module, plan: Plan) -> list[str]:
    """The parameters that no style of the plan can reach. A style that is no hook may reach all below its module."""
    reached = {
        id(part)
        for key, style in plan.items()
        if splits(style)
        for module in matched(model, key).values()
        for part in module.modules()
    }
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if id(module) not in reached
        for key, _ in module.named_parameters(recurse=False)
    ]


def shared(model: nn.Module) -> list[str]:
    """Parameters that several modules hold ("embedding.weight = head.weight"); split, each would have its own."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(f"{path}.{key}" if path else key)
    return [" = ".join(several) for several in names.values() if len(several) > 1]


def plan_faults(model: nn.Module, plan: Plan, name: str) -> list[str]:
    """What keeps `plan` from splitting all of `model`, in one line each. name: of the model in the words."""
    found = []
    if missed := left_out(model, plan):
        found.append(
            f"the tensor plan of {name} leaves out {', '.join(missed)}. Name the module of each; one whose weights stay"
            " whole takes src.parallel.tensor.Whole(Replicate())."
        )
    if several := shared(model):
        found.append(
            f"{name} shares {', '.join(several)}, and tensor parallelism would give each its own. Let one module serve"
            " both, as the tied table of src/models/gpt.py does, or use a strategy that does not split layers."
        )
    return found


def key_faults(model: nn.Module, plan: Plan, name: str) -> list[str]:
    """Keys that are no module's, in one line each."""
    return [
        f"the tensor plan of {name} names {key!r}, which is no module of it."
        + (f" Use {near!r}." if near else " Correct the name, or leave it out.")
        for key, near in unknown_keys(model, plan).items()
    ]


def refuse_unknown_keys(model: nn.Module, sequence_parallel: bool) -> None:
    """Raises ValueError where the plan of a whole model names a module that it has not; torch only warns."""
    plan = cast(Splittable, model).tensor_plan(sequence_parallel)
    if faults := key_faults(model, plan, type(model).__name__):
        raise ValueError(" ".join(faults))
