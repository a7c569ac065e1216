"""Models that no plan can follow: they look at the values of tensors, and a plan's have shapes only."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hydra.errors import InstantiationException
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from src.errors import Refused

MEASURE = "Take two steps instead, which say what they needed: task=train trainer.max_steps=2."

#: What torch's errors say where they have no type of their own; and whether a stand-in for the value would do.
TOLD = {
    "cannot be called on meta tensors": ("looks at a tensor's value", True),
    ".numpy() is not supported": ("hands a tensor to numpy", False),
    "'Meta' backend": ("uses an operation that does not tell shapes without values", False),
    "meta tensor": ("looks at a tensor's value", False),
}


@contextmanager
def refused_in_words(where_a_stand_in_does: str, elsewhere: str = MEASURE) -> Iterator[None]:
    """Turns what torch raises where a model looks at values into a Refused of one line; lets all else pass.

    where_a_stand_in_does: the remedy where any number would let the model go on. elsewhere: where its shapes hang on
    the value.
    """
    try:
        yield
    except (RuntimeError, InstantiationException) as error:
        cause = error.__cause__ or error if isinstance(error, InstantiationException) else error
        found = what_it_does(cause)
        if found is None:
            raise
        does, would_do = found
        remedy = where_a_stand_in_does if would_do else elsewhere
        raise Refused(
            f"the model {does} ({place_of(cause)}), and a plan's tensors have shapes but no values. {remedy}"
        ) from error


def what_it_does(error: BaseException) -> tuple[str, bool] | None:
    """In words, and whether a stand-in would do; None where the error is another one."""
    if isinstance(error, DataDependentOutputException):
        return "looks at a tensor's value", True
    if isinstance(error, DynamicOutputShapeException):
        return "makes a tensor whose shape depends on values", False
    if isinstance(error, UnsupportedOperatorException):
        return "uses an operation that does not tell shapes without values", False
    if isinstance(error, RuntimeError):
        return next((found for words, found in TOLD.items() if words in str(error)), None)
    return None


def place_of(error: BaseException) -> str:
    """The line of the model's own code: the innermost outside of torch and of what follows its operations."""
    torchs = str(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(torchs) and frame.name != "__torch_dispatch__"
    ]
    return f"{frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else "in torch's own code"
