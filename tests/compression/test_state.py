"""What a compressor keeps goes into checkpoints and comes back, on as many ranks or on others."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

from src.inheritance import Heir
from src.position import Position
from src.snapshots import SavePlan, Snapshots
from src.strategies.base import Axis
from tests.composing import run_in
from tests.compression.building import advance, built, microbatches, weights

KINDS = {
    "topk": ("topk", {"ratio": 0.1}),
    "topk sampled": ("topk", {"ratio": 0.1, "selection": "sampled", "warmup_steps": 2}),
    "powersgd": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 1}),
}
SHORT = [
    "model=cnn",
    "data.limit=64",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=8",
    "trainer.epochs=9",
    "checkpoint.every=4",
    "strategy.bucket_cap_mb=0.05",  # several buckets
]
OVERRIDES = {
    "topk": ["compression=topk", "compression.ratio=0.05"],
    "topk sampled": ["compression=topk", "compression.selection=sampled", "compression.warmup_steps=2"],
    "topk in its warm-up": ["compression=topk", "compression.warmup_steps=6"],
    "powersgd": ["compression=powersgd", "compression.warmup_steps=2"],
    "powersgd in its warm-up": ["compression=powersgd", "compression.warmup_steps=6"],
    "fp16": ["compression=fp16"],
}


@pytest.mark.parametrize("kind", OVERRIDES)
def test_a_resumed_run_is_bit_equal_to_the_unbroken_one(pool, tmp_path, kind):
    unbroken = run_in(pool, 2, tmp_path / "unbroken", *SHORT, *OVERRIDES[kind])
    checkpoint = tmp_path / "unbroken" / "checkpoints" / "step_00000004"
    resumed = run_in(pool, 2, tmp_path / "resumed", *SHORT, *OVERRIDES[kind], info={"resume": str(checkpoint)})
    for key in ("loss", "grad_norm", "sent_bytes", "residual_norm"):
        expected = [record.get(key) for record in unbroken.train[4:]]
        assert [record.get(key) for record in resumed.train] == expected, key
    for name, weight in unbroken.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert resumed.summary["compression"] == unbroken.summary["compression"], "totals count the steps before, too"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, ["compression=none"]), (1, ["strategy=single", "compression=none"]), (2, ["compression=powersgd"])],
    ids=["none", "single", "powersgd"],
)
def test_a_checkpoint_with_residuals_goes_on_without_that_compressor(pool, tmp_path, ranks, words):
    size = ["trainer.micro_batch_size=null", "trainer.global_batch_size=8", "trainer.accumulate=1"]
    short = [word for word in SHORT if "micro_batch" not in word and "bucket" not in word] + size
    unbroken = run_in(pool, 2, tmp_path / "unbroken", *short, "compression=topk")
    checkpoint = tmp_path / "unbroken" / "checkpoints" / "step_00000004"
    resumed = run_in(pool, ranks, tmp_path / "resumed", *short, *words, info={"resume": str(checkpoint)})
    # The weights are the same, so is the loss that the first step meets.
    assert resumed.series("loss")[0] == pytest.approx(unbroken.series("loss")[4], rel=1e-5)


def test_a_dense_checkpoint_goes_on_compressed_with_nothing_owed(pool, tmp_path):
    run_in(pool, 2, tmp_path / "dense", *SHORT)
    checkpoint = tmp_path / "dense" / "checkpoints" / "step_00000004"
    resumed = run_in(
        pool, 2, tmp_path / "resumed", *SHORT, "compression=topk", "compression.warmup_steps=1",
        info={"resume": str(checkpoint)},
    )  # fmt: skip
    assert [record["sent_bytes"] == record["dense_bytes"] for record in resumed.train] == [True, False, False, False]
    assert resumed.summary["compression"]["steps"] == 4


def kept_sum(strategy):
    """Residuals summed over the ranks, by parameter."""
    found = {}
    for name, kept in sorted(strategy.compression.residuals.named().items()):
        found[name] = kept.clone()
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, {name: kept.tolist() for name, kept in found.items()})
    total = {}
    for part in names:
        for name, kept in part.items():
            total[name] = total.get(name, 0) + torch.tensor(kept, dtype=torch.float64)
    return total


def snapshots_of(world, strategy, folder):
    from pathlib import Path

    return Snapshots(strategy, world, Path(folder), "run", SavePlan(every=1), seed=0)


def saved(world, name, arguments, folder):
    strategy = built(world, name, arguments)
    advance(world, strategy, range(5))
    snapshots = snapshots_of(world, strategy, folder)
    path = snapshots.save(Position(step=5), None, in_background=False)
    snapshots.finish()
    return str(path), kept_sum(strategy)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def restored(world, name, arguments, checkpoint, folder):
    from pathlib import Path

    strategy = built(world, name, arguments)
    handler = Lines()
    logging.getLogger("src.inheritance").addHandler(handler)
    logging.getLogger("src.inheritance").setLevel(logging.INFO)
    snapshots_of(world, strategy, folder).restore(Path(checkpoint))
    logging.getLogger("src.inheritance").removeHandler(handler)
    kept = kept_sum(strategy)
    steps = advance(world, strategy, range(5, 8))
    return kept, steps, weights(strategy), handler.lines


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_other_ranks_owe_together_what_the_saving_ones_did(pool, tmp_path, kind, before, after):
    (path, owed), *_ = pool.run(before, saved, *KINDS[kind], str(tmp_path))
    assert any(kept.abs().max() > 0 for kept in owed.values())
    found = pool.run(after, restored, *KINDS[kind], path, str(tmp_path))
    for kept, steps, held, lines in found:
        for name, expected in owed.items():
            # Of fp32, added once or twice.
            torch.testing.assert_close(kept[name], expected, rtol=1e-6, atol=1e-7)
        assert steps == found[0][1]
        assert all(torch.equal(held[name], found[0][2][name]) for name in held)
        assert f"{before} ranks kept unsent gradients, {after} go on" in lines[0]


def test_each_rank_of_a_checkpoint_has_one_heir():
    saved_names = [f"rank.{number}.residual.weight" for number in range(5)]
    for size in range(1, 8):
        heirs = [Heir(Axis(rank, size), 5, dict.fromkeys(saved_names)).infos.keys() for rank in range(size)]
        assert sorted(name for names in heirs for name in names) == saved_names
        assert size != 5 or [list(names) for names in heirs] == [[name] for name in saved_names]


def state_of(strategy):
    compression = strategy.compression
    return {key: tensor.clone() for key, tensor in compression.tensors().items()}, dict(compression.plain())


def discarded(world, name, arguments):
    """Two runs of six steps, one of which tried, and gave up, steps with other data in between."""
    results = []
    for tries in (False, True):
        strategy = built(world, name, arguments)
        for step in range(6):
            if tries:
                before = state_of(strategy)
                strategy.remember()
                strategy.forward_backward(microbatches(world.world_rank, 100 + step), 16)
                strategy.discard()
                after = state_of(strategy)
                assert after[1] == before[1]
                for key, tensor in after[0].items():
                    assert torch.equal(tensor, before[0].get(key, torch.zeros_like(tensor))), (step, key)
            results.append(advance(world, strategy, [step]))
    return results[:6], results[6:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_discarded_step_leaves_what_is_kept_as_it_was(pool, kind):
    for plain, with_tries in pool.run(2, discarded, *KINDS[kind]):
        assert with_tries == plain


def probed(world, name, arguments):
    """As the profiler does it, between two steps."""
    strategy = built(world, name, arguments)
    advance(world, strategy, range(4))
    before, held = state_of(strategy), weights(strategy)
    exchange = strategy.synchronization_alone(1)
    for _ in range(3):
        exchange()
    strategy.remember()
    with strategy.unsynchronized():
        strategy.forward_backward(microbatches(world.world_rank, 50), 16)
    strategy.discard()
    after = state_of(strategy)
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(after[0][key], before[0][key]) for key in after[0])
    now = weights(strategy)
    return all(torch.equal(now[key], held[key]) for key in held)


@pytest.mark.parametrize("kind", [*KINDS, "fp16"])
def test_measuring_communication_changes_nothing_that_is_kept(pool, kind):
    assert all(pool.run(2, probed, *(KINDS.get(kind) or (kind, {}))))


def test_what_a_compressor_says_of_all_ranks_is_plain(pool):
    for plain in pool.run(2, plain_state):
        assert json.loads(json.dumps(plain)) == plain


def plain_state(world):
    strategy = built(world, "topk", {"ratio": 0.1})
    advance(world, strategy, range(2))
    return strategy.state().plain
