"""A run's state taken out of any strategy and put into any other; DeepSpeed's in test_deepspeed_state.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from src.strategies.run_state import State
from src.strategies.state import put_back, take
from tests.strategies.resuming import (
    KINDS,
    OPTIMIZERS,
    advance,
    assert_equal,
    evaluate,
    load,
    microbatches,
    of_all_ranks,
    running,
    sized,
    whole,
)
from tests.workers import Pool

pytestmark = pytest.mark.slow  # together more than a minute; tests/test_resume.py has quick ones

FIRST, LAST = (0, 1, 2), (3, 4, 5)


def quick(kinds: dict[str, int], *chosen: str) -> list[Any]:
    """(kind, ranks) as parameters, those that aren't chosen marked slow."""
    return [
        pytest.param(kind, ranks, id=kind, marks=[] if kind in chosen else [pytest.mark.slow])
        for kind, ranks in kinds.items()
    ]


#: Ranks for each kind; four where it splits along two axes.
TWO_AXES = ("tp zero2", "tp zero3", "tp hybrid", "pp zero2", "pp zero3", "pp tp")
RANKS = {kind: 4 if kind in TWO_AXES else 2 for kind in KINDS if "deepspeed" not in kind}


def go_on(world: Any, kind: str, named: dict[str, str]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Three steps, a round trip into a build of other weights, three more: to the bit what six are.

    Returns the shapes and step counts of what a checkpoint would hold.
    """
    with running(world, kind, **named) as unbroken:
        expected = advance(unbroken, *FIRST, *LAST)
        with running(world, kind, **named) as stopped, running(world, kind, seed=1, **named) as resumed:
            advance(stopped, *FIRST)
            evaluate(stopped)  # after which zero2 holds gathered weights
            state = stopped.state()
            load(resumed, whole(state), state.plain)
            assert_equal(resumed.state(), stopped.state())
            assert advance(resumed, *LAST) == expected[len(FIRST) :]
            assert advance(stopped, *LAST) == expected[len(FIRST) :], "taking the state changed the run"
            assert_equal(resumed.state(), stopped.state())
            if named.get("model") != "convolutional":  # whose running means the evaluation made equal
                assert_equal(resumed.state(), unbroken.state())
            state = resumed.state()
            shapes = {name: tuple(tensor.shape) for name, tensor in state.tensors.items()}
            return of_all_ranks(shapes), state.plain["steps"]


@pytest.fixture(scope="session")
def of_one_process(pool: Pool) -> Any:
    """The shapes and step counts of strategy=single, by the model's name."""
    return {model: pool.run(2, go_on, "single", {"model": model})[0] for model in ("gpt", "gpt of four layers")}


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "ddp", "fsdp zero2", "fsdp1 zero3", "tp", "pp of two stages"))
def test_a_round_trip_goes_on_to_the_bit(pool: Pool, of_one_process: Any, kind: str, ranks: int) -> None:
    for shapes_and_steps in pool.run(ranks, go_on, kind, sized(kind)):
        assert shapes_and_steps == of_one_process[sized(kind)["model"]], (
            "names, shapes and counts are those of one process, on every rank"
        )


def test_the_names_are_those_of_the_bare_model(of_one_process: Any) -> None:
    shapes, steps = of_one_process["gpt of four layers"]
    weights = {name for name in shapes if name.startswith("model.")}
    assert "model.blocks.3.mlp.up.weight" in weights
    moments = {
        f"optimizer.{name.removeprefix('model.')}.{slot}" for name in weights for slot in ("exp_avg", "exp_avg_sq")
    }
    assert shapes.keys() == weights | moments
    assert steps == {name.removeprefix("model."): 6 for name in weights}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp zero3", "fsdp1 zero3", "tp", "pp"])
