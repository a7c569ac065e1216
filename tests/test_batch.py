"""The batch plan: which samples each step sees, whatever the split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.batch import BatchPlan, BatchSizes, GlobalBatch
from src.errors import Refused


@given(
    num_samples=st.integers(1, 300),
    micro=st.integers(1, 9),
    accumulate=st.integers(1, 5),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_counts_every_sample_exactly_once(num_samples, micro, accumulate, ranks, epoch):
    sizes = BatchSizes(micro, accumulate, ranks)
    plan = BatchPlan(num_samples, sizes.global_batch_size, seed=3)
    seen = []
    for batch in plan.epoch(epoch):
        per_rank = [batch.requests(sizes, rank) for rank in range(ranks)]
        assert len({len(requests) for requests in per_rank}) == 1, "every rank takes part in every micro-batch"
        for requests in per_rank:
            for request in requests:
                assert request.ids.shape == (micro,), "micro-batches are always full"
                assert set(request.ids) <= set(batch.sample_ids), "padding comes from the same batch"
                seen.extend(request.ids[: request.num_real])
    assert sorted(seen) == list(range(num_samples))


@given(micro=st.integers(1, 4), accumulate=st.integers(1, 4), ranks=st.integers(1, 4))
def test_the_plan_does_not_depend_on_the_split(micro, accumulate, ranks):
    size = BatchSizes(micro, accumulate, ranks).global_batch_size
    hashes = [batch.hash for batch in BatchPlan(101, size, seed=0).epoch(1)]
    assert hashes == [batch.hash for batch in BatchPlan(101, size, seed=0).epoch(1)]
    assert len(hashes) == -(-101 // size)


def test_the_hash_names_the_set_of_samples_not_their_order():
    one, other = GlobalBatch(0, np.array([3, 1, 2])), GlobalBatch(1, np.array([1, 2, 3]))
    assert one.hash == other.hash != GlobalBatch(0, np.array([1, 2, 4])).hash


def test_windows_of_seven_batches_accumulated_four_by_four_are_four_and_three():
    sizes = BatchSizes(micro_batch_size=2, accumulate=4, data_parallel_size=1)
    windows = [len(b.requests(sizes, 0)) for e in (0, 1) for b in BatchPlan(14, 8, seed=0).epoch(e)]
    assert windows == [4, 3, 4, 3]


def test_starting_within_an_epoch_gives_the_rest_of_the_same_order():
    plan = BatchPlan(20, 4, seed=5)
    whole = list(plan.epoch(2))
    for expected, got in zip(whole[2:], plan.epoch(2, first_sample=8), strict=True):
        assert (expected.sample_ids == got.sample_ids).all()


def test_epochs_are_shuffled_differently():
    plan = BatchPlan(100, 10, seed=0)
    assert not (plan.order(0) == plan.order(1)).all()


@pytest.mark.parametrize(
    ("micro", "accumulate", "global_batch", "expected"),
    [(8, 4, None, (8, 4, 256)), (8, None, 256, (8, 4, 256)), (None, 4, 256, (8, 4, 256)), (8, 4, 256, (8, 4, 256))],
)
def test_any_two_batch_sizes_give_the_third(micro, accumulate, global_batch, expected):
    # 8 a micro-batch x 4 accumulated x 8 data ranks = 256
    sizes = BatchSizes.solve(micro, accumulate, global_batch, data_parallel_size=8)
    assert (sizes.micro_batch_size, sizes.accumulate, sizes.global_batch_size) == expected


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((8, 4, 255), "8 x 4 x 8 = 256"),
        ((None, 4, 250), "multiple of accumulate x data ranks = 4 x 8 = 32"),
        ((8, None, 8), "multiple of micro_batch_size x data ranks = 8 x 8 = 64"),
        ((8, None, None), "give two of the three"),
        ((8, 0, None), "trainer.accumulate=0"),
    ],
)
def test_batch_sizes_that_disagree_are_refused_with_the_arithmetic(sizes, words):
    with pytest.raises(Refused, match=words.replace("(", r"\(")):
        BatchSizes.solve(*sizes, data_parallel_size=8)
