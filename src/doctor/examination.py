"""Ask every rank for its facts, and whether the ranks' process group adds up."""

import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from src.doctor.environment import shown
from src.doctor.facts import Facts, Gpu, Rank, Wandb
from src.doctor.machine import inspect_machine
from src.tracking.source import source_state
from src.world import World

#: Looked up without importing them; what is not there is said, and breaks nothing.
PACKAGES = (
    *("torch", "torchvision", "transformers", "accelerate", "datasets", "safetensors", "numpy"),
    *("hydra-core", "omegaconf", "wandb", "rich", "triton", "scikit-learn", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


def inspect_run(world: World, run_dir: Path, needed_by: Mapping[str, str], wandb: Wandb | None = None) -> Facts | None:
    """The facts of all ranks, on world rank 0; None elsewhere. Collective.

    needed_by: as in `Facts`. wandb: what rank 0 knows of its tracker; None: it is looked up there.
    """
    ranks = gathered(world, inspect_rank(world, run_dir, sums_right(world), versions(*needed_by)))
    if ranks is None:
        return None
    return Facts(
        ranks=tuple(ranks),
        backends={
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
            "ucc": dist.is_ucc_available(),
        },
        wandb=wandb or inspect_wandb(),
        commit=commit_words(),
        torch_build=torch_build(),
        needed_by=needed_by,
    )


def torch_build() -> dict[str, str]:
    """What this torch was built with."""
    backends: Any = torch.backends  # its functions carry no types
    libraries = {"MKL": backends.mkl, "oneDNN": backends.mkldnn, "OpenMP": backends.openmp}
    return {
        "CUDA": torch.version.cuda or "none: this build is for CPUs",
        "cuDNN": str(backends.cudnn.version() or "none"),
        **{name: "yes" if library.is_available() else "no" for name, library in libraries.items()},
    }


def gathered(world: World, rank: Rank) -> list[Rank] | None:
    """Every rank's facts by world rank, on world rank 0; None elsewhere. Collective."""
    found: list[Rank] | None = [rank] * world.world_size if world.is_main else None
    dist.gather_object(rank, found, dst=0)
    return found


def sums_right(world: World) -> dict[str, bool]:
    """By backend, whether an all_reduce gives the sum. Collective.

    Rank r gives (r + 1) times 1 to 8, and the sum over n ranks is n(n + 1) / 2 times 1 to 8.
    """
    devices = {"gloo": torch.device("cpu"), **({"nccl": world.device} if world.device.type == "cuda" else {})}
    found = {}
    for backend, device in devices.items():
        steps = torch.arange(1.0, 9.0, device=device)
        total = steps * (world.world_rank + 1)
        dist.all_reduce(total)
        found[backend] = bool(torch.equal(total, steps * (world.world_size * (world.world_size + 1) / 2)))
    return found


def inspect_rank(world: World, run_dir: Path, sums: dict[str, bool], installed: dict[str, str | None]) -> Rank:
    """This process's own facts. sums: as `sums_right` gave them. installed: as `versions` did."""
    return Rank(
        world_rank=world.world_rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        host=socket.gethostname(),
        device=str(world.device),
        threads=torch.get_num_threads(),
        versions=installed,
        variables=shown(os.environ),
        sums_right=sums,
        machine=inspect_machine(run_dir),
        gpu=inspect_gpu(world.device) if world.device.type == "cuda" else None,
    )


def versions(*more: str) -> dict[str, str | None]:
    """Of Python, PACKAGES, `more` packages, and the NCCL that torch was built with; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # with its build, "+cu130" or "+cpu"
    built_with = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    found["NCCL"] = None if built_with is None else ".".join(map(str, built_with))
    return found


def inspect_gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        has_native_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


def inspect_wandb() -> Wandb:
    """Whether a run could be tracked online from here. Asks no server, and shows no key."""
    try:
        from src.tracking.wandb_client import login_problem  # wandb, 0.6 s; it may not be installed
    except ImportError:
        return Wandb(is_installed=False)
    return Wandb(is_installed=True, problem=login_problem())


def commit_words() -> str:
    state = source_state()
    if state is None:
        return "not a git checkout"
    return f"commit {state['commit']}{' with uncommitted changes' if state['dirty'] else ''}"
