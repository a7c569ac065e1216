"""Starting a DeepSpeed engine without its side effects, and undoing those that can't be helped (DeepSpeed 0.19.8)."""

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from src.strategies.base import OptimizerFactory
from src.weights import Values, filled, is_unread
from src.world import World


def start_engine(
    model: nn.Module, optimizer: OptimizerFactory, config: dict[str, Any], world: World
) -> tuple[Any, ExitStack]:
    """(deepspeed.DeepSpeedEngine around `model`, what closing it takes). The process group must exist.

    Collective. Closing does not communicate.
    """
    deepspeed = load_deepspeed(world)
    with ExitStack() as undo:
        # Stage 3 reads them in the midst of training: LOCAL_RANK, and on CPUs LOCAL_SIZE as the number of devices,
        # which it would else ask numactl for in every gradient reduction.
        undo.enter_context(environment(LOCAL_RANK=str(world.local_rank), LOCAL_SIZE=str(world.local_size)))
        # Set when an engine autocasts and never cleared: the next engine of this process would take itself for one.
        vars(importlib.import_module("deepspeed.runtime.torch_autocast"))["TORCH_AUTOCAST_INITIALIZED"] = False
        # Stage 3 puts its own into torch, for everybody.
        undo.callback(setattr, nn.functional, "linear", nn.functional.linear)
        if config.get("fp16", {}).get("enabled"):
            cast_to_fp16(model)
        if config["zero_optimization"]["stage"] == 3:
            shard(model, config, world)
        else:
            filled(model, world)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=config,
        )
        undo.callback(engine.destroy)
        return engine, undo.pop_all()


def load_deepspeed(world: World) -> Any:
    """The package, imported so that it neither probes, compiles nor prints. RuntimeError says what is missing."""
    try:
        with environment(DS_ACCELERATOR=world.device.type):  # else it guesses, and prints its guess
            deepspeed = importlib.import_module("deepspeed")
            ops = importlib.import_module("deepspeed.ops")
    except Exception as error:  # a missing package or toolkit shows as ImportError, OSError or DeepSpeed's own
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RuntimeError(
            f"strategy=deepspeed can't import deepspeed: {reason}. Install what is missing (pip install deepspeed;"
            " on GPUs also the CUDA toolkit, with CUDA_HOME set), or use strategy=fsdp."
        ) from error
    if world.device.type == "cpu":
        # Asked for first when the engine joins the ranks: it would try every compiler, and then build the
        # shared-memory op into the user's cache for a minute.
        vars(ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    hear_through_root_logger(logging.getLogger("DeepSpeed"))
    # torch's new names for these collectives are not yet known to DeepSpeed.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        category=FutureWarning,
    )
    return deepspeed


def hear_through_root_logger(logger: logging.Logger) -> None:
    """Warnings into the run's logs rather than straight to stdout, without the one about optimizers."""
    logger.handlers.clear()
    logger.propagate = True
    if not logger.filters:
        # The configuration allows every torch optimizer, and the parity tests are the test it asks for.
        logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())


def cast_to_fp16(model: nn.Module) -> None:
    """Weights to fp16, and batch norm's running statistics, which it wants of its weights' type; other buffers stay."""
    for module in model.modules():
        tensors: list[Tensor] = [*module.parameters(recurse=False)]
        if isinstance(module, _BatchNorm):
            tensors += list(module.buffers(recurse=False))
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def shard(model: nn.Module, config: dict[str, Any], world: World) -> None:
    """Stage 3's sharding, one parameter at a time; `initialize` would move the whole model to the device before."""
    from deepspeed.comm import init_distributed
    from deepspeed.runtime.zero import Init

    init_distributed(dist_backend=world.backend)
    Init(module=OneByOne(Values(model, world), model) if is_unread(model) else model, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(world.device)


class OneByOne(nn.Module):
    """Gives zero.Init a model's parameters; each is filled when it is asked for, after the one before was split."""

    def __init__(self, values: Values, model: nn.Module) -> None:
        super().__init__()
        self.values, self.parts = values, list(model.modules())  # a list, and so no children of this one

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for part in self.parts:
            self.values.fill(part)
            yield from part.parameters(recurse=False)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables set meanwhile, for a library that can't be told otherwise."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def whole_parameter(parameter: nn.Parameter) -> Tensor:
    """The full fp32 weights of a parameter, whatever the stage. Collective for stages 1 to 3.

    From the fp32 masters: stage 3 under autocast gathers 16-bit copies, which are not what was learnt.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    master: Tensor | None = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if master is not None:
        return master
    if hasattr(parameter, "ds_id"):  # stage 3, frozen: sharded, but without a master
        with GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.data


def forget_gradients(engine: Any) -> None:
    """Instead of engine.step(): what the engine does of it where fp16 has overflowed, but for the loss scale."""
    zero = engine.optimizer
    engine.micro_steps += 1
    if engine.zero_optimization_stage() == 0:
        engine.zero_grad()
    elif engine.zero_optimization_stage() == 3:
        zero._pre_step()
        zero._partition_all_parameters()
        zero._overflow_clean_up(zero.loss_scale)
    else:
        zero.micro_step_id = -1  # as before the first micro-batch, which overwrites what the next ones add to
        zero._wait_for_offload_copies()
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        else:
            for group in zero.averaged_gradients:
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
