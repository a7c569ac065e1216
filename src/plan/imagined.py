"""A world of any size inside one process: torch's fake process group, and tensors that have shapes but no memory.

The real strategy runs in it as one rank of that world. Its collectives return at once, and where its code asks for a
tensor's value, it gets one.

What it needs of torch 2.14 has private names, and none in public: the fake process group is made for torch's own tests,
fake tensors and dispatch modes are documented but live in private modules, and nothing else turns all modes off.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from src import mesh
from src.world import World


@contextmanager
def imagined(world: World) -> Iterator[None]:
    """This process as `world`'s rank, until the block ends. There must be no process group yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=world.world_rank, world_size=world.world_size)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # FSDP1 compares the addresses of storages, which fake ones don't have; it goes on without.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            stack.enter_context(conversion_by_replacement())
            stack.enter_context(apart_from_the_modes())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(AnyValue())  # type: ignore[no-untyped-call]
            yield
    finally:
        dist.destroy_process_group()


class AnyValue(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base is untyped
    """Where a fake tensor is asked for its value (an optimizer's step count, an overflow check), it is one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        return func(*args, **(kwargs or {}))


@contextmanager
def conversion_by_replacement() -> Iterator[None]:
    """`module.to(...)` puts new parameters in the place of the old, since torch 2.14 can't swap fake ones in place."""
    # Private in torch 2.14, but what .to(), .cuda() and .float() all call; like torch's own it writes into the modules'
    # dictionaries, which nothing public replaces a parameter in without a module's own __setattr__.
    original = nn.Module._apply

    def replace(self: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        done: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        for module in self.modules() if recurse else [self]:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        done[tensor] = done[tensor] if tensor in done else converted(tensor, convert)
                        tensors[name] = done[tensor]  # type: ignore[assignment]
        return self

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@torch.no_grad()
def converted(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    made = convert(tensor)
    if made is tensor or not isinstance(tensor, nn.Parameter):
        return made
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


@contextmanager
def apart_from_the_modes() -> Iterator[None]:
    """What is no part of a step works outside of the modes: device meshes, made of numbers that are read, and DTensor's
    questions to itself.

    It learns an operation's shapes from the operation itself, on fake tensors of the whole, not this rank's part, which
    a real step has no memory for: a meter must not see them.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # 0.4 s, which only a trace pays

    # Private names of torch 2.14: slicing and flattening a mesh make tensors as well, and of DTensor's propagation no
    # public function is called in between.
    makers: list[tuple[Any, str]] = [(mesh, "init_device_mesh")]
    makers += [(ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    makers += [(DeviceMesh, name) for name in ("__init__", "__getitem__", "_flatten", "_concatenate")]
    originals = [vars(owner)[name] for owner, name in makers]
    for (owner, name), original in zip(makers, originals, strict=True):
        setattr(owner, name, outside_of_modes(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(makers, originals, strict=True):
            setattr(owner, name, original)


def outside_of_modes(function: Any) -> Any:
    """`function`, or a static method, that makes real tensors whatever mode it is called in."""
    if isinstance(function, staticmethod):
        return staticmethod(outside_of_modes(function.__func__))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class Traffic:
    """Counts collectives by name: how many there were, and the bytes that they were about.

    Bytes as nccl-tests count them: of reduce_scatter, all_gather and gather the whole of all ranks, else what a rank
    sends or receives.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def see(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Take note of an operation, if it is a collective."""
        namespace, _, rest = str(func).partition(".")
        if namespace not in ("c10d", "_c10d_functional"):
            return
        name = COLLECTIVES.get(rest.split(".")[0].strip("_"))
        if name is not None:
            # Among what goes in and what comes out, the larger: of all ranks, where that differs.
            sizes = [
                sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor)) for part in (*args, result)
            ]
            self.calls[name] = self.calls.get(name, 0) + 1
            self.bytes[name] = self.bytes.get(name, 0) + max(sizes)


#: torch's operators, without leading and trailing underscores, by the name of what they do.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
}
