"""Peak memory, as far as the machine can say."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the allocator's peak; on a CPU the process's peak resident size (weights, data and libraries alike)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
