"""A healthy machine, rank and run, for tests to make ill."""

import dataclasses
from typing import Any

from src.doctor.facts import Facts, Gpu, Interface, Machine, Rank, Wandb

GIB = 1 << 30

MACHINE = Machine(
    system="Linux 6.1",
    cpu="A CPU",
    cpu_capability="AVX512",
    has_native_bf16=True,
    machine_cores=16,
    allowed_cores=16,
    cpu_quota=None,
    memory_bytes=64 * GIB,
    available_memory_bytes=60 * GIB,
    memory_limit_bytes=None,
    shm_bytes=32 * GIB,
    disk_bytes=1000 * GIB,
    free_disk_bytes=500 * GIB,
    open_files=65536,
    memlock_bytes=8 << 20,
    has_infiniband=False,
    interfaces=(Interface("lo", True, True), Interface("eth0", True, True)),
    resolves_to=("other",),
    has_nvidia_driver=False,
    driver_version=None,
    visible_gpus=0,
)
GPU = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 138 * GIB, GIB // 2, GIB, has_native_bf16=True)
VERSIONS = {"python": "3.11.7", "torch": "2.14.1", "NCCL": "2.30.7", "numpy": "2.4.6"}


def ranks(*changes: dict[str, Any], machine: Machine = MACHINE) -> tuple[Rank, ...]:
    """One rank for each of `changes`, all on one host but for what the changes say."""
    healthy = Rank(0, len(changes), 0, len(changes), "a", "cpu", 1, VERSIONS, {}, {"gloo": True}, machine)
    return tuple(
        dataclasses.replace(healthy, **{"world_rank": number, "local_rank": number, **change})
        for number, change in enumerate(changes)
    )


def facts(*changes: dict[str, Any], machine: dict[str, Any] | None = None, **more: Any) -> Facts:
    """A run of healthy ranks with `changes`, on a host with the changes of `machine`."""
    made: dict[str, Any] = {
        "ranks": ranks(*(changes or ({}, {})), machine=dataclasses.replace(MACHINE, **(machine or {}))),
        "backends": {"gloo": True, "nccl": True, "mpi": False, "ucc": False},
        "wandb": Wandb(is_installed=True),
        "commit": "commit 123456789abc",
        "torch_build": {"CUDA": "13.0"},
    }
    return Facts(**(made | more))
