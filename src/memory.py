"""Peak memory, as far as the machine can say; sizes in words; what the C library does with memory that is freed."""

import ctypes
import resource
import sys

import torch


def synchronize(device: torch.device) -> None:
    """Wait for everything that was given to the device; before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


#: By GPU, the highest peak that its allocator was made to forget. Of the process, as the allocator itself is.
_forgotten: dict[torch.device, int] = {}


def forget_peak(device: torch.device) -> None:
    """Let a GPU's allocator measure a peak anew; `peak_memory_bytes` still knows the one before."""
    _forgotten[device] = peak_memory_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """So far: on a GPU the allocator's, on a CPU the process's resident size (weights, data and libraries alike)."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _forgotten.get(device, 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def memory(num_bytes: float) -> str:
    """A size in the largest unit that it has one of: GiB, MiB, KiB (2^30, 2^20, 2^10 bytes), or bytes."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.{0 if num_bytes >= 10 * unit else 1}f} {name}"
    return f"{num_bytes:.0f} bytes"


#: glibc's malloc.h: blocks from this size on are mapped one by one; free memory at the heap's end from this size on
#: is given back.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Let a CPU rank keep up to 1 GiB of what a step frees, for the next step, instead of giving it back.

    By default glibc unmaps a large tensor as soon as it is freed, and the next step's page faults map and clear it
    again: 2000 faults and a sixth of the time in a step of model=cnn. Does nothing under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    gib = 1 << 30
    if not mallopt(M_MMAP_THRESHOLD, gib):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that older versions take
    mallopt(M_TRIM_THRESHOLD, gib)
