"""Compose the configuration, refuse what can't work, launch the ranks."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from src.command.cli import CommandLine

#: Absolute, so that a link to this file works as well.
CONF = str(Path(__file__).resolve().parent / "conf")

command_line = CommandLine()


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")  # type: ignore[untyped-decorator]
def main(cfg: DictConfig) -> float | None:
    """One job: a run of its own, or one of a sweep."""
    return command_line.job(cfg)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
