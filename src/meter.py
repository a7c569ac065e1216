"""The bytes of every tensor that is alive, followed while a step runs: what a step needs, on a CPU or on fake tensors.

A process's resident size says nothing of a step: it holds libraries, freed pages and the data set. What is counted here
are the storages that torch's operations are seen to make. Workspaces inside kernels and the buffers of gloo are not
seen.
"""

import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.14 documents the mode under "Extending PyTorch", by this private name; tree_leaves has no public one.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.memory import forget_peak

#: Called with an operation, its arguments, and what it returned.
Seen = Callable[[Any, tuple[Any, ...], Any], None]


class Waits(threading.local):
    """Whether this thread waits for a collective, whose backend then copies out of buffers of its own."""

    is_waiting = False


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base is untyped
    """While entered, follows the storages that operations make and free. Not reentrant.

    current, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.watches: dict[int, weakref.ref[Any]] = {}
        self.seen: Seen | None = None
        self.waits = Waits()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Tensor) and is_wrapper(kind) for kind in types):
            return NotImplemented  # let it work on the tensors that it wraps, which come here in their turn
        result = func(*args, **(kwargs or {}))
        if self.waits.is_waiting:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if self.seen is not None:
            self.seen(func, args, result)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on until it is freed, once however many tensors share it."""
        # Engines keep shapes as tensors on meta (DeepSpeed, of every parameter), which have a size and no memory.
        if tensor.layout is torch.strided and tensor.device.type != "meta" and not is_wrapper(type(tensor)):
            self.add_storage(tensor.untyped_storage())

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Each of them; afterwards nothing here holds any."""
        for tensor in list(tensors):
            self.add(tensor)

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        """`add`, or bring up to date what it was counted with."""
        # torch 2.14: the object in C++ that tensors share; the ones in Python are made anew, and data_ptr() moves.
        key, size = storage._cdata, storage.nbytes()
        known = self.sizes.get(key)
        if known is None:
            self.watches[key] = weakref.ref(storage, lambda _: self._forget(key))
            known = 0
        if known != size:
            self.sizes[key] = size
            self.current += size - known
            self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.watches.pop(key, None)
        self.current -= self.sizes.pop(key, 0)

    def __enter__(self) -> "StorageMeter":
        # Engines give memory back, and take it again, by resizing a storage, which is no operation.
        self._resize, self._wait, self._then = torch.UntypedStorage.resize_, dist.Work.wait, torch._C.Future.then
        meter, resize, wait, then = self, self._resize, self._wait, self._then

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            answer = resize(storage, size)
            meter.add_storage(storage)
            return answer

        def waited(*arguments: Any, **named: Any) -> Any:
            before, meter.waits.is_waiting = meter.waits.is_waiting, True
            try:
                return wait(*arguments, **named)
            finally:
                meter.waits.is_waiting = before

        def called_here(future: Any, callback: Any) -> Any:
            # What follows a collective runs in a thread of gloo's, where it would not be seen, unless that is over.
            future.wait()
            return then(future, callback)

        torch._C.Future.then = called_here  # type: ignore[method-assign,assignment]
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        dist.Work.wait = waited  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        torch._C.Future.then = self._then  # type: ignore[method-assign]


def is_wrapper(kind: type) -> bool:
    """Whether a kind of tensor only holds others, as DTensor does. A fake tensor stands for one with a storage."""
    if kind in (Tensor, torch.nn.Parameter, FakeTensor):
        return False
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def tensors_of(root: Any) -> Iterator[Tensor]:
    """Every tensor that hangs on `root`, however deep: in attributes, containers, gradients, closures."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, SKIPPED):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield from storages_inside(item)
            if item.is_leaf and item.grad is not None:
                waiting.append(item.grad)
        if isinstance(item, types.FunctionType):
            waiting += [item.__closure__, item.__defaults__, item.__kwdefaults__]
        elif isinstance(item, types.MethodType):
            waiting += [item.__self__, item.__func__]
        else:
            waiting += gc.get_referents(item)


#: What leads out of an object into the program, or to the numbers of ranks: no step needs what is behind it alone.
SKIPPED = (DeviceMesh, types.ModuleType, type, types.FrameType, types.CodeType, str, bytes, int, float, types.NoneType)


def storages_inside(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage of their own that a tensor is made of: itself, or what it wraps."""
    if not is_wrapper(type(tensor)):
        yield tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from storages_inside(inner)


def storage_bytes(owner: Any, device_type: str | None = None) -> int:
    """Bytes of the storages of all tensors that hang on `owner`, each counted once. device_type: of those alone."""
    found = (tensor for tensor in tensors_of(owner) if device_type in (None, tensor.device.type))
    # By `_cdata` for the reason that StorageMeter.add_storage gives.
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}
    return sum(storages.values())


@contextmanager
def metered(owner: Any, seen: Seen | None = None, meter: StorageMeter | None = None) -> Iterator[StorageMeter]:
    """A meter over the block that knows already what hangs on `owner` (a strategy: weights, gradients, states).

    meter: one that has been used on it before, and goes on: what only an engine's own code holds (the buckets of DDP's
    reducer between two steps) it has seen when that was made. Its peak begins anew. seen: told of each operation.
    """
    meter = StorageMeter() if meter is None else meter
    meter.seen = seen
    meter.add_all(tensors_of(owner))
    meter.peak = meter.current
    with meter:
        yield meter


class StepPeak:
    """The peak of an owner's second step, and of its first where there is no second: in that, states are still made.

    owner: a strategy. device: on a GPU it is the allocator's peak, from the second step on. beside: what holds other
    tensors on the device, such as a data set, which don't count. after: steps to leave out before these two.
    """

    def __init__(self, owner: Any, device: torch.device, beside: Any = None, after: int = 0) -> None:
        self.owner, self.device, self.after = owner, device, after
        # Looked at now, since a walk over a data set has no place in a step that is timed.
        self.beside_bytes = storage_bytes(beside, "cuda") if device.type == "cuda" else 0
        self.steps = 0
        self.meter: StorageMeter | None = None
        self.bytes: int | None = None

    def step(self) -> AbstractContextManager[Any]:
        """Entered around a whole step; it does nothing but in the two that are looked at."""
        self.steps += 1
        if not self.after < self.steps <= self.after + STEPS_SEEN:
            self.meter = None
            return nullcontext()
        return self.allocator_peak() if self.device.type == "cuda" else self.storages_peak()

    @contextmanager
    def storages_peak(self) -> Iterator[None]:
        if self.meter is not None:
            gc.collect()  # gradients of the first step may hang in cycles, until Python looks: no step needs them
        with metered(self.owner, meter=self.meter) as self.meter:
            yield
        self.bytes = self.meter.peak

    @contextmanager
    def allocator_peak(self) -> Iterator[None]:
        forget_peak(self.device)
        yield
        self.bytes = torch.cuda.max_memory_allocated(self.device) - self.beside_bytes


STEPS_SEEN = 2  # an operation takes up to twice as long while storages are followed
