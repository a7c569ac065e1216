"""task=evaluate: loss and accuracy or perplexity of a checkpoint on the test set, under any strategy and world size."""

from src.evaluation import evaluate, metric_of
from src.run import Experiment
from src.task import Task
from src.tasks.parts import build_trained, peaks


class Evaluate(Task):
    """checkpoint: a run folder, whose newest whole checkpoint it means, or one of its checkpoints."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def __call__(self, experiment: Experiment) -> None:
        world, strategy = experiment.world, experiment.strategy
        position = build_trained(experiment, self.checkpoint, experiment.make_model())
        _, test = experiment.data.load(
            world.device, experiment.seed, data_rank=strategy.data.rank, local_size=world.local_size
        )
        metric = metric_of(experiment.data.kind)
        found = evaluate(strategy, test, experiment.sizes, world.device, metric, experiment.control.beat)
        experiment.control.rest()  # what a tracker takes to close is no hang
        experiment.reporter.evaluated({"step": position.step, **found})
        experiment.reporter.update(peak_memory_bytes=peaks(world))
