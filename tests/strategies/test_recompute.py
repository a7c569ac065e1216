"""Under every strategy, recomputing activations changes no bit of losses, norms, weights and states, and no name."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from src.batch import MicroBatch
from src.models.gpt import GPT, Block
from src.parallel.recompute import MODES, recompute_activations
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec, Strategy
from tests.composing import Result, composed, run_in
from tests.workers import Pool

VOCABULARY, LENGTH, BATCH, ACCUMULATE, STEPS = 16, 8, 2, 2, 2
LAYERS = 4
#: Of a run by command line: two steps of four samples a rank.
SMALL = "trainer.micro_batch_size=4 trainer.accumulate=1 trainer.max_steps=2"


@dataclass(frozen=True)
class Case:
    """arguments: of the class in src/strategies."""

    target: str
    sharding: str = "none"
    precision: str = "fp32"
    ranks: int = 2
    arguments: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [f"{key}={value}" for key, value in self.arguments]
        return " ".join([self.target.split(".")[-1], self.sharding, self.precision, f"on {self.ranks}", *given])


def case(target: str, sharding: str = "none", precision: str = "fp32", ranks: int = 2, **arguments: Any) -> Case:
    return Case(target, sharding, precision, ranks, tuple(arguments.items()))


DEEPSPEED, TP, PP = "deepspeed.DeepSpeed", "tp.TensorParallel", "pp.PipelineParallel"
QUICK = [
    case("single.Single", ranks=1),
    case("ddp.DDP"),
    case("fsdp.FSDP2", "zero3"),
    case("fsdp1.FSDP1", "zero3"),
    # Units of FSDP1 inside what is recomputed: every linear layer of the MLP, of 16 x 64 weights.
    case("fsdp1.FSDP1", "zero3", min_unit_parameters=1000),
    case(TP, tp=2),
    case(TP, tp=2, sequence_parallel=True),
    case(PP, schedule="1f1b"),
]
SLOW = [
    *[case(target, "none", precision, ranks=1) for target in ["single.Single"] for precision in ("bf16", "fp16")],
    *[case("ddp.DDP", "none", precision) for precision in ("bf16", "fp16")],
    case("ddp.DDP", find_unused_parameters=True),
    case("fsdp.FSDP2", "zero2"),
    case("fsdp.FSDP2", "zero3", sync_each_microbatch=False),
    *[case("fsdp.FSDP2", "zero3", precision) for precision in ("bf16", "fp16")],
    *[case("fsdp1.FSDP1", "zero3", precision, min_unit_parameters=1000) for precision in ("bf16", "fp16")],
    case("fsdp1.FSDP1", "zero2", min_unit_parameters=1000, sync_each_microbatch=False),
    *[case(DEEPSPEED, level, precision) for level in ("none", "zero1", "zero2") for precision in ("fp32", "bf16")],
    # Weights that stage 3 lets go after each use, rather than keep for their smallness.
    *[case(DEEPSPEED, "zero3", p, stage3_param_persistence_threshold=0) for p in ("fp32", "bf16")],
    *[case(TP, "none", precision, tp=2) for precision in ("bf16", "fp16")],
    *[case(TP, level, ranks=4, tp=2, sequence_parallel=True) for level in ("none", "zero3")],
    *[case(PP, "none", precision, schedule="gpipe") for precision in ("fp32", "bf16", "fp16")],
    case(PP, schedule="interleaved_1f1b"),
    case(PP, "zero3", ranks=4),
    case(PP, ranks=4, tp=2),
    case(PP, "zero3", "bf16", ranks=8, tp=2, sequence_parallel=True),
]


def model(mode: str) -> nn.Module:
    torch.manual_seed(0)
    bare = GPT(vocab_size=VOCABULARY, sequence_length=LENGTH, layers=LAYERS, width=16, heads=2, dropout=0.2)
    return recompute_activations(bare, mode)


def microbatch(generator: torch.Generator) -> MicroBatch:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])


def trained(world: Any, case: Case, mode: str) -> dict[str, Any]:
    """Losses, norms and evaluations of two steps; the whole weights; the names and this rank's parts of the state."""
    strategy: Strategy = instantiate({"_target_": f"src.strategies.{case.target}", **dict(case.arguments)})
    spec = BuildSpec(world, Precision(case.precision), Sharding(case.sharding), BATCH, ACCUMULATE, max_grad_norm=0.5)
    strategy.build(model(mode), partial(torch.optim.AdamW, lr=1e-2), spec)
    generator = torch.Generator().manual_seed(strategy.data.rank)
    torch.manual_seed(100 + strategy.data.rank)  # of dropout
    numbers: list[Tensor] = []
    for _ in range(STEPS):
        strategy.train_mode(True)
        batches = [microbatch(generator) for _ in range(ACCUMULATE)]
        loss = strategy.forward_backward(batches, BATCH * LENGTH * ACCUMULATE * strategy.data.size)
        report = strategy.optimizer_step(1.0, want_grad_norm=True)
        numbers += [torch.zeros(()) if loss is None else loss, whole(report.grad_norm)]
        strategy.train_mode(False)
        sums = strategy.evaluate(batches[0])
        numbers += [] if sums is None else [torch.as_tensor(sums.loss)]
    tensors = {key: local(tensor).clone() for key, tensor in strategy.state().tensors.items()}
    weights = strategy.weights()
    strategy.close()
    return {"numbers": numbers, "weights": weights or {}, "state": tensors}


