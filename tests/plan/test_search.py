"""What fits, and how fast: by models whose sizes are written down here."""

from dataclasses import replace

import pytest
import torch

from src.batch import MicroBatch
from src.footprint import Interval, ModelSizes
from src.models.gpt import GPT
from src.plan.search import (
    MAX_MICRO_BATCH,
    Assumptions,
    Sizes,
    candidates,
    degrees_of,
    estimate,
    growing,
    grown,
    largest_that_fits,
    with_micro_batch,
)
from src.plan.sizes import model_sizes
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import Setting, Strategy
from src.strategies.ddp import DDP
from src.strategies.footprint import ModelPart
from src.strategies.fsdp import FSDP2
from src.strategies.pp import PipelineParallel
from src.strategies.tp import TensorParallel
from tests.command import REPOSITORY

MILLION = 1_000_000


def sizes(strategy: type[Strategy], setting: Setting, world_rank: int) -> ModelSizes:
    """10^6 parameters; 10^6 bytes of activations and 6 x 10^9 operations a sample."""
    samples = setting.micro_batch_size
    return ModelSizes(
        parameters=((MILLION, None),),
        trained=MILLION,
        buffers=0,
        batch=0,
        activations=MILLION * samples,
        weight_copies=0,
        logits=0,
        output=0,
        stream=0,
        backward=(Interval(MILLION * samples, 0, MILLION, None),),
        optimizer_slots=2,
        flops=6000 * MILLION * samples,
    )


def setting(level: str = "none", ranks: int = 4, micro_batch_size: int = 1, accumulate: int = 1) -> Setting:
    return Setting("x", {}, ranks, ranks, "cuda", "fp32", Sharding(level), micro_batch_size, accumulate, None)


def test_a_step_takes_its_arithmetic_and_its_traffic() -> None:
    # 2 samples x 6e9 operations at half of 1 TFLOP/s; 4e6 bytes all-reduced by 4 ranks, 2 x 3/4 times, at 1 GB/s.
    found = estimate(DDP, setting(micro_batch_size=2), sizes, Assumptions(1.0, 0.5, 1.0))
    assert found.compute_seconds == pytest.approx(0.024)
    assert found.traffic_seconds == pytest.approx(0.006)
    assert found.samples_per_second == pytest.approx(2 * 4 / 0.03)


def test_what_fits_comes_fastest_first_and_nothing_else_comes() -> None:
    # DDP holds 16e6 bytes and 1e6 a sample: in 20e6 four samples fit, a power of two.
    ways: list[tuple[type[Strategy], Setting]] = [(DDP, setting()), (FSDP2, setting("zero3"))]
    found, _ = candidates(ways, sizes, 20 * MILLION, Assumptions(1.0, 0.5, 1.0), None)
    assert max(one.setting.micro_batch_size for one in found if one.strategy is DDP) == 4
    assert all(one.footprint.peak.bytes <= 20 * MILLION for one in found)
    speeds = [one.samples_per_second for one in found]
    assert speeds == sorted(speeds, reverse=True)


def test_where_nothing_fits_the_nearest_is_told() -> None:
    found, nearest = candidates([(DDP, setting())], sizes, MILLION, Assumptions(1.0, 0.5, 1.0), None)
    assert not found
    assert nearest is not None
    assert nearest.footprint.peak.bytes == 17 * MILLION


def test_a_global_batch_is_kept_by_accumulating_less() -> None:
    # 32 samples on 4 ranks: 8 each, as 2 x 4; 16 a micro-batch don't divide them.
    kept = with_micro_batch(setting(), 2, 32)
    assert kept is not None
    assert (kept.micro_batch_size, kept.accumulate) == (2, 4)
    assert with_micro_batch(setting(), 16, 32) is None


def test_the_largest_micro_batch_that_fits_is_a_power_of_two() -> None:
    # 16e6 bytes and 1e6 a sample: 7 samples would fit in 23e6, so four do.
    tried = list(growing(setting(), None))
    assert largest_that_fits(DDP, tried, sizes, 23 * MILLION) == 4
    assert largest_that_fits(DDP, tried, sizes, 24 * MILLION) == 8
    assert largest_that_fits(DDP, tried, sizes, 16 * MILLION) is None
    # Of 24 samples on 4 ranks: 1 or 2 a micro-batch, 4 not.
    assert largest_that_fits(DDP, growing(setting(), 24), sizes, 24 * MILLION) == 2


def test_the_largest_micro_batch_that_is_tried_is_told_to_who_configures() -> None:
    assert [tried.micro_batch_size for tried in growing(setting(), None)] == [2**n for n in range(11)]
    for path in ("conf/config.yaml", "conf/task/plan.yaml", "README.md"):
        assert f"up to {MAX_MICRO_BATCH}" in (REPOSITORY / path).read_text()


def test_degrees_divide_the_world_and_layers_stay_inside_a_machine() -> None:
    assert list(degrees_of(DDP, 16)) == [{}]
    assert [degrees["tp"] for degrees in degrees_of(TensorParallel, 16)] == [1, 2, 4, 8]
    assert {"pp": 2, "tp": 8} in list(degrees_of(PipelineParallel, 16))
    assert all(16 % (degrees["pp"] * degrees["tp"]) == 0 for degrees in degrees_of(PipelineParallel, 16))


def test_sizes_grow_by_the_sample() -> None:
    def walk(strategy: type[Strategy], setting: Setting, world_rank: int) -> ModelSizes:
        with torch.device("meta"):
            model, tokens = GPT(100, 32, 3, 64, 4), torch.zeros(setting.micro_batch_size, 32, dtype=torch.int64)
        return model_sizes(ModelPart(model, model.units()), MicroBatch(tokens, tokens), 2, Precision("fp32"))

    one, two, eight = (walk(DDP, setting(micro_batch_size=n), 0) for n in (1, 2, 8))
    assert grown(one, two, 1) == one  # nothing of it is forgotten, the gradients' shapes among it
    expected = grown(one, two, 8)
    # All but the most within an interval: with more samples another operation may be the largest, so a line through one
    # and two samples is a little low.
    assert replace(expected, backward=()) == replace(eight, backward=())
    assert expected.most_activations == pytest.approx(eight.most_activations, rel=0.02)
    assert Sizes(walk, lambda *_: None)(DDP, setting(micro_batch_size=8), 0) == expected
