"""What is wrong with a model's tensor plan, seen before anything starts: one line each, with a remedy.

The plan itself imports DTensor (1 s), so this is asked only where layers are split.
"""

from typing import cast

from torch import nn

from src.strategies.base import Setting

#: The methods of `src.parallel.tensor.Splittable`, and what each says.
CARRIES = {"tensor_plan": "how its layers are split", "tensor_counts": "what the number of ranks must divide"}


def lacking_problems(model: nn.Module, needing: str, without: str) -> list[str]:
    """The methods that `needing` asks of a model; without: what does not need them."""
    lacking = {method: words for method, words in CARRIES.items() if not hasattr(model, method)}
    said = " and ".join(f"{words} ({method})" for method, words in lacking.items())
    name = type(model).__name__
    return (
        [f"model {name} does not say {said}, which {needing} needs. Use {without}, or a model that does."]
        if lacking
        else []
    )


def plan_problems(model: nn.Module, sequence_parallel: bool) -> list[str]:
    """Of a whole model that carries a plan. model: on the meta device."""
    from src.parallel.plan import Splittable, key_faults, plan_faults

    plan, name = cast(Splittable, model).tensor_plan(sequence_parallel), type(model).__name__
    return key_faults(model, plan, name) or plan_faults(model, plan, name)


def stage_plan_problems(stages: list[nn.Module], sequence_parallel: bool) -> list[str]:
    """Of the stages of a model without `plan_problems`: their plans may name what other stages hold."""
    from src.parallel.plan import Splittable, plan_faults

    return [
        line
        for number, stage in enumerate(stages)
        for line in plan_faults(
            stage, cast(Splittable, stage).tensor_plan(sequence_parallel), f"stage {number} of {type(stage).__name__}"
        )
    ]


def fused_sgd_problems(setting: Setting) -> list[str]:
    """For strategies whose parameters are DTensors."""
    if setting.optimizer.get("_target_") == "torch.optim.SGD" and setting.optimizer.get("fused"):
        return ["optimizer.fused=true: torch has no fused SGD for sharded tensors. Use optimizer.fused=false."]
    return []
