"""What only a GPU can show: the same numbers there, and no hidden wait for the device on a step that is not logged."""

import pytest
import torch

from tests.command import QUICK, metrics, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]

ON_GPU = [*[word for word in QUICK if not word.startswith("launch.")], "launch.device=cuda", "launch.nproc=1"]
COMBINATIONS = [
    ("ddp", "none", "none"),
    ("fsdp", "zero3", "none"),
    ("fsdp", "zero3", "all"),
    ("fsdp1", "zero3", "none"),
    ("deepspeed", "zero2", "none"),
]
#: What keeps something refuses fp16's loss scale.
COMPRESSIONS = [
    "compression=topk",
    "compression=topk precision=bf16",
    "compression=topk trainer.activation_checkpointing=full",
    "compression=powersgd compression.warmup_steps=2",
    "compression=fp16",
    "compression=fp16 precision=fp16",
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("strategy", "sharding", "offload"), COMBINATIONS)
def test_a_gpu_learns_what_a_cpu_does(tmp_path, strategy, sharding, offload, precision):
    words = [f"strategy={strategy}", f"sharding={sharding}", f"sharding.offload={offload}", f"precision={precision}"]
    losses = losses_on_both(tmp_path, ["strategy=single"], words, steps=3)
    # Kernels of another device round elsewhere: the 16-bit bar for all.
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=2e-2)


@pytest.mark.parametrize("words", COMPRESSIONS)
def test_a_gpu_compresses_as_a_cpu_does(tmp_path, words):
    common = ["strategy=ddp", *words.split()]
    # Of the five losses, the last two or more are of weights that compressed gradients have changed.
    losses = losses_on_both(tmp_path, common, common, steps=5)
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=2e-2)


def losses_on_both(folder, on_cpu, on_gpu, steps):
    """By device, of one rank each."""
    common = [f"trainer.max_steps={steps}", "optimizer=sgd", "data.limit=80", "trainer.micro_batch_size=16"]
    found = {}
    for device, words in {"cpu": [*QUICK, "launch.nproc=1", *on_cpu], "gpu": [*ON_GPU, *on_gpu]}.items():
        (folder / device).mkdir()
        outcome = train(folder / device, *words, *common)
        assert outcome.code == 0, outcome.text
        found[device] = [record["loss"] for record in metrics(outcome.run_dir())]
    assert all(len(losses) == steps for losses in found.values())
    return found


def test_exact_top_k_never_waits_for_the_device():
    from src.compression.base import Ranks
    from src.compression.topk import TopK
    from tests.compression.building import LoneBucket

    parameter = torch.zeros(1000, 100, device="cuda")
    topk = TopK(0.01)
    topk.begin(Ranks(1), {parameter: "weight"})
    gradients = torch.randn(3, 100_000, device="cuda")
    try:
        for step, gradient in enumerate(gradients):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step sets kernels up
            topk.share(LoneBucket(parameter, gradient))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_unlogged_step_never_waits_for_the_device():
    from functools import partial

    from src.batch import MicroBatch
    from src.models.cnn import CNN
    from src.strategies.base import BuildSpec
    from src.strategies.single import Single
    from src.world import World

    device = torch.device("cuda", 0)
    strategy = Single()
    spec = BuildSpec(World(device=device), max_grad_norm=1.0)
    strategy.build(CNN([1, 8, 8], 10), partial(torch.optim.AdamW, lr=1e-3, fused=True), spec)
    batch = MicroBatch(torch.randn(8, 1, 8, 8, device=device), torch.zeros(8, dtype=torch.int64, device=device))
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step sets kernels up
        strategy.forward_backward([batch, batch], valid_targets=16 + step)
        strategy.optimizer_step(1.0, want_grad_norm=False)
    torch.cuda.set_sync_debug_mode("default")


def test_the_peak_of_a_run_outlives_that_of_a_step():
    from src.memory import peak_memory_bytes
    from src.meter import StepPeak

    device = torch.device("cuda", 0)
    large = torch.empty(64 << 20, dtype=torch.uint8, device=device)  # as in a model's construction
    del large
    peak = StepPeak(None, device, beside=torch.empty(32 << 20, dtype=torch.uint8))  # which lies in the host's memory
    for _ in range(2):
        with peak.step():
            torch.empty(16 << 20, dtype=torch.uint8, device=device)
    assert peak.bytes is not None
    assert 16 << 20 <= peak.bytes < 48 << 20
    assert peak_memory_bytes(device) >= 64 << 20
