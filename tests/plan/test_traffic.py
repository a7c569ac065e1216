"""What a step sends, over how many ranks each time: by arithmetic, and against traced steps."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from src.footprint import Footprint, Part
from src.plan.traffic import moved_bytes, step_traffic
from src.sharding import Sharding
from src.strategies.base import Setting
from src.strategies.ddp import DDP
from src.strategies.rings import ring_size
from tests.plan.test_search import sizes
from tests.plan.test_trace import experiment_of, parts, traced_peaks

SETTING = Setting("x", {}, 16, 16, "cuda", "fp32", Sharding("none"), 1, 1, None)


def sending(**traffic: int) -> Footprint:
    """A footprint that lists these bytes, of which nothing else is asked."""
    return cast(Footprint, SimpleNamespace(traffic={name: Part(size, "") for name, size in traffic.items()}))


@pytest.mark.parametrize(
    ("changes", "traffic", "moved"),
    [
        # Sums over 16 ranks: 2 x 15/16 of 16 bytes.
        ({}, {"all_reduce": 16}, 30.0),
        # Gathered over 16 ranks: 15/16.
        ({"sharding": Sharding("zero3")}, {"all_gather": 16, "reduce_scatter": 16}, 30.0),
        # Hybrid: gathered by 8 that share a copy, 7/8; the shards summed between 2 copies, 2 x 1/2.
        ({"sharding": Sharding("hybrid", shard_size=8)}, {"all_gather": 16}, 14.0),
        ({"sharding": Sharding("hybrid", shard_size=8)}, {"all_reduce": 16}, 16.0),
        # Layers split over 2 of 16 ranks: 2 x 1/2, whatever the 8 data ranks do.
        ({"arguments": {"tp": 2}, "data_parallel_size": 8}, {"all_reduce (layers)": 16}, 16.0),
        ({"arguments": {"tp": 4}, "data_parallel_size": 4}, {"all_gather (layers)": 16}, 12.0),
        # The data ranks beside them are 4 of 16: 2 x 3/4.
        ({"arguments": {"tp": 4}, "data_parallel_size": 4}, {"all_reduce": 16}, 24.0),
        # Reductions to one rank, and what goes from stage to stage: all of it once.
        ({"sharding": Sharding("zero1")}, {"reduce": 16}, 16.0),
        ({"arguments": {"pp": 4}, "data_parallel_size": 4}, {"send": 16}, 16.0),
    ],
    ids=str,
)
def test_each_collective_goes_over_its_own_axis(changes: dict[str, Any], traffic: dict[str, int], moved: float) -> None:
    assert moved_bytes(sending(**traffic), replace(SETTING, **changes)) == pytest.approx(moved)


def test_a_lone_rank_sends_nothing() -> None:
    alone = replace(SETTING, world_size=1, data_parallel_size=1)
    assert DDP.footprint(sizes(DDP, alone, 0), alone).traffic == {}
    # Nor does whoever lists something that would go to nobody, or nothing of it.
    assert step_traffic(sending(all_reduce=8, all_gather=8), alone) == {}
    assert step_traffic(sending(send=0), SETTING) == {}
    assert ring_size("all_reduce", replace(SETTING, sharding=Sharding("hybrid"))) == 1


def planned_traffic(config: dict[str, Any]) -> Mapping[str, int]:
    """Of rank 0, by formula."""
    from src.plan.formula import plan
    from src.world import World

    made = parts(World(0, 2, 0, 2, is_imagined=True), config)
    [planned] = plan(type(made.strategy), made.make_model, made.optimizer, made.data, made.setting)
    return {name: part.bytes for name, part in step_traffic(planned.footprint, made.setting).items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sequence_parallel", ["false", "true"])
def test_recomputation_repeats_the_traffic_of_split_layers(sequence_parallel: str) -> None:
    words = ["strategy=tp", f"strategy.sequence_parallel={sequence_parallel}", "model=gpt_tiny"]
    words += ["trainer.micro_batch_size=2", "trainer.activation_checkpointing="]
    kept, again = (experiment_of(2, *words[:-1], words[-1] + mode) for mode in ("none", "full"))
    [traced_kept], [traced_again] = (list(traced_peaks(config, 2).values()) for config in (kept, again))
    planned_kept, planned_again = planned_traffic(kept), planned_traffic(again)
    more = {name.removesuffix(" (layers)"): planned_again[name] - planned_kept[name] for name in planned_kept}
    # Other sums, of the loss and of what is in no unit, are not repeated: what a trace has more is the layers'.
    assert more == {name: traced_again.traffic[name] - traced_kept.traffic[name] for name in more}
    assert all(size > 0 for size in more.values())
