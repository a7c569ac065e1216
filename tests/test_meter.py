"""What a step needs, counted by storages. Expected bytes are worked out from shapes."""

import gc
import threading

import pytest
import torch
from torch import nn

from src import memory
from src.memory import peak_memory_bytes
from src.meter import StepPeak, StorageMeter, metered, storage_bytes, tensors_of

KIB = 1024


class Owner:
    """Something that tensors hang on."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)


def test_a_storage_counts_while_anything_holds_it():
    with StorageMeter() as meter:
        whole = torch.zeros(KIB, dtype=torch.uint8)
        view = whole[:10]  # a view is no storage of its own
        assert meter.current == KIB
        del whole
        assert meter.current == KIB
        del view
        assert meter.current == 0
    assert meter.peak == KIB


def test_the_peak_is_of_what_was_alive_at_once():
    with StorageMeter() as meter:
        for _ in range(3):
            torch.zeros(KIB, dtype=torch.uint8)
        kept = [torch.zeros(KIB, dtype=torch.uint8) for _ in range(2)]
    assert meter.peak == 2 * KIB
    del kept


def test_what_autograd_keeps_for_backward_counts():
    layer = nn.Linear(16, 16, bias=False)  # 1 KiB of weights
    inputs = torch.zeros(16, 16)
    with metered((layer, inputs)) as meter:
        assert meter.current == 2 * KIB
        outputs = layer(inputs).relu().sum()  # relu keeps its result; the matmul's own is freed
        assert meter.current == 3 * KIB + 4
        outputs.backward()
    # The gradient of relu's result, then that of the weights, while what forward kept is still there.
    assert layer.weight.grad is not None
    assert 4 * KIB < meter.peak <= 5 * KIB + 8


def test_a_storage_that_is_resized_counts_as_it_is():
    tensor = torch.zeros(KIB, dtype=torch.uint8)
    with metered(tensor) as meter:
        tensor.untyped_storage().resize_(0)  # what sharding engines do between a unit's uses
        assert meter.current == 0
        tensor.untyped_storage().resize_(2 * KIB)
        assert meter.current == meter.peak == 2 * KIB


def test_a_metered_block_leaves_torch_as_it_was():
    resize = torch.UntypedStorage.resize_
    with metered(()):
        assert torch.UntypedStorage.resize_ is not resize
    assert torch.UntypedStorage.resize_ is resize


def test_tensors_are_found_in_attributes_gradients_and_closures():
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    hidden, shared = torch.zeros(5), torch.zeros(7)
    owner = Owner(weight, shared)
    owner.call = lambda: hidden.sum()  # type: ignore[attr-defined]
    found = {id(tensor) for tensor in tensors_of({"deep": [owner, shared]})}
    assert {id(weight), id(weight.grad), id(hidden), id(shared)} <= found
    assert storage_bytes(owner) == 4 * (3 + 3 + 5 + 7)


def test_a_program_that_is_reachable_is_not_counted():
    assert not list(tensors_of([torch, nn.Linear, test_a_program_that_is_reachable_is_not_counted]))


def test_the_peak_of_a_step_is_the_second_ones():
    owner = Owner()
    peak = StepPeak(owner, torch.device("cpu"))
    for size in (4 * KIB, KIB, 8 * KIB):
        with peak.step():
            owner.tensors = [torch.zeros(size, dtype=torch.uint8)]
    # The second step begins with the 4 KiB that the first has left; the third is not looked at.
    assert peak.bytes == 5 * KIB


def test_what_only_the_engine_holds_is_known_from_the_first_step():
    hidden: list[torch.Tensor] = []  # stands for the buckets of a reducer in C++
    peak = StepPeak(Owner(), torch.device("cpu"))
    with peak.step():
        hidden.append(torch.zeros(4 * KIB, dtype=torch.uint8))
    with peak.step():
        torch.zeros(KIB, dtype=torch.uint8)
    assert peak.bytes == 5 * KIB
    gc.collect()


def test_the_steps_before_those_that_are_looked_at_do_not_count():
    owner = Owner()
    peak = StepPeak(owner, torch.device("cpu"), after=2)
    for size in (8, 8, 2, 1, 8):
        with peak.step():
            torch.zeros(size * KIB, dtype=torch.uint8)
    assert peak.bytes == KIB  # of the fourth step


def test_what_follows_in_a_thread_of_a_backend_is_seen():
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(0.05, lambda: answer.set_result(torch.zeros(KIB, dtype=torch.uint8))).start()
    with StorageMeter() as meter:
        copied = answer.then(lambda done: done.value().clone())
        copied.wait()
        assert meter.peak == KIB
    later: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    after = later.then(lambda done: done.value() + 1)  # without a meter nothing waits
    later.set_result(torch.zeros(1))
    assert float(after.wait()) == 1


def test_what_another_thread_waits_for_hides_nothing_of_this_one():
    with StorageMeter() as meter:

        def wait() -> None:
            meter.waits.is_waiting = True

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join()
        kept = torch.zeros(KIB, dtype=torch.uint8)
        assert meter.current == KIB
    del kept


class Allocator:
    """Stands for a GPU's: bytes that are there, and their peak since it was last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(memory, "_forgotten", {})

    def reset(self, device: torch.device) -> None:
        self.peak = 0


def test_a_gpus_peak_of_a_run_outlives_that_of_a_step_and_data_of_the_host_are_no_part_of_it(monkeypatch):
    device, allocator = torch.device("cuda", 0), Allocator(monkeypatch)
    beside = Owner(torch.zeros(KIB, dtype=torch.uint8))  # in the host's memory: not the GPU's
    allocator.peak = 900  # while the model was built
    peak = StepPeak(Owner(), device, beside)
    beside.tensors.append(torch.zeros(KIB))  # a walk over the data set within the step would find it
    for bytes_of_step in (300, 500, 700):
        with peak.step():
            allocator.peak = max(allocator.peak, bytes_of_step)
    assert peak.bytes == 500
    assert peak_memory_bytes(device) == 900
    allocator.peak = 1000
    assert peak_memory_bytes(device) == 1000
