"""Between Hydra and the launcher: one-line errors, the exit code, and what became of each job of a sweep."""

import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src import config as schema
from src.errors import Failed, Interrupted, Refused
from src.refuse import REFUSED, print_refusal

FAILED = 1


class CommandLine:
    """Runs Hydra's main and turns what happens into exit codes: 0 done, 1 failed, 2 refused, 128 + signal."""

    def __init__(self) -> None:
        self.started = False
        self.failures: list[tuple[str, int]] = []  # (job, exit code)
        schema.register()
        # Cached, so that the parent fixes one folder for a run; random, so that two runs of one second differ.
        OmegaConf.register_new_resolver("unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
        # Hydra re-raises its errors instead of printing them over several lines and exiting 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"

    def run(self, main: Callable[[], Any]) -> int:
        """The exit code of the whole command."""
        from hydra.errors import HydraException

        try:
            if joins_as_follower():
                return self.follow()
            main()
        except Refused as refused:
            print_refusal(refused)
            return REFUSED
        except Interrupted as interrupted:
            return interrupted.exit_code
        except KeyboardInterrupt:
            return 130
        except (HydraException, OmegaConfBaseException) as error:
            if self.started:
                raise
            from src.override_errors import explain  # composes the configuration once more, for the nearest name

            print_refusal(Refused(*explain(error, sys.argv[1:])))
            return REFUSED
        return self.conclude()

    def conclude(self) -> int:
        """List the failed jobs of a sweep; the exit code of the worst."""
        if len(self.failures) > 1 or (self.failures and self.failures[0][0]):
            print(f"shardlab: {len(self.failures)} job(s) of the sweep did not finish:", file=sys.stderr)
            for job, code in self.failures:
                print(f"  {job} (exit code {code})", file=sys.stderr)
        return FAILED if any(code == FAILED for _, code in self.failures) else max((c for _, c in self.failures), default=0)

    def job(self, cfg: DictConfig) -> float | None:
        """Check and launch one job; a failure is reported now and remembered, so that a sweep runs on."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self.started = True
        hydra = HydraConfig.get()
        in_sweep = hydra.mode == RunMode.MULTIRUN
        run_dir = Path(hydra.runtime.output_dir)
        label = f"job {hydra.job.num} ({hydra.job.override_dirname})" if in_sweep else ""
        try:
            from src import checks, launch  # torch: nothing of --help or --cfg job needs it

            # Again, although the callback has: ~hydra.callbacks.refuse removes that one, and other sweepers skip it.
            config, found = checks.check(cfg)
            if found:
                raise Refused(*found)
            info = {
                "overrides": list(hydra.overrides.task),
                "sweep": Path(hydra.sweep.dir).name if in_sweep else None,
                "choices": {k: v for k, v in hydra.runtime.choices.items() if "/" not in k},
            }
            return launch.launch(config, run_dir, info, in_place=not in_sweep)
        except Refused as refused:
            print_refusal(refused)
            self.failures.append((label, REFUSED))
        except Failed as failed:
            print(f"shardlab: {failed}", file=sys.stderr)
            self.failures.append((label, FAILED))
        except Interrupted as interrupted:
            # Ends a sweep as well: who stops one job with Ctrl-C does not mean to start the next.
            raise SystemExit(interrupted.exit_code) from interrupted
        except KeyboardInterrupt as interrupt:
            raise SystemExit(130) from interrupt
        return None

    def follow(self) -> int:
        """Under torchrun, every rank but the first: no Hydra, the first rank's configuration."""
        from src import launch

        try:
            launch.follow()
        except Failed as failed:
            print(f"shardlab: {failed}", file=sys.stderr)
            return FAILED
        return 0


def joins_as_follower() -> bool:
    """Whether torchrun started this process as another rank than 0. Drops torch.distributed.launch's old flag."""
    if os.environ.get("LOCAL_RANK") is not None:
        sys.argv = [word for word in sys.argv if not word.startswith(("--local_rank=", "--local-rank="))]
    from src.environment import torchrun_ranks

    ranks = torchrun_ranks()
    return ranks is not None and ranks.world_rank > 0
