"""A report in Markdown that reads as plain text: what is wrong first, then the facts. Made to be pasted by a user."""

from collections.abc import Iterator

from src.doctor.facts import Facts, Finding, Interface, Machine, Rank
from src.doctor.findings import has_native_bf16
from src.memory import memory


def report(facts: Facts, found: list[Finding]) -> str:
    """The whole text. Hosts go by number, and no address, key or folder is in it."""
    lines = ["# shardlab doctor", "", *findings_lines(found), *software_lines(facts), *ranks_lines(facts)]
    for number, rank in enumerate(facts.first_of_each_host):
        lines += machine_lines(number, rank.machine)
    return "\n".join([*lines, *variable_lines(facts)]) + "\n"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def findings_lines(found: list[Finding]) -> Iterator[str]:
    problems = sum(finding.level == "problem" for finding in found)
    yield f"{counted(problems, 'problem')}, {counted(len(found) - problems, 'note')}"
    yield ""
    for finding in found:
        yield f"- **{finding.level}**: {finding.what}. *Remedy:* {finding.remedy}"
    if found:
        yield ""


def software_lines(facts: Facts) -> Iterator[str]:
    first = facts.ranks[0]
    yield "## Software"
    yield ""
    yield f"- shardlab: {facts.commit}"
    missing = [name for name, version in first.versions.items() if version is None]
    installed = [f"{name} {version}" for name, version in first.versions.items() if version is not None]
    yield f"- versions: {', '.join(installed)}"
    yield f"- not installed: {', '.join(missing) or 'nothing that is looked for'}"
    yield f"- torch's build: {', '.join(f'{name} {what}' for name, what in facts.torch_build.items())}"
    there, absent = (
        [name for name, is_there in facts.backends.items() if is_there is wanted] for wanted in (True, False)
    )
    yield f"- backends: {', '.join(there) or 'none'} (not built in: {', '.join(absent) or 'none'})"
    yield f"- Weights & Biases: {wandb_words(facts)}"
    yield ""


def wandb_words(facts: Facts) -> str:
    if not facts.wandb.is_installed:
        return "not installed"
    return "logged in" if facts.wandb.problem is None else f"not online: {facts.wandb.problem}"


def ranks_lines(facts: Facts) -> Iterator[str]:
    yield "## Ranks"
    yield ""
    columns = ["rank", "world", "local rank", "host", "device", "threads"]
    columns += ["GPU memory allocated", "reserved", "free", "all_reduce"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for rank in facts.ranks:
        gpu = rank.gpu
        sums = ", ".join(f"{backend} {'right' if right else 'WRONG'}" for backend, right in rank.sums_right.items())
        taken = ["-"] * 3 if gpu is None else map(memory, (gpu.allocated_bytes, gpu.reserved_bytes, gpu.free_bytes))
        cells = [rank.world_rank, rank.world_size, f"{rank.local_rank} of {rank.local_size}"]
        cells += [facts.hosts.index(rank.host), device_words(rank), rank.threads, *taken, sums]
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""


def device_words(rank: Rank) -> str:
    bf16 = f"bf16 {'native' if has_native_bf16(rank) else 'emulated'}"
    if rank.gpu is None:
        return f"{rank.device} ({bf16})"
    major, minor = rank.gpu.capability
    return f"{rank.device}: {rank.gpu.name}, {memory(rank.gpu.total_bytes)}, capability {major}.{minor} ({bf16})"


def machine_lines(number: int, machine: Machine) -> Iterator[str]:
    quota = "no quota" if machine.cpu_quota is None else f"a quota of {machine.cpu_quota:g}"
    limit = "no limit" if machine.memory_limit_bytes is None else f"limit {memory(machine.memory_limit_bytes)}"
    pinned = "unlimited" if machine.memlock_bytes is None else memory(machine.memlock_bytes)
    driver = machine.driver_version or ("there, version unknown" if machine.has_nvidia_driver else "none")
    yield f"## Host {number}"
    yield ""
    yield f"- system: {machine.system}"
    bf16 = "native" if machine.has_native_bf16 else "emulated"
    yield f"- CPU: {machine.cpu}, torch uses {machine.cpu_capability}, bf16 {bf16}"
    yield f"- cores: {machine.machine_cores}, of which {machine.allowed_cores} allowed here, {quota}"
    yield f"- memory: {memory(machine.memory_bytes)}, {memory(machine.available_memory_bytes)} available, {limit}"
    yield f"- /dev/shm: {'none' if machine.shm_bytes is None else memory(machine.shm_bytes)}"
    yield f"- disk of the run folder: {memory(machine.free_disk_bytes)} free of {memory(machine.disk_bytes)}"
    yield f"- limits: {machine.open_files} open files, {pinned} pinned memory"
    yield f"- GPUs visible to torch: {machine.visible_gpus}; NVIDIA driver: {driver}"
    yield f"- InfiniBand: {'there' if machine.has_infiniband else 'none'}"
    yield f"- interfaces: {', '.join(map(interface_words, machine.interfaces))}"
    yield f"- its own name resolves to: {' and '.join(machine.resolves_to) or 'nothing'}"
    yield ""


def interface_words(interface: Interface) -> str:
    return f"{interface.name} ({'up' if interface.is_up else 'down'}, {'' if interface.has_ipv4 else 'no '}IPv4)"


def variable_lines(facts: Facts) -> Iterator[str]:
    yield "## Environment of rank 0"
    yield ""
    variables = facts.ranks[0].variables
    for name, value in variables.items():
        yield f"- {name}={value}"
    if not variables:
        yield "- none of the variables that matter is set"
