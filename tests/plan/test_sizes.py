"""What one micro-batch leaves of a model, against arithmetic by hand and against models that are gone through whole."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from src.batch import MicroBatch
from src.footprint import ModelSizes
from src.models.gpt import GPT
from src.models.mlp import MLP
from src.parallel.recompute import recompute_activations
from src.plan import sizes as of_models
from src.precision import Precision
from src.strategies.footprint import ModelPart

#: sequence, micro-batch, width, heads, vocabulary
S, B, H, HEADS, V = 32, 3, 64, 4, 100


def gpt(layers: int, mode: str = "none") -> nn.Module:
    return recompute_activations(GPT(V, S, layers, H, HEADS), mode)


def sizes_of(
    make: Callable[[], nn.Module], shape: tuple[int, ...], precision: str = "fp32", casts: bool = False
) -> ModelSizes:
    is_tokens = len(shape) == 2
    with torch.device("meta"):
        model = make()
        inputs = torch.zeros(shape, dtype=torch.int64 if is_tokens else torch.float32)
        targets = torch.zeros(shape if is_tokens else shape[:1], dtype=torch.int64)
    part = ModelPart(model, getattr(model, "units", list)())
    return of_models.model_sizes(part, MicroBatch(inputs, targets), 2, Precision(precision), casts)


def a_layer(precision: str, casts: bool = False, mode: str = "none") -> int:
    """Bytes that one block more keeps."""
    four, three = (sizes_of(partial(gpt, layers, mode), (B, S), precision, casts) for layers in (4, 3))
    return four.activations - three.activations


@pytest.mark.parametrize(("precision", "element"), [("fp32", 4), ("bf16", 2)])
def test_a_block_keeps_what_korthikanti_et_al_count(precision: str, element: int) -> None:
    # s b h x 16 elements: into each norm 2, out of each norm 2, q, k, v 3, attention's output 1, up and GELU 4 + 4. Of
    # their 34 bytes in 16 bits, 2 are dropout's masks, which there are none of at dropout 0. With fused attention there
    # is no term in the heads but the softmax's sums, fp32: s b a x 4; and each norm's mean and deviation, 2 x 2 x s b.
    kept = S * B * H * 16 * element
    sums = S * B * HEADS * 4
    norms = 2 * 2 * S * B * element
    assert a_layer(precision, casts=True) == pytest.approx(kept + sums + norms, abs=2 * 2 * S * B * 4)


def test_a_recomputed_block_keeps_its_input() -> None:
    assert a_layer("fp32", mode="full") == S * B * H * 4


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_blocks_stand_for_all_of_them(precision: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = sizes_of(lambda: gpt(5, mode), (B, S), precision)
    monkeypatch.setattr(of_models, "WALKED", 5)
    assert short == sizes_of(lambda: gpt(5, mode), (B, S), precision)


def test_units_that_differ_are_all_gone_through() -> None:
    assert of_models.equal_runs([nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)]) == [
        range(2),
        range(2, 3),
        range(3, 4),
    ]


def test_a_small_network_by_hand() -> None:
    # 64 -> 8 -> 10, 4 images. Kept: the ReLU's output, 4 x 8 fp32; the input is the batch's own.
    # Loss: the logits and their log-softmax, 4 x 10 fp32 each, the sum, and its weight.
    found = sizes_of(lambda: MLP([1, 8, 8], [8], 10), (4, 1, 8, 8))
    assert found.num_parameters == found.trained == 64 * 8 + 8 + 8 * 10 + 10
    assert found.batch == 4 * 64 * 4 + 4 * 8
    assert found.output == 4 * 10 * 4
    assert found.activations == 4 * 8 * 4
    assert found.logits == pytest.approx(2 * 4 * 10 * 4, abs=16)
    # 2 operations a weight and sample in forward, twice as many in backward.
    assert found.flops == 6 * 4 * (64 * 8 + 8 * 10)


def test_autocast_keeps_the_16_bit_weights_that_backward_multiplies_with() -> None:
    # The second layer's, for the gradient of its input; nobody asks for that of the images.
    found = sizes_of(lambda: MLP([1, 8, 8], [8], 10), (4, 1, 8, 8), "bf16")
    assert found.weight_copies == 2 * 8 * 10
    assert sizes_of(lambda: MLP([1, 8, 8], [8], 10), (4, 1, 8, 8), "bf16", casts=True).weight_copies == 0


def test_flops_of_a_gpt_are_those_of_the_usual_formula() -> None:
    # 6 a multiplied weight and token, and 12 s h a layer and token for attention in full (PaLM, appendix B).
    found = sizes_of(lambda: gpt(2), (B, S))
    with torch.device("meta"):
        model = gpt(2)
    multiplied = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    multiplied -= S * H  # the learned positions
    assert found.flops == B * S * (6 * multiplied + 12 * 2 * H * S)


def test_an_optimizers_slots_are_learnt_from_a_step() -> None:
    assert of_models.optimizer_slots(lambda parameters: torch.optim.AdamW(parameters)) == 2
    assert of_models.optimizer_slots(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) == 0
    assert of_models.optimizer_slots(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == 1
