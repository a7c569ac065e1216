"""What an experiment's configuration works out to: its strategy, device, ranks and batch sizes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from src.batch import BatchSizes
from src.checks.keys import locate
from src.compression.base import Compression
from src.environment import num_cores, torchrun_ranks
from src.errors import Refused
from src.sharding import Sharding
from src.strategies.base import Setting, Strategy
from src.task import Task

T = TypeVar("T")

MAX_RANKS = 1_000_000  # the largest training runs have had some 100,000 devices


def strategy_class(config: dict[str, Any]) -> type[Strategy]:
    """The class behind `strategy`, never built here."""
    found = locate(config["strategy"]["_target_"])
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise Refused(f"strategy._target_={config['strategy']['_target_']} is no Strategy; see src/strategies/base.py.")
    return found


def task_class(config: dict[str, Any]) -> type[Task]:
    """The class behind `task`, never built here."""
    found = locate(config["task"]["_target_"])
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise Refused(f"task._target_={config['task']['_target_']} is no Task; see src/task.py.")
    return found


def compressor_class(node: Mapping[str, Any]) -> type[Compression] | None:
    """The class behind `compression`, never built here; None where the option builds nothing."""
    if "_target_" not in node:
        return None
    found = locate(str(node["_target_"]))
    if not (isinstance(found, type) and issubclass(found, Compression)):
        raise Refused(f"compression._target_={node['_target_']} is no Compression; see src/compression/base.py.")
    return found


def strategy_name(config: dict[str, Any]) -> str:
    """The strategy as a user writes it: its module's name, which is its option's."""
    return str(config["strategy"]["_target_"]).split(".")[-2]


def device_type(config: dict[str, Any]) -> str:
    """ "cuda" or "cpu". Counts GPUs through NVML, which leaves CUDA uninitialised, so ranks can still be forked."""
    device = config["launch"]["device"]
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if gpus else "cpu"
    if device not in ("cpu", "cuda"):
        raise Refused(f"launch.device={device} is unknown; choose auto, cpu or cuda.")
    if device == "cuda" and not gpus and task_class(config).ranks != "imagined":
        raise Refused("launch.device=cuda, but no GPU is visible here (CUDA_VISIBLE_DEVICES?). Use launch.device=cpu.")
    return str(device)


def num_ranks(config: dict[str, Any]) -> int:
    """Ranks to start, or the world's size where torchrun has started them."""
    nproc, ranks = config["launch"]["nproc"], torchrun_ranks()
    if nproc != "auto" and (not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1):
        raise Refused(f"launch.nproc={nproc} is no number of processes; choose 1 or more, or auto.")
    if nproc != "auto" and nproc > MAX_RANKS:
        raise Refused(f"launch.nproc={nproc} is more ranks than any cluster has; choose {MAX_RANKS:,} or less.")
    device, wanted = device_type(config), task_class(config).ranks
    if wanted != "started":
        if ranks is not None and ranks.world_size > 1:
            raise Refused(f"this task runs in one process, and torchrun has started {ranks.world_size}: use python.")
        if wanted == "one" and nproc not in ("auto", 1):
            raise Refused(f"launch.nproc={nproc}, but this task runs in one process. Use launch.nproc=1, or drop it.")
        if wanted == "one" or nproc != "auto":
            return 1 if wanted == "one" else int(nproc)
        ranks = None
    if ranks is not None:
        if nproc not in ("auto", ranks.local_size):
            raise Refused(
                f"launch.nproc={nproc}, but torchrun has started {ranks.local_size} on this machine. Drop it."
            )
        _enough_gpus(device, ranks.local_size, "torchrun --nproc-per-node")
        return ranks.world_size
    if nproc == "auto":
        if not strategy_class(config).supports.many_processes:
            return 1
        return max(1, torch.cuda.device_count()) if device == "cuda" else min(2, num_cores())
    _enough_gpus(device, nproc, "launch.nproc")
    return int(nproc)


def _enough_gpus(device: str, num_local: int, option: str) -> None:
    gpus = torch.cuda.device_count()
    if device == "cuda" and num_local > gpus:
        raise Refused(
            f"{option}={num_local} asks for more GPUs than the {gpus} visible here (CUDA_VISIBLE_DEVICES?)."
            f" Use {option}={gpus}, or launch.device=cpu."
        )


def batch_sizes(config: dict[str, Any], world_size: int) -> BatchSizes:
    """The three batch sizes, the missing one worked out."""
    arguments = {k: v for k, v in config["strategy"].items() if not k.startswith("_")}
    ranks = strategy_class(config).data_parallel_size(world_size, arguments)
    trainer = config["trainer"]
    return BatchSizes.solve(trainer["micro_batch_size"], trainer["accumulate"], trainer["global_batch_size"], ranks)


def make_setting(config: dict[str, Any]) -> Setting:
    """The plain values that a strategy's own rules look at. Raises Refused where they can't be worked out."""
    setting, unknowns = known_setting(config)
    if unknowns:
        raise Refused(*unknowns)
    return setting


def known_setting(config: dict[str, Any]) -> tuple[Setting, list[str]]:
    """The setting, and why some of it can't be worked out; there it says what asks least of a strategy."""
    unknowns: list[str] = []

    def attempt(work_out: Callable[..., T], *arguments: Any, otherwise: T) -> T:
        try:
            return work_out(*arguments)
        except Refused as refused:
            unknowns.extend(refused.problems)
            return otherwise

    world_size = attempt(num_ranks, config, otherwise=1)
    sizes = attempt(batch_sizes, config, world_size, otherwise=BatchSizes(1, 1, 1))
    setting = Setting(
        strategy_name=strategy_name(config),
        arguments={k: v for k, v in config["strategy"].items() if not k.startswith("_")},
        world_size=world_size,
        data_parallel_size=sizes.data_parallel_size,
        device_type=attempt(device_type, config, otherwise="cuda"),
        precision=config["precision"]["name"],
        sharding=Sharding(**config["sharding"]),
        micro_batch_size=sizes.micro_batch_size,
        accumulate=sizes.accumulate,
        max_grad_norm=config["trainer"]["max_grad_norm"],
        activation_checkpointing=config["trainer"]["activation_checkpointing"],
        compile=config["trainer"]["compile"],
        optimizer=config["optimizer"],
        data=config["data"],
        local_size=attempt(ranks_of_a_machine, config, otherwise=None),
        compressor=attempt(compressor_class, config["compression"], otherwise=None),
        compression={k: v for k, v in config["compression"].items() if not k.startswith("_")},
    )
    return setting, list(dict.fromkeys(unknowns))


def ranks_of_a_machine(config: dict[str, Any]) -> int | None:
    """Of the ranks that torchrun has started; None where all are on one machine, as those that we start are."""
    ranks = torchrun_ranks() if task_class(config).ranks == "started" else None
    return None if ranks is None else ranks.local_size


def num_local_ranks(config: dict[str, Any]) -> int:
    """Ranks to run on this machine; imagined ones don't."""
    ranks = torchrun_ranks()
    if task_class(config).ranks != "started":
        return 1
    return num_ranks(config) if ranks is None else ranks.local_size
