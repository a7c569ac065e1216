"""Recomputing activations changes what is kept for backward, and no number."""

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from src.models.cnn import CNN
from src.models.gpt import GPT, Block
from src.models.mlp import MLP
from src.models.resnet import ResNet18
from src.objective import cross_entropy_sum
from src.parallel.recompute import recompute_activations

BATCH, LENGTH, WIDTH, LAYERS = 2, 8, 16, 3


def gpt(dropout: float = 0.2) -> GPT:
    return GPT(vocab_size=11, sequence_length=LENGTH, layers=LAYERS, width=WIDTH, heads=2, dropout=dropout)


class Spectral(nn.Module):
    """Divides its weight by a norm that it estimates from a buffer, which each training forward changes."""

    inputs = "images"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(64, 10)), nn.ReLU(), nn.Linear(10, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "mlp": lambda: MLP([1, 8, 8], [16, 12], 10),
    "cnn": lambda: CNN([1, 8, 8], 10),
    "resnet18": lambda: ResNet18([1, 8, 8], 10),
    "spectral norm": Spectral,
}


def drawn(name: str, mode: str) -> nn.Module:
    torch.manual_seed(0)
    return recompute_activations(MODELS[name](), mode)


def batches(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Three of two samples, the same at each call."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(0, 10, shape, generator=generator)

    if model.inputs == "tokens":
        return [(numbers(BATCH, LENGTH), numbers(BATCH, LENGTH)) for _ in range(3)]
    return [(torch.randn(BATCH, 1, 8, 8, generator=generator), numbers(BATCH)) for _ in range(3)]


def trained(name: str, mode: str, precision: torch.dtype | None = None) -> dict[str, Tensor]:
    """The gradients, added up over three micro-batches, the buffers, and the next random number."""
    model = drawn(name, mode)
    for inputs, targets in batches(model):
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            logits = model(inputs)
        torch.autograd.backward(cross_entropy_sum(logits, targets))
    gradients = {f"gradient of {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {**gradients, **dict(model.named_buffers()), "random number": torch.rand(1)}


@pytest.mark.parametrize(
    ("name", "precision"), [*[(name, None) for name in MODELS], ("gpt", torch.bfloat16), ("cnn", torch.bfloat16)]
)
def test_gradients_and_buffers_are_equal_to_the_bit(name: str, precision: torch.dtype | None) -> None:
    expected, found = (trained(name, mode, precision) for mode in ("none", "full"))
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_running_statistics_count_each_batch_once() -> None:
    norm = nn.BatchNorm1d(64, momentum=0.5)
    model = recompute_activations(nn.Sequential(nn.Flatten(), norm, nn.Linear(64, 10)), "full")
    for number in (2.0, 6.0):
        torch.autograd.backward(model(torch.full((2, 64), number)).sum())
    assert norm.num_batches_tracked == 2
    # From 0, halfway to 2 and then halfway to 6; counted twice, the way would be 0, 1, 1.5, 3.75, 4.875.
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, torch.full((64,), 3.5))


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps of one forward beyond the weights and the input, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    held = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)  # else another would get its address
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs, _ = batches(model)[0]
    own.add(inputs.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_less_is_kept_for_backward(name: str) -> None:
    without, full = (kept_bytes(drawn(name, mode)) for mode in ("none", "full"))
    assert full < without / 2


def test_a_block_keeps_its_input_only() -> None:
    """2·s·b·h of Korthikanti et al. 2022, section 5, with four bytes a number instead of two."""

    def blocks_keep(mode: str, layers: int) -> int:
        model = GPT(vocab_size=11, sequence_length=LENGTH, layers=layers, width=WIDTH, heads=2)
        return kept_bytes(recompute_activations(model, mode))

    assert blocks_keep("full", 3) - blocks_keep("full", 2) == 4 * LENGTH * BATCH * WIDTH
    # Whole, a block keeps many times as much: among it the MLP's inner layer before and after GELU, 8 of its inputs.
    assert blocks_keep("none", 3) - blocks_keep("none", 2) > 8 * 4 * LENGTH * BATCH * WIDTH


@pytest.fixture
def block_calls(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks whose forward runs, one entry a time."""
    calls: list[Block] = []
    forward = Block.forward

    def counted(block: Block, x: Tensor) -> Tensor:
        calls.append(block)
        return forward(block, x)

    monkeypatch.setattr(Block, "forward", counted)
    return calls


def test_each_block_runs_once_more_in_backward(block_calls: list[Block]) -> None:
    model = drawn("gpt", "full")
    inputs, targets = batches(model)[0]
    loss = cross_entropy_sum(model(inputs), targets)
    assert len(block_calls) == LAYERS
    torch.autograd.backward(loss)
    assert block_calls[LAYERS:] == block_calls[:LAYERS][::-1]


def test_evaluation_recomputes_nothing(block_calls: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn("gpt", "full").eval()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("checkpoint was asked for without gradients")

    monkeypatch.setattr("src.parallel.recompute.checkpoint", refuse)
    with torch.no_grad():
        logits = model(batches(model)[0][0])
    assert len(block_calls) == LAYERS
    expected = drawn("gpt", "none").eval()(batches(model)[0][0])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_names_stay_those_of_the_bare_model(name: str) -> None:
    bare, model = drawn(name, "none"), drawn(name, "full")
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [key for key, _ in model.named_modules()] == [key for key, _ in bare.named_modules()]


def test_a_copy_recomputes_with_its_own_weights() -> None:  # as the stages of a pipeline are made
    model = drawn("gpt", "full")
    twin = copy.deepcopy(model)
    inputs, targets = batches(model)[0]
    torch.autograd.backward(cross_entropy_sum(twin(inputs), targets))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_a_model_without_units_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        drawn("gpt", "full")
        assert caplog.records == []
        drawn("mlp", "full")
    assert re.search(r"recomputes all of MLP as one, since it names no units\(\)", caplog.text)
