"""Column- and row-parallel layers against nn.Linear, on real ranks.

Every comparison holds whole gradients against a single process's, so it fails where an all-reduce is missing: without
the forward one of the row layer each rank has only its term of the sum, without the backward one of the column layer
only its features' part of the input's gradient. It also fails where one is done twice, or in a direction too many:
the upstream gradients are different numbers everywhere, and two or four times them is not them.
"""

import copy
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from src.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.command import REPOSITORY
from tests.parallel.drawn import LAYERS, drawn, gradients, own, tensor_mesh, whole_gradients


class Case(NamedTuple):
    """One layer and its input. in_multiple, out_multiple: the features by number of ranks."""

    kind: str
    bias: bool
    whole: bool  # output gathered (column), input whole (row)
    in_multiple: int
    out_multiple: int
    batch: list[int]


CASES = st.builds(
    Case,
    kind=st.sampled_from(sorted(LAYERS)),
    bias=st.booleans(),
    whole=st.booleans(),
    in_multiple=st.integers(1, 5),
    out_multiple=st.integers(1, 5),
    batch=st.lists(st.integers(1, 4), max_size=3),  # a lone vector, rows, sequences, ...
)


def compare(case, mesh):
    """Value and gradients of one case, to float32's rounding (sums of up to 20 terms in another order)."""
    in_features, out_features = case.in_multiple * mesh.size(), case.out_multiple * mesh.size()
    plain, layer = drawn(case.kind, in_features, out_features, mesh, case.bias, case.whole)
    x = torch.randn(*case.batch, in_features, requires_grad=True)
    upstream = torch.randn(*case.batch, out_features)
    expected = plain(x)
    (expected_x,) = torch.autograd.grad(expected, x, upstream, retain_graph=True)
    expected.backward(upstream)

    input_is_split = case.kind == "row" and not case.whole
    output_is_split = case.kind == "column" and not case.whole
    own_x = (own(x, mesh) if input_is_split else x).detach().clone().requires_grad_()
    own_upstream = own(upstream, mesh).clone() if output_is_split else upstream.clone()
    seen = own_x.detach().clone(), own_upstream.clone()
    output = layer(own_x)
    output.backward(own_upstream)

    torch.testing.assert_close(output, own(expected, mesh) if output_is_split else expected)
    torch.testing.assert_close(own_x.grad, own(expected_x, mesh) if input_is_split else expected_x)
    torch.testing.assert_close(whole_gradients(layer), gradients(plain))
    assert torch.equal(seen[0], own_x), "the caller's input was written to"
    assert torch.equal(seen[1], own_upstream), "the caller's gradient was written to"


def compare_all(world, cases):
    for case in cases:
        try:
            compare(case, tensor_mesh(world))
        except Exception as error:
            error.add_note(str(case))
            raise


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_layers_equal_nn_linear_whatever_the_sizes(pool, num_ranks):
    # Several cases a message: what costs is the way to the ranks, not the arithmetic. No shrinking: a failure ends the
    # ranks, and starting them again takes seconds each time; the error names its case.
    @settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(cases=st.lists(CASES, min_size=4, max_size=8))
    def check(cases):
        pool.run(num_ranks, compare_all, cases)

    check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_layers_equal_nn_linear_with_every_option(pool, num_ranks):
    options = [(kind, bias, whole) for kind in LAYERS for bias in (False, True) for whole in (False, True)]
    pool.run(num_ranks, compare_all, [Case(*option, in_multiple=2, out_multiple=3, batch=[3]) for option in options])