def test_every_optimizer_goes_on_to_the_bit(pool: Pool, kind: str, optimizer: str) -> None:
    pool.run(2, go_on, kind, {"optimizer": optimizer})


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp zero3", "fsdp1 zero3"])
def test_batch_norm_and_frozen_weights_go_on_to_the_bit(pool: Pool, kind: str) -> None:
    (shapes, steps), _ = pool.run(2, go_on, kind, {"model": "convolutional", "optimizer": "fused decay groups"})
    assert shapes["model.body.1.num_batches_tracked"] == (1,), "a checkpoint has no tensors without a dim"
    assert "model.frozen.weight" in shapes
    assert not [name for name in shapes if "scratch" in name], "a buffer that isn't persistent"
    trained = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]
    assert sorted(steps) == sorted(trained)


def carry(world: Any, source: str, target: str, named: dict[str, str]) -> None:
    """Three steps under one strategy, three more under another: the losses of one process that never stopped."""
    with running(world, "single", **named) as unbroken:
        expected = advance(unbroken, *FIRST, *LAST)
    with running(world, source, **named) as stopped, running(world, target, seed=1, **named) as resumed:
        advance(stopped, *FIRST)
        state = stopped.state()
        load(resumed, whole(state), state.plain)
        # The design's bar for losses.
        assert advance(resumed, *LAST) == pytest.approx(expected[len(FIRST) :], rel=1e-5)


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "ddp", "fsdp zero3", "fsdp1 zero3", "tp sequence", "pp"))
def test_any_strategy_goes_on_from_one_process_and_back(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(ranks, carry, "single", kind, sized(kind))
    pool.run(ranks, carry, kind, "single", sized(kind))


@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    [
        ("pp of two stages", "fsdp1 zero3", 2),
        pytest.param("fsdp1 zero2", "tp sequence", 2, marks=pytest.mark.slow),
        pytest.param("tp zero3", "pp zero2", 4, marks=pytest.mark.slow),
        pytest.param("pp tp", "fsdp hybrid", 4, marks=pytest.mark.slow),
        pytest.param("fsdp offload", "pp zero3", 4, marks=pytest.mark.slow),
    ],
)
def test_strategies_go_on_from_each_other(pool: Pool, source: str, target: str, ranks: int) -> None:
    pool.run(ranks, carry, source, target, sized(source, target))


@pytest.mark.parametrize("optimizer", ["decay groups", "momentum"])
def test_decay_groups_and_momentum_go_from_strategy_to_strategy(pool: Pool, optimizer: str) -> None:
    pool.run(2, carry, "fsdp zero3", "fsdp1 zero3", {"optimizer": optimizer})
    pool.run(2, carry, "fsdp1 zero3", "tp", {"optimizer": optimizer})


def begin_elsewhere(world: Any, source: str, target: str, optimizer: str) -> None:
    """From before the first step."""
    with (
        running(world, source, optimizer=optimizer) as unbroken,
        running(world, target, seed=1, optimizer=optimizer) as b,
    ):
        state = unbroken.state()
        assert set(state.plain["steps"].values()) == {0}
        load(b, whole(state), state.plain)
        # Dampened momentum begins undamped: one of zeros would not do.
        assert advance(b, *FIRST) == pytest.approx(advance(unbroken, *FIRST), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["fused adamw", "momentum"])
def test_a_run_that_never_stepped_begins_elsewhere(pool: Pool, optimizer: str) -> None:
    for source, target in [("single", "fsdp1 zero3"), ("fsdp1 zero3", "fsdp zero3"), ("fsdp zero3", "single")]:
        pool.run(2, begin_elsewhere, source, target, optimizer)


