"""What a CPU rank does with memory that a step frees."""

import subprocess
import sys

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
