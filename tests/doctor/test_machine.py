"""Reading what the kernel says, from texts that kernels have written."""

from pathlib import Path

import pytest

from src.doctor import machine
from src.doctor.machine import cpu_model, driver_version, inspect_machine, limit_of, meminfo, quota_of, text_of
from src.doctor.network import interfaces, unmatched


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    found = inspect_machine(tmp_path)
    assert 1 <= found.allowed_cores <= found.machine_cores
    assert 0 < found.available_memory_bytes <= found.memory_bytes
    assert 0 < found.free_disk_bytes <= found.disk_bytes
    assert any(interface.is_loopback and interface.has_ipv4 for interface in found.interfaces)


def test_memory_is_counted_in_kib() -> None:
    text = "MemTotal:       24684096 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n"
    assert meminfo(text) == {"MemTotal": 24684096 * 1024, "MemAvailable": 1 << 20}


def test_a_cpu_without_a_model_name_has_none() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags: x\n") == "A CPU @ 2 GHz"
    assert cpu_model("processor\t: 0\nCPU implementer\t: 0x41\n") is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC 12",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("something else", None),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str | None) -> None:
    assert driver_version(text) == version


def test_a_quota_is_cores_worth_of_time() -> None:
    assert quota_of("150000", "100000") == 1.5
    assert quota_of("max", "100000") is None
    assert quota_of("-1", "100000") is None  # version 1's word for it


def test_a_memory_limit_near_two_to_the_63_is_none() -> None:
    assert limit_of("8589934592") == 8 << 30
    assert limit_of("9223372036854771712") is None
    assert limit_of("max") is None


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [("", []), ("eth0", []), ("eth", []), ("eth0,ib0", ["ib0"]), ("=eth", ["eth"]), ("=eth0", []), ("^docker", [])],
)
def test_interface_names_are_matched_as_nccl_does(wanted: str, missing: list[str]) -> None:
    assert unmatched(wanted, ["lo", "eth0"]) == missing


def test_this_hosts_loopback_is_up() -> None:
    [loopback] = [interface for interface in interfaces() if interface.name == "lo"]
    assert loopback.is_up


GIB = 1 << 30


def test_the_tightest_group_that_a_process_lies_in_limits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"/proc/self/cgroup": "0::/jobs/mine\n", "/proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB\n"}
    written = {
        "memory.max": "max",
        "jobs/memory.max": f"{8 * GIB}\n",
        "jobs/memory.current": f"{5 * GIB}\n",
        "jobs/mine/memory.max": f"{16 * GIB}\n",
        "jobs/mine/memory.current": f"{GIB}\n",
    }
    assert limits(tmp_path, monkeypatch, own, written) == (8 * GIB, 3 * GIB)


def test_version_1_of_control_groups_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "/proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/ab12\n",
        "/proc/meminfo": f"MemAvailable: {2 * GIB // 1024} kB\n",
    }
    # Inside its container the group is the root, whatever /proc calls it.
    written = {"memory/memory.limit_in_bytes": f"{4 * GIB}", "memory/memory.usage_in_bytes": f"{GIB}"}
    assert limits(tmp_path, monkeypatch, own, written) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("line", ["inactive_file", "total_inactive_file"])
def test_files_that_were_read_once_take_no_memory_from_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    own = {"/proc/self/cgroup": "0::/\n1:memory:/\n", "/proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB\n"}
    if line == "inactive_file":
        written = {"memory.max": f"{8 * GIB}", "memory.current": f"{7 * GIB}"}
    else:
        written = {"memory/memory.limit_in_bytes": f"{8 * GIB}", "memory/memory.usage_in_bytes": f"{7 * GIB}"}
    folder = str(Path(next(iter(written))).parent)
    written[f"{folder}/memory.stat"] = f"cache 9\nactive_file {GIB}\n{line} {5 * GIB}\n"
    assert limits(tmp_path, monkeypatch, own, written) == (8 * GIB, 6 * GIB)


def test_the_tightest_quota_of_nested_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"/proc/self/cgroup": "0::/jobs/mine\n2:cpu,cpuacct:/jobs\n"}
    written = {"cpu.max": "max 100000", "jobs/cpu.max": "150000 100000", "jobs/mine/cpu.max": "max 100000"}
    limits(tmp_path, monkeypatch, own, written)
    assert machine.cpu_quota() == 1.5
    first = {"cpu/jobs/cpu.cfs_quota_us": "100000", "cpu/jobs/cpu.cfs_period_us": "100000"}
    limits(tmp_path, monkeypatch, own, written | first)
    assert machine.cpu_quota() == 1.0


def test_without_a_limit_the_machine_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"/proc/self/cgroup": "0::/\n", "/proc/meminfo": f"MemAvailable: {2 * GIB // 1024} kB\n"}
    assert limits(tmp_path, monkeypatch, own, {"memory.max": "max", "memory.current": "1"}) == (None, 2 * GIB)


def limits(
    root: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], written: dict[str, str]
) -> tuple[int | None, int]:
    """(limit, free) of a made-up kernel. own: its files outside of /sys/fs/cgroup. written: those below it."""
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUPS", root)
    real = text_of
    monkeypatch.setattr(machine, "text_of", lambda path: own.get(str(path)) or real(path))
    return machine.memory_limit(), machine.free_memory_bytes()
