"""Low-rank adapters (Hu et al. 2021, "LoRA") for models of Hugging Face's, by peft."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Lora:
    """rank: of the adapters; None: there are none. alpha: their output is scaled by alpha / rank. dropout: of their
    input. modules: ends of the names of the layers that get one; None: what peft has for the architecture.
    """

    rank: int | None = None
    alpha: float = 16
    dropout: float = 0.0
    modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"model.lora.rank={self.rank} is no rank; choose 1 or more, or null for no adapters.")

    def add_to(self, model: Any) -> None:
        """Put adapters into `model`, in place, and freeze all else. Drawn on torch's default device."""
        if self.rank is None:
            return
        from peft import LoraConfig, inject_adapter_in_model  # accelerate and more

        made = LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.modules)
        try:
            inject_adapter_in_model(made, model)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"model.lora: {reason} Set model.lora.modules, such as [q_proj,v_proj].") from error


def merge(model: "nn.Module") -> None:
    """Add every adapter of `model` to the weights beside it and take it out. In place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
