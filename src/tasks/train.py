"""task=train: train, evaluate, save the weights once."""

import time

from src.data.base import Source
from src.evaluation import metric_of
from src.flops import CountsFlops
from src.plan.forecast import Forecast, compared
from src.position import Position
from src.random_state import seed_all
from src.run import Experiment
from src.task import Task
from src.tasks.disk_space import warn_if_short
from src.tasks.parts import of_every_rank, peaks, save_weights
from src.tasks.utilization import utilization
from src.trainer import Trainer


class Train(Task):
    """Joins the parts of an experiment and runs the loop."""

    trains = True

    def __call__(self, experiment: Experiment) -> None:
        train, test = joined(experiment)
        position = None
        if experiment.resume is not None:
            position = experiment.snapshots.restore(experiment.resume)
            told = {"step": position.step, "samples": position.samples, "checkpoint": str(experiment.resume)}
            experiment.reporter.resumed(told)
            experiment.reporter.update(checkpoint=told["checkpoint"])
        trainer = make_trainer(experiment, train, test, position)
        started = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - started
        experiment.snapshots.finish()
        save_weights(experiment)
        measured = of_every_rank(experiment.world, trainer.peak.bytes)
        experiment.reporter.update(peak_memory_bytes=peaks(experiment.world))
        if experiment.world.is_main:
            # It began with the run; a short run may wait for it a moment, in proportion.
            made = Forecast.read(experiment.run_dir, patience_seconds=min(2.0, seconds / 2))
            experiment.reporter.update(memory=compared(made, measured))


def joined(experiment: Experiment) -> tuple[Source, Source]:
    """Build the strategy around the model and load the data, training's and test's. Collective."""
    world, strategy = experiment.world, experiment.strategy
    model = experiment.make_model()
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(model, CountsFlops):
        experiment.flops = model.flops()
    experiment.reporter.update(
        world_size=world.world_size,
        data_parallel_size=experiment.sizes.data_parallel_size,
        parameters=parameters,
    )
    warn_if_short(experiment, parameters)
    strategy.build(model, experiment.optimizer, experiment.spec)
    # From here on data ranks draw differently (dropout), but the same at every start.
    seed_all(experiment.seed, 0, strategy.data.rank)
    return experiment.data.load(
        world.device, experiment.seed, data_rank=strategy.data.rank, local_size=world.local_size
    )


def make_trainer(experiment: Experiment, train: Source, test: Source, position: Position | None = None) -> Trainer:
    """The loop over what `joined` gave. position: of a checkpoint that the strategy was restored from."""
    return Trainer(
        experiment.strategy,
        train,
        test,
        experiment.sizes,
        experiment.limits,
        experiment.schedule,
        experiment.seed,
        experiment.world,
        experiment.reporter,
        experiment.snapshots,
        experiment.control,
        metric=metric_of(experiment.data.kind),
        position=position,
        utilization=utilization(experiment),
    )
