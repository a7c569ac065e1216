"""task=export: a checkpoint's weights as one model.safetensors, under the bare model's names.

A model that has a format of its own beside that (`write_folder`) is written in it too, into the folder `model`.
"""

import logging
from typing import Any

from src.run import Experiment
from src.task import Task
from src.tasks.parts import build_trained, peaks, save_weights

log = logging.getLogger(__name__)


class Export(Task):
    """checkpoint: a run folder, whose newest whole checkpoint it means, or one of its checkpoints."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def __call__(self, experiment: Experiment) -> None:
        model: Any = experiment.make_model()
        build_trained(experiment, self.checkpoint, model)
        weights = save_weights(experiment)
        if weights is not None and hasattr(model, "write_folder"):
            model.write_folder(experiment.run_dir / "model", weights)
            log.info("the model in its own format: %s", experiment.run_dir / "model")
        experiment.reporter.update(peak_memory_bytes=peaks(experiment.world))
