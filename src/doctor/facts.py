"""What the doctor knows: plain values only, so that findings can be tested with made-up ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """level: a "problem" breaks runs, or makes them wrong or much slower; a "note" a reader should know of."""

    level: Literal["problem", "note"]
    what: str
    remedy: str


@dataclass(frozen=True)
class Interface:
    """A network interface. has_ipv4: whether it has such an address."""

    name: str
    is_up: bool
    has_ipv4: bool

    @property
    def is_loopback(self) -> bool:
        return self.name.startswith("lo")


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU. allocated, reserved: by this process, through torch; free: of the whole device. All in bytes."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    has_native_bf16: bool


@dataclass(frozen=True)
class Machine:
    """One host, as a process on it sees it. None: the machine does not say.

    allowed_cores: that this process may run on. cpu_quota: cores' worth of time that its container may use.
    memory_limit_bytes: its container's. shm_bytes: size of /dev/shm. memlock_bytes: that a process may pin; None: no
    limit. resolves_to: what the host's own name means: "loopback", "other"; empty: nothing.
    has_nvidia_driver: whether the kernel has it, whatever torch can see of it. disk: the run folder's.
    """

    system: str
    cpu: str
    cpu_capability: str
    has_native_bf16: bool
    machine_cores: int
    allowed_cores: int
    cpu_quota: float | None
    memory_bytes: int
    available_memory_bytes: int
    memory_limit_bytes: int | None
    shm_bytes: int | None
    disk_bytes: int
    free_disk_bytes: int
    open_files: int
    memlock_bytes: int | None
    has_infiniband: bool
    interfaces: tuple[Interface, ...]
    resolves_to: tuple[str, ...]
    has_nvidia_driver: bool
    driver_version: str | None
    visible_gpus: int

    @property
    def usable_cores(self) -> float:
        return self.allowed_cores if self.cpu_quota is None else min(self.allowed_cores, self.cpu_quota)


@dataclass(frozen=True)
class Rank:
    """One rank of the run. host: its name, which the report does not show. device: "cpu", "cuda:0".

    versions: of packages and libraries; None: not there. variables: of the environment, as `environment.shown` says.
    sums_right: by backend, whether an all_reduce over all ranks gave the sum.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    device: str
    threads: int
    versions: Mapping[str, str | None]
    variables: Mapping[str, str]
    sums_right: Mapping[str, bool]
    machine: Machine
    gpu: Gpu | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Wandb:
    """problem: why a run could not go online, in words without any key; None: it could."""

    is_installed: bool
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything of a report. ranks: by world rank, at least one. backends: torch's, and whether each is built in.

    commit: of shardlab's own checkout, in words. needed_by: packages that an option of the configuration can't do
    without, and the option.
    """

    ranks: tuple[Rank, ...]
    backends: Mapping[str, bool]
    wandb: Wandb
    commit: str
    torch_build: Mapping[str, str] = field(default_factory=dict)
    needed_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of their first rank; a report calls them host 0, host 1, …"""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def first_of_each_host(self) -> tuple[Rank, ...]:
        return tuple(next(rank for rank in self.ranks if rank.host == host) for host in self.hosts)
