"""DeepSpeed trains what one process trains, whatever the stage and wherever its states live."""

import json
from functools import partial

import pytest
import torch

from src.batch import BatchPlan, BatchSizes
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec
from src.strategies.deepspeed import DeepSpeed
from tests.command import QUICK, metrics, summary, train
from tests.composing import run_in
from tests.strategies.building import linear_model, microbatches

#: 101 samples in steps of 18, so that the sixth step holds 11: with 3 micro-batches of 3 on each of 2 ranks, the engine
#: is told of 3 and gets 2. The warm-up moves the lr in each of the first steps.
COMMON = [
    "model=mlp",
    "model.hidden=[32]",
    "data.limit=101",
    "trainer.global_batch_size=18",
    "trainer.micro_batch_size=null",
    "trainer.max_steps=8",
    "trainer.epochs=2",
    "optimizer.lr=0.01",
    "schedule=linear",
    "schedule.warmup_steps=3",
]
CLIPPED = "trainer.max_grad_norm=0.5"  # below every norm that appears


@pytest.fixture(scope="module")
def on_one_rank(pool, tmp_path_factory):
    """on_one_rank(*overrides): the single process's run of COMMON with them, made once."""
    done = {}

    def run(*overrides):
        if overrides not in done:
            folder = tmp_path_factory.mktemp("single") / "run"
            done[overrides] = run_in(pool, 1, folder, "strategy=single", *COMMON, *overrides)
        return done[overrides]

    return run


def assert_same_training(result, reference):
    """The design's bars for fp32."""
    assert result.series("batch_hash") == reference.series("batch_hash")
    assert result.series("lr") == pytest.approx(reference.series("lr"))
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-5)
    assert result.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-4)


def assert_unrounded(weight, sixteen_bits, name):
    """The fp32 master is what was learnt, and nearly none of its values is one that 16 bits can hold."""
    assert weight.dtype == torch.float32, name
    assert (weight != weight.to(sixteen_bits).float()).float().mean() > 0.8, name


def built(world, model, sharding, precision="fp32", **arguments):
    strategy = DeepSpeed(**arguments)
    spec = BuildSpec(world, Precision(precision), Sharding(sharding), micro_batch_size=4, max_grad_norm=0.5)
    strategy.build(model, partial(torch.optim.SGD, lr=0.1), spec)
    return strategy


@pytest.mark.parametrize(
    ("ranks", "sharding", "accumulate", "others"),
    [
        (3, "none", 3, [CLIPPED]),
        (2, "zero1", 3, [CLIPPED]),
        (3, "zero2", 1, [CLIPPED, "optimizer=sgd"]),
        (2, "zero2", 3, []),
        (2, "zero3", 3, [CLIPPED]),
        (3, "zero3", 1, ["optimizer=sgd"]),
        (1, "zero3", 3, [CLIPPED]),
        # Nothing stays whole: every parameter is sharded, gathered and freed.
        (2, "zero3", 3, [CLIPPED, "strategy.stage3_param_persistence_threshold=0"]),
        # Buckets smaller than any layer: reduced in several rounds, and one by one.
        (2, "zero2", 3, [CLIPPED, "strategy.reduce_bucket_size=100", "strategy.allgather_bucket_size=100"]),
        (2, "zero2", 3, [CLIPPED, "strategy.overlap_comm=false", "strategy.reduce_scatter=false"]),
    ],
)
def test_every_stage_equals_one_process(pool, tmp_path, on_one_rank, ranks, sharding, accumulate, others):
    reference = on_one_rank(*(o for o in others if not o.startswith("strategy.")))
    overrides = ["strategy=deepspeed", f"sharding={sharding}", f"trainer.accumulate={accumulate}", *COMMON, *others]
    assert_same_training(run_in(pool, ranks, tmp_path / "deepspeed", *overrides), reference)


@pytest.mark.parametrize(
    ("sharding", "offload"), [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "all")]
)
def test_offloading_changes_no_number(pool, tmp_path, on_one_rank, sharding, offload):
    reference = on_one_rank(CLIPPED)
    overrides = [f"sharding={sharding}", f"sharding.offload={offload}", "trainer.accumulate=3", *COMMON, CLIPPED]
    assert_same_training(run_in(pool, 2, tmp_path / "deepspeed", "strategy=deepspeed", *overrides), reference)


