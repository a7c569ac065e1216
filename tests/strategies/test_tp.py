"""strategy=tp beyond parity (tests/test_products.py): copies stay copies, dropout, odd sizes, refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from src.batch import IGNORED, MicroBatch
from src.models.gpt import GPT
from src.parallel.draws import own_draws
from src.parallel.vocabulary import split_argmax, split_evaluation_sums
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec
from src.strategies.single import Single
from src.strategies.tp import TensorParallel
from tests.composing import composed
from tests.workers import Pool, RankError


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 37, "sequence_length": 8, "layers": 2, "width": 16, "heads": 4}
    return GPT(**{**sizes, **changes})


def tokens(seed: int, vocab_size: int = 37, batch: int = 4, length: int = 8) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 0, vocab_size, (batch, length), generator=generator)
    return MicroBatch(draw(), draw())


def built(world: Any, strategy: Any, model: nn.Module, precision: str = "fp32", sharding: str = "none") -> Any:
    spec = BuildSpec(world, Precision(precision), Sharding(sharding), max_grad_norm=1.0)
    strategy.build(model, partial(torch.optim.AdamW, lr=1e-2), spec)
    return strategy


def step(strategy: Any, *batches: MicroBatch) -> tuple[float, float]:
    """One optimizer step; (mean loss, gradient norm)."""
    targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    loss = strategy.forward_backward(list(batches), targets)
    report = strategy.optimizer_step(1.0, want_grad_norm=True)
    return float(loss) / targets, float(report.grad_norm)


def local_copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's own bits of every parameter that is replicated."""
    named = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {
        n: p.to_local().detach().clone()
        for n, p in named.items()
        if all(isinstance(x, Replicate) for x in p.placements)
    }


def train_and_give_copies(world: Any, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    strategy = built(world, TensorParallel(world.world_size, sequence_parallel), gpt())
    for number in range(20):
        step(strategy, tokens(number))
    return local_copies(strategy.model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_stay_bit_equal_for_20_steps(pool: Pool, sequence_parallel: bool) -> None:
    first, second = pool.run(2, train_and_give_copies, sequence_parallel)
    # positions, 5 norms of weight and bias, 2 x 2 row-parallel biases
    assert len(first) == 1 + 2 * 5 + 4
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def compare_with_single(world: Any, changes: dict[str, Any], sequence_parallel: bool) -> None:
    vocab_size = changes.get("vocab_size", 37)
    single = built(world, Single(), gpt(**changes))
    split = built(world, TensorParallel(world.world_size, sequence_parallel), gpt(**changes))
    for number in range(3):
        batches = [tokens(number, vocab_size), tokens(100 + number, vocab_size)]
        assert step(split, *batches) == pytest.approx(step(single, *batches), rel=1e-5)
    ours, theirs = (strategy.evaluate(tokens(7, vocab_size)).stacked() for strategy in (split, single))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    weights = split.weights()
    if world.is_main:
        for name, weight in single.weights().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
    else:
        assert weights is None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param({"kv_heads": 2}, 2, id="grouped key and value heads"),
        pytest.param({"tie_embeddings": True}, 2, id="tied embeddings"),
        pytest.param({"vocab_size": 7}, 4, id="a vocabulary of which the last rank holds less"),
    ],
)
def test_odd_models_equal_the_single_process(pool: Pool, changes: Any, ranks: int, sequence_parallel: bool) -> None:
    pool.run(ranks, compare_with_single, changes, sequence_parallel)


def argmax_of_split_logits(world: Any, vocabulary: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world.world_size,))
    logits = torch.randint(0, 4, (2, 50, vocabulary), generator=torch.Generator().manual_seed(0)).float()  # many ties
    part = list(logits.chunk(world.world_size, -1)) + [logits[..., :0]] * world.world_size
    split = DTensor.from_local(
        part[world.world_rank].contiguous(), mesh, [Shard(2)], shape=logits.shape, stride=logits.stride()
    )
    assert torch.equal(split_argmax(split), logits.argmax(-1))
    targets = logits.argmax(-1).clone()
    targets[0, :25], targets[1, 0] = IGNORED, (targets[1, 0] + 1) % vocabulary  # 75 valid ones, one of them a miss
    with loss_parallel():
        sums = split_evaluation_sums(split, targets)
    assert (int(sums.correct), int(sums.targets)) == (74, 75)


