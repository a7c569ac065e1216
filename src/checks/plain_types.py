"""Whether a plain value of a YAML may stand where a signature asks for a type."""

import inspect
import types
import typing
from typing import Any

PLAIN = (int, float, bool, str, list, dict, tuple, type(None))


def type_hints(target: Any) -> dict[str, Any]:
    """The annotations of a class's or function's parameters, as types."""
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):
        return {}  # annotations that only a type checker can read: no types to hold values against


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` may be given where `hint` is asked; types that aren't plain say nothing."""
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, dict) and "_target_" in value:
        return True
    if origin is typing.Literal:
        return value in arms
    if origin in (typing.Union, types.UnionType):
        # Beside a plain type, a class stands for what only Python can pass: lr: float | Tensor.
        can_be_written = [arm for arm in arms if arm in PLAIN or not isinstance(arm, type)]
        return any(fits(value, arm) for arm in can_be_written or arms)
    if origin in (list, tuple):
        items = [arm for arm in arms if arm is not Ellipsis]
        return isinstance(value, list | tuple) and (not items or all(any(fits(v, arm) for arm in items) for v in value))
    kind = origin or hint
    if kind not in PLAIN:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def readable(hint: Any) -> str:
    """A type as one would say it: "of type int or null", "one of 'a' or 'b'"."""
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {' or '.join(map(repr, typing.get_args(hint)))}"
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    arms = [arm for arm in typing.get_args(hint) if arm in PLAIN or not isinstance(arm, type)] if is_union else [hint]
    return f"of type {' or '.join(_name(arm) for arm in arms)}"


def _name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
