"""DeepSpeed's JSON, built from the experiment's own values as plain dictionaries. Nothing here imports deepspeed.

What the experiment already says (batch sizes, clipping, precision, sharding) is derived here and never typed
twice. The user's `strategy.config` is merged in last; where it contradicts a derived value it is refused.
Source: https://www.deepspeed.ai/docs/config-json/
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.sharding import Sharding
from src.strategies.base import BuildSpec, Setting

STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Given:
    """The experiment's values that DeepSpeed must be told. Batch sizes in samples; max_grad_norm None: no clipping."""

    micro_batch_size: int
    accumulate: int
    world_size: int
    device_type: str
    precision: str
    sharding: Sharding
    max_grad_norm: float | None

    @classmethod
    def of_setting(cls, setting: Setting) -> "Given":
        return cls(
            setting.micro_batch_size,
            setting.accumulate,
            setting.world_size,
            setting.device_type,
            setting.precision,
            setting.sharding,
            setting.max_grad_norm,
        )

    @classmethod
    def of_spec(cls, spec: BuildSpec) -> "Given":
        return cls(
            spec.micro_batch_size,
            spec.accumulate,
            spec.world.world_size,
            spec.world.device.type,
            spec.precision.name,
            spec.sharding,
            spec.max_grad_norm,
        )

    @property
    def stage(self) -> int:
        return STAGES[self.sharding.level]

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulate * self.world_size


def engine_config(
    given: Given, options: Mapping[str, Any], overrides: Mapping[str, Any], num_parameters: int | None = None
) -> dict[str, Any]:
    """What deepspeed.initialize takes, made of dict, list, str, int, float, bool and None alone.

    options: the arguments of DeepSpeed's constructor but `config`. overrides: that one.
    num_parameters: the model's; None: unknown, so the reduce bucket keeps its size.
    """
    config = {
        "train_batch_size": given.train_batch_size,
        "train_micro_batch_size_per_gpu": given.micro_batch_size,
        "gradient_accumulation_steps": given.accumulate,
        "gradient_clipping": 0.0 if given.max_grad_norm is None else given.max_grad_norm,  # 0 is its word for none
        "zero_optimization": _zero_section(given, options, num_parameters),
        **_precision_sections(given, options),
        "zero_allow_untested_optimizer": True,  # it has tested Adam and AdamW only
        # Offloaded states too are updated by the experiment's own optimizer. DeepSpeedCPUAdam would have to be
        # compiled on the user's machine, and is another arithmetic.
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},  # waits for the device in every step
    }
    return merged(config, overrides)


def _zero_section(given: Given, options: Mapping[str, Any], num_parameters: int | None) -> dict[str, Any]:
    if given.stage == 0:
        return {"stage": 0}
    bucket = int(options["reduce_bucket_size"])
    section: dict[str, Any] = {
        "stage": given.stage,
        # Held whole whatever the model's size: with 5e8 elements a model of 1 MiB would cost 2 GiB.
        "reduce_bucket_size": bucket if num_parameters is None else min(bucket, num_parameters),
        "overlap_comm": options["overlap_comm"],
        "contiguous_gradients": options["contiguous_gradients"],
        "reduce_scatter": options["reduce_scatter"],
    }
    if given.stage < 3:
        section["allgather_bucket_size"] = int(options["allgather_bucket_size"])
    else:
        section["stage3_prefetch_bucket_size"] = int(options["stage3_prefetch_bucket_size"])
        section["stage3_param_persistence_threshold"] = int(options["stage3_param_persistence_threshold"])
    # Pinned memory is for copies to a GPU; without one torch refuses to pin.
    host = {"device": "cpu", "pin_memory": options["pin_memory"] and given.device_type == "cuda"}
    if given.sharding.offload in ("optimizer", "all"):
        section["offload_optimizer"] = host
    if given.sharding.offload == "all":
        section["offload_param"] = dict(host)
    return section


