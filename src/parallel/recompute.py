"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): recompute, don't keep.

A unit of the model keeps only its inputs for backward, which runs the unit's forward once more: a third more
arithmetic a step, and memory for the activations of one unit at a time instead of all.

The unit's `forward` is replaced on the instance, and nothing else changes: parameters keep their names, and the unit's
own hooks (gathering and casting by `fully_shard`, a stream of random draws) stay outside of what is recomputed. So a
model can be handed to any strategy like this, and what comes of it is in torchtitan's order: split (whose hooks sit on
the modules inside), recomputed, sharded.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)

#: The values of trainer.activation_checkpointing.
MODES = ("none", "full")


def recompute_activations(model: nn.Module, mode: str) -> nn.Module:
    """`model`; under mode "full" its `units()` are recomputed in backward. In place, and before any strategy has it.

    A model without `units()` is one unit: while it waits for its backward it holds its inputs only, but in backward all
    activations are there at once.
    """
    if mode == "full":
        units = getattr(model, "units", None)
        if units is None:
            log.warning(
                "trainer.activation_checkpointing=full recomputes all of %s as one, since it names no units(): that"
                " takes time, and lowers its peak memory hardly.",
                type(model).__name__,
            )
        for unit in [model] if units is None else units():
            unit.forward = Recomputed(unit, unit.forward)
    return model


class Recomputed:
    """A module's forward that keeps its inputs for backward instead of its activations.

    Backward runs the same operations once more, on the same random numbers and buffers, so gradients are equal to the
    bit. Without gradients nothing is kept, and nothing recomputed.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=self.contexts, **named)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Entered around the forward, and around each recomputation of it."""
        return nullcontext(), BuffersBefore(self.module)


class BuffersBefore:
    """Lets a module run on copies of the buffers that it has now, and then have its own back.

    Else BatchNorm's running statistics would count each batch twice, and what depends on a buffer that it changes
    (spectral norm) would be recomputed from another one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before = [
            (part, name, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]

    def __enter__(self) -> None:
        # Replaced rather than overwritten: others may have saved the buffers themselves for their backward.
        self.own: list[Tensor | None] = [part._buffers[name] for part, name, _ in self.before]
        for part, name, before in self.before:
            part._buffers[name] = before.clone()  # a second recomputation starts from the same

    def __exit__(self, *raised: object) -> None:
        for (part, name, _), own in zip(self.before, self.own, strict=True):
            part._buffers[name] = own
