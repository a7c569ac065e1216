"""What the loop costs: a step of Trainer against a hand-written PyTorch loop that does the same work.

The same work: a 64-256-256-10 MLP on the digits, batch 64, the same samples in the same order, AdamW (fused on
both sides), gradients clipped to 1.0, one process with one thread. Lightning Fabric, Accelerate and Lightning join
where they are installed. Blocks of steps alternate in one run, so that the machine's drift meets all alike; each
competitor's figure is the median over its blocks, the ratio the median of the ratios of neighbouring blocks.

    python benchmarks/step_overhead.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

from src.batch import BatchPlan, BatchSizes
from src.data.digits import Digits
from src.models.mlp import MLP
from src.schedule import Constant
from src.strategies.base import BuildSpec
from src.strategies.single import Single
from src.tracking.reporter import SilentReporter
from src.trainer import Limits, Trainer

BATCH = 64
CPU = torch.device("cpu")
SAMPLES = 1472  # 23 full batches: a short last one is padded here and smaller there, which is not the same work
EPOCHS = 4
STEPS = 92  # of a block: four epochs

Block = Callable[[], None]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return MLP([1, 8, 8], [256, 256], 10)


def make_optimizer(parameters, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)


def load_digits():
    return Digits(image_shape=[1, 8, 8], num_classes=10, limit=SAMPLES).load(CPU, seed=0)


def orders(num_samples: int) -> list[torch.Tensor]:
    """A block's orders, the ones that the trainer draws."""
    plan = BatchPlan(num_samples, BATCH, seed=0)
    return [torch.from_numpy(plan.order(epoch)) for epoch in range(EPOCHS)]


def ours() -> Block:
    train, test = load_digits()
    strategy = Single()
    strategy.build(make_model(), make_optimizer, BuildSpec(world=_world(), micro_batch_size=BATCH, max_grad_norm=1.0))
    # No evaluation within the block: the others have none either. Loss is read every ten steps, as below.
    limits = Limits(epochs=EPOCHS, log_every=10)

    class NoEvaluation(Trainer):
        def evaluate(self):
            return {}

    def block() -> None:
        NoEvaluation(strategy, train, test, BatchSizes(BATCH, 1, 1), limits, Constant(), 0, CPU, SilentReporter()).fit()

    return block


def _world():
    from src.world import World

    return World()


def hand_written(fused: bool = True) -> Block:
    """What one would write: tensors in memory, an order an epoch, the loss read every ten steps."""
    train, _ = load_digits()
    images, labels, scale, shift = train.inputs, train.targets, train.scale, train.shift
    model = make_model()
    optimizer = make_optimizer(model.parameters(), fused)

    def block() -> None:
        step = 0
        for order in orders(len(images)):
            for start in range(0, len(images), BATCH):
                ids = order[start : start + BATCH]
                inputs = images[ids] * scale + shift
                loss = F.cross_entropy(model(inputs), labels[ids])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % 10 == 0:
                    loss.item()

    return block


def loader(train) -> torch.utils.data.DataLoader:
    images = train.inputs * train.scale + train.shift
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, train.targets), batch_size=BATCH, shuffle=True
    )


def fabric() -> Block:
    from lightning.fabric import Fabric

    train, _ = load_digits()
    fabric = Fabric(accelerator="cpu", devices=1)
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))
    batches = fabric.setup_dataloaders(loader(train))

    def block() -> None:
        for _ in range(EPOCHS):
            for inputs, targets in batches:
                loss = F.cross_entropy(model(inputs), targets)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    return block


def accelerate() -> Block:
    from accelerate import Accelerator

    train, _ = load_digits()
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, batches = accelerator.prepare(model, make_optimizer(model.parameters()), loader(train))

    def block() -> None:
        for _ in range(EPOCHS):
            for inputs, targets in batches:
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return block


def lightning() -> Block:
    import lightning as L

    train, _ = load_digits()

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, index):
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self):
            return make_optimizer(self.parameters(), fused=False)  # its clipping refuses fused optimizers

    module, batches = Module(), loader(train)

    def block() -> None:
        L.Trainer(
            accelerator="cpu", devices=1, max_epochs=EPOCHS, gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, batches)  # fmt: skip

    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of 92 steps a competitor (default 40)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    competitors: dict[str, Block] = {"hand-written": hand_written(), "shardlab": ours()}
    competitors["hand-written, default AdamW"] = hand_written(fused=False)
    for package, make in {"lightning": fabric, "accelerate": accelerate}.items():
        if find_spec(package) is not None:
            competitors["Lightning Fabric" if make is fabric else "Accelerate"] = make()
    if find_spec("lightning") is not None:
        competitors["Lightning"] = lightning()
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(arguments.blocks + 1):
        for name, block in competitors.items():
            before = time.perf_counter()
            block()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - before) / STEPS)
    reference = seconds["hand-written"]
    print(f"a step of batch {BATCH}, median of {arguments.blocks} blocks of {STEPS} steps; one process, one thread")
    for name, values in seconds.items():
        ratio = statistics.median(v / r for v, r in zip(values, reference, strict=True))
        print(f"  {name:<28} {statistics.median(values) * 1e3:7.3f} ms   {ratio:5.3f} of hand-written")
    ratio = statistics.median(v / r for v, r in zip(seconds["shardlab"], reference, strict=True))
    print(f"shardlab / hand-written: {ratio:.3f} (bar: at most 1.02)")


if __name__ == "__main__":
    main()