@pytest.mark.parametrize("vocabulary", [8, 7])
def test_the_largest_of_split_logits_is_the_first_of_the_largest(pool: Pool, vocabulary: int) -> None:
    pool.run(4, argmax_of_split_logits, vocabulary)


def dropped_activations(world: Any, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Which of this rank's activations dropout lets through, in the residual stream; and the copies after 5 steps."""
    model = gpt(dropout=0.5)
    attention = model.blocks["0"].attention
    # Uniform attention over values of one: what comes out of a head then shows its dropout mask and nothing else.
    for layer in (attention.q, attention.k, attention.v):
        nn.init.zeros_(layer.weight)
    nn.init.ones_(attention.v.bias)
    strategy = built(world, TensorParallel(world.world_size, sequence_parallel), model)
    kept: dict[str, torch.Tensor] = {}

    def remember(key: str, tensor: Any) -> None:
        kept.setdefault(key, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach())

    model.drop.register_forward_hook(lambda module, inputs, output: remember("embedding", output != 0))
    model.blocks["0"].drop.register_forward_hook(lambda module, inputs, output: remember("residual", output != 0))
    attention.o.register_forward_pre_hook(lambda module, inputs: remember("heads", inputs[0]))
    torch.manual_seed(5)  # the same on all ranks of the axis, as task=train seeds them
    for number in range(5):
        step(strategy, tokens(number))
    return {**kept, **{f"copy {name}": weight for name, weight in local_copies(model).items()}}


def test_dropout_on_whole_activations_is_the_same_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(2, dropped_activations, False)
    for key in ("embedding", "residual"):
        assert torch.equal(first[key], second[key]), key
        assert 0.3 < first[key].float().mean() < 0.7
    assert not torch.equal(first["heads"], second["heads"]), "each rank's heads have masks of their own"
    for name in (name for name in first if name.startswith("copy")):
        assert torch.equal(first[name], second[name]), name


def test_dropout_on_parts_of_a_sequence_differs_by_rank(pool: Pool) -> None:
    first, second = pool.run(2, dropped_activations, True)
    for key in ("embedding", "residual", "heads"):
        assert not torch.equal(first[key], second[key]), key
    for name in (name for name in first if name.startswith("copy")):
        assert torch.equal(first[name], second[name]), name


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)


