"""trainer.micro_batch_size=auto: the largest power of two whose predicted peak fits what memory there is."""

import functools
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import nn

from src.checks.acceptance import accepts
from src.checks.setting import known_setting, num_local_ranks, strategy_class, task_class
from src.checks.trial import built, on_meta, try_optimizer
from src.doctor.machine import free_memory_bytes
from src.errors import Refused
from src.footprint import NOT_COUNTED, ModelSizes
from src.memory import memory
from src.parallel.recompute import recompute_activations
from src.strategies.base import Setting, Strategy

if TYPE_CHECKING:
    from src.plan.search import SizesOf

AUTO = "auto"
#: Of the memory, what may be planned with: the rest is for what no formula counts.
SHARE = 0.8
GIB = 2**30
GIVE = "Give trainer.micro_batch_size a number."

#: In a process of its own: asking CUDA wakes the driver, and a process that has done so can't be forked.
ASK_GPUS = "import torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))"


def settle_micro_batch(config: dict[str, Any]) -> list[str]:
    """Put a number in the place of "auto", in `config`; why there is none, one line, and then it is 1."""
    trainer = config["trainer"]
    if trainer["micro_batch_size"] != AUTO:
        return []
    trainer["micro_batch_size"] = 1
    accumulate, global_batch = trainer["accumulate"], trainer["global_batch_size"]
    if (accumulate is None) == (global_batch is None):
        both = "null" if accumulate is None else "given"
        trainer["accumulate"], trainer["global_batch_size"] = 1, None  # so that the rest can be looked at
        return [
            f"trainer.micro_batch_size=auto with trainer.accumulate and trainer.global_batch_size both {both}:"
            " the batch is settled by one of them. Leave exactly one of the two null."
        ]
    if global_batch is not None:
        trainer["accumulate"], trainer["global_batch_size"] = 1, None  # while the size is looked for
    try:
        size = found_elsewhere(json.dumps(config), global_batch)
    except Refused as refused:
        return refused.problems
    finally:
        trainer["accumulate"], trainer["global_batch_size"] = accumulate, global_batch
    trainer["micro_batch_size"] = size
    return []


@functools.cache  # one command asks several times, and must get one answer
def found_elsewhere(config: str, global_batch: int | None) -> int:
    """`largest_size` of a configuration in JSON, by a process of its own.

    Looking at backward wakes autograd's threads, and after that no rank can be forked.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(largest_size, json.loads(config), global_batch).result()


def largest_size(config: dict[str, Any], global_batch: int | None) -> int:
    """Samples. 1 where the rest of the configuration is refused anyhow. Raises Refused where nobody can tell, or not
    one sample fits."""
    from src.plan.search import growing, largest_that_fits
    from src.plan.values import refused_in_words

    strategy = strategy_class(config)
    setting, unknowns = known_setting(config)
    planned = {key: value for key, value in config["task"].items() if not key.startswith("_")}
    if unknowns or task_class(config).problems(planned, setting):
        return 1
    model = on_meta(config["model"])
    if model is None:
        raise Refused(
            f"trainer.micro_batch_size=auto: model {config['model']['_target_']} can't be built without memory, so"
            f" nothing tells what it needs. {GIVE}"
        )
    settings = [resized for resized in growing(setting, global_batch) if accepts(strategy, resized, model)]
    if not settings:
        return 1
    available = SHARE * available_bytes(config)
    with refused_in_words(GIVE, GIVE):
        found = largest_that_fits(strategy, settings, sizes_of(config), available)
    if found is None:
        raise Refused(
            f"trainer.micro_batch_size=auto: not one sample fits {memory(available)} a rank ({SHARE:.0%} of what"
            f" there is, since nobody counts {NOT_COUNTED}). Shard more, recompute activations, or use a smaller model."
        )
    return found


def sizes_of(config: dict[str, Any]) -> "SizesOf":
    """Walks through the experiment's model. Raises Refused where its optimizer or data can't be built."""
    from src.plan.formula import walk
    from src.plan.sizes import optimizer_slots

    optimizer, data = built("optimizer", config["optimizer"]), built("data", config["data"])
    try_optimizer(optimizer)
    slots = optimizer_slots(optimizer)

    def make_model() -> nn.Module:
        return recompute_activations(built("model", config["model"]), config["trainer"]["activation_checkpointing"])

    def walked(strategy: type[Strategy], setting: Setting, world_rank: int) -> ModelSizes:
        return walk(strategy, make_model, slots, data, setting, world_rank)

    return walked


def available_bytes(config: dict[str, Any]) -> float:
    """Memory for one rank: of the planned device where the task names it, else what is free here now."""
    planned = config["task"].get("device_memory_gib")
    if planned is not None:
        return float(planned) * GIB
    setting, _ = known_setting(config)
    if setting.device_type == "cuda" and task_class(config).ranks == "started":
        return free_gpu_bytes()
    if setting.device_type == "cuda":
        raise Refused(
            "trainer.micro_batch_size=auto needs to know the planned GPUs' memory. Add task.device_memory_gib=<GiB>."
        )
    return free_memory_bytes() / num_local_ranks(config)


def free_gpu_bytes() -> int:
    """Of the GPU that has least. Raises Refused where they can't be asked."""
    asked = subprocess.run([sys.executable, "-c", ASK_GPUS], capture_output=True, text=True, check=False)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or ["no word"])[-1]
        raise Refused(
            f"trainer.micro_batch_size=auto: the GPUs can't be asked for their free memory ({why})."
            " Look at task=doctor, or give trainer.micro_batch_size a number."
        )
    return int(asked.stdout)
