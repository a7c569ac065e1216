"""Each fault, made up, is found with its remedy; a healthy run has none."""

import dataclasses
from typing import Any

import pytest

from src.doctor.facts import Facts, Wandb
from src.doctor.findings import findings
from tests.doctor.made_up import GIB, GPU, MACHINE, VERSIONS, facts

ON_GPU: dict[str, Any] = {"device": "cuda:0", "gpu": GPU}


def test_nothing_is_wrong_with_a_healthy_run() -> None:
    assert findings(facts()) == []
    assert findings(facts({**ON_GPU, "threads": 8}, {**ON_GPU, "threads": 8}, machine={"visible_gpus": 2})) == []


def only(found: Facts) -> tuple[str, str, str]:
    [finding] = findings(found)
    return finding


ILL = {
    "small /dev/shm": (facts(machine={"shm_bytes": 64 << 20}), "problem", "/dev/shm holds 64 MiB", "--ipc=host"),
    "full disk": (facts(machine={"free_disk_bytes": 100 << 20}), "problem", "has 100 MiB left", "hydra.run.dir"),
    "full memory": (
        facts(machine={"available_memory_bytes": GIB}),
        "problem",
        "1.00 GiB of the host's 64.00 GiB",
        "End",
    ),
    "memory limit": (facts(machine={"memory_limit_bytes": 8 * GIB}), "note", "may take 8.00 GiB", "--memory"),
    "CPU quota": (
        facts(machine={"cpu_quota": 4.0}),
        "problem",
        "time of 4 core(s), but sees 16",
        "OMP_NUM_THREADS to 4",
    ),
    "few open files": (facts(machine={"open_files": 256}), "problem", "may open 256 files", "ulimit -n"),
    "pinned memory": (facts(machine={"has_infiniband": True}), "problem", "a process may pin 8", "ulimit -l unlimited"),
    "host name": (facts(machine={"resolves_to": ()}), "problem", "name does not resolve", "/etc/hosts"),
    "GLOO_SOCKET_IFNAME": (
        facts({"variables": {"GLOO_SOCKET_IFNAME": "eth0,ib0"}}),
        "problem",
        "GLOO_SOCKET_IFNAME=eth0,ib0: no network interface here is called ib0",
        "choose from lo, eth0",
    ),
    "NCCL_SOCKET_IFNAME": (
        facts({"variables": {"NCCL_SOCKET_IFNAME": "=eth"}}),
        "problem",
        "NCCL_SOCKET_IFNAME==eth: no network interface",
        "Unset it",
    ),
    "hidden GPUs": (
        facts({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, machine={"has_nvidia_driver": True}),
        "problem",
        "CUDA_VISIBLE_DEVICES='' hides all",
        "Unset it.",
    ),
    "torch for CPUs": (
        facts(machine={"has_nvidia_driver": True}, torch_build={"CUDA": "none: for CPUs"}),
        "problem",
        "this build of torch is for CPUs",
        "for CUDA",
    ),
    "old driver": (
        facts(machine={"has_nvidia_driver": True, "driver_version": "470.82.01"}),
        "problem",
        "driver 470.82.01, torch built for CUDA 13.0",
        "nvidia-smi",
    ),
    "wrong sum": (
        facts({}, {"sums_right": {"gloo": False}}),
        "problem",
        "an all_reduce over gloo gave a wrong sum on rank 1",
        "Trust no training",
    ),
    "mixed versions": (
        facts({}, {"versions": VERSIONS | {"torch": "2.13.0"}}),
        "problem",
        "different versions of torch: 2.13.0, 2.14.1",
        "Install the same",
    ),
    "mixed variables": (
        facts({"variables": {"NCCL_ALGO": "Ring"}}, {}, {}),
        "note",
        "NCCL_ALGO is not set on rank 1, 2, and Ring on rank 0",
        "alike",
    ),
    "too many threads": (
        facts(*[{"threads": 16, "variables": {"OMP_NUM_THREADS": "16"}}] * 2),
        "problem",
        "2 rank(s) of 16 threads (OMP_NUM_THREADS=16) make 32 on 16 core(s)",
        "Set OMP_NUM_THREADS=8, or unset it.",
    ),
    "more ranks than cores": (
        facts({}, {}, {}, machine={"allowed_cores": 2}),
        "note",
        "3 ranks share 2 core(s)",
        "launch.nproc=2",
    ),
    "torchrun's one thread": (
        facts(*[{"variables": {"OMP_NUM_THREADS": "1"}}] * 4),
        "note",
        "each of 4 rank(s) computes on 1 of 16 cores",
        "OMP_NUM_THREADS=4",
    ),
    "full GPU": (
        facts(
            {**ON_GPU, "gpu": dataclasses.replace(GPU, free_bytes=40 * GIB, reserved_bytes=0)},
            machine={"visible_gpus": 1},
        ),
        "problem",
        "100.00 GiB of rank 0's GPU (140.00 GiB) are in other hands",
        "nvidia-smi",
    ),
    "GPUs unused": (
        facts(machine={"visible_gpus": 2}),
        "note",
        "2 GPU(s) are there, and this ran on the CPU",
        "device=cuda",
    ),
    "GPUs left over": (
        facts(ON_GPU, machine={"visible_gpus": 8}),
        "note",
        "8 GPUs are visible, and 1",
        "launch.nproc=8",
    ),
    "no NCCL": (
        facts(ON_GPU, machine={"visible_gpus": 1}, backends={"gloo": True, "nccl": False}),
        "problem",
        "built without NCCL",
        "Install",
    ),
    "emulated bf16": (facts(machine={"has_native_bf16": False}), "note", "this CPU has no bf16", "precision=fp32"),
    "costly variable": (
        facts(*[{"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}] * 2),
        "note",
        "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait",
        "Unset it",
    ),
    "no wandb": (facts(wandb=Wandb(False)), "note", "wandb is not installed", "tracking=off"),
    "not logged in": (facts(wandb=Wandb(True, "no API key")), "note", "offline only: no API key", "wandb login"),
    "a strategy's package": (
        facts({"versions": VERSIONS | {"shards": None}}, needed_by={"shards": "strategy=sharded"}),
        "note",
        "the package shards is not installed: strategy=sharded is refused",
        "pip install shards",
    ),
}


@pytest.mark.parametrize(("found", "level", "what", "remedy"), ILL.values(), ids=ILL.keys())
def test_a_fault_is_found_alone_and_with_its_remedy(found: Facts, level: str, what: str, remedy: str) -> None:
    finding = only(found)
    assert finding[0] == level
    assert what in finding[1]
    assert remedy in finding[2]


def test_a_name_that_means_loopback_is_wrong_only_where_others_look_for_it() -> None:
    at_home = dataclasses.replace(MACHINE, resolves_to=("loopback",))
    assert findings(facts({"machine": at_home}, {"machine": at_home})) == []
    level, what, _ = only(facts({"machine": at_home}, {"host": "b"}))
    assert level == "problem"
    assert "the name of host 0 means the loopback address" in what


def test_of_several_hosts_the_ill_one_is_named() -> None:
    ill = dataclasses.replace(MACHINE, shm_bytes=1 << 20)
    _, what, _ = only(facts({}, {"host": "b", "machine": ill}, {"host": "b", "machine": ill}))
    assert what.startswith("host 1: /dev/shm holds 1")


def test_threads_are_counted_a_host_at_a_time() -> None:
    # Two hosts of 16 cores with one rank of 16 threads each: nobody waits.
    assert findings(facts({"threads": 16}, {"threads": 16, "host": "b"})) == []


def test_a_quota_counts_as_the_cores_there_are() -> None:
    found = findings(facts({"threads": 8}, machine={"cpu_quota": 2.0}))
    assert any("1 rank(s) of 8 threads make 8 on 2 core(s)" in finding.what for finding in found)


def test_problems_come_before_notes() -> None:
    found = findings(facts(machine={"has_native_bf16": False, "shm_bytes": 1 << 20}))
    assert [finding.level for finding in found] == ["problem", "note"]
