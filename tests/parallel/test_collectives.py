"""The collectives by themselves; what they do inside layers is in test_linear.py."""

import torch

from src.parallel.collectives import copy_to_axis, gather_from_axis, reduce_from_axis, slice_for_axis
from tests.parallel.drawn import tensor_mesh


def pass_strided_tensors(world):
    """Values, gradients and untouched arguments of each, for a transposed x and a transposed gradient."""
    mesh, r = tensor_mesh(world), world.world_rank
    base = torch.arange(6.0).reshape(2, 3).t()  # (3, 2), not contiguous
    for function, value, slope in (
        # Rank r passes (r + 1) x and, backward, (r + 1) g; over two ranks 1 + 2 = 3.
        (copy_to_axis, lambda x: (r + 1) * x, lambda g: 3 * g),
        (reduce_from_axis, lambda x: 3 * x, lambda g: (r + 1) * g),
        (gather_from_axis, lambda x: torch.cat([x, 2 * x], dim=-1), lambda g: (r + 1) * g[:, 2 * r : 2 * r + 2]),
        (slice_for_axis, lambda x: (r + 1) * x[:, r : r + 1], lambda g: torch.cat([g, 2 * g], dim=-1)),
    ):
        x = ((r + 1) * base).requires_grad_()
        output = function(x, mesh)
        upstream = torch.arange(1.0, 1 + output.numel()).reshape(output.shape[::-1]).t()
        gradient = (r + 1) * upstream
        assert not x.is_contiguous()
        (seen,) = torch.autograd.grad(output, x, gradient)
        torch.testing.assert_close(output, value(base), rtol=0, atol=0)
        torch.testing.assert_close(seen, slope(upstream), rtol=0, atol=0)
        assert torch.equal(x, (r + 1) * base), function
        assert torch.equal(gradient, (r + 1) * upstream), function


def test_each_collective_turns_values_and_gradients_its_way_and_writes_to_no_argument(pool):
    pool.run(2, pass_strided_tensors)


def differentiate_twice(world):
    mesh = tensor_mesh(world)
    torch.manual_seed(0)  # the ranks may have drawn differently in tests before
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for there, back in ((slice_for_axis, gather_from_axis), (copy_to_axis, lambda y, m: reduce_from_axis(y / 2, m))):
        # There and back is the identity, so the cubes' first and second derivatives are 3 x^2 and 6 x.
        cubes = back(there(x, mesh) ** 3, mesh).sum()
        (first,) = torch.autograd.grad(cubes, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(first, 3 * x**2)
        torch.testing.assert_close(second, 6 * x)


def test_gradients_of_gradients_are_right_too(pool):
    pool.run(2, differentiate_twice)
