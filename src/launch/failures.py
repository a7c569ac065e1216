"""Which rank failed first, and why: the launcher names the first process it *noticed*, often a victim.

Each failing rank leaves a record with the time (elastic's own error file). A rank that was killed, or crashed
in C++, leaves none; of it the agent knows between which two looks it died. The earliest of all is the cause.
"""

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from src.errors import Refused, in_words
from src.tracking.files import write_summary

#: What gloo, NCCL and the store say when another process has gone.
LOST_PEER = re.compile(r"closed by peer|reset by peer|Broken pipe|remote process exited|communicator was aborted", re.I)
#: What they, and our own heartbeat, say when another process does not come.
WAITED = re.compile(
    r"waiting for another rank|Timed out waiting|wait timeout after|timeout caused pair closure|operation timeout", re.I
)
HUNG = "Hung: "  # how a heartbeat's own record begins


@dataclass(frozen=True)
class Failure:
    """A rank's own record. message: the exception's type and words, in one line. time: seconds since the epoch."""

    world_rank: int
    message: str
    time: float
    details: str = ""


@dataclass(frozen=True)
class Death:
    """A rank's end as its agent saw it.

    exit_code: negative for a signal. last_seen, noticed: seconds since the epoch.
    """

    world_rank: int
    exit_code: int
    last_seen: float
    noticed: float


def record_failure(error: BaseException, world_rank: int) -> Failure:
    """Leave a record for the parent (or for torchrun) in the file that the elastic agent named."""
    # A refusal's words say it all; its traceback is in the rank's log.
    details = "" if isinstance(error, Refused) else "".join(traceback.format_exception(error))
    failure = Failure(world_rank, in_words(error), time.time(), details)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"timestamp": str(int(failure.time)), "py_callstack": failure.details, **asdict(failure)}
        temporary = Path(path).with_suffix(".partial")
        with suppress(OSError):  # a full disk; the rank's log and its exit code are then all there is
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"message": {"message": failure.message, "extraInfo": extra}}))
            temporary.replace(path)
    return failure


def follows_another(message: str) -> bool:
    """Whether a rank's own words tell of another rank's end, or of its not coming."""
    return bool(LOST_PEER.search(message) or WAITED.search(message))


def tells_of_a_hang(message: str) -> bool:
    return message.startswith(HUNG) or bool(WAITED.search(message))


def read_records(folder: Path) -> list[Failure]:
    """The records that ranks left below `folder`; elastic's own, where one failed before it could write ours."""
    found = []
    for path in folder.rglob("error.json"):
        try:
            message = json.loads(path.read_text())["message"]
        except json.JSONDecodeError:
            continue  # cut off by a full disk
        extra = message["extraInfo"]
        if "world_rank" in extra:
            found.append(Failure(extra["world_rank"], extra["message"], extra["time"], extra["details"]))
        else:  # elastic names a rank's folder by its local rank
            words, seconds = message["message"], float(extra["timestamp"])
            found.append(Failure(int(path.parent.name), words, seconds, extra.get("py_callstack", "")))
    return found


def first_cause(deaths: Iterable[Death], records: Iterable[Failure], mute: Iterable[int] = ()) -> Failure:
    """The failure that the others followed from: the earliest, but for those that tell of a peer's end.

    deaths: of the ranks that were gone when the agent first noticed one, before it stopped the others. mute: the
    ranks that then went on without a word while the others had waited in vain.
    """
    records = list(records)
    told = {record.world_rank for record in records}
    silent = [death for death in deaths if death.world_rank not in told]
    # A silent rank was alive when last seen, and its victims' records are younger than that.
    silent_failures = [Failure(death.world_rank, how_it_ended(death.exit_code), death.last_seen) for death in silent]
    # NCCL's watchdog aborts a rank whose peers are gone, so that end may be a victim's too.
    aborted = {death.world_rank for death in silent if death.exit_code == -signal.SIGABRT}

    hung = [Failure(world_rank, f"{HUNG}the others waited for it in vain", 0.0) for world_rank in mute]

    def suspicion(failure: Failure) -> tuple[int, float]:
        follows = 2 if follows_another(failure.message) else 1 if failure.world_rank in aborted else 0
        return follows, failure.time

    return min(silent_failures + records + hung, key=suspicion)


def how_it_ended(exit_code: int) -> str:
    """Words for the exit code of a process that left no record; negative: a signal."""
    if exit_code == 0:
        return "left with exit code 0 before the run was over"
    if exit_code > 128 and exit_code - 128 in signal.valid_signals():
        return f"stopped by {signal.Signals(exit_code - 128).name}"
    if exit_code > 0:
        return f"left with exit code {exit_code} and no message"
    name = signal.Signals(-exit_code).name
    hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def describe(failure: Failure, log_file: Path) -> str:
    """What the last lines of a failed run say."""
    return f"rank {failure.world_rank} failed: {failure.message}\n  its log: {log_file}"


def mark_summary(run_dir: Path, status: str, error: str) -> None:
    """Make summary.json say how the run ended: rank 0 may have been a victim, or gone before it could write."""
    path = run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    write_summary(run_dir, summary | {"status": status, "error": error})
