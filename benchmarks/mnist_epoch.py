"""An epoch of the MNIST network (preset mnist_ddp) against a stock torchvision script, two processes each.

The stock script is what tutorials write: torchvision's MNIST, ToTensor and Normalize on each sample, a DataLoader with
two workers behind a DistributedSampler, DDP, Adam, `.item()` at every step. Same network, batch and learning rate.
An epoch is training only, without a tracker on either side; both are evaluated on the whole test set afterwards. Runs
alternate.

    python benchmarks/mnist_epoch.py <folder with the four idx files, gzipped or not>
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
NUM_TRAIN = 60_000

STOCK = """
import sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
train = datasets.MNIST(sys.argv[1], train=True, transform=transform)
test = datasets.MNIST(sys.argv[1], train=False, transform=transform)
sampler = DistributedSampler(train)
batches = DataLoader(train, batch_size=64, sampler=sampler, num_workers=2)
model = DistributedDataParallel(nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler.set_epoch(0)
before = time.perf_counter()
total = 0.0
for images, labels in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    total += loss.item()
seconds = time.perf_counter() - before
if rank == 0:
    model.eval()
    with torch.no_grad():
        right = sum((model.module(images).argmax(1) == labels).sum().item() for images, labels in DataLoader(test, 500))
    print("result", seconds, right / len(test), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def torchvision_layout(archives: Path, root: Path) -> None:
    """root/MNIST/raw with the unpacked files, as torchvision wants them."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in sorted(archives.glob("*-ubyte*")):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        (raw / path.name.removesuffix(".gz")).write_bytes(content)


def stock(folder: Path, root: Path) -> tuple[float, float]:
    """(seconds an epoch, test accuracy) of the stock script under torchrun."""
    script = folder / "stock.py"
    script.write_text(STOCK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(root)], capture_output=True, text=True, check=True, cwd=folder, timeout=900
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    _, seconds, accuracy = line.split()
    return float(seconds), float(accuracy)


def ours(folder: Path, root: Path) -> tuple[float, float]:
    """(seconds an epoch, test accuracy) of the preset."""
    run_dir = folder / "run"
    command = [sys.executable, str(REPOSITORY / "train.py"), "experiment=mnist_ddp", "trainer.epochs=1"]
    options = [
        f"data.root={root}",
        "launch.nproc=2",
        "launch.device=cpu",
        f"hydra.run.dir={run_dir}",
        "tracking=off",
    ]
    subprocess.run([*command, *options], capture_output=True, check=True, cwd=folder, timeout=900)
    summary = json.loads((run_dir / "summary.json").read_text())
    return NUM_TRAIN / summary["samples_per_second"], summary["eval"]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, help="folder with MNIST's four idx files")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    arguments = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {"stock torchvision script": [], "shardlab": []}
    with tempfile.TemporaryDirectory(prefix="shardlab-mnist-") as scratch:
        root = Path(scratch) / "data"
        torchvision_layout(arguments.archives, root)
        for number in range(arguments.runs):
            for name, run in (("stock torchvision script", stock), ("shardlab", ours)):
                folder = Path(scratch) / f"{run.__name__}-{number}"
                folder.mkdir()
                results[name].append(run(folder, root))
    print(f"an epoch of {NUM_TRAIN} images, batch 64 a rank, two ranks on {len(os.sched_getaffinity(0))} cores")
    for name, pairs in results.items():
        seconds, accuracies = zip(*pairs, strict=True)
        accuracy = statistics.median(accuracies)
        print(f"  {name:<26} median {statistics.median(seconds):6.1f} s   test accuracy {accuracy:.4f}")
    pairs = zip(results["shardlab"], results["stock torchvision script"], strict=True)
    ratio = statistics.median(ours / stock for (ours, _), (stock, _) in pairs)
    print(f"shardlab / stock: {ratio:.3f} (bar: at most 0.55)")


if __name__ == "__main__":
    main()
