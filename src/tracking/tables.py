"""What a task that measures or reports shows its reader on stdout."""

import logging
import sys

from src.logs import ONLY_IN_RANK_LOG

log = logging.getLogger(__name__)

WIDTH = 160  # columns, where nobody's terminal tells


def show(*parts: object) -> None:
    """Print tables of rich's, and text as it stands, without markup or wrapping.

    A reader that has gone (`| head`) fails nothing: the run's files have it all.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    try:
        for part in parts:
            if isinstance(part, str):
                console.print(Text(part), soft_wrap=True)
            else:
                console.print(part)
    except (OSError, SystemExit) as gone:  # rich leaves by SystemExit where a pipe's reader has
        log.info("the result could not be shown: %r", gone, extra=ONLY_IN_RANK_LOG)
