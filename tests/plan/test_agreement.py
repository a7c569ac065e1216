"""The forecast against real steps, over a sample of the product that `benchmarks/memory.py` walks."""

import statistics

import pytest

from benchmarks.memory import summary, walk
from tests.workers import Pool

EVERY = 29  # of 1440 combinations, of which a part is refused; prime, so every value of every axis comes
MEDIAN_BAR = 0.03


@pytest.mark.slow
@pytest.mark.timeout(900)
# Of one rank, which has nobody to share with.
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_the_forecast_is_within_its_bars(pool: Pool) -> None:
    rows = list(walk(pool, EVERY))
    print("\n".join(summary(rows)))
    assert len(rows) >= 30
    assert {row.way for row in rows} >= {"single", "ddp", "fsdp zero2", "fsdp zero3", "fsdp1", "deepspeed zero2", "tp"}
    over = [f"{row.error:+.1%} of {row.measured:,} bytes: {' '.join(row.words)}" for row in rows if row.is_over]
    assert not over, "\n".join(over)
    assert statistics.median(abs(row.error) for row in rows) <= MEDIAN_BAR