def add_a_bias_of_100(world):
    plain, layer = drawn("row", 6, 3, tensor_mesh(world))
    with torch.no_grad():
        plain.bias.fill_(100.0)
        layer.bias.fill_(100.0)
    x = torch.randn(4, 6)
    own_x = own(x, layer.mesh).clone().requires_grad_()
    x.requires_grad_()
    expected, output = plain(x), layer(own_x)
    for out in (expected, output):
        out.sum().backward()
    # fp32 near 100 has steps of 8e-6.
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(own_x.grad, own(x.grad, layer.mesh))
    torch.testing.assert_close(whole_gradients(layer), gradients(plain))
    # The sum's gradient is 1 for each of four rows, and not once more for the other rank.
    assert layer.bias.grad.to_local().tolist() == [4.0, 4.0, 4.0]


def test_the_row_layer_adds_its_bias_once(pool):
    # Seen as Wenyueh/MinivLLM#80: added inside the partial product, 100 comes out as 200 on two ranks.
    pool.run(2, add_a_bias_of_100)


def draw_and_assemble(world):
    parts = {}
    for kind in LAYERS:
        plain, layer = drawn(kind, 8, 4, tensor_mesh(world))
        after_plain = torch.get_rng_state()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.full_tensor(), getattr(plain, name)), (kind, name)
            assert parameter.to_local().is_contiguous()
        # A part holds its own memory, not a view that keeps the whole matrix alive.
        assert layer.weight.to_local().untyped_storage().nbytes() == 8 * 4 * 4 // world.world_size
        torch.manual_seed(0)
        nn.Linear(8, 4)
        assert torch.equal(after_plain, torch.get_rng_state()), "the layer drew more, or less, than nn.Linear"
        parts[kind] = layer.weight.to_local().flatten().tolist()
    return parts


def test_the_assembled_matrix_is_nn_linears_draw_and_the_parts_differ(pool):
    first, second = pool.run(2, draw_and_assemble)
    for kind in LAYERS:
        assert set(first[kind]).isdisjoint(second[kind]), "16 draws each; none occurs twice"


def test_without_a_mesh_a_layer_is_nn_linear():
    for kind in LAYERS:
        plain, layer = drawn(kind, 5, 3, mesh=None)
        x = torch.randn(2, 5)
        assert torch.equal(layer(x), plain(x))
        assert layer.state_dict().keys() == plain.state_dict().keys()


def refused(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the test looks at the words
        call(*args, **kwargs)
    return str(caught.value)


def misuse(world):
    mesh, layer = tensor_mesh(world), RowParallelLinear(8, 3)
    messages = {
        "column": refused(ColumnParallelLinear, 8, 6, mesh=mesh),
        "row": refused(RowParallelLinear, 10, 3, mesh=mesh),
        "axes": refused(layer.split, init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))),
    }
    layer.split(mesh)
    messages["again"] = refused(layer.split, mesh)
    messages["draw"] = refused(layer.reset_parameters)
    messages["whole"] = refused(layer, torch.zeros(1, 8))
    return messages


def test_what_can_not_work_is_refused_with_value_limit_and_remedy(pool):
    messages = pool.run(4, misuse)[0]
    not_divisible = "is not divisible by the mesh's 4 ranks. Use a mesh of"
    assert messages["column"] == f"ColumnParallelLinear: out_features=6 {not_divisible} 3, or out_features=8."
    assert messages["row"] == f"RowParallelLinear: in_features=10 {not_divisible} 2, or in_features=12."
    assert 'mesh["tensor"]' in messages["axes"]
    assert "already split over 4 ranks" in messages["again"]
    assert "Draw the whole layer, then split(mesh) it" in messages["draw"]
    assert "got 8 features and needs 2 of in_features=8" in messages["whole"]


def copy_a_split_layer(world):
    plain, layer = drawn("column", 4, 6, tensor_mesh(world), whole=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy.deepcopy(layer)(x), plain(x))


def test_a_split_layer_can_be_copied(pool):
    pool.run(2, copy_a_split_layer)


def test_a_layer_that_is_not_split_does_not_import_dtensors():
    code = (
        "import sys; from src.models.tp_mlp import TPMLP; TPMLP([1, 2, 2], 4, 3);"
        "sys.exit('torch.distributed.tensor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
