"""What is wrong and the remedy, over all ranks and hosts: functions of plain facts."""

from collections.abc import Iterator

from src.doctor import machine_findings as machines
from src.doctor.facts import Facts, Finding, Rank
from src.memory import memory

#: Of a GPU's memory in other hands; a CUDA context of one's own takes about half a GiB.
MAX_TAKEN, MAX_TAKEN_BYTES = 0.05, 2 << 30
#: What all ranks must have in one version, beside what an option of the configuration needs.
SHARED_VERSIONS = ("python", "torch", "NCCL", "numpy")
#: Variables that make a run slower or noisier, and what they do. None: whatever the value.
COSTLY: dict[tuple[str, str | None], str] = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "makes every kernel wait for the one before",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "compares every collective over all ranks",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "makes the host wait for every collective",
    ("NCCL_P2P_DISABLE", "1"): "sends what passes between GPUs of one host through its memory",
    ("NCCL_SHM_DISABLE", "1"): "sends what passes between ranks of one host through its network",
    ("NCCL_IB_DISABLE", "1"): "leaves InfiniBand and RoCE unused",
    ("NVIDIA_TF32_OVERRIDE", None): "overrules precision=fp32 and precision=tf32",
}


def findings(facts: Facts) -> list[Finding]:
    """All of them, problems first, each once."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(dict.fromkeys(found), key=lambda finding: finding.level != "problem")


def of_hosts(facts: Facts) -> Iterator[Finding]:
    """What is wrong with each host, its number before it where there are several."""
    torch_cuda = facts.torch_build.get("CUDA", "none")
    for number, rank in enumerate(facts.first_of_each_host):
        machine = rank.machine
        found = [
            *machines.shared_memory(machine),
            *machines.disk(machine),
            *machines.host_memory(machine),
            *machines.cpu_time(machine),
            *machines.limits(machine),
            *machines.host_name(machine),
            *machines.interface_names(machine, rank.variables),
            *machines.hidden_gpus(machine, rank.variables, torch_cuda),
        ]
        for finding in found:
            yield finding if len(facts.hosts) == 1 else finding._replace(what=f"host {number}: {finding.what}")


def loopback(facts: Facts) -> Iterator[Finding]:
    """A name that means the host itself is fine as long as nobody else has to find it."""
    found = [
        number for number, rank in enumerate(facts.first_of_each_host) if rank.machine.resolves_to == ("loopback",)
    ]
    if len(facts.hosts) > 1 and found:
        yield Finding(
            "problem",
            f"the name of host {listed(found)} means the loopback address there, where no other host finds it",
            "Correct /etc/hosts, or name the interface with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )


def sums(facts: Facts) -> Iterator[Finding]:
    for backend in facts.ranks[0].sums_right:
        wrong = [rank.world_rank for rank in facts.ranks if not rank.sums_right.get(backend)]
        if wrong:
            yield Finding(
                "problem",
                f"an all_reduce over {backend} gave a wrong sum on rank {listed(wrong)}",
                "Trust no training here. Look for a library that is preloaded or overclocked memory; report it.",
            )


def mixed_versions(facts: Facts) -> Iterator[Finding]:
    for name in (*SHARED_VERSIONS, *facts.needed_by):
        known = {str(rank.versions.get(name) or "not installed") for rank in facts.ranks}
        if len(known) > 1:
            yield Finding(
                "problem",
                f"the ranks have different versions of {name}: {', '.join(sorted(known))}",
                "Install the same on all hosts.",
            )


def mixed_variables(facts: Facts) -> Iterator[Finding]:
    first = facts.ranks[0].variables
    for name in sorted({name for rank in facts.ranks for name in rank.variables}):
        if not name.startswith(("NCCL_", "GLOO_", "TORCH_")) or name == "TORCH_NCCL_TRACE_BUFFER_SIZE":
            continue
        others = [rank.world_rank for rank in facts.ranks if rank.variables.get(name) != first.get(name)]
        if others:
            yield Finding(
                "note",
                f"{name} is {facts.ranks[others[0]].variables.get(name, 'not set')} on rank {listed(others)}, and"
                f" {first.get(name, 'not set')} on rank 0",
                "Set it alike everywhere, unless that is meant.",
            )


def threads(facts: Facts) -> Iterator[Finding]:
    """Too many threads for the cores of a host, or one where there is room for several."""
    for host in facts.hosts:
        ranks = [rank for rank in facts.ranks if rank.host == host]
        cores, each = ranks[0].machine.usable_cores, ranks[0].threads
        total, fair = sum(rank.threads for rank in ranks), max(1, int(cores // len(ranks)))
        told = ranks[0].variables.get("OMP_NUM_THREADS")
        setting = "" if told is None else f" (OMP_NUM_THREADS={told})"
        if total > cores and each > 1:
            yield Finding(
                "problem",
                f"{len(ranks)} rank(s) of {each} threads{setting} make {total} on {cores:g} core(s), where they"
                " wait for one another",
                f"Set OMP_NUM_THREADS={fair}{'' if told is None else ', or unset it'}.",
            )
        elif total > cores:
            yield Finding(
                "note",
                f"{len(ranks)} ranks share {cores:g} core(s): fit for trying things out, not for timing them",
                f"Use launch.nproc={int(cores)} or fewer.",
            )
        elif each == 1 and fair > 1 and told == "1" and not ranks[0].is_on_gpu:
            yield Finding(
                "note",
                f"each of {len(ranks)} rank(s) computes on 1 of {cores:g} cores: torchrun sets OMP_NUM_THREADS=1"
                " where nothing is set",
                f"Set OMP_NUM_THREADS={fair} before it.",
            )


def gpu_memory(facts: Facts) -> Iterator[Finding]:
    for rank in facts.ranks:
        if rank.gpu is None:
            continue
        taken = rank.gpu.total_bytes - rank.gpu.free_bytes - rank.gpu.reserved_bytes
        if taken > max(MAX_TAKEN_BYTES, MAX_TAKEN * rank.gpu.total_bytes):
            yield Finding(
                "problem",
                f"{memory(taken)} of rank {rank.world_rank}'s GPU ({memory(rank.gpu.total_bytes)}) are in other hands",
                "See with nvidia-smi which process holds them: often a rank of an earlier run that did not end.",
            )


def gpu_use(facts: Facts) -> Iterator[Finding]:
    for rank in facts.first_of_each_host:
        gpus = rank.machine.visible_gpus
        if gpus and not facts.backends.get("nccl"):
            yield Finding(
                "problem",
                "torch sees GPUs, but was built without NCCL: GPUs can't exchange anything",
                "Install a build of torch with NCCL (the ones for Linux of pytorch.org have it).",
            )
        if gpus and not rank.is_on_gpu:
            yield Finding("note", f"{gpus} GPU(s) are there, and this ran on the CPU", "Use launch.device=cuda.")
        elif gpus > rank.local_size:
            yield Finding(
                "note",
                f"{gpus} GPUs are visible, and {rank.local_size} rank(s) use one each",
                f"Use launch.nproc={gpus} for all of them.",
            )


def bf16(facts: Facts) -> Iterator[Finding]:
    lacking = [rank for rank in facts.ranks if not has_native_bf16(rank)]
    if lacking:
        what = "CPU" if lacking[0].gpu is None else lacking[0].gpu.name
        yield Finding(
            "note",
            f"this {what} has no bf16 arithmetic and emulates it",
            "Use precision=fp32 where time counts; precision=bf16 shows the right numbers, slowly.",
        )


def has_native_bf16(rank: Rank) -> bool:
    return rank.machine.has_native_bf16 if rank.gpu is None else rank.gpu.has_native_bf16


def costly_variables(facts: Facts) -> Iterator[Finding]:
    for rank in facts.first_of_each_host:
        for (name, value), effect in COSTLY.items():
            if name in rank.variables and value in (None, rank.variables[name]):
                yield Finding("note", f"{name}={rank.variables[name]} {effect}", "Unset it, unless that is meant.")


def optional_packages(facts: Facts) -> Iterator[Finding]:
    if not facts.wandb.is_installed:
        yield Finding(
            "note",
            "the package wandb is not installed: runs are not tracked",
            "pip install wandb, or use tracking=off.",
        )
    elif facts.wandb.problem is not None:
        yield Finding(
            "note",
            f"Weights & Biases follows runs offline only: {facts.wandb.problem}",
            "Run wandb login; wandb sync uploads what was offline.",
        )
    for package, option in facts.needed_by.items():
        if facts.ranks[0].versions.get(package) is None:
            yield Finding(
                "note", f"the package {package} is not installed: {option} is refused", f"pip install {package}."
            )


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


CHECKS = (
    of_hosts,
    loopback,
    sums,
    mixed_versions,
    mixed_variables,
    threads,
    gpu_memory,
    gpu_use,
    bf16,
    costly_variables,
    optional_packages,
)
