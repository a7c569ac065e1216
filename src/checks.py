"""The rules that refuse an experiment before anything is started or written, all of them at once.

Each problem is one line: the choice, the reason, the remedy. No rule names a strategy: what a strategy
can't do stands in its `Support`, what only it refuses in its `problems`.
"""

from importlib.util import find_spec
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from src.batch import BatchSizes
from src.errors import Refused
from src.keys import did_you_mean, locate, resolve
from src.precision import PRECISIONS
from src.sharding import LEVELS, OFFLOADS, Sharding
from src.strategies.base import Setting, Strategy
from src.environment import num_cores, torchrun_ranks

#: Keys that scripts may name already and that nothing reads yet, with the one value they can have.
NOT_YET = {
    "checkpoint.every": None,
    "checkpoint.keep": 3,
    "checkpoint.async": False,
    "checkpoint.monitor": None,
    "checkpoint.resume": None,
    "launch.max_restarts": 0,
    "trainer.activation_checkpointing": "none",
    "trainer.compile": False,
}


def check(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """The resolved plain configuration, and what is wrong with it.

    cfg: as composed, with or without Hydra's own node.
    """
    config, found = resolve(cfg)
    return config, found or rule_problems(config)


def rule_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with a configuration whose keys are right."""
    found = _value_problems(config)
    try:
        setting = make_setting(config)
    except Refused as refused:
        return found + refused.problems
    strategy = strategy_class(config)
    found += _support_problems(setting, strategy)
    found += strategy.problems(setting)
    found += _pairing_problems(config)
    return found


def strategy_class(config: dict[str, Any]) -> type[Strategy]:
    """The class behind `strategy`, never built here."""
    found = locate(config["strategy"]["_target_"])
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise Refused(f"strategy._target_={config['strategy']['_target_']} is no Strategy; see src/strategies/base.py.")
    return found


def strategy_name(config: dict[str, Any]) -> str:
    """The strategy as a user writes it: its module's name, which is its option's."""
    return str(config["strategy"]["_target_"]).split(".")[-2]


def device_type(config: dict[str, Any]) -> str:
    """"cuda" or "cpu". Counts GPUs through NVML, which leaves CUDA uninitialised, so ranks can still be forked."""
    device = config["launch"]["device"]
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if gpus else "cpu"
    if device not in ("cpu", "cuda"):
        raise Refused(f"launch.device={device} is unknown. {did_you_mean(str(device), ['auto', 'cpu', 'cuda'])}")
    if device == "cuda" and not gpus:
        raise Refused("launch.device=cuda, but no GPU is visible here (CUDA_VISIBLE_DEVICES?). Use launch.device=cpu.")
    return str(device)


def num_ranks(config: dict[str, Any]) -> int:
    """Ranks to start, or the world's size where torchrun has started them."""
    ranks = torchrun_ranks()
    if ranks is not None:
        return ranks.world_size
    nproc = config["launch"]["nproc"]
    device = device_type(config)
    if nproc == "auto":
        if not strategy_class(config).supports.many_processes:
            return 1
        return torch.cuda.device_count() if device == "cuda" else min(2, num_cores())
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise Refused(f"launch.nproc={nproc} is no number of processes; choose 1 or more, or auto.")
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise Refused(
            f"launch.nproc={nproc} asks for more GPUs than the {torch.cuda.device_count()} visible"
            f" here (CUDA_VISIBLE_DEVICES?). Use launch.nproc={torch.cuda.device_count()}, or launch.device=cpu."
        )
    return nproc


def batch_sizes(config: dict[str, Any], world_size: int) -> BatchSizes:
    """The three batch sizes, the missing one worked out."""
    arguments = {k: v for k, v in config["strategy"].items() if not k.startswith("_")}
    ranks = strategy_class(config).data_parallel_size(world_size, arguments)
    trainer = config["trainer"]
    return BatchSizes.solve(trainer["micro_batch_size"], trainer["accumulate"], trainer["global_batch_size"], ranks)


def make_setting(config: dict[str, Any]) -> Setting:
    """The plain values that a strategy's own rules look at. Raises Refused where they can't be worked out."""
    world_size = num_ranks(config)
    sizes = batch_sizes(config, world_size)
    return Setting(
        strategy_name=strategy_name(config),
        arguments={k: v for k, v in config["strategy"].items() if not k.startswith("_")},
        world_size=world_size,
        device_type=device_type(config),
        precision=config["precision"]["name"],
        sharding=Sharding(**config["sharding"]),
        micro_batch_size=sizes.micro_batch_size,
        accumulate=sizes.accumulate,
        max_grad_norm=config["trainer"]["max_grad_norm"],
        optimizer=config["optimizer"],
    )


def _value_problems(config: dict[str, Any]) -> list[str]:
    """Values out of range, each on its own."""
    found = []
    for key, only in NOT_YET.items():
        value = _at(config, key)
        if value != only:
            shown = "null" if only is None else str(only).lower()
            found.append(f"{key}={value} is not available in this version of shardlab. Use {key}={shown}.")
    at_least_one = ["trainer.epochs", "trainer.max_steps", "trainer.log_every", "trainer.eval_every", "data.limit"]
    for key in at_least_one:
        value = _at(config, key)
        if value is not None and value < 1:
            empty = " leaves an empty data set" if key == "data.limit" else " is less than one"
            found.append(f"{key}={value}{empty}; choose 1 or more.")
    for key in ("trainer.max_grad_norm", "launch.timeout_seconds"):
        value = _at(config, key)
        if value is not None and not value > 0:
            found.append(f"{key}={value} must be more than 0{'; null: no clipping' if 'norm' in key else ''}.")
    if not 0 <= config["seed"] < 2**32:
        found.append(f"seed={config['seed']} is out of range; choose 0 to {2**32 - 1}.")
    if _at(config, "data.num_workers") is not None and _at(config, "data.num_workers") < 0:
        found.append(f"data.num_workers={_at(config, 'data.num_workers')} is negative; choose 0 or more, or null.")
    for key, known in (("sharding.level", LEVELS), ("sharding.offload", OFFLOADS), ("precision.name", PRECISIONS)):
        if _at(config, key) not in known:
            found.append(f"{key}={_at(config, key)} is unknown. {did_you_mean(str(_at(config, key)), known)}")
    return found


def _at(config: dict[str, Any], dotted_key: str) -> Any:
    """The value at a dotted key; None where the node has no such key."""
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _support_problems(setting: Setting, strategy: type[Strategy]) -> list[str]:
    """The combination against what the strategy declares."""
    supports, name, sharding = strategy.supports, setting.strategy_name, setting.sharding
    found = []
    for package in supports.packages:
        if find_spec(package) is None:
            found.append(f"strategy={name} needs the package {package}, which is not installed. Run: pip install {package}")
    if setting.world_size > 1 and not supports.many_processes:
        found.append(
            f"launch.nproc={setting.world_size} starts {setting.world_size} processes, but strategy={name} {supports.layout}."
            " Use strategy=ddp, or launch.nproc=1."
        )
    if sharding.level in LEVELS and sharding.level not in supports.sharding:
        choices = ", ".join(level for level in LEVELS if level in supports.sharding)
        others = "" if "zero3" in supports.sharding else " Use strategy=fsdp, or"
        found.append(
            f"sharding={sharding.level} {LEVELS[sharding.level]}, but strategy={name} {supports.layout}."
            f"{others or ' Use'} sharding={choices}."
        )
    if sharding.offload != "none" and sharding.offload not in supports.offload:
        choices = " or ".join(["none", *sorted(supports.offload)])
        found.append(
            f"sharding.offload={sharding.offload} is nothing that strategy={name} can do; use sharding.offload={choices}."
        )
    if setting.precision in PRECISIONS and setting.precision not in supports.precision:
        choices = ", ".join(p for p in PRECISIONS if p in supports.precision)
        found.append(f"precision={setting.precision} is nothing that strategy={name} can do; use precision={choices}.")
    if setting.precision == "tf32" and setting.device_type == "cpu":
        found.append(
            "precision=tf32 is a mode of NVIDIA GPUs (Ampere and later), and launch.device is cpu. Use precision=fp32."
        )
    return found + _shard_size_problems(setting)


def _shard_size_problems(setting: Setting) -> list[str]:
    size, world_size = setting.sharding.shard_size, setting.world_size
    if setting.sharding.level != "hybrid":
        if size is not None:
            return [f"sharding.shard_size={size} means something for sharding=hybrid only. Use sharding.shard_size=null."]
        return []
    if size is not None and (size < 1 or world_size % size):
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        return [f"sharding.shard_size={size} does not divide the {world_size} ranks. Choose it from {divisors}."]
    return []


def _pairing_problems(config: dict[str, Any]) -> list[str]:
    """Model and data that don't belong together."""
    model, data = locate(config["model"]["_target_"]), locate(config["data"]["_target_"])
    takes, gives = getattr(model, "inputs", None), getattr(data, "kind", None)
    if takes is not None and gives is not None and takes != gives:
        return [
            f"model {config['model']['_target_']} takes {takes}, but data {config['data']['_target_']} gives {gives}."
            f" Choose a model for {gives}, or data of {takes}."
        ]
    vocabulary, tokens = _at(config, "model.vocab_size"), _at(config, "data.vocab_size")
    if vocabulary is not None and tokens is not None and tokens > vocabulary:
        return [
            f"data.vocab_size={tokens} has more tokens than model.vocab_size={vocabulary} knows."
            f" Use model.vocab_size={tokens} or more."
        ]
    return []


def prepare(config: dict[str, Any]) -> None:
    """Fetch the data once, and build what costs little, so that a bad value is refused rather than fails.

    Raises Refused. The parent calls this before any rank starts.
    """
    for key in ("schedule", "strategy", "tracking", "task"):
        _build(key, config[key])
    with torch.device("meta"):  # shapes without memory
        _build("model", config["model"])
    # The first optimizer of a process imports torch._dynamo (2 s). Here the ranks inherit it.
    optimizer = _build("optimizer", config["optimizer"])
    try:
        optimizer([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused(f"optimizer can't be built: {error}") from error
    _build("data", config["data"]).prepare()


def _build(key: str, node: dict[str, Any]) -> Any:
    try:
        return instantiate(node, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, Refused):
            raise cause from error
        raise Refused(f"{key} ({node['_target_']}) can't be built: {type(cause).__name__}: {cause}") from error
