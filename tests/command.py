"""Running train.py as a user does: a process of its own, in a folder of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
TRAIN = REPOSITORY / "train.py"

#: A short run on two CPU ranks; tests add to it.
QUICK = ["launch.device=cpu", "launch.nproc=2", "trainer.max_steps=2", "trainer.log_every=1", "tracking=off"]


@dataclass(frozen=True)
class Outcome:
    """What a command left behind. cwd: where it ran."""

    code: int
    stdout: str
    stderr: str
    cwd: Path

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    def run_dirs(self) -> list[Path]:
        """The folders of all runs below cwd, sweeps' jobs included."""
        return sorted(
            path.parent for path in self.cwd.rglob("config.yaml") if not {".hydra", "files"} & set(path.parts)
        )

    def run_dir(self) -> Path:
        [only] = self.run_dirs()
        return only


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without what changes a run; changes: None removes a variable."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY")
    env = {key: value for key, value in os.environ.items() if key not in unset and not key.startswith("TORCHELASTIC")}
    env["PYTHONPATH"] = str(REPOSITORY)  # for test doubles named by _target_
    for key, value in changes.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


def train(cwd: Path, *overrides: str, timeout: float = 120, **env: str | None) -> Outcome:
    """python train.py <overrides> in cwd, to its end."""
    done = subprocess.run(
        [sys.executable, str(TRAIN), *overrides],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, cwd)


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in metrics.jsonl, in order."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())
