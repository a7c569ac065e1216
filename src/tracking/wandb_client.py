"""The wandb package, spoken to from one thread: open a run, log, close it, leave no process behind.

Settings go through wandb.Settings: it must not print, prompt, capture the console, or read the source code.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import wandb

from src.tracking.base import RunInfo
from src.tracking.source import source_state

log = logging.getLogger(__name__)

#: Entries of summary.json that W&B's table of runs shows.
SUMMARY_FACTS = (
    "status",
    "error",
    "parameters",
    "world_size",
    "data_parallel_size",
    "seconds",
    "samples_per_second",
    "peak_memory_bytes",
    "checkpoint",
)


def login_problem() -> str | None:
    """Why wandb could not go online from here, in words; None where it could. No prompt and no network."""
    try:
        with quiet_login():
            if wandb.login(prompt=False, verify=False):
                return None
        return "wandb has no API key here, or was told to stay offline (WANDB_MODE, `wandb offline`)"
    except wandb.errors.AuthenticationError as error:
        return f"wandb can't use its API key: {str(error).rstrip('.')}"
    finally:
        wandb.teardown()  # its thread: ranks are forked from this process


@contextmanager
def quiet_login() -> Iterator[None]:
    """login() takes no settings, and before setup() these variables are the only way to give it any.

    Silent, it does not ask its server either who the key belongs to; without git it starts no process.
    """
    before = {name: os.environ.get(name) for name in ("WANDB_SILENT", "WANDB_DISABLE_GIT")}
    os.environ.update(dict.fromkeys(before, "true"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def quiet_settings(**more: Any) -> "wandb.Settings":
    return wandb.Settings(
        silent=True,  # neither banners nor prompts
        console="off",  # stdout and stderr stay the run's
        disable_git=True,  # no patch, no remote's address; the commit goes into the configuration
        disable_code=True,
        save_code=False,
        reinit="create_new",  # no global wandb.run
        **more,
    )


class WandbClient:
    """One run in wandb. Every method but kill_service belongs to one thread.

    mode: "online", "offline" or "disabled", once open() has settled it.
    """

    def __init__(self, run_id: str, init_timeout_seconds: float, finish_timeout_seconds: float) -> None:
        self.run_id = run_id
        self.init_timeout_seconds, self.finish_timeout_seconds = init_timeout_seconds, finish_timeout_seconds
        self.mode: str | None = None
        self.url: str | None = None
        self.run: Any = None
        self.service_pids: list[int] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}  # rows by kind

    def open(self, run: RunInfo, wanted_mode: str, project: str | None) -> None:
        """Open the run: online where that is wanted and works, else offline. Raises what wandb raises offline."""
        self._start_service()
        mode = self._settle_mode(wanted_mode)
        if mode == "online":
            try:
                self.run = self._init(run, "online", project)
            except Exception as error:  # no network, no such key, no such project, a version it no longer talks to …
                reason = (str(error).splitlines() or [""])[0]
                log.warning(
                    "Weights & Biases can't be reached; the run goes on offline. %s: %s", type(error).__name__, reason
                )
                mode = "offline"
                # The id is taken in this service, by the attempt that failed.
                wandb.teardown()
                self._start_service()
        if mode == "offline":
            self.run = self._init(run, "offline", project)
        self.mode = mode
        if self.run is not None:
            self.run_id, self.url = self.run.id, self.run.url
            # The x axis is our own step: wandb's can't go back, and would drop what a resumed run repeats.
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
            log.info("Weights & Biases run %s is %s%s", self.run_id, mode, f": {self.url}" if self.url else "")

    def _start_service(self) -> None:
        """wandb's helper process, a child of this thread."""
        ours = sys.exit, sys.excepthook
        wandb.setup(settings=quiet_settings())
        sys.exit, sys.excepthook = ours  # it puts its own in their place, for an exit code that we tell it
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children")  # Linux
        self.service_pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def _settle_mode(self, wanted_mode: str) -> str:
        if wanted_mode == "offline":
            return "offline"
        told = wandb.setup().settings.mode
        if wanted_mode == "auto" and told in ("disabled", "offline"):
            return str(told)
        try:
            logged_in = wandb.login(prompt=False, verify=False)
        except wandb.errors.AuthenticationError as error:
            log.warning("Weights & Biases: %s. The run goes on offline.", error)
            return "offline"
        if wanted_mode == "online" and not logged_in:
            log.warning("Weights & Biases is no longer logged in; the run goes on offline.")
        return "online" if logged_in else "offline"

    def _init(self, run: RunInfo, mode: Literal["online", "offline"], project: str | None) -> Any:
        return wandb.init(
            mode=mode,
            project=project,
            id=self.run_id,
            resume=None if run.earlier_id is None else "allow",
            name=run.name,
            group=run.group,
            tags=list(dict.fromkeys(tag[:64] for tag in run.tags)),
            config={**run.config, "git": source_state()},
            dir=str(run.run_dir),
            settings=quiet_settings(
                init_timeout=self.init_timeout_seconds,
                finish_timeout=self.finish_timeout_seconds,
            ),
        )

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl, its numbers named train/loss, …; without a step, a row for `finish`."""
        if "step" not in record:
            self.tables.setdefault(record["kind"], []).append({k: v for k, v in record.items() if k != "kind"})
        elif self.run is not None:
            self.run.log(metrics(record))

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Close the run with the job's exit code; waits for uploads, up to finish_timeout_seconds."""
        if self.run is not None:
            if self.tables:
                self.run.log({kind: table(rows) for kind, rows in self.tables.items()})
            # What the metrics do not say already.
            self.run.summary.update({key: summary[key] for key in SUMMARY_FACTS if summary.get(key) is not None})
            self.run.finish(exit_code=exit_code)

    def close(self) -> None:
        """End wandb's helper process, and wait for it."""
        wandb.teardown()

    def kill_service(self) -> None:
        """End a helper process that does not answer, from any thread: it would outlive the run, or keep it waiting."""
        for pid in self.service_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def metrics(record: dict[str, Any]) -> dict[str, Any]:
    """{"kind": "train", "step": 3, "loss": 0.5, "batch_hash": …} -> {"step": 3, "train/loss": 0.5}; numbers only."""
    kind = record["kind"]
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
    return {"step": record["step"], **{f"{kind}/{key}": value for key, value in numbers.items()}}


def table(rows: list[dict[str, Any]]) -> "wandb.Table":
    """Rows that need not all have the same keys, as one table whose columns stand in the order of their first use."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(column) for column in columns] for row in rows]
    return wandb.Table(columns=columns, data=data, allow_mixed_types=True)
