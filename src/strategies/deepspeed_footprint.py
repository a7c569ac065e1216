"""What a DeepSpeed engine holds (0.19.8), worked out from its code and from what real steps were measured to take.

Weights stay fp32 but in fp16; beside them the optimizer has its own fp32 masters, as flat partitions. Gradients go
through buckets of reduce_bucket_size elements, which are flattened once more to be reduced. DeepSpeed's own estimators
(estimate_zero2_model_states_mem_needs: 2 P + 18 P / N) know neither buckets nor activations, so they are not used here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from src.footprint import FP32_BYTES, NONE, Footprint, ModelSizes, Part
from src.strategies.base import Setting
from src.strategies.deepspeed_config import STAGES
from src.strategies.footprint import Shares, gradients_as_they_come, on_device, states

#: DeepSpeed's stage3_max_live_parameters, elements, which this project leaves as it is.
MAX_LIVE = 1_000_000_000


def engine_footprint(sizes: ModelSizes, setting: Setting, options: Mapping[str, Any]) -> Footprint:
    """options: the engine's, by the names of DeepSpeed's constructor here."""
    stage = STAGES[setting.sharding.level]
    made = {0: unsharded, 1: flat_partitions, 2: flat_partitions, 3: partitioned}[stage](sizes, setting, options)
    return replace(made, traffic=traffic(sizes, setting, stage)) if setting.world_size > 1 else made


def weight_bytes(setting: Setting) -> int:
    """An element of the weights that compute: bf16 is autocast over fp32, and so is fp16 where nothing is sharded."""
    return 2 if setting.precision == "fp16" and setting.sharding.level != "none" else FP32_BYTES


def bucket_bytes(sizes: ModelSizes, setting: Setting, options: Mapping[str, Any]) -> int:
    """Of one reduce bucket, which this project cuts to the model's size."""
    return weight_bytes(setting) * min(int(options["reduce_bucket_size"]), sizes.num_parameters)


def unsharded(sizes: ModelSizes, setting: Setting, options: Mapping[str, Any]) -> Footprint:
    """Stage 0: whole gradients, and at the end of backward a flat copy of them to be all-reduced."""
    held = states(sizes, setting, Shares())
    copy = held.gradients.bytes if setting.world_size > 1 else 0
    return held.footprint(
        max(gradients_as_they_come(sizes, setting), held.gradients.bytes + copy),
        "states at rest + the most of activations and gradients, or gradients and their flat copy",
        buffers=Part(copy, f"4 x {sizes.trained:,} gradients, flat") if copy else NONE,
    )


