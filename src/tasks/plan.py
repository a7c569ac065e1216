"""task=plan: what an experiment needs of memory and communication, before anything is allocated or started."""

import json
from collections.abc import Mapping
from typing import Any

from src.plan.formula import Planned, fullest, plan
from src.plan.report import memory_table, record, traffic_table, words
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tracking.tables import show

GIB = 2**30


class Plan(Task):
    """device_memory_gib: of each device, to say whether it fits; None: unknown."""

    ranks = "imagined"
    reads_data = False
    is_tracked = False

    def __init__(self, device_memory_gib: float | None = None) -> None:
        self.device_memory_bytes = None if device_memory_gib is None else device_memory_gib * GIB

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        memory = arguments.get("device_memory_gib")
        if memory is not None and memory <= 0:
            return [f"task.device_memory_gib={memory} holds nothing; choose more than 0, or null."]
        return []

    def __call__(self, experiment: Experiment) -> None:
        setting = experiment.setting
        plans = plan(type(experiment.strategy), experiment.make_model, experiment.optimizer, experiment.data, setting)
        self.report(experiment, plans)

    def report(self, experiment: Experiment, plans: list[Planned]) -> None:
        """Tables on stdout, plan.json in the run's folder, the fullest rank's figures in summary.json."""
        setting, worst = experiment.setting, fullest(plans)
        found = {
            "world_size": setting.world_size,
            "data_parallel_size": setting.data_parallel_size,
            "ranks": [record(planned) for planned in plans],
        }
        (experiment.run_dir / "plan.json").write_text(json.dumps(found, indent=2) + "\n")
        experiment.reporter.update(
            world_size=setting.world_size,
            data_parallel_size=setting.data_parallel_size,
            parameters=worst.sizes.num_parameters,
            plan=record(worst),
        )
        show(memory_table(worst, setting, len(plans)))
        if worst.footprint.traffic:
            show(traffic_table(worst.footprint))
        show(words(worst.footprint, self.device_memory_bytes))
