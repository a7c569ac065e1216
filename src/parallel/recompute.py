"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): recompute, don't keep.

A unit of the model keeps only its inputs for backward, which runs the unit's forward once more: a third more
arithmetic a step, and memory for the activations of one unit at a time instead of all. Selective (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 5): the results of matrix products,
convolutions and attention are kept as well, and only what is cheap between them is computed again.

The unit's `forward` is replaced on the instance, and nothing else changes: parameters keep their names, and the unit's
own hooks (gathering and casting by `fully_shard`, a stream of random draws) stay outside of what is recomputed. So a
model can be handed to any strategy like this, and what comes of it is in torchtitan's order: split (whose hooks sit on
the modules inside), recomputed, sharded.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from src.meter import storages_inside

log = logging.getLogger(__name__)

#: The values of trainer.activation_checkpointing.
MODES = ("none", "full", "selective")

#: What takes most of a forward's arithmetic, by aten's names, in whichever of its kernels.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
COSTLY = frozenset(f"aten::{name}" for name in (*PRODUCTS, *ATTENTION))


def recompute_activations(model: nn.Module, mode: str) -> nn.Module:
    """`model`; but in mode "none" its `units()` are recomputed in backward. In place, and before any strategy has it.

    A model without `units()` is one unit: while it waits for its backward it holds its inputs only, but in backward all
    activations are there at once.
    """
    if mode != "none":
        units = getattr(model, "units", None)
        if units is None:
            log.warning(
                "trainer.activation_checkpointing=%s recomputes all of %s as one, since it names no units(): that"
                " takes time, and lowers its peak memory hardly.",
                mode,
                type(model).__name__,
            )
        for unit in [model] if units is None else units():
            unit.forward = Recomputed(unit, unit.forward, keeps_costly=mode == "selective")
    return model


class Recomputed:
    """A module's forward that keeps its inputs for backward instead of its activations.

    keeps_costly: the results of COSTLY operations as well. Backward runs the others once more, on the same random
    numbers and buffers, so gradients are equal to the bit. Without gradients nothing is kept, and nothing recomputed.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], keeps_costly: bool = False) -> None:
        self.module, self.forward, self.keeps_costly = module, forward, keeps_costly

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        if torch.compiler.is_compiling():
            return self.traced(*inputs, **named)
        # Whoever hooks what is saved for backward (to move it to the host, to count it) sees what is kept here as well.
        return checkpoint(
            self.forward,
            *inputs,
            use_reentrant=False,
            context_fn=self.contexts,
            respect_saved_tensors_hooks=True if self.keeps_costly else None,
            **named,
        )

    def traced(self, *inputs: Any, **named: Any) -> Any:
        """The same where torch.compile reads it, which decides by a graph without effects: buffers need no copies."""
        if not self.keeps_costly:
            return checkpoint(self.forward, *inputs, use_reentrant=False, **named)
        contexts = partial(create_selective_checkpoint_contexts, keeps)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Entered around the forward, and around each recomputation of it."""
        buffers = BuffersBefore(self.module)
        if not self.keeps_costly:
            return nullcontext(), buffers
        keep, reuse = create_selective_checkpoint_contexts(Keeping(self.module))  # type: ignore[no-untyped-call]
        return keep, Within(buffers, OnCostly(reuse))


def keeps(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """`Keeping` for a graph, in which nothing is overwritten, and a kept draw is the one that all see."""
    return CheckpointPolicy.MUST_SAVE if is_costly(operation) else CheckpointPolicy.PREFER_RECOMPUTE


class Keeping:
    """Says of each operation of a forward whether its result is kept, and watches that nobody overwrites what is.

    torch notices that by a tensor's version, and `x @ weight` of three dims loses it on its way: `x @ weight` followed
    by `+=` gave wrong gradients without a word.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: dict[int, str] = {}  # which operation made a storage

    def __call__(self, context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        if not isinstance(operation, OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        given = dict(zip((a.name for a in operation._schema.arguments), arguments, strict=False)) | named
        if operation._schema.is_mutable:
            self.refuse_overwriting(operation, given)
        # Not one that draws: in backward, what follows it would find other random numbers.
        if not is_costly(operation) or given.get("dropout_p"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.kept |= dict.fromkeys(storages(context.op_output), name_of(operation))
        return CheckpointPolicy.MUST_SAVE

    def refuse_overwriting(self, operation: OpOverload, given: dict[str, Any]) -> None:
        """Raises ValueError where `operation` writes to what is kept. given: its arguments by name."""
        written = [a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for storage in storages([given.get(name) for name in written]):
            if storage in self.kept:
                raise ValueError(
                    f"trainer.activation_checkpointing=selective keeps the result of {self.kept[storage]} in a"
                    f" {type(self.module).__name__}, and {name_of(operation)} overwrites it. Use"
                    " trainer.activation_checkpointing=full, or compute it out of place (x = x + y, inplace=False)."
                )


def storages(tree: Any) -> list[int]:
    """What identifies the memory of each tensor in `tree`, while it is alive."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [inner.untyped_storage()._cdata for leaf in leaves for inner in storages_inside(leaf)]


def is_costly(operation: Any) -> bool:
    return isinstance(operation, OpOverload) and name_of(operation).partition(".")[0] in COSTLY


def name_of(operation: OpOverload) -> str:
    """As "aten::add_.Tensor"."""
    return str(operation.name())  # type: ignore[no-untyped-call]


class OnCostly(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base is untyped
    """Shows `mode` the COSTLY operations only.

    torch's own, which is to give back what was kept, counts all operations and fails where a recomputation does others
    than the forward did: as FSDP1 and ZeRO-3 do around a layer, whose weights are there already or are not.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_costly(func):
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class Within:
    """Several contexts as one, entered in their order; again and again, where each of them can be."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.entered = stack.pop_all()

    def __exit__(self, *raised: Any) -> None:
        self.entered.__exit__(*raised)


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
