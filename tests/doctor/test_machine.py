"""Reading what the kernel says, from texts that kernels have written."""

from pathlib import Path

import pytest

from src.doctor.machine import cpu_model, driver_version, inspect_machine, limit_of, meminfo, quota_of
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