@pytest.mark.parametrize(
    ("sharding", "in_fp32"), [("none", True), ("zero1", True), ("zero2", True), ("zero3", True), ("zero3", False)]
)
def test_bf16_learns_the_same_and_saves_fp32_weights(pool, tmp_path, on_one_rank, sharding, in_fp32):
    reference = on_one_rank(CLIPPED, "precision=bf16")
    overrides = [f"sharding={sharding}", f"strategy.communicate_in_fp32={in_fp32}", "trainer.accumulate=3"]
    overrides += ["strategy.stage3_param_persistence_threshold=0"]  # what is saved has to be gathered
    result = run_in(
        pool, 2, tmp_path / "deepspeed", "strategy=deepspeed", "precision=bf16", *overrides, *COMMON, CLIPPED
    )
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=2e-2)  # the design's bar
    for name, weight in result.weights.items():
        assert_unrounded(weight, torch.bfloat16, name)


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_bf16_gradients_are_summed_in_fp32(pool, tmp_path, sharding):
    # DDP casts at the same places and sums in fp32. Summed in bf16, norms would part by its 4e-3.
    overrides = ["precision=bf16", "trainer.accumulate=3", *COMMON, "trainer.max_steps=4"]
    reference = run_in(pool, 2, tmp_path / "ddp", "strategy=ddp", *overrides)
    result = run_in(pool, 2, tmp_path / "deepspeed", "strategy=deepspeed", f"sharding={sharding}", *overrides)
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-4)


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_a_rank_whose_targets_are_all_masked_adds_nothing(pool, tmp_path, sharding):
    sizes = BatchSizes(2, 2, 2)
    second = list(BatchPlan(23, 8, seed=0).epoch(0))[1]
    masked = [int(i) for request in second.requests(sizes, data_rank=1) for i in request.ids]
    tokens = [
        "model=mlp",
        "model._target_=tests.crafted.TokenModel",
        "data._target_=tests.crafted.MaskedTokens",
        f"+data.masked={masked}",
        "trainer.micro_batch_size=null",
        "trainer.global_batch_size=8",
        "trainer.max_steps=5",
    ]
    reference = run_in(pool, 1, tmp_path / "single", "strategy=single", *tokens)
    result = run_in(
        pool, 2, tmp_path / "deepspeed", "strategy=deepspeed", f"sharding={sharding}", "trainer.accumulate=2", *tokens
    )
    assert_same_training(result, reference)


def running_means(world, sharding):
    """After one step on inputs that are all 1 + world_rank: before evaluation, in evaluation, as saved."""
    from tests.crafted import NormalisedModel

    strategy = built(world, NormalisedModel(), sharding)
    strategy.train_mode(True)
    [batch] = microbatches(0, 1)
    strategy.forward_backward([batch._replace(inputs=torch.full((4, 4), 1.0 + world.world_rank))], 8)
    strategy.optimizer_step(1.0, want_grad_norm=True)
    before = strategy.engine.module.norm.running_mean.tolist()
    strategy.train_mode(False)
    averaged = strategy.engine.module.norm.running_mean.tolist()
    weights = strategy.weights()
    strategy.close()
    return before, averaged, None if weights is None else weights["norm.running_mean"].tolist()


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_batch_statistics_are_averaged_over_the_ranks_before_evaluating_and_saving(pool, sharding):
    # momentum 0.1 from 0: rank 0 has 0.1 x 1, rank 1 has 0.1 x 2, the mean is 0.15
    (before_0, averaged_0, saved_0), (before_1, averaged_1, saved_1) = pool.run(2, running_means, sharding)
    assert before_0 == pytest.approx([0.1] * 4)
    assert before_1 == pytest.approx([0.2] * 4)
    assert averaged_0 == averaged_1 == saved_0 == pytest.approx([0.15] * 4)
    assert saved_1 is None


def frozen_weights(world, sharding):
    """The weights before and after a step with a frozen first layer."""
    model = linear_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strategy = built(world, model, sharding, stage3_param_persistence_threshold=0)
    strategy.forward_backward(microbatches(world.world_rank, 2), 16)
    strategy.optimizer_step(1.0, want_grad_norm=True)
    after = strategy.weights()
    strategy.close()
    return before, after


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero3"])
def test_frozen_parameters_stay_and_are_saved(pool, sharding):
    (before, after), _ = pool.run(2, frozen_weights, sharding)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in ("0.weight", "0.bias"))
    assert not torch.equal(after["2.weight"], before["2.weight"])


def test_the_configuration_is_written_into_the_log_before_training(tmp_path):
    overrides = ["strategy=deepspeed", "sharding=zero3", "trainer.max_grad_norm=1.5", "trainer.accumulate=2"]
    overrides += ["optimizer=sgd"]  # about which DeepSpeed would warn
    outcome = train(tmp_path, *QUICK, "data.limit=64", *overrides)
    assert outcome.code == 0, outcome.text
    log = (outcome.run_dir() / "rank_0.log").read_text()
    printed = json.loads(log.split("DeepSpeed's configuration: ")[1].splitlines()[0])
    # 64 a micro-batch x 2 x 2 ranks
    assert printed["train_batch_size"] == 256
    assert printed["gradient_clipping"] == 1.5
    assert printed["zero_optimization"]["stage"] == 3
    noise = [word for word in ("warn", "caution", "accelerator", "deprecated") if word in outcome.text.lower()]
    assert not noise, outcome.text
    assert outcome.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero2_offload", "zero3_offload"])
def test_a_preset_trains_on_two_cores(tmp_path, preset):
    outcome = train(tmp_path, f"experiment={preset}", "tracking=off")
    assert outcome.code == 0, outcome.text
    losses = [record["loss"] for record in metrics(outcome.run_dir())]
    assert losses[-1] < losses[0] / 2
    assert summary(outcome.run_dir())["eval"]["accuracy"] > 0.8
