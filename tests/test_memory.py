"""What a CPU rank does with memory that a step frees, and how sizes are said."""

import subprocess
import sys

import pytest

from src.memory import memory
from tests.command import REPOSITORY

COUNT_FAULTS = """
import resource, torch
from src.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
step = lambda: torch.ones(10_000_000)  # 40 MB: 9766 pages
for _ in range(30):  # until blocks of the size that alignment asks for have come about
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS.format(keep=keep)]
    return int(subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)


def test_memory_that_one_step_frees_serves_the_next_without_page_faults():
    # Ten steps of 9766 pages, or of 20 huge ones, where each step's memory is given back (glibc does so from 32 MB on).
    assert faults(keep=True) < 100 < faults(keep=False)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 1024 + 512, "3.5 KiB"),
        (650 * 1024, "650 KiB"),
        (2**20, "1.0 MiB"),
        (79 * 2**20, "79 MiB"),
        (2**30, "1.00 GiB"),
        (2600 * 2**30, "2,600.00 GiB"),
    ],
)
def test_sizes_are_said_in_the_largest_unit_that_they_have_one_of(num_bytes: int, words: str) -> None:
    assert memory(num_bytes) == words
