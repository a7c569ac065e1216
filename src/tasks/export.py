"""task=export: a checkpoint's weights as one model.safetensors, under the bare model's names."""

from src.run import Experiment
from src.task import Task
from src.tasks.parts import build_trained, peaks, save_weights


class Export(Task):
    """checkpoint: a run folder, whose newest whole checkpoint it means, or one of its checkpoints."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def __call__(self, experiment: Experiment) -> None:
        build_trained(experiment, self.checkpoint)
        save_weights(experiment)
        experiment.reporter.update(peak_memory_bytes=peaks(experiment.world))