def flat_partitions(sizes: ModelSizes, setting: Setting, options: Mapping[str, Any]) -> Footprint:
    """Stages 1 and 2, which differ in what they send, and hardly in what they hold."""
    ranks, element = setting.data_parallel_size, weight_bytes(setting)
    bucket = bucket_bytes(sizes, setting, options)
    buckets = bucket * (2 if options["overlap_comm"] else 1)
    partition = element * sizes.trained // ranks
    before = partition if setting.accumulate > 1 else 0
    # The buckets come with the first gradient; each is flattened when it is full, and the last at the end.
    in_backward = sizes.before_gradients + before
    filled = done = 0
    for interval, earlier in zip(sizes.backward[1:], sizes.backward, strict=False):
        filled += element * earlier.parameter
        in_backward = max(in_backward, interval.activations + buckets + max(before, done // ranks))
        if filled + element * interval.parameter > bucket:
            in_backward = max(in_backward, earlier.left + buckets + filled + max(before, done // ranks))
            done, filled = done + filled, 0
    filled += element * sizes.backward[-1].parameter
    in_backward = max(in_backward, sizes.backward[-1].left + buckets + min(filled, bucket) + max(before, done // ranks))
    held = whole_weights(sizes, setting, ranks)
    masters = Part(-(-FP32_BYTES * sizes.trained // ranks), f"4 x {sizes.trained:,} / {ranks}, flat fp32 masters")
    return on_device(
        held.footprint(
            in_backward,
            "weights, masters, optimizer states + the most of activations, buckets and a bucket's flat copy, or"
            " 12 x parameters / ranks while the optimizer steps",
            in_update=2 * FP32_BYTES * sizes.trained // ranks,
            buffers=Part(buckets + bucket, f"{buckets // bucket} bucket(s) of {bucket:,} bytes, and a flat copy"),
            master_copies=masters,
        ),
        setting,
    )


def whole_weights(sizes: ModelSizes, setting: Setting, ranks: int) -> Any:
    held = states(sizes, setting, Shares(gradients=ranks, optimizer=ranks))
    element = weight_bytes(setting)
    weights = Part(element * sizes.num_parameters + sizes.buffers, f"{element} x {sizes.num_parameters:,} parameters")
    return replace(held, parameters=weights)


def partitioned(sizes: ModelSizes, setting: Setting, options: Mapping[str, Any]) -> Footprint:
    """Stage 3: partitions of weights and gradients beside the optimizer's; small parameters stay whole.

    Gradients have a flat buffer of their own for good, and so has the bucket. Weights are gathered ahead of their use,
    into one buffer and out of it into each, and stay while no more than MAX_LIVE are there. Its own linear layer keeps
    no 16-bit copies of weights.
    """
    ranks, element = setting.data_parallel_size, weight_bytes(setting)
    threshold = int(options["stage3_param_persistence_threshold"])
    small = 0 if ranks == 1 else sum(size for size, _ in sizes.parameters if size < threshold)
    large = 0 if ranks == 1 else sizes.num_parameters - small
    live, ahead = min(large, MAX_LIVE), min(large, int(options["stage3_prefetch_bucket_size"]))
    bucket = bucket_bytes(sizes, setting, options)
    held = states(sizes, setting, Shares(ranks, ranks, ranks))
    shards = element * sizes.num_parameters // ranks
    whole = f" + {element} x {small:,} in parameters below {threshold:,}, which stay whole" if small else ""
    held = replace(
        held,
        parameters=Part(
            shards + element * small + sizes.buffers, f"{element} x {sizes.num_parameters:,} / {ranks}{whole}"
        ),
        gradients=Part(element * sizes.trained // ranks, f"{element} x {sizes.trained:,} / {ranks}, flat, for good"),
    )
    in_forward = sizes.activations - sizes.weight_copies + element * (live + ahead)
    in_backward = sizes.most_activations - sizes.weight_copies + element * live
    made = held.footprint(
        max(in_forward, in_backward, bucket) + held.gradients.bytes,
        "all that stays + the most of activations and gathered weights, or a bucket's flat copy",
        in_update=FP32_BYTES * sizes.trained // ranks,
        buffers=Part(
            bucket + element * (live + ahead),
            f"a bucket of {bucket:,} bytes, {live:,} weights gathered and {ahead:,} on their way",
        ),
        buffers_at_rest=bucket,
        master_copies=Part(-(-FP32_BYTES * sizes.trained // ranks), f"4 x {sizes.trained:,} / {ranks} in fp32"),
    )
    return on_device(replace(made, weight_copies=NONE), setting)


def traffic(sizes: ModelSizes, setting: Setting, stage: int) -> dict[str, Part]:
    """Bytes of a step; stage 1 and 2 send their shards by reductions to each owner, so as much as a reduce_scatter."""
    gradients = FP32_BYTES * sizes.trained
    if stage == 0:
        return {"all_reduce": Part(gradients, f"4 x {sizes.trained:,} gradients, once a step")}
    element = weight_bytes(setting) if stage < 3 or setting.precision != "bf16" else 2
    times = 1 if stage < 3 else 2 * setting.accumulate
    reductions = 1 if stage == 1 else setting.accumulate
    return {
        "reduce": Part(reductions * gradients, f"{reductions} x 4 x {sizes.trained:,} gradients to their owners"),
        "all_gather": Part(times * element * sizes.num_parameters, f"{times} x {element} x {sizes.num_parameters:,}"),
    }
