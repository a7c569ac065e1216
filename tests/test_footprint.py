"""Every part of a footprint against arithmetic by hand, for a model of 10^6 parameters without units (ME-01)."""

from dataclasses import replace

import pytest

from src.footprint import Footprint, Interval, ModelSizes
from src.sharding import Sharding
from src.strategies.base import Setting, Strategy
from src.strategies.ddp import DDP
from src.strategies.deepspeed import DeepSpeed
from src.strategies.footprint import shares_of
from src.strategies.fsdp import FSDP2

MILLION = 1_000_000
CLASSES: dict[str, type[Strategy]] = {"ddp": DDP, "fsdp": FSDP2, "deepspeed": DeepSpeed}
SLOTS = {"adamw": 2, "sgd": 0}


def model(slots: int = 2) -> ModelSizes:
    """One parameter in no unit. After forward 3000 bytes are kept and 500 of logits; in backward 5000 at most."""
    return ModelSizes(
        parameters=((MILLION, None),),
        trained=MILLION,
        buffers=0,
        batch=100,
        activations=3000,
        weight_copies=0,
        logits=500,
        output=400,
        stream=0,
        backward=(Interval(5000, 1000, MILLION, None),),
        optimizer_slots=slots,
        flops=6 * MILLION,
    )


def footprint(
    name: str, level: str, precision: str, ranks: int, slots: int = 2, accumulate: int = 1, **given: object
) -> Footprint:
    setting = Setting(name, given, ranks, ranks, "cuda", precision, Sharding(level), 1, accumulate, None)
    return CLASSES[name].footprint(model(slots), setting)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_data_parallel_ranks_hold_whole_states(precision: str, optimizer: str, ranks: int) -> None:
    found = footprint("ddp", "none", precision, ranks, SLOTS[optimizer])
    # Weights stay fp32 under every precision, so they are their own masters: 4 + 4 bytes, and 8 for Adam's moments.
    assert found.parameters.bytes == found.gradients.bytes == 4 * MILLION
    assert found.optimizer_states.bytes == {"adamw": 8, "sgd": 0}[optimizer] * MILLION
    assert found.master_copies.bytes == 0
    assert found.model_states == {"adamw": 16, "sgd": 8}[optimizer] * MILLION
    # The buckets are the gradients. At the peak all of them are there beside 5000 bytes and the batch.
    assert found.communication_buffers.bytes == 0
    assert found.peak.bytes == found.model_states + 5000 + 100


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sharding_engines_divide_all_states(precision: str, optimizer: str, ranks: int) -> None:
    found = footprint("fsdp", "zero3", precision, ranks, SLOTS[optimizer])
    assert found.model_states == {"adamw": 16, "sgd": 8}[optimizer] * MILLION // ranks
    assert found.master_copies.bytes == 0
    # In no unit: gathered (4 or 2 bytes an element) all through the step. As forward starts, where there are other
    # ranks, in the buffer it was gathered into as well; at the end, the fp32 buffer in which gradients are reduced.
    element = 4 if precision == "fp32" else 2
    gathered = element * MILLION
    assert found.communication_buffers.bytes == max(gathered if ranks == 1 else 2 * gathered, 4 * MILLION)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("level", ["zero1", "zero2"])
def test_flat_partitions_have_masters(level: str, precision: str, optimizer: str, ranks: int) -> None:
    found = footprint("deepspeed", level, precision, ranks, SLOTS[optimizer])
    # fp16 alone has 16-bit weights; bf16 is autocast over fp32 ones. All keep flat fp32 masters for their partition.
    element = 2 if precision == "fp16" else 4
    assert found.parameters.bytes == element * MILLION
    assert found.master_copies.bytes == 4 * MILLION // ranks
    assert found.optimizer_states.bytes == {"adamw": 8, "sgd": 0}[optimizer] * MILLION // ranks
    # Two buckets (overlap_comm), cut to the model's size, and the flat copy in which one is reduced.
    assert found.communication_buffers.bytes == 3 * element * MILLION


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stage_three_divides_weights_and_keeps_buffers_for_good(precision: str, ranks: int) -> None:
    found = footprint("deepspeed", "zero3", precision, ranks)
    element = 2 if precision == "fp16" else 4
    # 10^6 parameters in one are above the threshold of 10^5, so they are partitioned too.
    assert found.parameters.bytes == found.gradients.bytes == element * MILLION // ranks
    assert found.master_copies.bytes == 4 * MILLION // ranks
    assert found.optimizer_states.bytes == 8 * MILLION // ranks
    gathered = 0 if ranks == 1 else 2 * element * MILLION  # into a buffer, and out of it
    assert found.communication_buffers.bytes == element * MILLION + gathered


