"""task=plan: what an experiment needs of memory and communication, before anything is allocated or started."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from src.bench.peaks import PEAKS
from src.footprint import NOT_COUNTED
from src.plan import dry_run
from src.plan.formula import Planned, example, fullest, plan
from src.plan.report import memory_table, record, traffic_table, words
from src.plan.search import Assumptions
from src.plan.traffic import step_traffic
from src.plan.values import MEASURE, refused_in_words
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tasks import plan_search
from src.tracking.tables import show

GIB = 2**30


#: Dense TFLOP/s of an A100 by precision (src/bench/peaks.py), where nobody says what the devices are.
A100 = PEAKS[next(name for name in PEAKS if "A100" in name)]


MAX_TRACED_RANKS = 4096  # of a dry run, which at that size takes minutes
#: What to do about a model that looks at a tensor's value, where formulas can't go on.
GO_ON = "Add task.dry_run=true (and task.search=false), whose step goes on with 1 for a number and false for a truth."


class Plan(Task):
    """device_memory_gib: of each device, to say whether it fits; None: unknown.

    dry_run: take a step of the real strategy on fake tensors, instead of the formulas. search: list what fits, the
    fastest estimate first, by a roofline of the other arguments: peak_tflops (dense; None: an A100's, of the
    experiment's precision), efficiency (0 ... 1, of that), bandwidth_gb (GB/s a rank).
    """

    ranks = "imagined"
    reads_data = False
    is_tracked = False

    def __init__(
        self,
        device_memory_gib: float | None = None,
        dry_run: bool = False,
        search: bool = False,
        peak_tflops: float | None = None,
        efficiency: float = 0.4,
        bandwidth_gb: float = 50.0,
    ) -> None:
        self.device_memory_bytes = None if device_memory_gib is None else device_memory_gib * GIB
        self.is_dry_run, self.searches = dry_run, search
        self.peak_tflops, self.efficiency, self.bandwidth_gb = peak_tflops, efficiency, bandwidth_gb

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        found = [
            f"task.{key}={arguments[key]} must be more than 0."
            for key in ("device_memory_gib", "peak_tflops", "efficiency", "bandwidth_gb")
            if arguments.get(key) is not None and arguments[key] <= 0
        ]
        if arguments.get("efficiency", 0.4) > 1:
            found.append(f"task.efficiency={arguments['efficiency']} is a share of the peak; choose at most 1.")
        if arguments.get("search") and arguments.get("device_memory_gib") is None:
            found.append(
                "task.search=true looks for what fits, and task.device_memory_gib is null."
                " Give the memory of a device, such as task.device_memory_gib=80."
            )
        sharding = setting.sharding
        if sharding.level == "hybrid" and sharding.shard_size is None and not arguments.get("search"):
            found.append(
                "sharding=hybrid with sharding.shard_size=null shares a copy inside a machine, and a plan knows of no"
                " machines. Give the ranks of one, such as sharding.shard_size=8."
            )
        if arguments.get("search") and arguments.get("dry_run"):
            found.append("task.search=true asks for many plans, and task.dry_run=true for one. Use one of them.")
        if arguments.get("dry_run") and setting.world_size > MAX_TRACED_RANKS:
            found.append(
                f"task.dry_run=true of launch.nproc={setting.world_size}: a trace takes time for each rank, and ends"
                f" at {MAX_TRACED_RANKS}. Use task.dry_run=false, which plans by formulas, or fewer ranks."
            )
        return found

    def __call__(self, experiment: Experiment) -> None:
        can_be_traced = type(experiment.strategy).supports.can_be_traced
        with refused_in_words(GO_ON if can_be_traced and not self.is_dry_run else MEASURE):
            if self.is_dry_run:
                self.dry_run(experiment)
            elif self.searches:
                self.search(experiment)
            else:
                self.by_formula(experiment)

    def by_formula(self, experiment: Experiment) -> None:
        """Each kind of rank, part by part."""
        plans = plan(
            type(experiment.strategy),
            experiment.make_model,
            experiment.optimizer,
            experiment.data,
            experiment.setting,
        )
        self.report(experiment, plans)

    def dry_run(self, experiment: Experiment) -> None:
        """A traced step of each kind of rank."""
        setting, strategy = experiment.setting, experiment.strategy
        ranks = type(strategy).different_ranks(setting.world_size, setting.arguments)
        steps = dry_run.dry_run(
            strategy,
            experiment.make_model,
            experiment.optimizer,
            experiment.spec,
            lambda: example(experiment.data, setting.micro_batch_size),
            ranks,
        )
        answer = {"world_size": setting.world_size, "method": "trace", "ranks": dry_run.records(steps)}
        (experiment.run_dir / "plan.json").write_text(json.dumps(answer, indent=2) + "\n")
        experiment.reporter.update(world_size=setting.world_size, plan=answer)
        show(dry_run.memory_table(steps, setting.world_size), dry_run.traffic_table(steps), dry_run.NOT_SEEN)

    def search(self, experiment: Experiment) -> None:
        """What fits, in a table with a command line each."""
        assert self.device_memory_bytes is not None
        precision = experiment.setting.precision
        peak = self.peak_tflops or getattr(A100, precision)
        assumptions = Assumptions(peak, self.efficiency, self.bandwidth_gb)
        alternatives = experiment.alternatives()
        found, nearest = plan_search.search(experiment, alternatives, self.device_memory_bytes, assumptions)
        rows = [
            {
                "command": alternatives.command(one.strategy, one.setting),
                "peak_bytes": one.footprint.peak.bytes,
                "compute_seconds": one.compute_seconds,
                "traffic_seconds": one.traffic_seconds,
                "samples_per_second": one.samples_per_second,
            }
            for one in found[: plan_search.MAX_SHOWN]
        ]
        answer = {"world_size": experiment.setting.world_size, "assumptions": asdict(assumptions), "fits": rows}
        (experiment.run_dir / "plan.json").write_text(json.dumps(answer, indent=2) + "\n")
        experiment.reporter.update(world_size=experiment.setting.world_size, plan=answer)
        if not found:
            show(plan_search.nothing_fits(nearest, self.device_memory_bytes))
            return
        show(plan_search.table(found, self.device_memory_bytes))
        show("\n".join(f"{number:2} {row['command']}" for number, row in enumerate(rows, 1)))
        show(plan_search.assumed(assumptions), f"Not counted: {NOT_COUNTED}.")

    def report(self, experiment: Experiment, plans: list[Planned]) -> None:
        """Tables on stdout, plan.json in the run's folder, the fullest rank's figures in summary.json."""
        setting, worst = experiment.setting, fullest(plans)
        found = {
            "world_size": setting.world_size,
            "data_parallel_size": setting.data_parallel_size,
            "ranks": [record(planned, setting) for planned in plans],
        }
        (experiment.run_dir / "plan.json").write_text(json.dumps(found, indent=2) + "\n")
        experiment.reporter.update(
            world_size=setting.world_size,
            data_parallel_size=setting.data_parallel_size,
            parameters=worst.sizes.num_parameters,
            plan=record(worst, setting),
        )
        show(memory_table(worst, setting, len(plans)))
        if traffic := step_traffic(worst.footprint, setting):
            show(traffic_table(traffic))
        show(words(worst.footprint, self.device_memory_bytes))
