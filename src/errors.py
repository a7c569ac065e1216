"""What a user can be told: a refusal before the start, a failure after it."""

import difflib
import signal
from collections.abc import Iterable


class Refused(ValueError):  # noqa: N818 - an outcome, named like the others
    """The experiment can't start as configured. Exit code 2.

    problems: one line each, of the form "choice, reason, remedy".
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Failed(RuntimeError):  # noqa: N818
    """The experiment started and failed; the message names rank, error and log. Exit code 1.

    details: the failing rank's traceback, where it left one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Interrupted(BaseException):
    """A signal asked to stop. Exit code 128 + signal. Not an Exception: nothing may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A remedy naming the nearest of `known`, or all of them where none is near. prefix: stands before the nearest."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    return f"Known: {', '.join(known)}." if known else "It takes none."
