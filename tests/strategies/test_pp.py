"""strategy=pp: equal to one process, its loss on rank 0, whole weights, dropout.

The letters TP-.. name the reported faults that a test stands for.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.batch import MicroBatch
from src.models.gpt import GPT
from src.precision import Precision
from src.strategies.base import BuildSpec
from src.strategies.pp import PipelineParallel, padded
from tests.command import metrics, train
from tests.composing import Result, run_in
from tests.tracking.wandb_runs import folders, history, home
from tests.workers import Pool

#: 24 samples a step; 100 samples, so that the fifth step has 4: one micro-batch, itself padded, of an epoch's end.
#: 21 samples to test on, which no micro-batch divides.
SMALL = [
    "model=gpt_tiny",
    "model.width=32",
    "data=synthetic_tokens",
    "data.vocab_size=64",
    "data.sequence_length=16",
    "data.num_samples=100",
    "data.num_test_samples=21",
    "trainer.global_batch_size=24",
    "trainer.micro_batch_size=null",
    "trainer.max_steps=6",
    "trainer.epochs=2",
    "trainer.max_grad_norm=0.3",  # below the norms that appear
    "optimizer.lr=0.003",  # at 0.01 rounding grows past 1e-5 in six steps, with strategy=tp as well
    "optimizer.eps=1e-5",  # AdamW makes full steps of gradients that are rounding noise
]


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    return run_in(pool, 1, run_dir, *SMALL, "strategy=single", "trainer.accumulate=1")


def assert_equal(result: Result, reference: Result) -> None:
    """Within the design's bars: 1e-5 of losses and norms, 1e-4 of weights."""
    assert result.series("batch_hash") == reference.series("batch_hash")
    assert result.series("samples") == reference.series("samples")
    for key in ("loss", "grad_norm"):
        assert result.series(key) == pytest.approx(reference.series(key), rel=1e-5), key
    for ours, theirs in zip(result.evaluations, reference.evaluations, strict=True):
        assert ours["samples"] == theirs["samples"] == 21
        assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-5)
    assert result.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("schedule", "accumulate", "stages_per_rank"),
    [
        ("gpipe", 1, 1),
        ("gpipe", 3, 1),
        ("1f1b", 4, 1),
        ("interleaved_1f1b", 4, 2),
        ("interleaved_1f1b", 3, 1),
        ("zero_bubble", 4, 1),
        ("zero_bubble", 3, 2),
    ],
)
def test_two_ranks_equal_one_process_with_a_short_last_step(  # TP-07
    pool: Pool, tmp_path: Path, single: Result, schedule: str, accumulate: int, stages_per_rank: int
) -> None:
    result = run_in(
        pool, 2, tmp_path / "run", *SMALL, "strategy=pp", f"strategy.schedule={schedule}",
        f"trainer.accumulate={accumulate}", f"strategy.stages_per_rank={stages_per_rank}",
    )  # fmt: skip
    assert_equal(result, single)


def test_a_run_tells_its_bubble_beside_the_predicted_one(pool: Pool, tmp_path: Path) -> None:
    result = run_in(pool, 2, tmp_path / "run", *SMALL, "strategy=pp", "trainer.accumulate=4")
    assert result.series("bubble_predicted") == [1 / 5] * 6  # (p - 1) / (m + p - 1)
    assert "bubble" not in result.train[0]  # the first step also works out the shapes
    assert all(0 < record["bubble"] < 1 for record in result.train[1:])


def test_the_split_by_layer_is_the_users(pool: Pool, tmp_path: Path, single: Result) -> None:
    uneven = ["strategy.split_points=[3]", "trainer.accumulate=2"]
    assert_equal(run_in(pool, 2, tmp_path / "run", *SMALL, "strategy=pp", *uneven), single)
    assert pool.run(2, blocks_after_building, [3]) == [["0", "1", "2"], ["3"]]


def blocks_after_building(world: Any, split_points: list[int]) -> list[str]:
    strategy = built(world, PipelineParallel(split_points=split_points))
    return [name for stage in strategy.model for name in stage.blocks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "product",
    [
        ["sharding=none"],
        ["sharding=zero3"],
        ["sharding=zero2", "strategy.schedule=zero_bubble"],
        ["sharding=hybrid", "strategy.schedule=interleaved_1f1b"],
        ["strategy.tp=2", "strategy.sequence_parallel=true", "strategy.schedule=zero_bubble"],
    ],
    ids=" ".join,
)
def test_products_equal_one_process(pool: Pool, tmp_path: Path, single: Result, product: list[str]) -> None:
    assert_equal(run_in(pool, 4, tmp_path / "run", *SMALL, "strategy=pp", "trainer.accumulate=4", *product), single)


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 37, "sequence_length": 8, "layers": 4, "width": 16, "heads": 4}
    return GPT(**{**sizes, **changes})


def built(world: Any, strategy: Any, precision: str = "fp32", accumulate: int = 2, **changes: Any) -> Any:
    spec = BuildSpec(world, Precision(precision), micro_batch_size=4, accumulate=accumulate, max_grad_norm=1.0)
    strategy.build(gpt(**changes), partial(torch.optim.AdamW, lr=1e-2), spec)
    return strategy


