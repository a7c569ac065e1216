"""What is wrong with one host, whatever runs on it: functions of plain facts."""

from collections.abc import Iterator, Mapping

from src.doctor.facts import Finding, Machine
from src.doctor.network import unmatched
from src.memory import memory

MIN_SHM_BYTES = 1 << 30  # Docker's default of 64 MiB is less than one batch of images
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 1024
MIN_AVAILABLE = 0.05  # of the host's memory
NO_GPU = ("", "-1", "NoDevFiles")  # what CUDA_VISIBLE_DEVICES says to hide all


def shared_memory(machine: Machine) -> Iterator[Finding]:
    if machine.shm_bytes is not None and machine.shm_bytes < MIN_SHM_BYTES:
        yield Finding(
            "problem",
            f"/dev/shm holds {memory(machine.shm_bytes)}: loader processes hand over batches in it and NCCL's ranks of"
            " one host meet in it, and a full one ends them with a bus error",
            "Give a container docker run --ipc=host, or --shm-size=8g; else mount -o remount,size=8G /dev/shm.",
        )


def disk(machine: Machine) -> Iterator[Finding]:
    if machine.free_disk_bytes < MIN_DISK_BYTES:
        yield Finding(
            "problem",
            f"the run folder's disk has {memory(machine.free_disk_bytes)} left of {memory(machine.disk_bytes)}",
            "Make room, or write elsewhere with hydra.run.dir=...",
        )


def host_memory(machine: Machine) -> Iterator[Finding]:
    if machine.available_memory_bytes < MIN_AVAILABLE * machine.memory_bytes:
        yield Finding(
            "problem",
            f"{memory(machine.available_memory_bytes)} of the host's {memory(machine.memory_bytes)} are available",
            "End what takes the rest, or the kernel will end a rank without a word.",
        )
    limit = machine.memory_limit_bytes
    if limit is not None and limit < machine.memory_bytes:
        yield Finding(
            "note",
            f"the container may take {memory(limit)} of the host's {memory(machine.memory_bytes)}; a rank beyond it is"
            " killed without a word",
            "Count with the smaller number, or raise the limit (docker run --memory).",
        )


def cpu_time(machine: Machine) -> Iterator[Finding]:
    quota, cores = machine.cpu_quota, machine.allowed_cores
    if quota is not None and quota < cores:
        yield Finding(
            "problem",
            f"the container may use the time of {quota:g} core(s), but sees {cores}: threads are shared out over"
            f" {cores} and stand still together once the time is used up",
            "Limit the cores instead (docker run --cpuset-cpus), or set OMP_NUM_THREADS to"
            f" {max(1, int(quota))} divided by the ranks of the host.",
        )


def limits(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.open_files < MIN_OPEN_FILES:
        yield Finding(
            "problem",
            f"a process may open {machine.open_files} files: loader processes and many ranks need more",
            "Run ulimit -n 65536 before the start.",
        )
    if machine.has_infiniband and machine.memlock_bytes is not None:
        yield Finding(
            "problem",
            f"there is InfiniBand, but a process may pin {memory(machine.memlock_bytes)} of memory only, and NCCL's"
            " transport over it fails or is not used",
            "Run ulimit -l unlimited before the start, or docker run --ulimit memlock=-1.",
        )


def host_name(machine: Machine) -> Iterator[Finding]:
    if not machine.resolves_to:
        yield Finding(
            "problem",
            "the host's own name does not resolve: gloo and torchrun look it up, and may hang or meet on the wrong"
            " address",
            "Add it to /etc/hosts, or name an interface with GLOO_SOCKET_IFNAME.",
        )


def interface_names(machine: Machine, variables: Mapping[str, str]) -> Iterator[Finding]:
    """For GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME that name none of the host's interfaces."""
    names = [interface.name for interface in machine.interfaces]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for part in unmatched(variables.get(variable, ""), names):
            yield Finding(
                "problem",
                f"{variable}={variables[variable]}: no network interface here is called {part}, and ranks that"
                f" look for it can't meet",
                f"Unset it, or choose from {', '.join(names)}.",
            )


def hidden_gpus(machine: Machine, variables: Mapping[str, str], torch_cuda: str) -> Iterator[Finding]:
    """torch_cuda: the CUDA that torch was built for, or words that begin with "none"."""
    if not machine.has_nvidia_driver or machine.visible_gpus:
        return
    what = "the kernel has NVIDIA's driver, but torch sees no GPU"
    hiding = variables.get("CUDA_VISIBLE_DEVICES")
    if hiding is not None and hiding.strip() in NO_GPU:
        yield Finding("problem", f"{what}: CUDA_VISIBLE_DEVICES={hiding!r} hides all", "Unset it.")
    elif torch_cuda.startswith("none"):
        yield Finding("problem", f"{what}: this build of torch is for CPUs", "Install one for CUDA (pytorch.org).")
    else:
        driver = f"driver {machine.driver_version}, " if machine.driver_version else ""
        yield Finding(
            "problem",
            f"{what} ({driver}torch built for CUDA {torch_cuda})",
            "See whether nvidia-smi works here; a container needs docker run --gpus all, and an old driver an update.",
        )