def overflow_and_resume(world: Any, kind: str) -> None:
    """fp16; the second step overflows, so that scale and growth counter are not the ones it began with."""
    with running(world, kind, "perceptron", precision="fp16") as stopped:
        for step, scale in enumerate((1.0, 1e6, 1.0)):
            stopped.forward_backward(*microbatches(stopped, step, scale))
            stopped.optimizer_step(1.0, want_grad_norm=False)
        state = stopped.state()
        assert state.plain["scaler"] == {"scale": 32768.0, "growth_tracker": 1}  # halved, and one step since
        assert set(state.plain["steps"].values()) == {2}
        with running(world, kind, "perceptron", precision="fp16", seed=1) as resumed:
            load(resumed, whole(state), state.plain)
            assert resumed.extra_metrics() == {"loss_scale": 32768.0}
            assert advance(resumed, *LAST) == advance(stopped, *LAST)
            assert_equal(resumed.state(), stopped.state())
            assert resumed.state().plain["scaler"] == {"scale": 32768.0, "growth_tracker": 4}


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp zero3", "fsdp1 zero3"])
def test_the_loss_scale_and_its_growth_counter_go_on(pool: Pool, kind: str) -> None:
    pool.run(2, overflow_and_resume, kind)


def discard_a_step(world: Any, kind: str, named: dict[str, str]) -> None:
    with running(world, kind, **named) as strategy, running(world, kind, **named) as never_saw_it:
        for each in (strategy, never_saw_it):
            advance(each, *FIRST)
        before = whole(strategy.state()), strategy.state().plain
        strategy.remember()
        strategy.forward_backward(*microbatches(strategy, 9, scale=1e3))
        strategy.discard()
        after = whole(strategy.state()), strategy.state().plain
        assert before[1] == after[1]
        assert all(torch.equal(tensor, before[0][name]) for name, tensor in after[0].items())
        assert advance(strategy, *LAST) == advance(never_saw_it, *LAST)
        assert_equal(strategy.state(), never_saw_it.state())


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "single", "ddp", "fsdp zero3", "fsdp1 zero3", "tp", "pp"))
def test_a_discarded_step_leaves_no_trace(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(ranks, discard_a_step, kind, sized(kind))


@pytest.mark.parametrize("kind", ["single", "fsdp zero3"])
def test_a_discarded_step_leaves_the_scaler_alone(pool: Pool, kind: str) -> None:
    pool.run(2, discard_a_step, kind, {"model": "perceptron", "precision": "fp16"})


class Scaled(nn.Module):
    """Its parameter has no dim, and its table two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.table = nn.Linear(3, 3, bias=False)
        self.tied = self.table

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.table(x)) * self.scale


def test_a_parameter_without_a_dim_and_one_with_two_names_are_kept() -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = Scaled()
        optimizer = torch.optim.NAdam(model.parameters())  # which has a slot without a dim beside its count
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return model, optimizer

    (first, optimizer), (second, fresh) = trained(2), trained(0)
    state = take([first], optimizer)
    assert {name: tuple(t.shape) for name, t in state.tensors.items()} == {
        "model.scale": (1,),
        "model.table.weight": (3, 3),
        "model.tied.weight": (3, 3),
        **{f"optimizer.scale.{slot}": (1,) for slot in ("exp_avg", "exp_avg_sq", "mu_product")},
        **{f"optimizer.table.weight.{slot}": (3, 3) for slot in ("exp_avg", "exp_avg_sq")},
        "optimizer.table.weight.mu_product": (1,),
    }
    assert state.plain == {"steps": {"scale": 2, "table.weight": 2}}
    put_back(state, [second], fresh)
    assert_equal(take([second], fresh), state)
    assert fresh.state_dict()["state"][0]["mu_product"].ndim == 0


def test_an_optimizer_of_other_shapes_is_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="Adafactor keeps 'row_var'"):
        take([model], torch.optim.Adafactor(model.parameters()))


def test_learning_rates_are_the_ones_of_today() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = take([model], optimizer)
    today = torch.optim.AdamW(model.parameters(), lr=0.25)
    put_back(State(state.tensors, {"steps": {"weight": 7, "bias": 7}}), [model], today)
    assert today.param_groups[0]["lr"] == 0.25
    assert {int(slots["step"]) for slots in today.state.values()} == {7}
