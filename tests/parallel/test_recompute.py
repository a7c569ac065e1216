"""Recomputing activations changes what is kept for backward, and no number."""

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from src.meter import metered
from src.models.cnn import CNN
from src.models.gpt import GPT, Block
from src.models.mlp import MLP
from src.models.resnet import ResNet18
from src.objective import cross_entropy_sum
from src.parallel.recompute import MODES, Keeping, recompute_activations

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
    expected, *others = [trained(name, mode, precision) for mode in MODES]
    for mode, found in zip(MODES[1:], others, strict=True):
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (mode, key)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_running_statistics_count_each_batch_once(mode: str) -> None:
    norm = nn.BatchNorm1d(64, momentum=0.5)
    model = recompute_activations(nn.Sequential(nn.Flatten(), norm, nn.Linear(64, 10)), mode)
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
    without, full, selective = (kept_bytes(drawn(name, mode)) for mode in MODES)
    assert full < without / 2
    if name in ("gpt", "cnn", "resnet18"):  # others are little else than products: kept before ReLU, not after it
        assert full < selective < without


def test_a_block_keeps_its_input_only() -> None:
    """2·s·b·h of Korthikanti et al. 2022, section 5, with four bytes a number instead of two."""

    def blocks_keep(mode: str, layers: int) -> int:
        model = GPT(vocab_size=11, sequence_length=LENGTH, layers=layers, width=WIDTH, heads=2)
        return kept_bytes(recompute_activations(model, mode))

    assert blocks_keep("full", 3) - blocks_keep("full", 2) == 4 * LENGTH * BATCH * WIDTH
    # Selective: beside it 3 for query, key and value, 1 and a number for each of 2 heads of attention, 1 of its output,
    # 4 of the inner layer before GELU and 1 of the MLP's output, in inputs of the block.
    kept = 11 * 4 * LENGTH * BATCH * WIDTH + 4 * LENGTH * BATCH * 2
    assert blocks_keep("selective", 3) - blocks_keep("selective", 2) == kept
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


def peak_bytes(mode: str) -> int:
    """Of forward and backward beyond the weights: gpt_124m's width and heads, three layers, 4 x 512 tokens."""
    model = recompute_activations(GPT(vocab_size=256, sequence_length=512, layers=3, width=768, heads=12), mode)
    tokens = torch.zeros(4, 512, dtype=torch.int64)
    with metered(model) as meter:
        torch.autograd.backward(cross_entropy_sum(model(tokens), tokens))
    return meter.peak - sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(partial(FakeTensorMode, allow_non_fake_inputs=True), id="fake"),
        pytest.param(nullcontext, id="real", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_the_measured_peak_of_selective_lies_between_full_and_none(tensors: Any) -> None:
    with tensors():
        none, full, selective = (peak_bytes(mode) for mode in MODES)
    print(f"beyond weights: none {none:,}, selective {selective:,}, full {full:,} bytes")
    assert full < 0.9 * selective
    assert selective < 0.9 * none


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_selective_computes_no_product_and_no_attention_twice(dropout: float) -> None:
    model = recompute_activations(gpt(dropout), "selective")
    inputs, targets = batches(model)[0]
    forward, backward = Counted(), Counted()
    with forward:
        loss = cross_entropy_sum(model(inputs), targets)
    with backward:
        torch.autograd.backward(loss)
    # Backward multiplies twice for each product of forward, by its own operations. Of attention: the CPU's kernel does
    # not drop, so with dropout attention is products, of which backward has twice as many.
    products = forward.of("mm", "addmm", "bmm", "baddbmm")
    assert backward.of("mm", "addmm", "bmm", "baddbmm") == 2 * products
    assert backward.of("_scaled_dot_product_flash_attention_for_cpu") == 0
    assert forward.of("_scaled_dot_product_flash_attention_for_cpu") == (LAYERS if dropout == 0 else 0)
    assert backward.of("gelu") == LAYERS


class Counted(TorchDispatchMode):
    """Counts aten's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> int:
        return sum(self.counts[name] for name in names)


def test_attention_that_draws_is_computed_again() -> None:
    decide, context = Keeping(nn.Identity()), SelectiveCheckpointContext(is_recompute=False)
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1)
    kept = CheckpointPolicy.MUST_SAVE
    assert decide(context, attend, q, q, q) is decide(context, attend, q, q, q, 0.0, True) is kept
    assert decide(context, attend, q, q, q, 0.1, True) is not kept
    assert decide(context, attend, q, q, q, dropout_p=0.1) is not kept
    assert decide(context, torch.ops.aten.gelu.default, q) is not kept


class Overwrites(nn.Module):
    """Adds to a product in place, which torch's own check does not see: the product of three dims is another tensor."""

    inputs = "tokens"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return y.sin()


def test_a_layer_that_overwrites_what_selective_keeps_is_named() -> None:
    model = recompute_activations(Overwrites(), "selective")
    with pytest.raises(
        ValueError, match=r"keeps the result of aten::mm in a Overwrites, and aten::add_.* overwrites it"
    ):
        model(torch.ones(2, 3, 4))


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
    bare, *models = [drawn(name, mode) for mode in MODES]
    for model in models:
        assert list(model.state_dict()) == list(bare.state_dict())
        assert [key for key, _ in model.named_modules()] == [key for key, _ in bare.named_modules()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_copy_recomputes_with_its_own_weights(mode: str) -> None:  # as the stages of a pipeline are made
    model = drawn("gpt", mode)
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