def _precision_sections(given: Given, options: Mapping[str, Any]) -> dict[str, Any]:
    in_fp32 = options["communicate_in_fp32"]
    if given.precision == "bf16" or (given.precision == "fp16" and given.stage == 0):
        # Not the `bf16` mode: that one keeps bf16 weights, so that the fp32 masters begin already rounded. Nor `fp16`
        # in stage 0: DeepSpeed 0.19.8 divides gradients there by a loss scale that it never multiplied with.
        autocast: dict[str, Any] = {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[given.precision]}
        if in_fp32:
            # Gradients of the modules listed here would be summed in 16 bits; by default, linear and convolution.
            autocast["lower_precision_safe_modules"] = []
        return {"torch_autocast": autocast}
    if given.precision == "fp16":
        fp16 = {
            "enabled": True,
            "auto_cast": True,  # inputs too, since the weights are fp16 (their masters are fp32)
            "loss_scale": 0,  # dynamic
            "initial_scale_power": options["initial_scale_power"],
            "loss_scale_window": options["loss_scale_window"],
        }
        return {"fp16": fp16, **({"communication_data_type": "fp32"} if in_fp32 else {})}
    return {}


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overrides` laid over it, mapping by mapping, all of it plain (no OmegaConf containers)."""
    result: dict[str, Any] = plain(base)
    for key, value in overrides.items():
        inside = isinstance(value, Mapping) and isinstance(result.get(key), dict)
        result[str(key)] = merged(result[key], value) if inside else plain(value)
    return result


def plain(value: Any) -> Any:
    """dict and list all the way down, which is all that JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def contradictions(given: Given, options: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """What `overrides` say other than the experiment does: one line each, with both values and the key to edit."""
    derived = engine_config(given, options, {})
    wanted = merged(derived, overrides)
    found = []
    for path, (implied, reason, remedy) in _reasons(given).items():
        asked = _at(wanted, path, implied)
        if asked != _at(derived, path, implied):
            found.append(f"strategy.config.{path}={_shown(asked)} disagrees with {reason}. Drop it, and {remedy}.")
    for section, key in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        if section in overrides:
            found.append(
                f"strategy.config.{section} would stand beside {key}=..., which every strategy shares."
                f" Drop it, and set {key}=<option> and its keys."
            )
    return found


def _reasons(given: Given) -> dict[str, tuple[Any, str, str]]:
    """(what DeepSpeed takes an absent value for, why the derived value is what it is, what to set instead) by path."""
    micro, accumulate, ranks = given.micro_batch_size, given.accumulate, given.world_size
    limit = "null" if given.max_grad_norm is None else given.max_grad_norm
    precision = f"precision={given.precision}"
    return {
        "train_batch_size": (
            None,
            f"micro-batch x accumulate x data ranks = {micro} x {accumulate} x {ranks} = {given.train_batch_size}",
            "set trainer.global_batch_size, or trainer.micro_batch_size and trainer.accumulate",
        ),
        "train_micro_batch_size_per_gpu": (
            None,
            f"the global batch / (accumulate x data ranks)"
            f" = {given.train_batch_size} / ({accumulate} x {ranks}) = {micro}",
            "set trainer.micro_batch_size",
        ),
        "gradient_accumulation_steps": (
            None,
            f"the global batch / (micro-batch x data ranks)"
            f" = {given.train_batch_size} / ({micro} x {ranks}) = {accumulate}",
            "set trainer.accumulate",
        ),
        "gradient_clipping": (0.0, f"trainer.max_grad_norm={limit}", "set trainer.max_grad_norm"),
        "zero_optimization.stage": (
            0,
            f"sharding={given.sharding.level}, which is stage {given.stage}",
            "set sharding=none, zero1, zero2 or zero3",
        ),
        "fp16.enabled": (False, precision, "set precision=fp16 or another"),
        "bf16.enabled": (False, f"{precision}, whose weights are fp32", "set precision=bf16 (autocast) or another"),
        "torch_autocast.enabled": (False, precision, "set precision=bf16 or another"),
        "torch_autocast.dtype": (None, precision, "set precision=bf16 or another"),
        # The loss is already normalised over all micro-batches and ranks, for an engine that averages.
        "gradient_allreduce_op": ("mean", "the loss's normalisation, made for mean", "leave the mean to the strategy"),
        "managed_gradient_accumulation": (True, "the strategy's own boundaries", "set trainer.accumulate"),
    }


def _at(config: Mapping[str, Any], dotted_path: str, default: Any) -> Any:
    """The value at a dotted path; `default` where nothing stands there."""
    value: Any = config
    for part in dotted_path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _shown(value: Any) -> str:
    """As a user would write it in an override."""
    return value if isinstance(value, str) else json.dumps(value)