def whole(norm: Any) -> Tensor:
    return torch.as_tensor(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def modes(case: Case) -> list[str]:
    """Those that the case does not refuse."""
    in_place = case.target == DEEPSPEED and case.sharding == "zero3"  # biases are added to products in place
    return [mode for mode in MODES if not (in_place and mode == "selective")]


def compare(world: Any, case: Case) -> tuple[int, ...]:
    """Raises where a bit differs. The forwards of blocks on this rank, under each mode."""
    calls: list[Block] = []
    forward = Block.forward

    def counted(block: Block, x: Tensor) -> Tensor:
        calls.append(block)
        return forward(block, x)

    found, counts = [], []
    Block.forward = counted  # type: ignore[assignment, method-assign]
    try:
        for mode in modes(case):
            calls.clear()
            found.append(trained(world, case, mode))
            counts.append(len(calls))
    finally:
        Block.forward = forward  # type: ignore[method-assign]
    expected, *others = found
    for mode, got in zip(modes(case)[1:], others, strict=True):
        numbers, due = torch.stack(got["numbers"]), torch.stack(expected["numbers"])
        assert numbers.equal(due), (mode, numbers, due)
        for part in ("weights", "state"):
            assert list(got[part]) == list(expected[part])
            for key, tensor in expected[part].items():
                assert torch.equal(got[part][key], tensor), (mode, key)
    return tuple(counts)


def check(pool: Pool, case: Case) -> None:
    for without, *counts in pool.run(case.ranks, compare, case):
        # Once a micro-batch each of the rank's blocks, beyond the forwards of training and evaluation.
        blocks = LAYERS // 2 if case.target == PP else LAYERS
        expected = blocks * ACCUMULATE * STEPS
        # In its first step a pipeline learns the shapes, once more through all blocks.
        for count in counts:
            assert expected <= count - without <= expected + (blocks if case.target == PP else 0)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_no_bit_and_no_name_changes(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_no_bit_and_no_name_changes_elsewhere(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.slow
def test_the_key_changes_no_record_of_a_run(pool: Pool, tmp_path: Path) -> None:
    def run(mode: str) -> Result:
        options = f"model=gpt_tiny model.dropout=0.1 data.sequence_length=16 data.limit=16 strategy=fsdp {SMALL}"
        return run_in(pool, 2, tmp_path / mode, *options.split(), f"trainer.activation_checkpointing={mode}")

    expected, *results = [run(mode) for mode in MODES]
    for result in results:
        for key in ("loss", "grad_norm", "batch_hash"):
            assert result.series(key) == expected.series(key)
        assert list(result.weights) == list(expected.weights)
        assert all(torch.equal(result.weights[name], weight) for name, weight in expected.weights.items())


def test_a_mode_that_is_none_is_refused_with_the_nearest() -> None:
    _, [line] = composed("launch.device=cpu", "trainer.activation_checkpointing=ful")
    assert line == "trainer.activation_checkpointing=ful is unknown. Did you mean full?"


def test_what_adds_biases_in_place_can_not_keep_products() -> None:
    words = ["launch.device=cpu", "strategy=deepspeed", "trainer.activation_checkpointing=selective"]
    assert composed(*words, "sharding=zero2")[1] == []
    _, [line] = composed(*words, "sharding=zero3")
    assert line.endswith("Use trainer.activation_checkpointing=full, or sharding=zero2.")
