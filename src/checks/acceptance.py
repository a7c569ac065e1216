"""Whether a strategy takes a setting, yes or no: for ways that are tried, where nobody reads why."""

from torch import nn

from src.strategies.base import Setting, Strategy


def accepts(strategy: type[Strategy], setting: Setting, model: nn.Module) -> bool:
    """Whether a run of it would start here, but for packages to install. model: whole, on the meta device."""
    supports = strategy.supports
    return (
        (setting.world_size == 1 or supports.many_processes)
        and setting.precision in supports.precision
        and setting.sharding.level in supports.sharding
        and setting.sharding.offload in {"none", *supports.offload}
        and divides(setting.sharding.shard_size, setting.data_parallel_size)
        and all(hasattr(model, method) for method in supports.model_carries)
        and (setting.compressor is None or supports.compresses)
        and not (setting.compressor and setting.compressor.problems(setting.compression))
        and not strategy.problems(setting)
        and not strategy.model_problems(model, setting)
    )


def divides(shard_size: int | None, ranks: int) -> bool:
    return shard_size is None or (shard_size >= 1 and ranks % shard_size == 0)
