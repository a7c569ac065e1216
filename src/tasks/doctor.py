"""task=doctor: what this machine, its software and the started ranks are like, and what is wrong with them."""

import getpass
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from src.checks.keys import locate
from src.checks.remedies import STRATEGIES
from src.doctor.environment import redacted, shown
from src.doctor.examination import inspect_run
from src.doctor.facts import Facts, Finding
from src.doctor.findings import findings
from src.doctor.network import interfaces, unmatched
from src.doctor.report import report
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tracking.tables import show


class Doctor(Task):
    """Runs on real ranks, so that it also shows whether they can meet and add up. Writes doctor.md."""

    reads_data = False
    is_tracked = False

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        """What keeps ranks from meeting at all: then no report could be gathered."""
        variables, names = shown(os.environ), [interface.name for interface in interfaces()]
        return [
            f"GLOO_SOCKET_IFNAME={variables['GLOO_SOCKET_IFNAME']} in the environment: no network interface here is"
            f" called {part}, so no rank can start. Unset it, or choose from {', '.join(names)}."
            for part in unmatched(variables.get("GLOO_SOCKET_IFNAME", ""), names)
        ]

    def __call__(self, experiment: Experiment) -> None:
        world, run_dir = experiment.world, experiment.run_dir
        facts = inspect_run(world, run_dir, strategy_packages())
        if facts is None:
            return
        found = findings(facts)
        text = redacted(report(facts, found), os.environ, str(Path.home()), user_name())
        (run_dir / "doctor.md").write_text(text, encoding="utf-8")
        experiment.reporter.update(world_size=world.world_size, doctor=as_record(facts, found))
        show(text.rstrip("\n"))


def strategy_packages() -> dict[str, str]:
    """What must be installed for a shipped strategy, and that strategy's option."""
    found = {}
    for path in sorted(STRATEGIES.glob("*.yaml")):
        target = yaml.safe_load(path.read_text()).get("_target_")
        if target is not None:  # else it is a variant of another
            found.update(dict.fromkeys(locate(target).supports.packages, f"strategy={path.stem}"))
    return found


def user_name() -> str:
    """The account's; "" in a container whose user has no entry in /etc/passwd."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def as_record(facts: Facts, found: list[Finding]) -> dict[str, Any]:
    """For summary.json: what was found, and the versions it was found with."""
    return {
        "findings": [finding._asdict() for finding in found],
        "versions": dict(facts.ranks[0].versions),
        "ranks": [
            {"world_rank": rank.world_rank, "device": rank.device, "sums_right": dict(rank.sums_right)}
            for rank in facts.ranks
        ],
    }
