"""Floating-point operations of what a model multiplies, for estimates of time."""

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

#: torch counts the fused attention of GPUs only.
FUSED_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flops_of(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Of one operation; 2 a multiplication and addition, attention in full (PaLM, appendix B). Elementwise ones: 0."""
    packet = getattr(func, "overloadpacket", func)
    if packet is FUSED_ON_CPU:
        query, key, value = args[:3]
        # Grouped heads: each query head multiplies with its group's keys.
        heads = (math.prod(query.shape[:-2]), 1)
        shapes = [(*heads, *tensor.shape[-2:]) for tensor in (query, key, value)]
        return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, out_val=result))
