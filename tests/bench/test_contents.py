"""Contents that tell who sent them: what would be wrong is found, and what is right is right in every type."""

import math

import pytest
import torch
from torch import Tensor

from src.bench import contents
from src.bench.collectives import DTYPES
from src.bench.contents import NOTHING, Part, WrongContents, check, stretched, sums, terms, values, write

LENGTH = 600  # elements: more than two periods of the values


def sent(world_rank: int, world_size: int, is_summed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.empty(LENGTH, dtype=dtype)
    write(found, terms(world_rank, world_size) if is_summed else values(world_rank))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8, 64, 300])
def test_all_terms_together_are_the_sums_exactly(world_size: int, dtype: str) -> None:
    total = torch.zeros(LENGTH, dtype=DTYPES[dtype])
    for world_rank in range(world_size):
        total += sent(world_rank, world_size, is_summed=True, dtype=DTYPES[dtype])
    check(total, [Part(None, 0, LENGTH)], "all")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sum_without_a_rank_or_with_one_twice_or_that_is_no_sum_is_found(world_size: int) -> None:
    all_terms = [sent(rank, world_size, is_summed=True) for rank in range(world_size)]
    right = torch.stack(all_terms).sum(0)
    wrong = [right - all_terms[-1], right + all_terms[0], torch.stack(all_terms).amax(0), right / world_size]
    wrong += [right.roll(1), right * math.nan, torch.zeros(LENGTH), torch.full((LENGTH,), float(NOTHING))]
    for received in wrong:
        with pytest.raises(WrongContents):
            check(received, [Part(None, 0, LENGTH)], "all")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_another_rank_sent_or_another_place_is_found(dtype: str) -> None:
    right = sent(1, 4, is_summed=False, dtype=DTYPES[dtype])
    check(right, [Part(1, 0, LENGTH)], "all")
    for received in (right.roll(1), sent(2, 4, is_summed=False, dtype=DTYPES[dtype]), torch.full_like(right, NOTHING)):
        with pytest.raises(WrongContents):
            check(received, [Part(1, 0, LENGTH)], "all")


def test_the_message_names_the_first_wrong_element_beyond_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "CHUNK", 256)
    received = torch.cat([sent(0, 2, is_summed=False), sent(1, 2, is_summed=False)])
    parts = [Part(0, 0, LENGTH), Part(1, 0, LENGTH)]
    check(received, parts, "all")
    received[LENGTH + 300] = 7
    received[LENGTH + 500] = 7
    # Rank 1 sends (31 + i) mod 251: for i = 300, 331 - 251 = 80.
    with pytest.raises(
        WrongContents, match=r"^gather on rank 0: element 900 of 1200 is 7, and what rank 1 sent is 80\."
    ):
        check(received, parts, "gather on rank 0")


def test_a_part_is_compared_from_where_it_starts() -> None:
    check(sent(3, 4, is_summed=False)[123:323], [Part(3, 123, 200)], "all")
    with pytest.raises(WrongContents):
        check(sent(3, 4, is_summed=False)[124:324], [Part(3, 123, 200)], "all")


def test_a_period_is_repeated_from_any_element() -> None:
    assert stretched(torch.tensor([1, 2, 3]), 5, 7).tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert sums().tolist() == [3, 4, 5, 6, 7, 8, 9]
