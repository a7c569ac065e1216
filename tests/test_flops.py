"""What a token costs a decoder, and the share of a peak that its throughput is."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from src.flops import DecoderFlops, Utilization
from src.models.gpt import GPT
from src.pace import Pace

SIZES = {"vocab_size": 50, "sequence_length": 8, "layers": 2, "width": 16, "heads": 2}


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_what_torch_counts_of_a_step(tied):
    model = GPT(**SIZES, tie_embeddings=tied)
    tokens = torch.randint(0, 50, (4, 8))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    # torch knows no attention fused on CPUs, counts no biases and norms, which the formula takes for matrices, and the
    # first layer's inputs are embeddings, which have a gradient too.
    attention = 12 * 2 * 16 * 8
    vectors = 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert model.flops().a_token(8) - attention - vectors == counter.get_total_flops() / 32


def test_a_frozen_parameter_costs_two_thirds_of_a_trained_one():
    model = GPT(**SIZES)
    before = model.flops()
    model.head.weight.requires_grad_(False)
    flops = model.flops()
    assert (flops.trained, flops.frozen) == (before.trained - 800, 800)  # 50 x 16
    assert before.a_token(8) - flops.a_token(8) == 2 * 800
    assert flops.formula() == f"6 x {flops.trained:,} parameters + 4 x 800 frozen + 12 x 2 layers x 16 width x sequence"


def test_mfu_is_the_share_of_all_ranks_peak():
    # 6 x 100 + 4 x 10 + 12 x 2 x 4 x 5 = 1120 operations a token; 3 tokens a second of a peak of 6720: a half.
    assert DecoderFlops(100, 10, 2, 4).a_token(5) == 1120
    assert Utilization(DecoderFlops(100, 10, 2, 4), 6720.0).of(3.0, 5) == 0.5


def test_tokens_a_second_are_those_that_count_and_mfu_counts_every_slot():
    pace = Pace(torch.device("cpu"), True, Utilization(DecoderFlops(100, 10, 2, 4), 6720.0))
    pace.count(4, torch.tensor(3), 5)
    pace.count(2, torch.tensor(0), 5)  # a fully masked step
    rates = pace.rates(10.0)
    assert rates["tokens_per_second"] == pytest.approx(0.3)
    assert rates["samples_per_second"] == pytest.approx(0.6)
    assert rates["mfu"] == pytest.approx(1120 * 30 / 10 / 6720)


def test_images_have_no_tokens_and_an_unknown_peak_no_mfu():
    images, tokens = Pace(torch.device("cpu")), Pace(torch.device("cpu"), has_tokens=True)
    for pace in (images, tokens):
        pace.count(4, 4, 1)
    assert not {"tokens_per_second", "mfu"} & images.rates(1.0).keys()
    assert "mfu" not in tokens.rates(1.0)
