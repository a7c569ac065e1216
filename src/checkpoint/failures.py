"""What can go wrong with a checkpoint, in words for the user."""

MAX_LISTED = 20  # problems that one message lists; it says how many more there are


class CheckpointFailed(RuntimeError):  # noqa: N818 - an outcome, named like the others
    """A checkpoint was not written. Raised on every rank; what was there before is still there."""


class CheckpointDamaged(RuntimeError):  # noqa: N818
    """What lies at a path is no whole checkpoint, or none of ours. Raised on every rank."""


class CheckpointMismatch(RuntimeError):  # noqa: N818
    """A checkpoint holds other tensors than those that are to be loaded. Raised on every rank.

    problems: one line a name, sorted; the message lists the first of them.
    """

    def __init__(self, path: str, problems: list[str]) -> None:
        # The first on the first line, which is all that a summary has room for.
        first, *others = listed(problems, MAX_LISTED)
        super().__init__("\n  ".join([f"{path} does not fit what it is to be loaded into: {first}", *others]))
        self.problems = problems


def listed(lines: list[str], most: int) -> list[str]:
    """The first `most` of `lines`, and a last one that counts the others."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more"]
