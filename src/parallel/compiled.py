"""torch.compile, a layer at a time: equal layers share one compilation, and engines see the modules that they know."""

import os
import shutil

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from src.parallel.recompute import Recomputed


def compile_units(model: nn.Module, device: torch.device) -> nn.Module:
    """`model`, each of its `units()` compiled at its first call; without `units()` all of it as one. In place.

    After recomputing and before any wrapper. `Module.compile` puts no wrapper around a module, so that names stay.
    Random numbers are drawn as without compiling, so dropout drops the same.
    """
    if device.type == "cpu":
        from torch._inductor import config

        # In this process: on a CPU the ranks take all cores, and a pool of processes a rank would outlive a kill.
        config.compile_threads = 1
    units = getattr(model, "units", None)
    for unit in [model] if units is None else units():
        refuse_changing_buffers(unit)
        unit.compile(dynamic=False, options={"fallback_random": True})
    return model


def refuse_changing_buffers(unit: nn.Module) -> None:
    """Raises ValueError for a recomputed unit whose forward changes buffers: compiled, it would change them twice."""
    changing = [part for part in unit.modules() if isinstance(part, _BatchNorm) or is_parametrized(part)]
    if isinstance(unit.forward, Recomputed) and changing:
        raise ValueError(
            f"trainer.compile=true can't keep the buffers of {type(changing[0]).__name__} in a"
            f" {type(unit).__name__} as they were when it is recomputed. Use trainer.compile=false, or"
            " trainer.activation_checkpointing=none."
        )


def compiler_problems(device_type: str) -> list[str]:
    """Why nothing can be compiled for a device of that type here."""
    compiler = os.environ.get("CXX", "g++")
    if device_type != "cpu" or shutil.which(compiler) is not None:
        return []
    return [
        f"trainer.compile=true compiles C++ for a CPU, and there is no compiler {compiler} here. Install one (g++, or"
        " name it with CXX=...), or use trainer.compile=false."
    ]
