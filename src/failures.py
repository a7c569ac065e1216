"""Which rank failed first, and why: the launcher names the first process it *noticed*, often a victim.

Each failing rank leaves a record with the time (elastic's own error file); the earliest is the cause,
unless a rank died without a word.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


@dataclass(frozen=True)
class Failure:
    """world_rank: who failed. message: the exception's type and words, or the signal. time: seconds since the epoch."""

    world_rank: int
    message: str
    time: float


def record_failure(error: BaseException, world_rank: int) -> Failure:
    """Leave a record for the parent (or for torchrun) in the file that the elastic agent named."""
    failure = Failure(world_rank, f"{type(error).__name__}: {error}", time.time())
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"timestamp": str(int(failure.time)), "world_rank": world_rank, "time": failure.time}
        temporary = Path(path).with_suffix(".partial")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"message": {"message": failure.message, "extraInfo": extra}}))
        temporary.replace(path)
    return failure


def first_cause(error: "ChildFailedError", records: Path) -> Failure:
    """The failure that the others followed from. records: the folder under which error files lie."""
    noticed_rank, noticed = error.get_first_failure()
    known = []
    for path in records.rglob("error.json"):
        message = json.loads(path.read_text())["message"]
        extra = message["extraInfo"]
        known.append(Failure(extra["world_rank"], message["message"], extra["time"]))
    if not any(failure.world_rank == noticed_rank for failure in known):
        # Dead without a word: killed from outside, or a crash in C++. The others only lost their peer.
        return Failure(noticed_rank, how_it_ended(noticed.exitcode), noticed.timestamp)
    return min(known, key=lambda failure: failure.time)


def how_it_ended(exit_code: int) -> str:
    """Words for a process's exit code; negative: a signal."""
    if exit_code >= 0:
        return f"left with exit code {exit_code} and no message"
    name = signal.Signals(-exit_code).name
    hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def describe(failure: Failure, log_file: Path) -> str:
    """What the last lines of a failed run say."""
    return f"rank {failure.world_rank} failed: {failure.message}\n  its log: {log_file}"


def mark_summary_failed(run_dir: Path, failure: Failure) -> None:
    """Make summary.json name the cause: rank 0 may have been a victim, or gone before it could write."""
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    summary |= {"status": "failed", "error": f"rank {failure.world_rank}: {failure.message}"}
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)