def test_buckets_beside_gradients_cost_another_copy_of_them() -> None:
    # DDP's docstring: without gradient_as_bucket_view "peak memory usage" is greater by the gradients' size; here the
    # only gradient comes at the end, so at the peak it is counted once in the buckets and once in the update.
    views, copies = (footprint("ddp", "none", "fp32", 8, gradient_as_bucket_view=views) for views in (True, False))
    assert copies.communication_buffers.bytes == 4 * MILLION
    assert copies.peak.bytes == 12 * MILLION + 100 + 2 * 4 * MILLION
    assert views.peak.bytes == 12 * MILLION + 100 + 4 * MILLION + 5000


def test_deferring_the_reduction_adds_a_full_copy_of_the_gradients() -> None:
    # pytorch #72185: instead of shards, 4 x 10^6 / 8 bytes, whole fp32 gradients wait for the last micro-batch.
    each = footprint("fsdp", "zero3", "bf16", 8, accumulate=4)
    once = footprint("fsdp", "zero3", "bf16", 8, accumulate=4, sync_each_microbatch=False)
    assert each.gradients.bytes == 4 * MILLION // 8
    assert once.gradients.bytes == 4 * MILLION
    # When the next micro-batch begins: gathered into a buffer 2, and out of it 2, while the fp32 buffer of the last
    # reduction is still there, 4, and the output, 400; shards of earlier micro-batches 4 / 8. Or in the reduction:
    # buffer 4, whole fp32 gradients 4, the result 4 / 8, the 1000 left. Beside: weights, moments 12 / 8, four batches.
    assert each.peak.bytes == (12 + 4) * MILLION // 8 + (2 + 2 + 4) * MILLION + 400
    assert once.peak.bytes == (12 + 4) * MILLION // 8 + (4 + 4) * MILLION + 1000 + 400
    # And it is what saves traffic: one reduction instead of four.
    assert each.traffic["reduce_scatter"].bytes == 4 * once.traffic["reduce_scatter"].bytes


def test_hybrid_ranks_share_a_copy_within_their_machine() -> None:
    # 16 data ranks on machines of 8: weights, 4 x 10^6 bytes, / 8; with tp=2 a machine has 4 data ranks.
    whole = Setting("fsdp", {}, 16, 16, "cuda", "fp32", Sharding("hybrid"), 1, 1, None)
    machines = replace(whole, local_size=8)
    assert FSDP2.footprint(model(), whole).parameters.bytes == 4 * MILLION // 16
    assert FSDP2.footprint(model(), machines).parameters.bytes == 4 * MILLION // 8
    assert shares_of(replace(machines, arguments={"tp": 2}, data_parallel_size=8)).parameters == 4
    assert shares_of(replace(machines, sharding=Sharding("hybrid", shard_size=2))).parameters == 2


def test_traffic_of_a_step_in_bytes_by_collective() -> None:
    # DDP: one all-reduce of fp32 gradients. ZeRO-3: weights gathered for forward and for backward in 16 bits, gradients
    # reduced in fp32; ZeRO-2 gathers once.
    assert footprint("ddp", "none", "bf16", 8).traffic["all_reduce"].bytes == 4 * MILLION
    assert footprint("fsdp", "zero3", "bf16", 8).traffic["all_gather"].bytes == 2 * 2 * MILLION
    assert footprint("fsdp", "zero3", "bf16", 8).traffic["reduce_scatter"].bytes == 4 * MILLION
    assert footprint("fsdp", "zero2", "bf16", 8).traffic["all_gather"].bytes == 2 * MILLION
    assert footprint("fsdp", "zero3", "bf16", 1).traffic == {}


def test_what_is_offloaded_is_the_hosts() -> None:
    setting = Setting("deepspeed", {}, 8, 8, "cuda", "fp32", Sharding("zero3", offload="all"), 1, 1, None)
    found = DeepSpeed.footprint(model(), setting)
    # Adam's moments 8, masters 4 and weights 4 bytes, / 8.
    assert found.host.bytes == 16 * MILLION // 8
    assert found.parameters.bytes == found.optimizer_states.bytes == found.master_copies.bytes == 0


def test_what_fully_shard_offloads_is_the_hosts_and_its_gradients_too() -> None:
    setting = Setting("fsdp", {}, 8, 8, "cuda", "fp32", Sharding("zero3", offload="all"), 1, 1, None)
    found = FSDP2.footprint(model(), setting)
    # Weights 4, gradients 4 and Adam's moments 8 bytes, / 8.
    assert found.host.bytes == 16 * MILLION // 8
    assert found.parameters.bytes == found.optimizer_states.bytes == found.gradients.bytes == 0
    kept = FSDP2.footprint(model(), Setting("fsdp", {}, 8, 8, "cuda", "fp32", Sharding("zero3"), 1, 1, None))
    assert kept.peak.bytes - found.peak.bytes == 12 * MILLION // 8  # a gradient is on the device while it is made
