"""The facts of one host, read from the kernel and from torch. Linux; elsewhere what it does not say is None."""

import os
import platform
import re
import resource
import shutil
from pathlib import Path

import torch

from src.doctor.facts import Machine
from src.doctor.network import interfaces, own_name_means
from src.environment import num_cores
from src.precision import cpu_has_native_bf16

CGROUPS = Path("/sys/fs/cgroup")
#: By version of control groups, 2 and 1: the limit, what is taken, and in memory.stat the files not used of late.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "none" by a number near 2^63


def inspect_machine(run_dir: Path) -> Machine:
    """This host, now. Starts no CUDA context."""
    memory = meminfo(text_of(Path("/proc/meminfo")) or "")
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk, shm = shutil.disk_usage(run_dir), Path("/dev/shm")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    driver = text_of(Path("/proc/driver/nvidia/version"))
    return Machine(
        system=f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver()) or 'libc unknown'}",
        cpu=cpu_model(text_of(Path("/proc/cpuinfo")) or "") or platform.machine(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        has_native_bf16=cpu_has_native_bf16(),
        machine_cores=os.cpu_count() or num_cores(),
        allowed_cores=num_cores(),
        cpu_quota=cpu_quota(),
        memory_bytes=memory.get("MemTotal", pages),
        available_memory_bytes=memory.get("MemAvailable", pages),
        memory_limit_bytes=memory_limit(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        disk_bytes=disk.total,
        free_disk_bytes=disk.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        interfaces=interfaces(),
        resolves_to=own_name_means(),
        has_nvidia_driver=driver is not None or Path("/dev/nvidiactl").exists(),
        driver_version=None if driver is None else driver_version(driver),
        visible_gpus=torch.cuda.device_count(),
    )


def text_of(path: Path) -> str | None:
    """A file of the kernel's; None where this kernel, or this container, has none or shows none."""
    try:
        return path.read_text()
    except OSError:
        return None


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes: it writes kB and means KiB."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def cpu_model(text: str) -> str | None:
    """Of /proc/cpuinfo; ARM's has none."""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def driver_version(text: str) -> str | None:
    """Of /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."."""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def cpu_quota() -> float | None:
    """Cores' worth of time that this process's control group, and those that it lies in, may use; None: no limit."""
    found = []
    for group in control_groups("cpu"):
        if (text := text_of(group / "cpu.max")) is not None:
            found.append(quota_of(*text.split()))
        quota, period = (text_of(group / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
        if quota is not None and period is not None:
            found.append(quota_of(quota.strip(), period.strip()))
    return min((quota for quota in found if quota is not None), default=None)


def quota_of(quota: str, period: str) -> float | None:
    """Microseconds of CPU in each period of wall time, as cores; "max" and -1 are no limit."""
    return None if quota in ("max", "-1") else int(quota) / int(period)


def memory_limit() -> int | None:
    """Bytes that this process's control group, and those that it lies in, may take; None: no limit."""
    return min((limit for limit, _ in memory_groups()), default=None)


def free_memory_bytes() -> int:
    """What this process can still be given without swapping, by the machine and by its control groups."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of a system without /proc: all there is
    available = meminfo(text_of(Path("/proc/meminfo")) or "").get("MemAvailable", pages)
    return max(0, min([available, *(limit - taken for limit, taken in memory_groups())]))


def memory_groups() -> list[tuple[int, int]]:
    """(limit, taken), bytes, of each control group that this process lies in and that has a limit.

    taken: without the pages of files that the kernel drops first when memory is short. What has once read a data set
    larger than its limit would else look full for ever.
    """
    found = []
    for group in control_groups("memory"):
        for limit_name, taken_name, file_name in MEMORY_FILES:
            limit, taken = text_of(group / limit_name), text_of(group / taken_name)
            if limit is not None and taken is not None and (most := limit_of(limit.strip())) is not None:
                stat = text_of(group / "memory.stat") or ""
                files = re.search(rf"^{file_name} (\d+)$", stat, re.MULTILINE)
                found.append((most, int(taken) - (int(files[1]) if files else 0)))
    return found


def control_groups(controller: str) -> list[Path]:
    """Folders of the groups that this process lies in, innermost first: of version 2, then of version 1."""
    own = text_of(Path("/proc/self/cgroup")) or ""
    second = re.search(r"^0::/(.*)$", own, re.MULTILINE)
    first = re.search(rf"^\d+:(?:.*,)?{controller}(?:,.*)?:/(.*)$", own, re.MULTILINE)
    found = []
    for root, inside in ((CGROUPS, second), (CGROUPS / controller, first)):
        folder = root / (inside[1] if inside else "")
        # A container may see its own group as the root while /proc names it by the host's path.
        found += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return found


def limit_of(text: str) -> int | None:
    return None if text == "max" or int(text) >= NO_LIMIT_BYTES else int(text)
