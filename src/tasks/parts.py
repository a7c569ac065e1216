"""What several tasks do: write the weights, ask every rank for its peak, find a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from src.checkpoint.tied import unshared
from src.memory import peak_memory_bytes
from src.position import Position
from src.run import Experiment
from src.world import World


def save_weights(experiment: Experiment) -> dict[str, Tensor] | None:
    """model.safetensors: the bare model's names, written by rank 0, whole or not at all. Collective.

    Returns what was written; None but on rank 0.
    """
    weights = experiment.strategy.weights()
    if weights is not None:
        path = experiment.run_dir / "model.safetensors"
        partial = path.with_suffix(".partial")
        spans: dict[int, list[range]] = {}
        save_file({name: unshared(tensor, spans) for name, tensor in weights.items()}, partial)
        partial.chmod((experiment.run_dir / "metrics.jsonl").stat().st_mode)  # safetensors makes it private
        partial.replace(path)
    return weights


def peaks(world: World) -> list[int]:
    """Every rank's peak memory, in bytes. Collective."""
    return [peak for peak in of_every_rank(world, peak_memory_bytes(world.device)) if peak is not None]


def of_every_rank(world: World, number: int | None) -> list[int | None]:
    """Each rank's number, by world rank. Collective."""
    table = torch.full((world.world_size,), -1, dtype=torch.int64, device=world.device)
    table[world.world_rank] = -1 if number is None else number
    if world.world_size > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX)
    return [None if entry < 0 else entry for entry in table.tolist()]


def build_trained(experiment: Experiment, checkpoint: str, model: nn.Module) -> Position:
    """The strategy around `model` with a checkpoint's weights; where its run was. Collective.

    checkpoint: its folder or its run's.
    """
    from src.checkpoint.whole import find  # torch.distributed.checkpoint

    experiment.reporter.update(
        world_size=experiment.world.world_size,
        data_parallel_size=experiment.sizes.data_parallel_size,
        parameters=sum(p.numel() for p in model.parameters()),
    )
    # Nothing is trained: without momentum SGD keeps no state beside the weights.
    experiment.strategy.build(model, partial(torch.optim.SGD, lr=0.0, fused=False), experiment.spec)
    found: list[Any] = [str(find(Path(checkpoint)))] if experiment.world.is_main else [None]
    if experiment.world.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    position = experiment.snapshots.restore_weights(Path(found[0]))
    experiment.reporter.update(steps=position.step, samples=position.samples, checkpoint=found[0])
    return position
