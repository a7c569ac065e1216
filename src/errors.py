"""What a user can be told: a refusal before the start, a failure after it."""

import difflib
import signal
from collections.abc import Iterable

from hydra.errors import InstantiationException

MAX_MESSAGE = 500  # characters of an exception's words that the terminal shows; its log has them all


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
    """A signal asked to stop. Exit code 128 + signal. Not an Exception: nothing may swallow it.

    words: what stands behind the signal, where that is known.
    """

    def __init__(self, signal_number: int, words: str | None = None) -> None:
        super().__init__(words or f"stopped by {signal.Signals(signal_number).name}")
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


def in_words(error: BaseException) -> str:
    """An exception in one line; for one that Hydra raised while building a part, the part's own exception."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return in_words(error.__cause__)
    if isinstance(error, SystemExit):
        return f"left by sys.exit({error.code!r}) in the middle of the run"
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")
    words = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return words if len(words) <= MAX_MESSAGE else f"{words[:MAX_MESSAGE]}..."