@pytest.mark.parametrize("training", [True, False])
def test_own_draws_differ_by_number_and_call_and_leave_the_shared_stream_alike(training: bool) -> None:
    drawn, after = [], []
    for number in (0, 1):
        module = Noise().train(training)
        own_draws(module, number, "cpu")
        torch.manual_seed(3)
        drawn.append([module(torch.zeros(4)), module(torch.zeros(4))])
        after.append(torch.rand(4))
    assert torch.equal(after[0], after[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(drawn[0][0], drawn[1][0]) is not training


def overflow_on_one_part(world: Any) -> tuple[bool, bool, dict[str, float]]:
    """In fp16, make a gradient of the last rank's part alone infinite in the first of two steps."""
    model = gpt()
    strategy = built(world, TensorParallel(world.world_size), model, precision="fp16")
    up = model.blocks["0"].mlp.up.weight

    def spoil(gradient: Any) -> Any:
        return gradient * float("inf") if world.world_rank == world.world_size - 1 and spoil.armed else gradient

    spoil.armed = True  # type: ignore[attr-defined]
    up.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(spoil(torch.ones(()))))
    skipped = []
    for _ in range(2):
        strategy.forward_backward([tokens(0)], 32)
        skipped.append(strategy.optimizer_step(1.0, want_grad_norm=False).skipped)
        spoil.armed = False  # type: ignore[attr-defined]
    return skipped[0], skipped[1], strategy.extra_metrics()


def test_an_overflow_on_one_rank_is_skipped_by_all(pool: Pool) -> None:
    outcomes = pool.run(2, overflow_on_one_part)
    # The scale began at 2^16 and backed off once, on both.
    assert outcomes == [(True, False, {"loss_scale": 2.0**15})] * 2


def sharded_weights_after_an_evaluation(world: Any) -> None:
    strategy = built(world, TensorParallel(2), gpt(), sharding="zero2")
    strategy.evaluate(tokens(0))  # leaves the weights gathered
    weights = strategy.weights()
    if world.is_main:
        for name, weight in gpt().state_dict().items():
            assert torch.equal(weights[name], weight), name


def test_weights_are_whole_after_an_evaluation_under_zero2(pool: Pool) -> None:
    pool.run(4, sharded_weights_after_an_evaluation)


class ForgetfulGPT(GPT):
    def tensor_plan(self, sequence_parallel: bool) -> Any:
        return {key: style for key, style in super().tensor_plan(sequence_parallel).items() if "mlp_norm" not in key}


def build_forgetful(world: Any) -> None:
    model = ForgetfulGPT(vocab_size=37, sequence_length=8, layers=1, width=16, heads=4)
    built(world, TensorParallel(2), model)


def test_a_plan_that_leaves_a_module_out_is_named(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"ForgetfulGPT leaves out blocks\.0\.mlp_norm\.weight, blocks\.0\.mlp_norm\."):
        pool.run(2, build_forgetful)


def run_odd_sequences(world: Any) -> None:
    step(built(world, TensorParallel(2, sequence_parallel=True), gpt()), tokens(0, length=7))


def test_sequences_that_do_not_split_evenly_are_an_error_not_a_wrong_number(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"sequences of 7 tokens don't split over strategy\.tp=2 ranks"):
        pool.run(2, run_odd_sequences)


def only_problem(*overrides: str) -> str:
    _, problems = composed("strategy=tp", "launch.device=cpu", *overrides)
    assert len(problems) == 1, problems
    return problems[0]


def test_heads_that_the_degree_does_not_divide_are_refused_with_the_degrees_that_do() -> None:
    line = only_problem("model=gpt_tiny", "model.heads=3", "model.width=96", "launch.nproc=2")
    assert line == "model.heads=3 is not divisible by strategy.tp=2. Choose tp from 1, 3."


def test_key_value_heads_that_the_degree_does_not_divide_are_refused() -> None:
    line = only_problem("model=gpt_tiny", "model.kv_heads=2", "strategy.tp=4", "launch.nproc=4")
    assert line == "model.kv_heads=2 is not divisible by strategy.tp=4. Choose tp from 1, 2."


def test_a_vocabulary_that_leaves_a_rank_without_a_row_is_refused() -> None:
    # Parts of ceil(5 / 4) = 2 rows: 2, 2, 1, 0.
    overrides = ["data=synthetic_tokens", "data.vocab_size=5", "strategy.tp=4", "launch.nproc=4"]
    assert "model.vocab_size=5 leaves some of strategy.tp=4 ranks" in only_problem("model=gpt_tiny", *overrides)


@pytest.mark.parametrize(
    ("nproc", "tp", "words"),
    [
        (3, 2, "3 rank(s) can't be split by strategy.tp=2"),
        (2, 4, "2 rank(s) can't be split by strategy.tp=4"),
        (2, 0, "strategy.tp=0 is no degree; choose 1 or more."),
    ],
)
def test_a_world_that_the_degree_does_not_divide_is_refused(nproc: int, tp: int, words: str) -> None:
    assert words in only_problem("model=gpt_tiny", f"launch.nproc={nproc}", f"strategy.tp={tp}")


def test_a_model_without_a_plan_is_refused_by_name_with_those_that_have_one() -> None:
    line = only_problem("model=cnn", "launch.nproc=2")
    assert line.startswith("model src.models.cnn.CNN does not say how its layers are split (tensor_plan)")
    assert "model=gpt_tiny" in line
    assert "model=tp_mlp" in line
    assert "model=resnet18" not in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=tp_mlp"], "model TPMLP has none"),
        (["model=gpt_tiny", "data.sequence_length=63"], "data.sequence_length=63 is not divisible by strategy.tp=2"),
    ],
)
def test_sequence_parallelism_without_sequences_to_split_is_refused(overrides: list[str], words: str) -> None:
    assert words in only_problem("strategy.sequence_parallel=true", "launch.nproc=2", *overrides)


def test_sharding_groups_are_of_data_ranks_not_of_all() -> None:
    line = only_problem("model=gpt_tiny", "launch.nproc=4", "sharding=hybrid", "sharding.shard_size=4")
    assert line == "sharding.shard_size=4 does not divide the 2 data ranks. Choose it from 1, 2."


def test_degrees_larger_than_what_the_axes_leave_are_not_counted_as_data_ranks() -> None:
    config, problems = composed("strategy=tp", "model=gpt_tiny", "launch.nproc=4", "launch.device=cpu")
    assert not problems
    assert TensorParallel.data_parallel_size(4, config["strategy"]) == 2
