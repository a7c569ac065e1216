"""Dry runs of worlds that no test machine has: 512 ranks of GPT-2 small, under each way to share it."""

import math
import resource
from collections.abc import Iterable

import pytest
import torch

from src.checks.trial import on_meta
from tests.plan.test_trace import experiment_of, traced_peaks

#: Of this process, on two cores.
BAR_SECONDS = 60
RANKS = 512
GPT_2 = ["model=gpt_124m", "trainer.micro_batch_size=2"]


def rows_of_rank_0(shapes: Iterable[torch.Size], shards: int) -> int:
    """Bytes of fp32 weights on rank 0: of each the first of `shards` runs of rows, the last of which may be shorter."""
    return sum(4 * -(-shape[0] // shards) * math.prod(shape[1:]) for shape in shapes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "shards", "held_by_all"),
    [
        (["strategy=fsdp"], 512, None),
        # Machines of 8 share a copy.
        (["strategy=fsdp", "sharding=hybrid", "sharding.shard_size=8"], 8, None),
        # Each layer over 4, and what a rank has of it over its 128 data ranks: an even share at least, and more where
        # rows don't divide.
        (["strategy=tp", "strategy.tp=4", "sharding=zero3"], None, (1.0, 1.1)),
        # Four stages, whole on each of their 128 data ranks.
        (["strategy=pp", "strategy.pp=4", "trainer.accumulate=8"], None, (1.0, 1.0)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_dry_run_of_512_ranks_takes_less_than_a_minute(
    words: list[str], shards: int | None, held_by_all: tuple[float, float] | None
) -> None:
    config = experiment_of(RANKS, *GPT_2, *words)
    shapes = [parameter.shape for parameter in on_meta(config["model"]).parameters()]
    whole = 4 * sum(map(math.prod, shapes))
    before = resource.getrusage(resource.RUSAGE_SELF)
    found = list(traced_peaks(config, RANKS).values())
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Of the processor: the clock on the wall also counts what else a machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < BAR_SECONDS
    if shards is not None:
        assert [traced.parameters for traced in found] == [rows_of_rank_0(shapes, shards)]
    if held_by_all is not None:
        of_each_kind = RANKS if len(found) == 1 else 1
        least, most = held_by_all
        assert least * whole <= of_each_kind * sum(traced.parameters for traced in found) <= most * whole


def test_heads_that_do_not_divide_are_found_by_the_dry_run_where_a_model_does_not_say_so() -> None:
    """With its count the model is refused before; without, the trace runs into what the ranks would."""
    words = ["strategy=tp", "strategy.tp=4", "model.heads=2", "model=gpt_tiny", "trainer.micro_batch_size=1"]
    config = experiment_of(8, *words, "model._target_=tests.own_models.ForgetsItsHeads")
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        traced_peaks(config, 8)
