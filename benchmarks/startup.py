"""From the command to the first optimizer step, two processes on CPUs, tracking included.

`python train.py` (composing, checking, launching, an offline W&B run) against a minimal hand-written DDP script under
torchrun, which does none of that: it imports torch, and through the first optimizer torch._dynamo, once a rank.
Runs alternate; both are watched from outside: ours by the first line of metrics.jsonl, which is written after the
first step, the script by the line that it prints then.

    python benchmarks/startup.py
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

MINIMAL = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, targets = torch.randn(64, 64), torch.randint(0, 10, (64,))
F.cross_entropy(model(inputs), targets).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", flush=True)
dist.destroy_process_group()
"""


def hand_written(folder: Path) -> float:
    """Seconds to the script's first optimizer step."""
    script = folder / "minimal.py"
    script.write_text(MINIMAL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    before = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seconds: float | None = None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "first step" in line:
            seconds = time.perf_counter() - before
    process.wait(timeout=60)
    # Not by its exit code: torch 2.14 now and then aborts a script like this one at its very end, when all is done.
    if seconds is None:
        raise RuntimeError(f"the hand-written script failed:\n{''.join(lines[-20:])}")
    return seconds


def ours(folder: Path) -> float:
    """Seconds to train.py's first optimizer step, with its default tracker offline."""
    run_dir = folder / "run"
    command = [
        sys.executable, str(REPOSITORY / "train.py"), "launch.nproc=2", "launch.device=cpu", "model=mlp",
        "tracking=offline", "trainer.max_steps=100000", "trainer.epochs=100000", f"hydra.run.dir={run_dir}",
    ]  # fmt: skip
    before = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before its first step")
        time.sleep(0.005)
    seconds = time.perf_counter() - before
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each, after one warm-up (default 7)")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"torchrun, hand-written": [], "python train.py": []}
    for number in range(arguments.runs + 1):
        for name, start in (("torchrun, hand-written", hand_written), ("python train.py", ours)):
            with tempfile.TemporaryDirectory(prefix="shardlab-startup-") as folder:
                taken = start(Path(folder))
            if number:
                seconds[name].append(taken)
    print(f"seconds from the command to the first optimizer step, two ranks on {len(os.sched_getaffinity(0))} cores")
    for name, values in seconds.items():
        print(f"  {name:<24} median {statistics.median(values):5.2f}  ({min(values):.2f} to {max(values):.2f})")
    pairs = zip(seconds["python train.py"], seconds["torchrun, hand-written"], strict=True)
    print(f"shardlab / hand-written: {statistics.median(a / b for a, b in pairs):.3f} (bar: at most 0.8)")


if __name__ == "__main__":
    main()
