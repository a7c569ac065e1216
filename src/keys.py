"""Every key of a composed configuration must be one that something reads.

Hydra accepts `+trainer.acumulate=4` and then nobody reads it. Here each key is held against the schema's
dataclasses or, below a `_target_`, against the target's signature; what fits nowhere is refused with the nearest name.
"""

import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.config import TARGET_GROUPS, Config

HYDRA_WORDS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
SIMPLE_TYPES = (int, float, bool, str, list, dict, tuple, type(None))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy naming the nearest of `known`, or all of them where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Known: {', '.join(known)}." if known else "It takes none."


def resolve(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """The plain, resolved configuration without Hydra's own node, and its problems.

    One line for each key that is unknown, missing, of the wrong type, or does not resolve.
    """
    root = {key: cfg._get_node(key) for key in cfg if key != "hydra"}
    fields = {f.name for f in dataclasses.fields(Config)}
    found = [f"{key} is no key of the configuration. {did_you_mean(str(key), fields)}" for key in root if key not in fields]
    found += [f"{key} was removed, but every run needs it. Drop the override ~{key}." for key in sorted(fields - root.keys())]
    resolved, unresolved = _resolve(cfg, [key for key in root if key in fields])
    found += unresolved
    for key, value in resolved.items():
        typed = OmegaConf.get_type(root[key])
        if dataclasses.is_dataclass(typed):
            found += _against_dataclass(str(key), value, typed)
        elif key in TARGET_GROUPS and (not isinstance(value, dict) or "_target_" not in value):
            found.append(f"{key} has no _target_, so nothing can be built of it. Choose one with {key}=<option>.")
        elif isinstance(value, dict):
            found += _against_target(str(key), value)
    return resolved, found


def _resolve(cfg: DictConfig, keys: list[Any]) -> tuple[dict[Any, Any], list[str]]:
    """The resolved value of each top-level key, and a line for each that does not resolve."""
    resolved, found = {}, []
    for key in keys:
        node = cfg._get_node(key)
        try:
            resolved[key] = OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else cfg[key]
        except OmegaConfBaseException as error:
            where = getattr(error, "full_key", None) or key
            reason = str(error.msg if hasattr(error, "msg") and error.msg else error).splitlines()[0]
            found.append(f"{where} can't be resolved: {reason}. Correct the ${{...}} that it holds.")
    return resolved, found


def _against_dataclass(path: str, value: dict[str, Any], schema: Any) -> list[str]:
    fields = {f.name for f in dataclasses.fields(schema)}
    found = [f"{path}.{key} is no key of {path}. {did_you_mean(key, fields)}" for key in value if key not in fields]
    for key in sorted(fields):
        if key not in value:
            found.append(f"{path}.{key} was removed, but every run needs it. Drop the override ~{path}.{key}.")
        elif value[key] == "???":
            found.append(f"{path}.{key} has no value; give one with {path}.{key}=...")
    return found


def _against_target(path: str, node: dict[str, Any]) -> list[str]:
    """The keys of a node against its target's signature, and of the nodes with a target below it."""
    found = []
    if "_target_" in node:
        try:
            target = locate(str(node["_target_"]))
        except ImportError as error:
            return [f"{path}._target_={node['_target_']} can't be found: {error}"]
        found += _against_signature(path, node, target)
    for key, value in node.items():
        if value == "???":
            found.append(f"{path}.{key} has no value; give one with {path}.{key}=...")
        if isinstance(value, dict):
            found += _against_target(f"{path}.{key}", value)
    return found


def _against_signature(path: str, node: dict[str, Any], target: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return []  # a builtin without a signature: instantiating it is the check
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    names = {n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}
    given = {key for key in node if key not in HYDRA_WORDS}
    found = [
        f"{path}.{key} is nothing that {node['_target_']} takes. {did_you_mean(key, names)}"
        for key in node
        if key in given - names
    ]
    if not node.get("_partial_") and "_args_" not in node:
        found += [
            f"{path}.{name} is missing; {node['_target_']} needs it. Give it with {path}.{name}=..."
            for name, p in parameters.items()
            if name in names - given and p.default is p.empty
        ]
    hints = _type_hints(target)
    for key in sorted(given & names):
        if key in hints and not _fits(node[key], hints[key]):
            expected = getattr(hints[key], "__name__", None) or str(hints[key])
            found.append(f"{path}.{key}={node[key]!r} is not of type {_readable(hints[key], expected)}.")
    return found


def _readable(hint: Any, fallback: str) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_readable(arm, str(arm)) for arm in typing.get_args(hint))
    return "null" if hint is type(None) else fallback


def _type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    callable_ = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(callable_)
    except (NameError, TypeError):
        return {}  # annotations that only a type checker can read: no types to hold values against


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value may be given where `hint` is asked; types that aren't plain say nothing."""
    origin = typing.get_origin(hint)
    if isinstance(value, dict) and "_target_" in value:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arm) for arm in typing.get_args(hint))
    if origin in (list, tuple):
        arms = [arm for arm in typing.get_args(hint) if arm is not Ellipsis]
        return isinstance(value, list | tuple) and (not arms or all(any(_fits(v, arm) for arm in arms) for v in value))
    kind = origin or hint
    if kind not in SIMPLE_TYPES:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def locate(dotted_path: str) -> Any:
    """The object of a dotted path. Raises ImportError with the part that is missing and the nearest name."""
    parts = dotted_path.split(".")
    if not all(parts):
        raise ImportError(f"{dotted_path!r} is no dotted path.")
    found: Any = None
    for index, part in enumerate(parts):
        path = ".".join(parts[: index + 1])
        if index and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not path.startswith(error.name):
                raise ImportError(f"{path} needs {error.name}, which is not installed.") from error
            if found is None:
                raise ImportError(f"there is no module {part}.") from error
            names = [name for name in dir(found) if not name.startswith("_")]
            near = difflib.get_close_matches(part, names, n=1, cutoff=0.6)
            hint = f" Did you mean {'.'.join(parts[:index])}.{near[0]}?" if near else ""
            raise ImportError(f"{'.'.join(parts[:index])} has no {part}.{hint}") from error
    return found
