"""Between Hydra and the launcher: one-line errors, the exit code, and what became of each job of a sweep."""

import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from src import config as schema
from src.command import resolvers
from src.command.job import in_sweep, job_problems, task_overrides
from src.command.refuse import REFUSED, print_refusal, vouched_for
from src.command.resume import AUTO, continuation, is_finished, with_earlier_words
from src.environment import restart_count, torchrun_ranks
from src.errors import Failed, Interrupted, Refused

FAILED = 1
MAX_LABEL = 200  # characters of a job's overrides that a line about it repeats


class CommandLine:
    """Runs Hydra's main and turns what happens into exit codes: 0 done, 1 failed, 2 refused, 128 + signal."""

    def __init__(self) -> None:
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name) is None:  # closed by who started us, and Python and torch both expect it
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
                setattr(sys, name, os.fdopen(number, "w"))
        # Imports make objects by the hundred thousand and no garbage; looking for it takes a tenth of their time.
        gc.disable()
        self.started = False
        self.failures: list[tuple[str, int, str]] = []  # (a sweep's job, exit code, what happened)
        schema.register()
        resolvers.register()
        # Hydra re-raises its errors instead of printing them over several lines and exiting 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"

    def run(self, main: Callable[[], Any]) -> int:
        """The exit code of the whole command."""
        try:
            if joins_as_follower():
                return self.follow()
            sys.argv[1:] = with_earlier_words(sys.argv[1:])
            try:
                main()
            except SystemExit as leaving:  # --help; after a refusal torchrun itself stops the other ranks
                if leaving.code in (0, None):
                    self.dismiss_followers()
                raise
            self.dismiss_followers()
        except Refused as refused:
            print_refusal(refused)
            return REFUSED
        except (Interrupted, KeyboardInterrupt) as interrupt:
            # Ends a sweep as well: who stops one job with Ctrl-C does not mean to start the next.
            interrupted = interrupt if isinstance(interrupt, Interrupted) else Interrupted(signal.SIGINT)
            print(f"shardlab: {interrupted}", file=sys.stderr)
            self.list_failures()
            return interrupted.exit_code
        except Exception as error:
            from src.command.override_errors import COMPOSING, explain  # composes once more, for the nearest name

            if self.started or not isinstance(error, (*COMPOSING, OSError)):
                raise
            print_refusal(Refused(*(no_room(error) or explain(error, sys.argv[1:]))))
            return REFUSED
        self.list_failures()
        codes = [code for _, code, _ in self.failures]
        return FAILED if FAILED in codes else max(codes, default=0)

    def dismiss_followers(self) -> None:
        """As torchrun's rank 0 without a run (--help, --cfg job): tell the others not to wait for one."""
        if not self.started and torchrun_ranks() is not None:
            from src.launch import parent  # torch

            parent.dismiss()

    def list_failures(self) -> None:
        """Once more, at the end of a sweep: each was reported when it happened, and has scrolled away since."""
        failed = [f"{job}{happened}" for job, _, happened in self.failures if job]
        if failed:
            print(f"shardlab: {len(failed)} job(s) of the sweep did not finish:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in failed), file=sys.stderr)

    def job(self, cfg: DictConfig) -> float | None:
        """Check and launch one job; a failure is reported now and remembered, so that a sweep runs on."""
        from hydra.core.hydra_config import HydraConfig

        self.started = True
        label = job_label(HydraConfig.get())
        try:
            return start(cfg, HydraConfig.get())
        except Refused as refused:
            print_refusal(refused, label)
            self.failures.append((label, REFUSED, f"refused: {' '.join(refused.problems)}"))
        except Failed as failed:
            print(f"{failed.details}shardlab: {label}{failed}", file=sys.stderr)
            self.failures.append((label, FAILED, str(failed)))
        except Exception as error:
            # A fault of ours, not of a rank's. Said in full, but the other jobs of a sweep may well run.
            traceback.print_exc()
            self.failures.append((label, FAILED, f"{type(error).__name__}: {error}"))
        return None

    def follow(self) -> int:
        """Under torchrun, every rank but the first: no Hydra, the first rank's configuration."""
        from src.launch import parent

        self.started = True
        collect_garbage_from_now_on()
        try:
            parent.follow()
        except Failed as failed:
            print(f"shardlab: {failed}", file=sys.stderr)  # its traceback rank 0 prints, and the log holds
            return FAILED
        return 0


def start(cfg: DictConfig, hydra: DictConfig) -> float | None:
    """Launch one composed job in the folder that Hydra has made for it. hydra: its own node of the configuration."""
    from src.checks import rules
    from src.launch import parent  # torch: nothing of --help or --cfg job needs it
    from src.launch.folder import final_loss

    if not vouched_for(hydra):
        found = job_problems(cfg, task_overrides(hydra), fetch=True)
        if found:
            raise Refused(*found)
    config, found = rules.check(cfg)
    if found:
        raise Refused(*found)
    run_dir = Path(hydra.runtime.output_dir)
    resume = config["checkpoint"]["resume"]
    if in_sweep(hydra) and resume == AUTO and is_finished(run_dir):
        print(f"{job_label(hydra)}finished before; nothing to do")
        return final_loss(run_dir)
    info = {
        **continuation(resume, run_dir),
        "overrides": task_overrides(hydra),
        "sweep": Path(hydra.sweep.dir).name if in_sweep(hydra) else None,
        "choices": {k: v for k, v in hydra.runtime.choices.items() if "/" not in k},
    }
    collect_garbage_from_now_on()
    # torch's thread pools don't survive the forks of the jobs to come.
    return parent.launch(config, run_dir, info, in_place=not in_sweep(hydra))


def collect_garbage_from_now_on() -> None:
    """End what CommandLine began. What is imported by now stays: forked ranks then share its memory."""
    gc.freeze()
    gc.enable()


def job_label(hydra: DictConfig) -> str:
    """What a line about one job of a sweep begins with; nothing for a run of its own."""
    if not in_sweep(hydra):
        return ""
    overrides = " ".join(task_overrides(hydra))
    shown = overrides if len(overrides) <= MAX_LABEL else f"{overrides[:MAX_LABEL]}..."
    return f"job {hydra.job.num} ({shown}): "


def no_room(error: Exception) -> list[str]:
    """Where the disk filled up since the folder was looked at: who writes to an open file does not name it."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
        return []
    return [
        f"{error.strerror} while Hydra wrote its files into the run's folder (hydra.run.dir; hydra.sweep.dir of a"
        " sweep), which now holds a part of them. Remove it, and make room or choose another."
    ]


def joins_as_follower() -> bool:
    """Whether torchrun started this process as another rank than 0. Drops torch.distributed.launch's old flag."""
    if os.environ.get("LOCAL_RANK") is not None:
        sys.argv = [word for word in sys.argv if not word.startswith(("--local_rank=", "--local-rank="))]
    ranks = torchrun_ranks()
    if ranks is None or restart_count() == 0:
        return ranks is not None and ranks.world_rank > 0
    from src.launch import parent  # torch

    # Started again: rank 0 as well takes what the first one was given, folder and all.
    return ranks.world_rank > 0 or parent.was_given()
