"""The arithmetic of pipelines, against brute force and against the orders that torch's schedules run."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from src.models.gpt import GPT
from src.parallel.cutting import cut
from src.parallel.pipeline import (
    SEVERAL_STAGES,
    nearest_counts,
    predicted_bubble,
    split_at,
    split_evenly,
    stages_of_rank,
    takes_microbatches,
)
from src.parallel.stages import SCHEDULES


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_an_even_split_has_the_smallest_largest_part(counts: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(counts)))
    ranges = split_evenly(counts, parts)
    assert [layer for part in ranges for layer in part] == list(range(len(counts)))
    assert len(ranges) == parts
    assert all(len(part) > 0 for part in ranges)
    everything = (split_at(list(points), len(counts)) for points in combinations(range(1, len(counts)), parts - 1))
    assert largest(counts, ranges) == min(largest(counts, split) for split in everything)


def largest(counts: list[int], ranges: list[range]) -> int:
    return max(sum(counts[layer] for layer in part) for part in ranges)


def test_split_points_come_before_layers() -> None:
    # The split of 24 layers into 4 stages that R12 of the design names.
    assert split_at([5, 11, 17], 24) == [range(5), range(5, 11), range(11, 17), range(17, 24)]


def test_stages_go_round_the_ranks() -> None:
    assert [stages_of_rank(2, 3, rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_stages_are_the_models_own_weights_under_their_own_names() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=11, sequence_length=4, layers=4, width=8, heads=2)
    whole = dict(model.state_dict())
    stages = cut(model, split_at([1, 3], 4))
    assert [list(stage.blocks) for stage in stages] == [["0"], ["1", "2"], ["3"]]
    parts = [stage.state_dict() for stage in stages]
    assert sum(len(part) for part in parts) == len(whole)
    for part in parts:
        for name, weight in part.items():
            assert weight.data_ptr() == whole[name].data_ptr(), name


def test_the_bubble_of_the_textbook() -> None:
    assert predicted_bubble("gpipe", 8, 4) == 3 / 11
    assert predicted_bubble("1f1b", 8, 4) == 3 / 11
    assert predicted_bubble("interleaved_1f1b", 8, 4, stages_per_rank=2) == 3 / 19
    assert predicted_bubble("zero_bubble", 8, 4) == 3 / 27
    assert predicted_bubble("zero_bubble", 3, 4) is None


def test_the_nearest_counts_are_on_both_sides() -> None:
    # Rounds of p = 2: 5 micro-batches would be two rounds of 2.5.
    assert nearest_counts("zero_bubble", 5, 2) == [4, 6]
    # 4 ranks, 17: four rounds; 16 divides, 18 and 19 don't, and five rounds begin at 20.
    assert nearest_counts("interleaved_1f1b", 17, 4) == [16, 20]


@pytest.fixture(params=[2, 3, 4])
def num_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many ranks, of which there is only this one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [(name, several) for name in SCHEDULES for several in ([1, 2, 3] if name in SEVERAL_STAGES else [1])],
)
def test_the_checks_know_what_torch_takes_and_how_long_its_orders_idle(
    num_ranks: int, name: str, stages_per_rank: int
) -> None:
    for count in range(1, 13):
        try:
            orders = orders_of(name, num_ranks, stages_per_rank, count)
        except ValueError:
            assert not takes_microbatches(name, count, num_ranks), count
            continue
        assert takes_microbatches(name, count, num_ranks), count
        predicted = predicted_bubble(name, count, num_ranks, stages_per_rank)
        # torch 2.14's picture of 1F1B, which it does not run by, lacks some of the last rank's forwards.
        if predicted is not None and name != "1f1b":
            assert idle_share(orders, num_ranks * stages_per_rank) == pytest.approx(predicted), count


def orders_of(name: str, num_ranks: int, stages_per_rank: int, count: int) -> dict[int, list[Any]]:
    """Each rank's actions, as torch's schedule has them. Raises ValueError where it refuses the count."""
    num_stages = num_ranks * stages_per_rank
    stages = [
        PipelineStage(torch.nn.Identity(), number, num_stages, torch.device("cpu"))
        for number in stages_of_rank(num_ranks, stages_per_rank, 0)
    ]
    several = name in SEVERAL_STAGES
    schedule: Any = SCHEDULES[name](stages if several else stages[0], count, loss_fn=torch.sub)  # type: ignore[arg-type]
    return schedule.pipeline_order


def idle_share(orders: dict[int, list[Any]], num_stages: int) -> float:
    """Of the ranks that run `orders`, with forward, input and weight gradients of one unit each and free sends."""
    ended: dict[tuple[int, str, int], int] = {}  # (stage, F or B, micro-batch): when
    now, work = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    left = {
        rank: [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a is not None]
        for rank, actions in orders.items()
    }
    while any(left.values()):
        rank, action = next(
            (rank, todo[0]) for rank, todo in left.items() if todo and ready(todo[0], ended, num_stages)
        )
        left[rank].pop(0)
        stage, kind, _ = action
        # torch's names: F forward; B whole backward; I input gradients; W weight gradients. The first stage has no
        # input gradients, so torch does its whole backward as W.
        units = {"F": 1, "B": 2, "I": int(stage > 0), "W": 1 + int(stage == 0)}.get(kind, 0)
        start = max([now[rank], *(ended[need] for need in needs(action, num_stages))])
        now[rank], work[rank] = start + units, work[rank] + units
        ended[stage, "B" if kind == "I" else kind, action[2]] = now[rank]
    return 1 - sum(work.values()) / len(work) / max(now.values())


def needs(action: tuple[int, str, int], num_stages: int) -> list[tuple[int, str, int]]:
    stage, kind, number = action
    if kind == "F":
        return [(stage - 1, "F", number)] if stage else []
    if kind in ("B", "I"):
        return [(stage, "F", number)] + ([(stage + 1, "B", number)] if stage < num_stages - 1 else [])
    return []  # what comes after a backward on the same rank


def ready(action: tuple[int, str, int], ended: dict[tuple[int, str, int], int], num_stages: int) -> bool:
    return all(need in ended for need in needs(action, num_stages))
