"""The text that users paste."""

import dataclasses

from src.doctor.facts import Wandb
from src.doctor.findings import findings
from src.doctor.report import report
from tests.doctor.made_up import GPU, MACHINE, VERSIONS, facts


def test_it_says_what_is_wrong_first_and_names_no_host() -> None:
    made = facts({"host": "secret-host"}, {"host": "other-host"}, machine={"shm_bytes": 64 << 20})
    text = report(made, findings(made))
    assert text.startswith("# shardlab doctor\n\n2 problems, 0 notes\n\n- **problem**: host 0: /dev/shm holds 64 MiB")
    assert text.index("*Remedy:*") < text.index("## Software")
    assert "## Host 0" in text
    assert "## Host 1" in text
    assert "secret-host" not in text


def test_nothing_wrong_is_said_as_well() -> None:
    assert "0 problems, 0 notes" in report(facts(), [])


def test_ranks_stand_in_one_table_with_their_memory() -> None:
    gpu = dataclasses.replace(GPU, allocated_bytes=512 << 20, reserved_bytes=1 << 30, free_bytes=100 << 30)
    made = facts({"device": "cuda:0", "gpu": gpu, "sums_right": {"gloo": True, "nccl": False}}, {})
    rows = [line for line in report(made, []).splitlines() if line.startswith("| ")]
    assert len({row.count("|") for row in rows}) == 1
    assert "| 0 | 2 | 0 of 2 | 0 | cuda:0: NVIDIA H200, 140.00 GiB, capability 9.0 (bf16 native) |" in rows[1]
    assert "| 512 MiB | 1.00 GiB | 100.00 GiB | gloo right, nccl WRONG |" in rows[1]
    assert "| - | - | - | gloo right |" in rows[2]


def test_what_is_missing_is_listed_and_breaks_nothing() -> None:
    versions = dict.fromkeys(VERSIONS) | {"python": "3.11.7"}
    made = facts({"versions": versions}, wandb=Wandb(False), torch_build={"CUDA": "none: for CPUs"})
    text = report(made, findings(made))
    assert "- versions: python 3.11.7\n" in text
    assert "- not installed: torch, NCCL, numpy\n" in text
    assert "- Weights & Biases: not installed\n" in text


def test_what_a_machine_does_not_say_is_none() -> None:
    bare = dataclasses.replace(MACHINE, shm_bytes=None, memlock_bytes=None, resolves_to=(), interfaces=())
    text = report(facts({"machine": bare}), [])
    assert "- /dev/shm: none\n" in text
    assert "unlimited pinned memory" in text
    assert "- its own name resolves to: nothing\n" in text
