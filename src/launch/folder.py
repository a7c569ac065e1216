"""A run's folder in the launcher's hands: who owns it, which configuration it holds, what came out of it."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from src.errors import Failed, Refused


@contextmanager
def claimed(run_dir: Path, may_exist: bool) -> Iterator[None]:
    """Own the folder: nobody else runs in it until the block ends, and the ranks are gone as well.

    may_exist: whether a run may be there, which is then gone on with. The lock is the kernel's, so it goes with the
    processes that hold it, forked ranks among them.
    """
    try:
        log_file = (run_dir / "train.log").open("a" if may_exist else "x")
    except FileExistsError:
        raise Refused(f"hydra.run.dir={run_dir} was taken by another run just now. Choose another folder.") from None
    except OSError as error:
        raise Failed(f"the run folder can't be written to: {error}") from error
    with log_file:
        try:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"the run in {run_dir} is still going on. Stop it first, or wait for its end.") from None
        yield


def is_claimed(run_dir: Path) -> bool:
    """Whether a run goes on in the folder at this moment."""
    try:
        with (run_dir / "train.log").open() as log_file:
            fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def write_config(config: dict[str, Any], run_dir: Path, resumes: int) -> None:
    """config.yaml or, of a run that is gone on with, resume-<n>.yaml: the run's own stays. Raises Failed."""
    name = f"resume-{resumes}.yaml" if resumes else "config.yaml"
    try:
        (run_dir / name).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise Failed(f"the run folder can't be written to: {error}") from error


def final_loss(run_dir: Path) -> float | None:
    """The last evaluation's, of a run that has finished."""
    summary = json.loads((run_dir / "summary.json").read_text())
    loss = (summary.get("eval") or {}).get("loss")
    return None if loss is None else float(loss)
