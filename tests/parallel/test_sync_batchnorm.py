"""BatchNorm over all ranks' samples equals BatchNorm over one big batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from src.parallel.batchnorm import GlobalBatchNorm, synchronize_batchnorm
from tests.workers import Pool

SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d of two dims": (nn.BatchNorm1d, (6, 3)),
    "1d": (nn.BatchNorm1d, (6, 3, 5)),
    "2d": (nn.BatchNorm2d, (6, 3, 4, 5)),
    "3d": (nn.BatchNorm3d, (6, 3, 2, 4, 5)),
}
CASES = [
    *[(name, {}) for name in SHAPES],
    ("2d", {"momentum": None}),
    ("2d", {"affine": False}),
    ("2d", {"track_running_stats": False}),
    ("2d", {"eps": 0.1, "momentum": 0.5}),
]


def norm_and_batches(name: str, arguments: dict[str, Any]) -> tuple[nn.Module, list[Tensor]]:
    kind, shape = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    norm = kind(3, **arguments)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=1.0, generator=generator)
    # Off zero, where a difference of means of squares would lose digits.
    return norm, [torch.randn(shape, generator=generator) * 2 + 10 for _ in range(3)]


def outcome(norm: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Of three training forwards and backwards and an evaluation."""
    found: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        x = batch.clone().requires_grad_()
        out = norm(x)
        found[f"output {step}"] = out.detach()
        torch.autograd.backward(out.sin().sum())
        assert x.grad is not None
        found[f"gradient {step}"] = x.grad
    found["evaluated"] = norm.eval()(batches[0]).detach()
    found |= {f"gradient of {key}": p.grad for key, p in norm.named_parameters() if p.grad is not None}
    return found | {key: buffer for key, buffer in norm.named_buffers() if buffer is not None}


def on_own_samples(world: Any, name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    norm, batches = norm_and_batches(name, arguments)
    model = synchronize_batchnorm(nn.Sequential(norm), world.device)
    return outcome(model[0], [batch.chunk(world.world_size)[world.world_rank] for batch in batches])


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_two_ranks_equal_the_whole_batch(pool: Pool, name: str, arguments: dict[str, Any]) -> None:
    expected = outcome(*norm_and_batches(name, arguments))
    first, second = pool.run(2, on_own_samples, name, arguments)
    assert first.keys() == expected.keys()
    for key, tensor in expected.items():
        if key in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(first[key], second[key]), key
            found = first[key]
        elif key.startswith("gradient of"):
            found = first[key] + second[key]  # each rank has its samples' share
        elif key == "evaluated" and not arguments.get("track_running_stats", True):
            continue  # without running statistics each batch is normalised by its own
        else:
            found = torch.cat([first[key], second[key]])
        # At 10 fp32 has seven digits, of which centring takes one, and gradients of few samples cancel.
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-4, msg=key)


def test_names_and_the_object_itself_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before, norm, names = copy.deepcopy(model.state_dict()), model[1], [name for name, _ in model.named_modules()]
    assert synchronize_batchnorm(model, torch.device("cpu")) is model
    assert model[1] is norm
    assert isinstance(norm, GlobalBatchNorm)
    assert [name for name, _ in model.named_modules()] == names
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_a_model_without_batch_norm_is_named(caplog: pytest.LogCaptureFixture) -> None:
    synchronize_batchnorm(nn.Linear(2, 2), torch.device("cpu"))
    assert "strategy.sync_batchnorm=true changes nothing: Linear has no BatchNorm." in caplog.text