def microbatches(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 37, (count, 4, 9), generator=generator)
    return [MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def weights_at_the_start(world: Any) -> dict[str, Tensor] | None:
    return built(world, PipelineParallel(schedule="interleaved_1f1b")).weights()


def test_the_assembled_model_is_the_single_process_draw(pool: Pool) -> None:  # TP-03
    first, second = pool.run(2, weights_at_the_start)
    assert second is None
    whole = gpt().state_dict()
    assert first.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(first[name], weight), name


def losses_and_norms(world: Any) -> tuple[bool, float]:
    strategy = built(world, PipelineParallel())
    loss = strategy.forward_backward(microbatches(2), 2 * 4 * 8)
    return loss is None, float(strategy.optimizer_step(1.0, want_grad_norm=True).grad_norm)


def test_only_the_last_stage_holds_the_loss_and_all_know_the_norm(pool: Pool) -> None:
    (first_has_none, first_norm), (last_has_none, last_norm) = pool.run(2, losses_and_norms)
    assert (first_has_none, last_has_none) == (True, False)
    assert first_norm == last_norm


def skips_and_weights(world: Any) -> tuple[bool, bool, dict[str, Tensor] | None]:
    strategy = built(world, PipelineParallel(), "fp16")
    before = strategy.scale
    # An overflow in the last stage's backward only: its loss is not a number.
    strategy.loss = lambda logits, targets: logits.float().sum() * torch.inf
    strategy.forward_backward(microbatches(2), 2 * 4 * 8)
    skipped = strategy.optimizer_step(1.0, want_grad_norm=False).skipped
    return skipped, strategy.scale < before, strategy.weights()


def test_an_overflow_is_skipped_by_every_stage(pool: Pool) -> None:
    results = pool.run(2, skips_and_weights)
    assert [result[:2] for result in results] == [(True, True), (True, True)]
    for name, weight in gpt().state_dict().items():
        assert torch.equal(results[0][2][name], weight), name


def dropped(world: Any, tp: int) -> list[Tensor]:
    """Where the last dropout of each of this rank's two blocks drops, in the first micro-batch of a step."""
    strategy = built(world, PipelineParallel(tp=tp), dropout=0.5)
    torch.manual_seed(5)  # as the task does, the same for all ranks of a pipeline
    masks: list[Tensor] = []
    for stage in strategy.model:
        for block in stage.blocks.values():
            block.drop.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    strategy.forward_backward(microbatches(2), 2 * 4 * 8)
    # The first two forwards, of two blocks with two dropouts each, only worked out the shapes.
    return masks[4:8]


def test_stages_drop_different_activations(pool: Pool) -> None:
    first, last = pool.run(2, dropped, 1)
    assert len(first) == len(last) == 4
    assert not any(torch.equal(ours, theirs) for ours in first for theirs in last)
    again, _ = pool.run(2, dropped, 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


@pytest.mark.slow
def test_tensor_ranks_of_a_stage_drop_the_same_of_their_copies(pool: Pool) -> None:
    first, first_twin, last, last_twin = pool.run(4, dropped, 2)
    for ours, theirs in ((first, first_twin), (last, last_twin)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(torch.equal(ours, theirs) for ours in first for theirs in last)


def test_a_short_step_is_filled_with_masked_micro_batches() -> None:
    [batch] = microbatches(1)
    filled = padded([batch], 3)
    assert filled[0] is batch
    assert [tuple(other.targets.unique().tolist()) for other in filled[1:]] == [(-100,), (-100,)]


@pytest.mark.slow
def test_the_loss_of_the_last_stage_is_on_rank_0s_console_and_in_wandb(tmp_path: Path) -> None:  # TP-10
    quick = [*SMALL, "trainer.max_steps=2", "trainer.epochs=1", "trainer.log_every=1", "launch.device=cpu"]
    losses = {}
    for strategy, options in {"pp": ["launch.nproc=2", "trainer.accumulate=4"], "single": ["launch.nproc=1"]}.items():
        cwd = tmp_path / strategy
        cwd.mkdir()
        accumulate = [] if strategy == "pp" else ["trainer.accumulate=1"]
        outcome = train(cwd, *quick, f"strategy={strategy}", *options, *accumulate, "tracking=offline", **home(cwd))
        assert outcome.code == 0, outcome.text
        losses[strategy] = [record["loss"] for record in metrics(outcome.run_dir())]
        shown = [float(number) for number in re.findall(r"step \d+/2 +loss ([\d.]+)", outcome.stdout)]
        assert shown == pytest.approx(losses[strategy], abs=1e-4)  # four decimals
        [folder] = folders(outcome.run_dir())  # the one run, rank 0's
        tracked = [item for item in history(folder) if "train/loss" in item]
        assert [item["train/loss"] for item in tracked] == losses[strategy]
        assert len(tracked) == 2
    assert losses["pp"] == pytest.approx(losses["single"], rel=1e-5)
