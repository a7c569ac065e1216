"""Weights & Biases behind a queue: the training hands over records and never waits for the client.

One thread of rank 0 does everything that touches the wandb package (wandb_client.py), importing it among the rest:
imported by the parent, before the ranks are forked, it would cost every run 0.3 s before its first step.
"""

import logging
import queue
import secrets
import shlex
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import Refused, did_you_mean
from src.tracking.base import RunInfo, Tracker

if TYPE_CHECKING:
    from src.tracking.wandb_client import WandbClient

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline")
MAX_TAG = 64  # characters, W&B's limit
#: How long finish() waits for uploads after a run that ended well, and after one that did not: then its other
#: ranks are gone, and the launcher kills what is left after 8 s (src/launch/agent.py).
FINISH_SECONDS = 30.0
FAILED_FINISH_SECONDS = 4.0
SILENT_SECONDS = 2.0  # it waits that long before it says so


@dataclass(frozen=True)
class Closing:
    """The last entry of the queue."""

    exit_code: int
    summary: dict[str, Any]


class WandbTracker(Tracker):
    """One run of Weights & Biases.

    mode: "online", "offline", or "auto": as WANDB_MODE or wandb's settings say, else online where wandb finds
    an API key. init_timeout_seconds: online, a server that has not answered by then is given up for this run,
    which goes on offline. Raises Refused for mode "online" where wandb is not logged in, and for impossible tags.
    """

    def __init__(
        self,
        mode: str = "auto",
        init_timeout_seconds: float = 30.0,
        project: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        super().__init__(project, group, tags)
        self.mode, self.init_timeout_seconds = mode, init_timeout_seconds
        problems = self._problems()
        if problems:
            raise Refused(*problems)
        self.run_dir: Path | None = None
        self.run_id: str | None = None
        self.client: WandbClient | None = None
        self.queue: queue.SimpleQueue[dict[str, Any] | Closing] = queue.SimpleQueue()
        self.opened = threading.Event()  # the run is open, or never will be
        self.closed = threading.Event()  # the thread has nothing more to do
        self.abandoned = False

    def _problems(self) -> list[str]:
        found = []
        if self.mode not in MODES:
            found.append(f"tracking.mode={self.mode} is unknown. {did_you_mean(self.mode, MODES)}")
        if not self.init_timeout_seconds > 0:
            found.append(f"tracking.init_timeout_seconds={self.init_timeout_seconds} must be more than 0.")
        for tag in self.tags:
            if not 1 <= len(tag) <= MAX_TAG:
                found.append(
                    f"tracking.tags: {tag!r} has {len(tag)} characters, and W&B takes 1 to {MAX_TAG}. Shorten it."
                )
        if self.mode == "online" and not found:
            from src.tracking.wandb_client import login_problem  # wandb, 0.6 s; ranks inherit the import

            problem = login_problem()
            if problem is not None:
                found.append(
                    f"tracking.mode=online, but {problem}."
                    " Run `wandb login` (or set WANDB_API_KEY), or use tracking=offline."
                )
        return found

    def start(self, run: RunInfo) -> None:
        self.run_dir = run.run_dir
        # Ours rather than wandb's, so that it is known at once, and the same if the run has to go on offline.
        self.run_id = run.earlier_id or secrets.token_hex(4)
        threading.Thread(target=self._work, args=(run, self.run_id), name="wandb", daemon=True).start()

    def log(self, record: dict[str, Any]) -> None:
        if not self.closed.is_set():  # after a failure nobody would empty the queue
            self.queue.put(record)

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self.queue.put(Closing(exit_code, summary))
        if self.closed.wait(SILENT_SECONDS):
            return
        seconds = FINISH_SECONDS if exit_code == 0 else FAILED_FINISH_SECONDS
        log.info("waiting for Weights & Biases")
        if exit_code == 0:
            # A short run may end while its tracker still waits for the server to answer.
            self.opened.wait(self.init_timeout_seconds)
        if not self.closed.wait(seconds):
            self.abandoned = True
            log.warning("Weights & Biases did not finish in %.0f s and is left behind. %s", seconds, self._later())
            if self.client is not None:
                self.client.kill_service()

    def _work(self, run: RunInfo, run_id: str) -> None:
        """The thread. Whatever goes wrong here ends the tracking with one warning, and nothing else."""
        try:
            from src.tracking.wandb_client import WandbClient  # wandb, 0.6 s

            self.client = WandbClient(run_id, self.init_timeout_seconds, FINISH_SECONDS)
            self._follow(self.client, run)
        except (Exception, SystemExit) as error:  # wandb.teardown() leaves by SystemExit where its service failed
            if not self.abandoned:
                log.warning(
                    "Weights & Biases stopped following: %s: %s. The training goes on, and metrics.jsonl has it all.",
                    type(error).__name__,
                    error,
                )
        finally:
            self.opened.set()
            self.closed.set()

    def _follow(self, client: "WandbClient", run: RunInfo) -> None:
        """Hand the queue's records to the client until the closing one. Closes the client whatever happens."""
        try:
            client.open(run, self.mode, self.project)
            self.opened.set()
            while not isinstance(entry := self.queue.get(), Closing):
                client.log(entry)
            client.finish(entry.exit_code, entry.summary)
        finally:
            client.close()

    def identity(self) -> dict[str, Any]:
        mode = self.client.mode if self.client else None
        if mode == "disabled":
            return {"id": None, "mode": mode}
        return {"id": self.client.run_id if self.client else self.run_id, "mode": mode}

    def commands(self) -> list[str]:
        mode = self.identity()["mode"]
        if self.run_dir is None or mode not in ("online", "offline"):
            return []
        found = [f"{client_command()} leet {shlex.quote(str(self.run_dir / 'wandb'))}"]
        if mode == "offline":
            found.append(self._sync())
        elif self.client is not None and self.client.url is not None:
            found.append(self.client.url)
        return found

    def _sync(self) -> str:
        # All segments of a run that was resumed: named together, wandb uploads them in order.
        prefix = "offline-run" if self.identity()["mode"] == "offline" else "run"
        return f"{client_command()} sync {shlex.quote(str(self.run_dir))}/wandb/{prefix}-*"

    def _later(self) -> str:
        if self.identity()["mode"] is None:
            return "This run is in its run folder only."
        return f"To upload what it has: {self._sync()}"


def client_command() -> str:
    """How wandb's command is typed: by its name, or, in an environment that is not activated, by its path."""
    beside = Path(sys.executable).with_name("wandb")
    return shlex.quote(str(beside)) if shutil.which("wandb") is None and beside.exists() else "wandb"
