"""Runs of the real W&B client, and what its own reader finds in them."""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from tests.command import environment

WANDB = str(Path(sys.executable).parent / "wandb")
#: Two steps, each of them logged, of a small model; the data have 12 global batches.
TINY = ["launch.device=cpu", "launch.nproc=2", "trainer.max_steps=2", "trainer.log_every=1", "model=mlp"]


def home(tmp_path: Path, **changes: str | None) -> dict[str, str]:
    """An environment without an account: no key, no netrc, no settings; wandb's cache goes to the test's folder."""
    folder = tmp_path / "home"
    folder.mkdir(exist_ok=True)
    own = {key: None for key in os.environ if key.startswith("WANDB_") or key == "NETRC"}
    return environment(**{**own, "HOME": str(folder), **changes})


def folders(run_dir: Path) -> list[Path]:
    """What W&B made in a run folder, one folder a run (or a segment of one)."""
    return sorted(path for path in (run_dir / "wandb").glob("*run-*") if path.is_dir() and not path.is_symlink())


@cache
def records(folder: Path) -> list[dict[str, Any]]:
    """Every record of a run, by wandb's reader."""
    lines = subprocess.run(
        [WANDB, "leet", "inspect", "--json", str(folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return [json.loads(line) for line in lines]


def of_type(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record[name] for record in records(folder) if record["type"] == name]


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged metrics, in order, without wandb's own (they begin with an underscore)."""
    items = [record["item"] for record in of_type(folder, "history")]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


def run_of(folder: Path) -> dict[str, Any]:
    """The run record: run_id, display_name, config, tags, …"""
    [run] = of_type(folder, "run")
    return run


def exit_code(folder: Path) -> int:
    [last] = of_type(folder, "exit")
    return int(last.get("exit_code", 0))


def processes_in(cwd: Path, name: str = "") -> list[int]:
    """Processes that work in `cwd` and have `name` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                works_here = (entry / "cwd").readlink() == cwd
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # gone, or a zombie
                continue
            if works_here and command and name in command:
                found.append(int(entry.name))
    return found


def wait_until_gone(cwd: Path, seconds: float) -> list[int]:
    """The processes still in `cwd` after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_in(cwd)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
