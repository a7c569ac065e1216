"""task=train: train, evaluate, save the weights once."""

import logging

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from src.memory import peak_memory_bytes
from src.run import Experiment
from src.trainer import Trainer
from src.world import World

log = logging.getLogger(__name__)


class Train:
    """Joins the parts of an experiment and runs the loop."""

    def __call__(self, experiment: Experiment) -> None:
        world, strategy = experiment.world, experiment.strategy
        model = experiment.make_model()
        experiment.reporter.update(
            world_size=world.world_size,
            data_parallel_size=experiment.sizes.data_parallel_size,
            parameters=sum(p.numel() for p in model.parameters()),
        )
        strategy.build(model, experiment.optimizer, experiment.spec)
        # From here on ranks draw differently (dropout), but the same at every start.
        torch.manual_seed(experiment.seed + 1 + strategy.data.rank)
        train, test = experiment.data.load(
            world.device, experiment.seed, data_rank=strategy.data.rank, local_size=world.local_size
        )
        trainer = Trainer(
            strategy,
            train,
            test,
            experiment.sizes,
            experiment.limits,
            experiment.schedule,
            experiment.seed,
            world.device,
            experiment.reporter,
            metric="perplexity" if experiment.data.kind == "tokens" else "accuracy",
        )
        trainer.fit()
        self.save_weights(experiment)
        experiment.reporter.update(peak_memory_bytes=peaks(world))

    def save_weights(self, experiment: Experiment) -> None:
        """model.safetensors: the bare model's names, written by rank 0, whole or not at all."""
        weights = experiment.strategy.weights()
        if weights is not None:
            path = experiment.run_dir / "model.safetensors"
            partial = path.with_suffix(".partial")
            save_file(weights, partial)
            partial.chmod((experiment.run_dir / "metrics.jsonl").stat().st_mode)  # safetensors makes it private
            partial.replace(path)


def peaks(world: World) -> list[int]:
    """Every rank's peak memory, in bytes."""
    table = torch.zeros(world.world_size, dtype=torch.int64, device=world.device)
    table[world.world_rank] = peak_memory_bytes(world.device)
    if world.world_size > 1:
        dist.all_reduce(table)
    return table.tolist()
